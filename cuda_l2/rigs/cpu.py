"""The CPU this process runs on."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.build.cpu import build_all
from cuda_l2.kernelbench.arms import KeptBaselines, ModelBaselines
from cuda_l2.machine.cpu import target as cpu
from cuda_l2.machine.cpu.arena import Arena, operand_bytes
from cuda_l2.machine.cpu.target import CpuTarget, available_memory_bytes
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.baselines import PREALLOCATED, TorchBaselines
from cuda_l2.measure.cpu_rounds import measure_cpu
from cuda_l2.measure.outputs import Operands
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import Terms
from cuda_l2.measure.task_baselines import TaskBaselines
from cuda_l2.records import Build, Candidate, Gemm, Operation, Task, Timing, Verdict
from cuda_l2.rigs import cpu_task
from cuda_l2.rigs._base import Bench, Rig
from cuda_l2.rigs.cpu_task import CpuTaskBench
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import is_foreign
from cuda_l2.verify import Cases, all_checks, verify
from cuda_l2.verify._cpu import CpuReferences, CpuSession

SLOT_BYTES = 32 << 20
"""Operands of all launches of a timed round together, and their outputs, take at most this, one launch more."""
MAX_SLOTS = 128
SLOWEST_GFLOPS = 0.2
"""A timed launch slower than this is taken to hang."""
MOST_MODELS = 4
"""Of KernelBench files, whose processes are kept for the next kernel; each has two Pythons with torch loaded."""
WORKSPACE_BYTES, WORKSPACE_BYTES_A_CORE = 64 << 20, 4 << 20


class CpuRig(Rig):
    """Candidates in sandboxed processes, torch's baselines in another."""

    target: CpuTarget
    suffix = ".c"
    builds_disturb = True
    arms = TorchBaselines.names

    def __init__(self) -> None:
        self.target = cpu.detect()
        self.target.ceilings()  # measured while the machine is still idle
        self.protocols = CPU_PROTOCOLS
        self.baselines = TorchBaselines(self.target.cores)
        self._task_baselines: TaskBaselines | None = None
        self._models = KeptBaselines(lambda task: ModelBaselines(task, self.target.cores), MOST_MODELS)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self.target.cores)  # references on all cores

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        if isinstance(task, Operation):
            return CpuTaskBench(self.target, partial(self._baselines_of, task), task, seed)
        self.require_feasible(task)
        return CpuBench(self, task, seed)

    def _baselines_of(self, task: Operation) -> TaskBaselines | ModelBaselines:
        """PyTorch on a task: of a KernelBench file its own Model, kept as long as few others are asked for."""
        if not is_foreign(task.name):
            return self.task_baselines()
        return self._models.get(task)

    def task_baselines(self) -> TaskBaselines:
        """PyTorch's process for tasks of our own, started when it is first asked for."""
        if self._task_baselines is None:
            self._task_baselines = TaskBaselines(self.target.cores)
        return self._task_baselines

    def require_feasible(self, task: Task) -> None:
        if isinstance(task, Operation):
            cpu_task.require_feasible(task)
            return
        gemm = task
        # arena, private copies in fp16 and fp32, baselines' buffers, references in fp64
        need = 30 * (gemm.m * gemm.k + gemm.k * gemm.n) + 60 * gemm.m * gemm.n + WORKSPACE_BYTES
        available = available_memory_bytes()
        if need > available:
            raise UserError(
                f"{gemm} needs about {need / 2**30:.1f} GiB of memory to check and time,"
                f" {available / 2**30:.1f} GiB are free; choose a smaller shape"
            )

    def environment(self) -> dict[str, Any]:
        return self.target.environment() | {
            "torch": importlib.metadata.version("torch"),
            "torch_threads": self.target.cores,
        }

    def close(self) -> None:
        torch.set_num_threads(self._threads)
        self.baselines.close()
        if self._task_baselines:
            self._task_baselines.close()
        self._models.close()


class CpuBench(Bench):
    """The stages for one shape on the CPU."""

    def __init__(self, rig: CpuRig, gemm: Gemm, seed: int) -> None:
        self._rig, self._gemm = rig, gemm
        self._rng = np.random.default_rng(seed)
        slots = max(1, min(MAX_SLOTS, SLOT_BYTES // max(operand_bytes(gemm), 2 * gemm.m * gemm.n)))
        workspace = WORKSPACE_BYTES + WORKSPACE_BYTES_A_CORE * rig.target.cores + 8 * gemm.m * gemm.n
        self._arena = Arena(gemm, slots=slots, workspace_bytes=workspace)
        self._cases = Cases(gemm, seed, CpuReferences())
        self._operands: Operands | None = None

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        return iter(build_all(candidates, self._rig.target))

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        return verify(partial(CpuSession, candidate, build, self._arena, self._cases), all_checks(), full=full)

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, beat: float = 0.0) -> Timing:
        return self._time(candidate, build, protocol, beat)

    def time_baselines(self, protocol: Protocol) -> Timing:
        return self._time(None, None, protocol)

    def _time(self, candidate: Candidate | None, build: Build | None, protocol: Protocol, beat: float = 0.0) -> Timing:
        baselines, arena, gemm = self._rig.baselines, self._arena, self._gemm
        if baselines.arena is not arena:
            baselines.attach(arena)
        if self._operands is None:
            self._operands = Operands(arena, self._rng)
        names = [PREALLOCATED]  # the usual strongest
        if not protocol.selects:
            names = sorted(self._rig.reported(baselines.names), key=lambda name: name != PREALLOCATED)

        def open_candidate() -> Worker:
            assert candidate and build
            called = contract.parse_cpu(candidate.source)
            arena.poison_workspace(called.workspace_bytes(gemm))
            return Worker(arena, Path(build.artifact), called)

        arms = {name: baselines.arm(name) for name in names}
        terms, timeout_s = Terms(protocol, self._rng, beat), 5.0 + 64 * gemm.flops / SLOWEST_GFLOPS * 1e-9
        return measure_cpu(open_candidate if candidate else None, arms, self._operands, terms, timeout_s)

    def renew(self) -> None:
        """Every session and every timing has a process of its own anyway."""

    def redraw(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._cases = Cases(self._gemm, seed, CpuReferences())
        self._operands = None

    def close(self) -> None:
        self._arena.close()
