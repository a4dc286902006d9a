"""The stages for one task other than a matrix product on a GPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.machine.cuda.task_arena import CudaTaskArena, arena_bytes, given_file
from cuda_l2.measure.cuda_task_baselines import require_some
from cuda_l2.measure.cuda_task_outputs import CudaTaskOperands
from cuda_l2.measure.graph_rounds import measure_cuda
from cuda_l2.measure.profile import collect
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Terms
from cuda_l2.measure.timed_memory import TaskMemory
from cuda_l2.records import Build, Candidate, Operation, Timing, Verdict
from cuda_l2.rigs._base import Bench
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import is_foreign
from cuda_l2.tasks.cases import OwnCases, TaskCases, in_full_precision
from cuda_l2.verify import verify
from cuda_l2.verify._cuda_task import CudaTaskSession
from cuda_l2.verify.tasks._base import task_checks

if TYPE_CHECKING:
    from cuda_l2.rigs.cuda import CudaRig

T = TypeVar("T")

DEVICE = "cuda"
LEAST_WINDOWS, MOST_WINDOWS = 2, 4
CACHE_SHARE = 0.5
"""Of the L2 cache, that the windows of a timed round may take together where they are more than the least."""
MAX_ROTATED = 128
"""Each window has a case of its own, with its reference."""
WORKSPACE_BYTES, WORKSPACES = 256 << 20, 2
"""A candidate's workspaces may take so much, and so many times the task's tensors more."""
REFERENCE_COPIES = 12
"""Of a task's tensors in fp64, that a reference and its tolerance take at once, about."""
OTHERS_BYTES, MODELS = 4 << 30, 2
"""Of CUDA contexts and the like in the processes of a KernelBench file; those with its Model and tensors."""
LEAST_CACHED, MOST_CACHED = 1 << 30, 48 << 30
"""Bytes of cases that are kept, with their references."""


