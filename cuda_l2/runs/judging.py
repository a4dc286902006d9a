"""Candidates that one or more processes for each GPU judge, in place of the one that proposes them."""

import collections
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from cuda_l2.evaluator import Evaluator
from cuda_l2.records import Build, Task
from cuda_l2.reward import RewardSettings
from cuda_l2.rigs import Request, Rig, open_rig
from cuda_l2.runs import on_ray, pool, workers
from cuda_l2.runs.pool import Pool, Start
from cuda_l2.search import Judged, Order
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.turns import Turns
from cuda_l2.tasks.kinds import kind_of

LIMIT_S = 1200.0
"""For one candidate: its process starts, tunes cuBLASLt, verifies and times twice, and has a second GPU do so."""
OPEN = 4
"""Evaluators kept open: each holds memory for its inputs, outputs and references."""


class Evaluators(Closing):
    """Evaluators of the tasks that were asked for last. A context manager."""

    def __init__(self, rig: Rig, *, judges_here: bool = True) -> None:
        self._rig, self._judges_here = rig, judges_here
        self._open: collections.OrderedDict[tuple[Task, RewardSettings], Evaluator] = collections.OrderedDict()

    def of(self, task: Task, rewards: RewardSettings) -> Evaluator:
        key = task, rewards
        if key not in self._open:
            while len(self._open) >= OPEN:
                _, longest_unused = self._open.popitem(last=False)
                longest_unused.close()
            self._open[key] = Evaluator(task, self._rig, rewards=rewards, judges_here=self._judges_here)
        self._open.move_to_end(key)
        return self._open[key]

    def close(self) -> None:
        for evaluator in self._open.values():
            evaluator.close()


@dataclass(frozen=True)
class Judging:
    """What a process does: one evaluator's work, on the GPU that it sees first."""

    target: str
    request: Request

    @contextlib.contextmanager
    def opened(self) -> Iterator[Callable[[Order], Judged]]:
        with open_rig(self.target, self.request) as rig, Evaluators(rig) as evaluators:
            yield partial(_judged, evaluators, rig.turns)


def _judged(evaluators: Evaluators, turns: Turns, order: Order) -> Judged:
    with turns.taken():  # where it is the first for its task inputs are drawn on the GPU
        evaluator = evaluators.of(order.task, order.rewards)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
    seconds, queued_s = dict(evaluator.stage_seconds), evaluator.queued_s
    evaluator.best_speedup = max(evaluator.best_speedup, order.best_speedup)
    evaluator.ends = evaluator.clock.now() + order.left_s
    if order.build:
        trial = evaluator.judge(order.candidate, order.build, full=order.full)
        seconds["build"] -= order.built_s
    else:
        (trial,) = evaluator.evaluate([order.candidate], full=order.full)
    took = {stage: after - seconds[stage] for stage, after in evaluator.stage_seconds.items()}
    return Judged(trial, took, evaluator.queued_s - queued_s)


def _with_build(build: Callable[[], Build | None], order: Order) -> Order:
    """The order once the candidate is built."""
    start = time.perf_counter()
    built = build()
    return replace(order, build=built, built_s=time.perf_counter() - start)


class JudgePool(Closing):
    """The processes of a search or a training run. A context manager; `search.Judges` describes it.

    each: number of processes on each GPU, which verify at once there and take turns to time.
    """

    def __init__(
        self,
        gpus: Sequence[str],
        target: str,
        say: Callable[[str], None],
        request: Request = Request(),
        each: int = 1,
        start: Start = pool.on_this_machine,
    ) -> None:
        self._builds_here = start is pool.on_this_machine  # what is built here no other machine can read
        with contextlib.ExitStack() as stack:
            if each > 1:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                request = replace(request, turns=folder)
            servant = Judging(target, request)
            self._pool = stack.enter_context(Pool([*gpus] * each, servant, say, LIMIT_S, start))
            self._opened = stack.pop_all()
        self.count = self._pool.count
        self._under_way: dict[tuple[Task, str], Future[Judged]] = {}
        self._lock = threading.Lock()

    def begin(self, order: Order, build: Callable[[], Build | None] = lambda: None) -> "Future[Judged]":
        """Have a candidate judged when a process is free; the future of an earlier order for it that is under way."""
        require_known(order.task)
        key = order.task, order.candidate.id
        complete = partial(_with_build, build if self._builds_here else lambda: None)
        with self._lock:
            found = self._under_way.get(key)
            if found is None or found.done():
                found = self._under_way[key] = self._pool.begin(order, complete)
        found.add_done_callback(lambda future: self._forget(key, future))
        return found

    def _forget(self, key: tuple[Task, str], future: "Future[Judged]") -> None:
        with self._lock:
            if self._under_way.get(key) is future:
                del self._under_way[key]

    def close(self) -> None:
        self._opened.close()


@contextlib.contextmanager
def judge_pool(
    asked: str, target: str, say: Callable[[str], None], request: Request = Request(), each: int = 1
) -> Iterator[JudgePool]:
    """The pool that --workers asks for, on this machine's GPUs or a Ray cluster's. target: cpu or cuda.

    each: as for `JudgePool`, on this machine.
    """
    on_ray.require_gpus(asked, target)
    ray = on_ray.is_ray(asked)
    gpus = on_ray.cluster(asked) if ray else contextlib.nullcontext(workers.gpus(asked, target))
    start: Start = pool.on_ray if ray else pool.on_this_machine
    with gpus as found, JudgePool(found, target, say, request, each, start) as judges:
        yield judges


def require_known(task: Task, option: str = "--workers") -> None:
    """UserError for a task that another process does not know by its text. option: that asks for the process."""
    if not kind_of(task).known_by_text:
        raise UserError(f"{task}: files of KernelBench are judged by one process; leave {option} out")
