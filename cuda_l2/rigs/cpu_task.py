"""The stages for one task other than a matrix product on the CPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from cuda_l2 import contract
from cuda_l2.build.cpu import build_all
from cuda_l2.kernelbench.arms import ModelBaselines
from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.machine.cpu.target import CpuTarget, available_memory_bytes
from cuda_l2.machine.cpu.task_arena import TaskArena, TaskMemory
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.cpu_rounds import Contestant, measure_cpu
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import Terms
from cuda_l2.measure.task_baselines import TaskBaselines
from cuda_l2.measure.task_outputs import FreshWorker, TaskOperands, launches_that_fit
from cuda_l2.records import Build, Candidate, Operation, Timing, Verdict
from cuda_l2.rigs._base import Bench
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import is_foreign
from cuda_l2.tasks.cases import OwnCases, TaskCases
from cuda_l2.verify import verify
from cuda_l2.verify._cpu_task import CpuTaskSession, launch_timeout_s
from cuda_l2.verify.tasks._base import task_checks

SLOT_BYTES = 32 << 20
"""Tensors of all launches of a timed round together take at most this, one launch more."""
MAX_SLOTS = 64
WORKSPACE_BYTES, WORKSPACE_BYTES_A_CORE = 64 << 20, 4 << 20
COPIES = 40
"""Of a task's tensors in fp32, at most, that checking and timing keep at once: cases, references in fp64, the arena."""


class CpuTaskBench(Bench):
    """The stages for one task on the CPU. open_baselines: PyTorch's process, started where it is needed."""

    def __init__(
        self,
        target: CpuTarget,
        open_baselines: Callable[[], TaskBaselines | ModelBaselines],
        task: Operation,
        seed: int,
    ) -> None:
        require_feasible(task)
        self._target, self._open_baselines, self._task = target, open_baselines, task
        self._draw(seed)

    def _draw(self, seed: int) -> None:
        """Cases, memory for their shapes, and what is timed."""
        task = self._task
        self._rng = np.random.default_rng(seed)
        self._cases: TaskCases = ForeignCases(task, seed) if is_foreign(task.name) else OwnCases(task, seed)
        self._arena = TaskArena(
            [task, *self._cases.others],
            slots=launches_that_fit(task, SLOT_BYTES, MAX_SLOTS),
            workspace_bytes=WORKSPACE_BYTES + WORKSPACE_BYTES_A_CORE * self._target.cores,
        )
        self._operands = TaskOperands(self._arena, self._cases, self._rng)

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return iter(build_all(candidates, self._target))

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        open_session = partial(CpuTaskSession, candidate, build, self._arena, self._cases)
        return verify(open_session, task_checks(), full=full)

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, beat: float = 0.0) -> Timing:
        terms = contract.parse_cpu(candidate.source)
        self._arena.select(self._task)
        self._operands.workspace_bytes = terms.workspace_bytes(self._task)
        memory, forget = TaskMemory(self._arena, terms), self._operands.forget

        def open_worker() -> Worker:
            return Worker(memory, Path(build.artifact), terms)

        return self._time(lambda: FreshWorker(open_worker, forget), protocol, beat)

    def time_baselines(self, protocol: Protocol) -> Timing:
        self._arena.select(self._task)
        self._operands.workspace_bytes = 0
        return self._time(None, protocol)

    def _time(self, open_candidate: Callable[[], FreshWorker] | None, protocol: Protocol, beat: float = 0.0) -> Timing:
        baselines = self._open_baselines()
        if baselines.task_arena is not self._arena:
            baselines.attach_task(self._arena, self._cases.timed(0))
        # compiled first: where there is no candidate it stands in its place
        names = baselines.ready(compiles=not protocol.selects)
        arms: dict[str, Contestant] = {name: baselines.arm(name) for name in names}
        timeout_s = self._arena.slots * launch_timeout_s(self._task)
        timing = measure_cpu(open_candidate, arms, self._operands, Terms(protocol, self._rng, beat), timeout_s)
        left_out = {"left out": dict(baselines.left_out)} if baselines.left_out else {}
        return replace(timing, conditions={**timing.conditions, **baselines.conditions, **left_out})

    def renew(self) -> None:
        """Every session and every sample has a process of its own anyway."""

    def redraw(self, seed: int) -> None:
        self.close()
        self._draw(seed)

    def close(self) -> None:
        self._cases.close()
        self._arena.close()


def require_feasible(task: Operation) -> None:
    """UserError where checking and timing the task does not fit into memory."""
    need = COPIES * task.bytes + WORKSPACE_BYTES
    available = available_memory_bytes()
    if need > available:
        raise UserError(
            f"{task} needs about {need / 2**30:.1f} GiB of memory to check and time,"
            f" {available / 2**30:.1f} GiB are free; choose smaller sizes"
        )