class CudaTaskBench(Bench):
    """The stages for one task on a GPU."""

    def __init__(self, rig: "CudaRig", task: Operation, seed: int) -> None:
        self._rig, self._task = rig, task
        self._draw(seed)

    def _draw(self, seed: int) -> None:
        """Cases, and memory for their shapes."""
        rig, task = self._rig, self._task
        self._rng = np.random.default_rng(seed)
        need = needed_bytes(task, rig.target.l2_bytes)
        cached = int(min(MOST_CACHED, max(LEAST_CACHED, (rig.free_bytes() - need) / 2)))
        opened = ForeignCases if is_foreign(task.name) else OwnCases
        self._cases: TaskCases = opened(task, seed, DEVICE, cached)
        self._arenas: dict[bool, CudaTaskArena] = {}
        self._operands: dict[bool, CudaTaskOperands] = {}
        """By whether they rotate."""
        self._arena(rotates=False)

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return self._rig.builders.build(candidates)

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        rig, arena = self._rig, self._arena(rotates=False)
        open_session = partial(CudaTaskSession, candidate, build, arena, self._cases, rig.facilities)
        return self._on_the_gpu(lambda: verify(open_session, task_checks(), full=full))

    def profile(self, candidate: Candidate, build: Build) -> dict[str, float]:
        case = self._cases.drawn("seed 0")
        plan = contract.plan_cuda(candidate.source, self._task, self._rig.target.sms)
        with given_file(self._task, case.tensors) as given:
            return collect(Path(build.artifact), plan, self._task, given)

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, beat: float = 0.0) -> Timing:
        return self._time({CANDIDATE: Kernel(candidate, build)}, protocol, beat)

    def time_baselines(self, protocol: Protocol) -> Timing:
        return self._time({}, protocol)

    def renew(self) -> None:
        self._rig.workers.renew()

    def redraw(self, seed: int) -> None:
        self.close()
        self._draw(seed)

    def close(self) -> None:
        torch.cuda.synchronize()  # nothing may be at work in memory that goes
        self._rig.workers.detach()
        for operands in self._operands.values():
            operands.close()
        for arena in self._arenas.values():
            arena.close()
        self._operands, self._arenas = {}, {}
        self._cases.close()
        torch.cuda.empty_cache()  # the driver, which gives the next arena its memory, does not see it as free

    def _time(self, kernels: Mapping[str, Kernel], protocol: Protocol, beat: float = 0.0) -> Timing:
        return self._on_the_gpu(lambda: self._timed(kernels, protocol, beat))

    def _timed(self, kernels: Mapping[str, Kernel], protocol: Protocol, beat: float) -> Timing:
        rig, task, baselines = self._rig, self._task, self._rig.baselines_of(self._task)
        if is_foreign(task.name):
            require_back_to_back(task, protocol)
        self._arena(protocol.rotates).select(task)
        operands = self._operands_of(protocol.rotates)
        # in a search the first that works without a compiler stands for all
        wanted = [each for each in baselines.all if not (protocol.selects and each.compiled)]
        chosen = baselines.arms(task, wanted, operands)
        left_out = baselines.left_out(wanted)
        require_some(task, chosen, left_out)
        chosen = chosen[:1] if protocol.selects else chosen
        terms = Terms(protocol, self._rng, beat, rig.clock)

        def measure() -> dict[str, Timing]:
            memory = TaskMemory(operands, baselines, rotates=protocol.rotates)
            return measure_cuda(rig.shared, chosen, kernels, memory, terms)

        (timing,) = rig.steadily(measure).values()
        if protocol.selects:
            return timing
        return replace(timing, conditions=replace(timing.conditions, left_out=left_out, **baselines.conditions))

    def _on_the_gpu(self, work: Callable[[], T]) -> T:
        """Without gradients and in the task's precision; UserError where the GPU's memory does not suffice."""

        def run() -> T:
            with torch.no_grad(), in_full_precision():
                return work()

        try:
            return self._rig.retried(run)
        except torch.cuda.OutOfMemoryError:
            raise UserError(
                f"{self._task}: its reference in fp64, or PyTorch's own way, takes more memory than this GPU has left;"
                " choose smaller sizes, or end what else runs on the GPU"
            ) from None

    def _arena(self, rotates: bool) -> CudaTaskArena:
        if rotates not in self._arenas:
            tasks, l2_bytes = [self._task, *self._cases.others], self._rig.target.l2_bytes
            count = min(MAX_ROTATED, self._rig.rotated(self._task)) if rotates else windows(self._task, l2_bytes)
            arena = CudaTaskArena(tasks, workspace_bytes(self._task), windows=count, rotates=rotates)
            self._arenas[rotates] = arena
        return self._arenas[rotates]

    def _operands_of(self, rotates: bool) -> CudaTaskOperands:
        if rotates not in self._operands:
            arena, helpers = self._arena(rotates), self._rig.workers.helpers
            self._operands[rotates] = CudaTaskOperands(arena, self._cases, self._rng, helpers)
        return self._operands[rotates]


def windows(task: Operation, l2_bytes: int) -> int:
    """How many sets of tensors timed launches alternate between: the cache keeps them all where it would keep one."""
    return max(LEAST_WINDOWS, min(MOST_WINDOWS, int(CACHE_SHARE * l2_bytes / max(1, task.bytes))))


def workspace_bytes(task: Operation) -> int:
    """What a candidate's workspaces may take."""
    return WORKSPACE_BYTES + WORKSPACES * task.bytes


def needed_bytes(task: Operation, l2_bytes: int) -> int:
    """About what checking and timing take of the GPU's memory."""
    elements = sum(tensor.elements for tensor in (*task.inputs, *task.weights, *task.outputs))
    arena = arena_bytes([task], workspace_bytes(task), windows(task, l2_bytes), rotates=False)
    others = OTHERS_BYTES + MODELS * MOST_WINDOWS * task.bytes if is_foreign(task.name) else 0
    return REFERENCE_COPIES * 8 * elements + arena + LEAST_CACHED + others


def require_back_to_back(task: Operation, protocol: Protocol) -> None:
    """UserError where a file's task would be timed by single launches, which are traced in our own process alone."""
    if not protocol.round_s:
        raise UserError(
            f"{task} is timed back to back alone, as in offline or rotating: its Model runs in a process of its own,"
            f" where single launches, as in {protocol.name}, cannot be traced"
        )


def require_feasible(task: Operation, l2_bytes: int, free_bytes: int) -> None:
    """UserError where checking and timing the task does not fit into the GPU's memory."""
    need = needed_bytes(task, l2_bytes)
    if need > free_bytes:
        raise UserError(
            f"{task} needs about {need / 2**30:.1f} GiB of GPU memory to check and time,"
            f" {free_bytes / 2**30:.1f} GiB are free; choose smaller sizes, or end what else runs on the GPU"
        )
