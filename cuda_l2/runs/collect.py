"""Collects verified kernels for supervised fine-tuning, as CUDA-L1 does: per task and model a few tries, few kept.

It serves models behind endpoints, models in this process or in training (`propose._function.FunctionProposer`), and
policies that write schedules. Every try is appended to the collection's file once it is judged; a run that was killed
goes on from there.
"""

import collections
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.archive import Archive
from cuda_l2.corpus import dataset
from cuda_l2.corpus.duplicates import digest
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.corpus.instruct import for_task
from cuda_l2.evaluator import Evaluator
from cuda_l2.llm._base import Messages
from cuda_l2.machine._base import Target
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._base import Proposer
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.review._base import Checker
from cuda_l2.rigs import Rig
from cuda_l2.search import comparable, judge_group
from cuda_l2.settings import Limits
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import LinesFile, parsed
from cuda_l2.system.text import counted, fenced

FORMAT = "cuda-l2 collect 1"
TRIES = "tries.jsonl"
PART = "sft"
NO_CODE = "no-code"
ABOUT = """\
Kernels that a model wrote, each built, verified and timed: instruction, context, code, and the conversation as it was.
docs/training.md of cuda-l2 describes the columns."""

Make = Callable[[Evaluator, Callable[[], list[Trial]]], Proposer]
"""Makes a proposer for the evaluator's task from its own trials so far."""


@dataclass
class Pair:
    """The tries of one task and model so far."""

    task: Task
    model: str
    lines: list[dict[str, Any]]
    failure: str = ""  # why the model could not be asked, one line

    @property
    def tries(self) -> int:
        return len(self.lines)

    @property
    def kept(self) -> int:
        return sum(line["kept"] for line in self.lines)

    @property
    def statuses(self) -> collections.Counter[str]:
        return collections.Counter(line["status"] for line in self.lines)

    def done(self, limits: Limits) -> bool:
        return self.tries >= limits.tries or self.kept >= limits.keep

    def __str__(self) -> str:
        """Numbers of tries by outcome and the best speedup kept, in one line."""
        became = ", ".join(f"{count} {status}" for status, count in self.statuses.items())
        speedups = [line["speedup"] for line in self.lines if line["kept"]]
        best = f", best {max(speedups):.3f}x" if speedups else ""
        return f"{counted(self.tries, 'try', 'tries')} ({became}), {self.kept} kept{best}"


class Collection(Closing):
    """A folder with every try and the dataset of those kept. A context manager; one run at a time has it."""

    def __init__(self, folder: Path) -> None:
        dataset.require_ours(folder)
        self.folder = folder
        self._file = LinesFile(folder / TRIES, _accept)
        lines = [line for text in self._file.lines if (line := parsed(text)) is not None]
        if not lines:
            self._file.append(json.dumps({"format": FORMAT}))
        self.lines: list[dict[str, Any]] = [line for line in lines if "task" in line]

    def of(self, task: Task, machine: str, model: str, round_: int) -> list[dict[str, Any]]:
        """The tries of one pair."""
        wanted = {"task": str(task), "machine": machine, "model": model, "round": round_}
        return [line for line in self.lines if wanted.items() <= line.items()]

    def append(self, line: dict[str, Any]) -> None:
        """Store one try; it is there after a kill once this returns."""
        self._file.append(json.dumps(line))
        self.lines.append(line)

    def take_over(self, path: Path) -> None:
        """Append the tries of another collection's file that are not here; of a kernel that is kept twice the first.

        UserError where another run is writing it.
        """
        with LinesFile(path, _accept) as other:
            found = [line for text in other.lines if (line := parsed(text)) is not None and "task" in line]
        for line in found:
            if line not in self.lines and not (line["kept"] and self._keeps(line["task"], line["digest"])):
                self.append(line)

    def rows(self) -> list[dict[str, Any]]:
        """The kept kernels as rows of the dataset."""
        return [line["row"] for line in self.lines if line["kept"]]

    def has(self, task: Task, source: str) -> bool:
        """Whether a kernel that differs in comments and layout at most is kept for the task."""
        return self._keeps(str(task), digest(source))

    def export(self) -> int:
        """Write the kept kernels as a dataset; the number of its rows."""
        rows = self.rows()
        if rows:
            dataset.write(self.folder, {PART: rows}, ABOUT)
        return len(rows)

    def close(self) -> None:
        self._file.close()

    def _keeps(self, task: str, own: str) -> bool:
        return any(line["kept"] and line["task"] == task and line["digest"] == own for line in self.lines)


