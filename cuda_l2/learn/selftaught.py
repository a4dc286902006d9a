"""Self-supervised rounds (CUDA-L1's second stage): the model writes kernels and learns from the verified ones."""

import functools
import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.learn import models
from cuda_l2.learn.run import Run
from cuda_l2.learn.settings import StageSettings
from cuda_l2.learn.tune import Say, fine_tune
from cuda_l2.learn.writer import Questions, Writer
from cuda_l2.propose._function import FunctionProposer
from cuda_l2.records import Task, Trial
from cuda_l2.rigs import Rig
from cuda_l2.runs.collect import Collection, Collector, Make, Pair
from cuda_l2.settings import Limits
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted

NAME = "self-supervised"
"""The model's name as candidates' proposer and in the collection."""


@dataclass(frozen=True)
class SelfSupervision:
    """The stage, with the parts that its rounds share."""

    tasks: Sequence[Task]
    settings: StageSettings
    rig: Rig
    archive: Archive
    questions: Questions
    say: Say

    def train(self, model: str, run: Run, others: Sequence[Sequence[Mapping[str, str]]] = ()) -> None:
        """Rounds of collecting with the model itself and fine-tuning on what it kept. Goes on where it was.

        others: conversations that every round's training sees too. UserError where a round keeps no kernel.
        """
        assert self.settings.collecting is not None
        for number in range(1, self.settings.collecting.rounds + 1):
            folder = run.folder / f"round-{number}"
            kept = self._collect(model, number, folder / "collected")
            with Run(folder / "tuned", {"model": model, "kernels": len(kept)}) as tuning:
                if not tuning.done:
                    fine_tune(model, [*kept, *others], self.settings, tuning, self.say)
                model = str(tuning.model)
        run.finish(functools.partial(shutil.copytree, model))

    def _collect(self, model: str, number: int, folder: Path) -> list[list[dict[str, str]]]:
        """Conversations that this round keeps."""
        wanted, hold_out = self.settings.collecting, self.questions.hold_out
        assert wanted is not None
        limits = Limits(wanted.tries, wanted.keep, number, wanted.least_speedup, math.inf)
        said: dict[Task, Pair] = {}

        def tried(pair: Pair) -> None:
            said[pair.task] = pair

        with Collection(folder) as collection:
            makers = {NAME: self._making(model, number, collection)}
            collector = Collector(self.rig, self.archive, collection, limits, hold_out, on_try=tried)
            collector.collect(self.tasks, makers)
            collection.export()
            for pair in said.values():
                self.say(f"round {number}, {pair.task}: {pair}")
            rows = collection.rows()
        if not rows:
            raise UserError(
                f"round {number} kept no kernel: the model writes none that is correct (see {folder / 'tries.jsonl'});"
                " train it longer on others' kernels first, with --stage sft, or raise collecting.tries"
            )
        self.say(f"round {number}: {counted(len(rows), 'kernel')} of its own")
        return [row["messages"] for row in rows]

    def _making(self, model: str, number: int, collection: Collection) -> Make:
        """Proposers that ask the model; it is loaded once, where a task is left."""
        tuning, sampling = self.settings.tuning, self.settings.sampling
        assert sampling is not None

        @functools.cache
        def loaded() -> Writer:
            pupil = models.load(model, tuning.precision)
            pupil.model.to(models.device()).eval()
            return Writer(pupil.model, pupil.tokenizer, sampling)

        def make(evaluator: Evaluator, history: Callable[[], list[Trial]]) -> FunctionProposer:
            task, machine, writer = evaluator.task, evaluator.target.machine, loaded()
            question = self.questions.ask(task, history(), writer.tokenizer)
            prompt = writer.prompt_ids(question)

            def write(count: int) -> list[str]:
                tries = len(collection.of(task, machine, NAME, number))  # answers after a kill are new ones
                parts = tuning.seed, number, str(task), tries
                with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                    torch.manual_seed(int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6]))
                    return [writer.text(answer) for answer in writer.write([prompt] * count)]

            return FunctionProposer(NAME, question, write, sampling.at_once)

        return make
