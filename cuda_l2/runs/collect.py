"""Collects verified kernels for supervised fine-tuning, as CUDA-L1 does: per task and model a few tries, few kept.

The same for models behind endpoints, in this process, in training (`propose._function.FunctionProposer`), and for the
policies that write schedules. Every try is a line of the collection's own file the moment it is judged; a run that was
killed goes on from there.
"""

import collections
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from cuda_l2.propose._prompt import fenced
from cuda_l2.records import Task, Trial
from cuda_l2.review._base import Checker
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import LinesFile, parsed

FORMAT = "cuda-l2 collect 1"
TRIES = "tries.jsonl"
PART = "sft"
NO_CODE = "no-code"
ABOUT = """\
Kernels that a model wrote, each built, verified and timed: instruction, context, code, and the conversation as it was.
docs/training.md of cuda-l2 describes the columns."""

Make = Callable[[Evaluator, Callable[[], list[Trial]]], Proposer]
"""Makes a proposer for the evaluator's task from its own trials so far."""


@dataclass(frozen=True)
class Settings:
    """When a pair of task and model is done, and what is not collected."""

    tries: int = 20
    keep: int = 2
    round: int = 0  # of self-supervision: each begins to count anew
    budget_s: float = math.inf  # a pair and run
    least_speedup: float = 0.0  # of what is kept
    hold_out: HoldOut = HoldOut()

    def __post_init__(self) -> None:
        if self.tries < 1 or self.keep < 1:
            raise UserError("tries and kernels to keep must be at least 1")
        if self.round < 0 or self.least_speedup < 0:
            raise UserError("the round and the least speedup must not be negative")


@dataclass
class Pair:
    """Where one task and model stand."""

    task: Task
    model: str
    tries: int = 0
    kept: int = 0
    best: float = 0.0  # speedup of what is kept
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    failure: str = ""  # why the model could not be asked, one line

    def count(self, line: Mapping[str, Any]) -> None:
        self.tries += 1
        self.statuses[line["status"]] += 1
        if line["kept"]:
            self.kept += 1
            self.best = max(self.best, line["speedup"])

    def done(self, settings: Settings) -> bool:
        return self.tries >= settings.tries or self.kept >= settings.keep


class Collection:
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

    def rows(self) -> list[dict[str, Any]]:
        """What was kept, as rows of the dataset."""
        return [line["row"] for line in self.lines if line["kept"]]

    def has(self, task: Task, source: str) -> bool:
        """Whether a kernel that differs in comments and layout at most is kept for the task."""
        own = digest(source)
        return any(line["kept"] and line["task"] == str(task) and line["digest"] == own for line in self.lines)

    def export(self) -> int:
        """Bring the dataset to what is kept: how many rows it has."""
        rows = self.rows()
        if rows:
            dataset.write(self.folder, {PART: rows}, ABOUT)
        return len(rows)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Collection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect(
    tasks: Sequence[Task],
    makers: Mapping[str, Make],
    rig: Rig,
    archive: Archive,
    collection: Collection,
    settings: Settings = Settings(),
    *,
    checker: Checker | None = None,
    on_try: Callable[[Pair], None] = lambda pair: None,
) -> list[Pair]:
    """Let every model try every task until its tries are spent or enough is kept; held-out tasks are passed over.

    makers: by the model's name. A model that cannot be asked at all is left alone from then on; UserError where none
    can. Trials go into the archive, and kernels that it knows are not measured again. checker: is shown kernels whose
    reward jumps.
    """
    pairs: list[Pair] = []
    failed: dict[str, str] = {}
    machine = rig.target.machine
    for task in tasks:
        if settings.hold_out.task(task):
            continue
        todo: list[Pair] = []
        for model in makers:
            pair = Pair(task, model, failure=failed.get(model, ""))
            for line in collection.of(task, machine, model, settings.round):
                pair.count(line)
            pairs.append(pair)
            if not pair.done(settings) and not pair.failure:
                todo.append(pair)
        if not todo:
            continue
        with Evaluator(task, rig, checker=checker) as evaluator:
            evaluator.recall(archive.best(task, machine, SEARCH.name))
            for pair in todo:
                _collect_pair(pair, makers[pair.model], evaluator, archive, collection, settings, on_try)
                if pair.failure:
                    failed[pair.model] = pair.failure
                    on_try(pair)
        if len(failed) == len(makers):
            raise UserError("; ".join(dict.fromkeys(failed.values())))
    return pairs


def _collect_pair(
    pair: Pair,
    make: Make,
    evaluator: Evaluator,
    archive: Archive,
    collection: Collection,
    settings: Settings,
    on_try: Callable[[Pair], None],
) -> None:
    machine = evaluator.target.machine

    def add(fields: dict[str, Any]) -> None:
        about = {"task": str(pair.task), "machine": machine, "model": pair.model, "round": settings.round}
        line = {**about, "try": pair.tries + 1, "kept": False, **fields}
        collection.append(line)
        pair.count(line)
        on_try(pair)

    def history() -> list[Trial]:
        tried = {line["candidate"] for line in collection.of(pair.task, machine, pair.model, settings.round)}
        trials = archive.trials(pair.task, machine, SEARCH.name)
        return [trial for trial in trials if trial.candidate.id in tried]

    try:
        proposer = make(evaluator, history)
    except UserError as error:
        pair.failure = str(error)
        return
    proposer.deadline = time.perf_counter() + settings.budget_s
    while not pair.done(settings) and time.perf_counter() < proposer.deadline:
        before = proposer.fruitless
        try:
            group = proposer.propose(min(proposer.group or evaluator.rig.group, settings.tries - pair.tries))
        except UserError as error:
            pair.failure = str(error)
            return
        wasted = proposer.fruitless - before
        for _ in range(wasted):
            add({"candidate": "", "status": NO_CODE})
        if not group and not wasted:
            return
        conversations = proposer.conversations()
        trials: list[Trial] = []
        for i, (trial, _) in enumerate(judge_group(evaluator, archive, group)):
            trials.append(trial)
            fields: dict[str, Any] = {"candidate": trial.candidate.id, "status": trial.status, "speedup": trial.speedup}
            if _worthy(trial, settings) and not collection.has(pair.task, trial.candidate.source):
                asked = conversations[i] if conversations else ()
                row = _row(trial, evaluator.target, pair, settings, asked)
                fields |= {"kept": True, "digest": digest(trial.candidate.source), "row": row}
            add(fields)
            if pair.done(settings):
                break
        proposer.observe(trials)


def _worthy(trial: Trial, settings: Settings) -> bool:
    fast = trial.speedup > 0 and trial.speedup >= settings.least_speedup
    return fast and not settings.hold_out.candidate(trial.candidate)


def _row(trial: Trial, target: Target, pair: Pair, settings: Settings, asked: Messages) -> dict[str, Any]:
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
        "round": settings.round,
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
