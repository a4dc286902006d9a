"""CUDA candidates for tasks other than matrix products: launches in a worker process on shared device memory."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.device_arena import NOT_RESTORED, OUTSIDE
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.task_arena import CudaTaskArena, Tensors, given_file, largest_given
from cuda_l2.machine.cuda.worker import slowest_s
from cuda_l2.records import Build, Candidate, Operation, VerdictStatus
from cuda_l2.tasks.cases import TaskCase, TaskCases
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify._gpu import BESIDE_NS, PRODUCER_NS, Facilities, LoadedCandidate
from cuda_l2.verify.tasks._base import GpuTaskSession, Outputs, require_written

USUAL_GFLOPS, USUAL_GBYTES_PER_S = 20e3, 1e3


class CudaTaskSession(LoadedCandidate, GpuTaskSession):
    """One candidate loaded in a worker; the arena is laid out for the sizes of each case, snug until `as_timed`."""

    def __init__(
        self, candidate: Candidate, build: Build, arena: CudaTaskArena, cases: TaskCases, facilities: Facilities
    ) -> None:
        super().__init__(candidate, build, arena, facilities)
        self.task, self.cases, self.arena, self._snug = cases.task, cases, arena, True
        self.programmatic = self.plan_for(self.task).programmatic
        self._load(self.task)

    def _load(self, task: Operation) -> None:
        """Lay the arena out for these sizes, and have the worker launch for them."""
        plan = self.plan_for(task)
        self.require_workspace(plan, f" for {task}")
        self.arena.select(task, snug=self._snug)
        self.plan, self.places = plan, self.arena.places(plan)
        self.timeout_s = self.limit_s(slowest_s(task))
        self.use(self.build)
        self.arena.fill_workspaces(plan, persistent=True)

    def require_served(self, task: Operation) -> None:
        self.plan_for(task)

    def as_timed(self) -> None:
        self._snug = False
        self._load(self.task)

    def launch(self, case: TaskCase, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        self._fill(case.task, case.tensors, prefill, keep)
        self.worker.call("launch", self.timeout_s)
        return self._result(case)

    def launch_behind_producer(self, old: TaskCase, case: TaskCase) -> Outputs:
        late = largest_given(case.task)
        self._fill(case.task, {**case.tensors, late.name: old.tensors[late.name]})
        self.arena.stage(case.tensors[late.name])
        torch.cuda.synchronize()
        place = self.places[late.name]
        terms: dict[str, Any] = {"source": ["staging", 0], "target": [place.buffer, place.offset]}
        self.worker.call("after_slow", self.timeout_s, size=late.bytes, ns=PRODUCER_NS, **terms)
        return self._result(case)

    def launch_beside_load(self, case: TaskCase, count: int) -> Outputs:
        self._fill(case.task, case.tensors)
        self.worker.call("loaded_launches", self.timeout_s * count, count=count, occupied=0.5, ns=BESIDE_NS)
        return self._result(case)

    def launch_stressed(self, case: TaskCase, seeds: Sequence[int], count: int) -> Iterator[Outputs]:
        """The outputs of each launch; they lie in records that the next launches overwrite.

        The last of each seed's is that of several launches with nothing between them.
        """
        arena, task = self.arena, case.task
        self._fill(task, case.tensors)
        usual_s = task.flops / USUAL_GFLOPS * 1e-9 + task.bytes / USUAL_GBYTES_PER_S * 1e-9
        fill = partial(self._fill, task, case.tensors)
        for recorded in self.stressed(fill, seeds, count, arena.written(), slowest_s(task), int(2e9 * usual_s)):
            found = self._result(case)
            yield from map(arena.recorded, range(recorded)) if recorded else [found]

    def plan_for(self, task: Operation) -> Plan:
        return contract.plan_cuda(self.candidate.source, task, self.sms)

    def sanitize(self, tool: Tool, case: TaskCase) -> str:
        with given_file(case.task, case.tensors) as given:
            job = sanitizer.job(tool, Path(self.build.artifact), self.plan_for(case.task), case.task, given)
            return self.found_by(tool, job)

    def _fill(self, task: Operation, tensors: Tensors, prefill: Outputs | None = None, keep: bool = False) -> None:
        """Tensors, and what all else holds before a launch. keep: leave workspaces as they are."""
        if self.arena.task != task:
            self._load(task)
            keep = False
        scratch = [] if keep else self.arena.scratch(self.plan)
        self._segments.fill([*self.arena.before_launch(tensors, prefill), *scratch])

    def _result(self, case: TaskCase) -> Outputs:
        """The outputs, once everything else is found as it must be."""
        guards, persistent = self.arena.after_launch(self.plan)
        given = self.arena.held(case.tensors)
        kept = self._segments.hold([*guards, *persistent, *given])
        if not all(kept[: len(guards)]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, OUTSIDE)
        if not all(kept[len(guards) : len(guards) + len(persistent)]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, NOT_RESTORED)
        if not all(kept[len(guards) + len(persistent) :]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs or weights")
        found = {output.name: self.arena.output(output).clone() for output in case.task.outputs}
        for output in case.task.outputs:
            require_written(output, found[output.name])
        return found
