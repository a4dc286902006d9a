"""What the miniature's training texts are made of: measured schedules without the best decile, code from headers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from family import families_for

from cuda_l2.archive import Archive
from cuda_l2.corpus import dataset
from cuda_l2.corpus.build import build
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.evaluator import Evaluator
from cuda_l2.learn.settings import Sampling
from cuda_l2.learn.writer import Questions
from cuda_l2.propose._base import space_for
from cuda_l2.propose._prompt import Templates
from cuda_l2.propose.random import draw
from cuda_l2.records import Candidate, Gemm, Trial
from cuda_l2.retrieve.sources import installed_sources
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group

HELD_SHARE = 0.1
SNIPPETS, SNIPPET_CHARS = 150, 500


@dataclass(frozen=True)
class Teacher:
    """Measured schedules: what may be shown, and what may not."""

    trials: dict[Gemm, list[Trial]]  # best first, none held out
    held_out: list[Candidate]

    def best(self, count: int) -> list[Candidate]:
        """Training kernels by their mean speedup over the shapes."""
        means: dict[str, list[float]] = {}
        sources = {}
        for trials in self.trials.values():
            for trial in trials:
                means.setdefault(trial.candidate.id, []).append(trial.speedup)
                sources[trial.candidate.id] = trial.candidate
        ranked = sorted(means, key=lambda key: -fmean(means[key]))
        return [sources[key] for key in ranked[:count]]


def measure(gemms: Sequence[Gemm], count: int, rig: Rig, archive: Archive) -> Teacher:
    """Measure so many schedules, drawn at random, on every shape; the best by their mean are held out."""
    rng = np.random.default_rng(0)
    space = space_for(families_for(gemms[0], rig.target), gemms[0], rig.target)
    drawn: dict[str, Candidate] = {}
    while len(drawn) < count:
        candidate = space.render(draw(space, rng), "random")
        drawn[candidate.id] = candidate
    trials: dict[Gemm, list[Trial]] = {}
    for gemm in gemms:
        with Evaluator(gemm, rig) as evaluator:
            trials[gemm] = [trial for trial, _ in judge_group(evaluator, archive, list(drawn.values()))]
    means = {key: fmean(by_id[key].speedup for by_id in map(_by_id, trials.values())) for key in drawn}
    held = frozenset(sorted(means, key=lambda key: -means[key])[: round(HELD_SHARE * count)])
    kept = {
        gemm: sorted((t for t in found if t.speedup and t.candidate.id not in held), key=lambda t: -t.speedup)
        for gemm, found in trials.items()
    }
    return Teacher(kept, [drawn[key] for key in held])


def write_data(folder: Path, teacher: Teacher, rig: Rig, prompts: Path, seed: int) -> None:
    """The datasets: of pretraining, code of headers and instruction, context and kernel as text; of fine-tuning."""
    rng = random.Random(seed)
    sources = [source for source in installed_sources() if source.name == "aten"]
    collected = [row["text"] for row in build(sources, HoldOut(), context_tokens=0).text]
    pieces = [piece for text in collected for piece in text.split("\n\n") if 80 < len(piece) <= SNIPPET_CHARS]
    conversations = [
        _conversation(gemm, trials, trial, rig, prompts, shown, seed + i)
        for gemm, trials in teacher.trials.items()
        for i, trial in enumerate(trials)
        for shown in (0, 2, 2)
    ]
    rendered = ["\n\n".join(turn["content"] for turn in turns) for turns in conversations]
    texts = [*rng.sample(pieces, min(SNIPPETS, len(pieces))), *rendered]
    rng.shuffle(texts)
    dataset.write(folder / "corpus", {"text": [{"text": text} for text in texts]}, "Of the miniature.")
    rng.shuffle(conversations)
    rows = [{"messages": turns} for turns in conversations]
    dataset.write(folder / "collected", {"sft": rows}, "Of the miniature.")


def question(gemm: Gemm, history: Sequence[Trial], rig: Rig, prompts: Path, exemplars: int, seed: int) -> str:
    """What a model is asked here."""
    sampling = Sampling(temperature=1.0, prompt_tokens=10_000, answer_tokens=1, exemplars=exemplars, at_once=1)
    rng = np.random.default_rng(seed)
    return Questions(rig.target, Templates(prompts), sampling, HoldOut(), rng).ask(gemm, history, _words)


def _conversation(
    gemm: Gemm, trials: Sequence[Trial], wanted: Trial, rig: Rig, prompts: Path, exemplars: int, seed: int
) -> list[dict[str, str]]:
    """The kernel as the answer to a question that shows slower ones."""
    slower = [trial for trial in trials if trial.reward < wanted.reward]
    asked = question(gemm, slower, rig, prompts, exemplars, seed)
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": f"```c\n{wanted.candidate.source}```\n"},
    ]


def _words(text: str, **_: Any) -> dict[str, list[str]]:
    return {"input_ids": text.split()}


def _by_id(trials: Sequence[Trial]) -> dict[str, Trial]:
    return {trial.candidate.id: trial for trial in trials}
