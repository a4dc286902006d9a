"""What the miniature's training texts are made of: measured schedules without the best decile, code from headers."""

import random
from collections.abc import Callable, Sequence
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
from cuda_l2.families._base import Family
from cuda_l2.learn.settings import Sampling
from cuda_l2.learn.writer import Questions
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import Values, draw, space_for
from cuda_l2.propose._prompt import Templates
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.retrieve.sources import installed_sources
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group

HELD_SHARE = 0.1
SNIPPETS, SNIPPET_CHARS = 150, 500


@dataclass(frozen=True)
class Asking:
    """How questions are made. shown: exemplars of the questions to each kernel; exemplar_lines: of each; 0 for all."""

    prompts: Path
    exemplar_lines: int = 0
    shown: tuple[int, ...] = (0, 2, 2)


@dataclass(frozen=True)
class Teacher:
    """Measured schedules: what may be shown, and what may not."""

    trials: dict[Task, list[Trial]]  # best first, none held out
    held_out: list[Candidate]

    def best(self, count: int) -> list[Candidate]:
        """Training kernels by their mean speedup over the tasks."""
        means: dict[str, list[float]] = {}
        sources = {}
        for trials in self.trials.values():
            for trial in trials:
                means.setdefault(trial.candidate.id, []).append(trial.speedup)
                sources[trial.candidate.id] = trial.candidate
        ranked = sorted(means, key=lambda key: -fmean(means[key]))
        return [sources[key] for key in ranked[:count]]


def measure(
    tasks: Sequence[Task],
    count: int,
    rig: Rig,
    archive: Archive,
    families: Callable[[Task, Target], Sequence[Family]] = families_for,
) -> Teacher:
    """Measure so many schedules, drawn at random, on every task; the best by their mean are held out."""
    rng = np.random.default_rng(0)
    spaces = {task: space_for(families(task, rig.target), task, rig.target) for task in tasks}
    drawn: dict[Values, None] = {}
    while len(drawn) < count:
        drawn[draw(spaces[tasks[0]], rng)] = None
    trials: dict[Task, list[Trial]] = {}
    for task, space in spaces.items():
        candidates = [space.render(values, "random") for values in drawn]
        with Evaluator(task, rig) as evaluator:
            trials[task] = [trial for trial, _ in judge_group(evaluator, archive, candidates)]
    means = [fmean(trial.speedup for trial in column) for column in zip(*trials.values(), strict=True)]
    held = sorted(range(count), key=lambda index: -means[index])[: round(HELD_SHARE * count)]
    held_out = {found[index].candidate.id: found[index].candidate for found in trials.values() for index in held}
    kept = {
        task: sorted((t for t in found if t.speedup and t.candidate.id not in held_out), key=lambda t: -t.speedup)
        for task, found in trials.items()
    }
    return Teacher(kept, list(held_out.values()))


def write_data(folder: Path, teacher: Teacher, rig: Rig, asking: Asking, seed: int, *, corpus: bool = True) -> None:
    """The datasets: of pretraining, code of headers and instruction, context and kernel as text; of fine-tuning."""
    rng = random.Random(seed)
    conversations = [
        _conversation(task, trials, trial, rig, asking, shown, seed + i)
        for task, trials in teacher.trials.items()
        for i, trial in enumerate(trials)
        for shown in asking.shown
    ]
    if corpus:
        rendered = ["\n\n".join(turn["content"] for turn in turns) for turns in conversations]
        texts = [*_pieces(rng), *rendered]
        rng.shuffle(texts)
        dataset.write(folder / "corpus", {"text": [{"text": text} for text in texts]}, "Of the miniature.")
    rng.shuffle(conversations)
    rows = [{"messages": turns} for turns in conversations]
    dataset.write(folder / "collected", {"sft": rows}, "Of the miniature.")


def _pieces(rng: random.Random) -> list[str]:
    """Some code of ATen's headers."""
    sources = [source for source in installed_sources() if source.name == "aten"]
    collected = [row["text"] for row in build(sources, HoldOut(), context_tokens=0).text]
    pieces = [piece for text in collected for piece in text.split("\n\n") if 80 < len(piece) <= SNIPPET_CHARS]
    return rng.sample(pieces, min(SNIPPETS, len(pieces)))


def question(task: Task, history: Sequence[Trial], rig: Rig, asking: Asking, exemplars: int, seed: int) -> str:
    """What a model is asked here."""
    sampling = Sampling(
        temperature=1.0,
        prompt_tokens=10_000,
        answer_tokens=1,
        exemplars=exemplars,
        exemplar_lines=asking.exemplar_lines,
        at_once=1,
    )
    rng = np.random.default_rng(seed)
    return Questions(rig.target, Templates(asking.prompts), sampling, HoldOut(), rng).ask(task, history, _words)


def _conversation(
    task: Task, trials: Sequence[Trial], wanted: Trial, rig: Rig, asking: Asking, exemplars: int, seed: int
) -> list[dict[str, str]]:
    """The kernel as the answer to a question that shows slower ones."""
    slower = [trial for trial in trials if trial.reward < wanted.reward]
    asked = question(task, slower, rig, asking, exemplars, seed)
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": f"```c\n{wanted.candidate.source}```\n"},
    ]


def _words(text: str, **_: Any) -> dict[str, list[str]]:
    return {"input_ids": text.split()}