@dataclass(frozen=True)
class Collector:
    """Lets models try tasks on one machine.

    Trials go into the archive; kernels that it holds are not measured again. checker: reviews kernels whose reward
    jumps.
    """

    rig: Rig
    archive: Archive
    collection: Collection
    limits: Limits = Limits()
    hold_out: HoldOut = HoldOut()
    checker: Checker | None = None
    on_try: Callable[[Pair], None] = lambda pair: None

    def collect(self, tasks: Sequence[Task], makers: Mapping[str, Make]) -> list[Pair]:
        """Let every model try every task until the limits end the pair; held-out tasks are skipped.

        makers: by the model's name. A model that cannot be asked at all is skipped from then on; UserError where none
        can.
        """
        machine, pairs, failed = self.rig.target.machine, list[Pair](), dict[str, str]()
        for task in tasks:
            if self.hold_out.task(task):
                continue
            tried = {model: self.collection.of(task, machine, model, self.limits.round) for model in makers}
            new = [Pair(task, model, lines, failed.get(model, "")) for model, lines in tried.items()]
            pairs += new
            todo = [pair for pair in new if not pair.done(self.limits) and not pair.failure]
            if not todo:
                continue
            with Evaluator(task, self.rig, checker=self.checker) as evaluator:
                evaluator.recall(comparable(self.archive, task, machine))
                for pair in todo:
                    self._run(pair, makers[pair.model], evaluator)
                    if pair.failure:
                        failed[pair.model] = pair.failure
                        self.on_try(pair)
            if len(failed) == len(makers):
                raise UserError("; ".join(dict.fromkeys(failed.values())))
        return pairs

    def _run(self, pair: Pair, make: Make, evaluator: Evaluator) -> None:
        """Propose and judge until the limits end the pair; where the model cannot be asked, the pair has the reason."""
        try:
            proposer = make(evaluator, lambda: self._history(pair))
        except UserError as error:
            pair.failure = str(error)
            return
        proposer.deadline = time.perf_counter() + self.limits.budget_s
        while not pair.done(self.limits) and time.perf_counter() < proposer.deadline:
            before = proposer.fruitless
            try:
                group = proposer.propose(min(proposer.group or self.rig.group, self.limits.tries - pair.tries))
            except UserError as error:
                pair.failure = str(error)
                return
            wasted = proposer.fruitless - before
            for _ in range(wasted):
                self._add(pair, {"candidate": "", "status": NO_CODE})
            if not group and not wasted:
                return
            proposer.observe(self._judged(pair, group, proposer.conversations(), evaluator))

    def _judged(
        self, pair: Pair, group: list[Candidate], conversations: Sequence[Messages], evaluator: Evaluator
    ) -> list[Trial]:
        """The trials of a group, up to the one that ends the pair; each is stored as a try."""
        trials: list[Trial] = []
        for i, (trial, _) in enumerate(judge_group(evaluator, self.archive, group)):
            trials.append(trial)
            fields: dict[str, Any] = {"candidate": trial.candidate.id, "status": trial.status, "speedup": trial.speedup}
            fast = trial.speedup > 0 and trial.speedup >= self.limits.least_speedup
            worthy = fast and not self.hold_out.candidate(trial.candidate)
            if worthy and not self.collection.has(pair.task, trial.candidate.source):
                asked = conversations[i] if conversations else ()
                row = _row(trial, evaluator.target, pair, self.limits.round, asked)
                fields |= {"kept": True, "digest": digest(trial.candidate.source), "row": row}
            self._add(pair, fields)
            if pair.done(self.limits):
                break
        return trials

    def _add(self, pair: Pair, fields: dict[str, Any]) -> None:
        """Store one try."""
        machine, number = self.rig.target.machine, self.limits.round
        about = {"task": str(pair.task), "machine": machine, "model": pair.model, "round": number}
        line = {**about, "try": pair.tries + 1, "kept": False, **fields}
        self.collection.append(line)
        pair.lines.append(line)
        self.on_try(pair)

    def _history(self, pair: Pair) -> list[Trial]:
        """The trials of the pair's own tries."""
        tried = {line["candidate"] for line in pair.lines}
        trials = self.archive.trials(pair.task, self.rig.target.machine, SEARCH.name)
        return [trial for trial in trials if trial.candidate.id in tried]


def _row(trial: Trial, target: Target, pair: Pair, round_: int, asked: Messages) -> dict[str, Any]:
    """One row of the dataset; every row has the same columns."""
    assert trial.timing is not None and trial.timing.candidate is not None and trial.verdict is not None
    question = for_task(pair.task, target).text
    source = trial.candidate.source
    if asked:
        messages = [{"role": message.role, "content": message.text} for message in asked]
    else:
        answer = f"### Code\n{fenced(source, 'c' if target.name == 'cpu' else 'cuda', len(source))}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    users = [message.text for message in asked if message.role == "user"]
    return {
        "instruction": question,
        "context": users[0] if users and users[0] != question else "",
        "code": source,
        "messages": messages,
        "source": pair.model,
        "license": "",
        "kind": "collected",
        "sha": trial.candidate.id,
        "task": str(pair.task),
        "machine": trial.machine,
        "round": round_,
        "try": pair.tries + 1,
        "turn": max(0, len(users) - 1),
        "reward": trial.reward,
        "speedup": trial.speedup,
        "latency_us": trial.timing.candidate.latency_us.estimate,
        "reference": trial.timing.reference,
        "max_difference": trial.timing.max_difference,
        "verdict": str(trial.verdict.status),
        "passed": list(trial.verdict.passed),
        "schedule": " ".join(f"{name}={value}" for name, value in trial.candidate.schedule),
        "created": trial.created,
    }


def _accept(first: bytes) -> None:
    header = parsed(first)
    if header is None or header.get("format") != FORMAT:
        raise UserError(f"{TRIES} there is no collection of this version; choose another folder with --out")
