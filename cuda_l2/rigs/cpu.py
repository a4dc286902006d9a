"""The CPU this process runs on."""

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from cuda_l2.build.cpu import build_all
from cuda_l2.errors import UserError
from cuda_l2.execute.arena import Arena, operand_bytes
from cuda_l2.measure.baselines import PREALLOCATED, TorchBaselines
from cuda_l2.measure.cpu_rounds import measure_cpu
from cuda_l2.measure.outputs import Operands
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.records import Build, Candidate, Gemm, Timing, Verdict
from cuda_l2.rigs._base import Bench, Rig
from cuda_l2.targets import cpu
from cuda_l2.targets.cpu import CpuTarget, available_memory_bytes
from cuda_l2.verify import Cases, verify
from cuda_l2.verify._cpu import CpuReferences, CpuSession

SLOT_BYTES = 32 << 20
"""Operands of all launches of a timed round together, and their outputs, take at most this, one launch more."""
MAX_SLOTS = 128
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
        self._threads = torch.get_num_threads()
        torch.set_num_threads(self.target.cores)  # references on all cores

    def open(self, gemm: Gemm, seed: int, *, both_layouts: bool = False) -> Bench:
        self.require_feasible(gemm)
        return CpuBench(self, gemm, seed)

    def require_feasible(self, gemm: Gemm) -> None:
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
        return verify(partial(CpuSession, candidate, build, self._arena, self._cases), full=full)

    def time(self, candidate: Candidate, build: Build, protocol: Protocol, beat: float = 0.0) -> Timing:
        return self._time(candidate, build, protocol, beat)

    def time_baselines(self, protocol: Protocol) -> Timing:
        return self._time(None, None, protocol)

    def _time(self, candidate: Candidate | None, build: Build | None, protocol: Protocol, beat: float = 0.0) -> Timing:
        baselines = self._rig.baselines
        if baselines.arena is not self._arena:
            baselines.attach(self._arena)
        if self._operands is None:
            self._operands = Operands(self._arena, self._rng)
        names = [PREALLOCATED]  # the usual strongest
        if not protocol.selects:
            names = sorted(self._rig.reported(baselines.names), key=lambda name: name != PREALLOCATED)
        return measure_cpu(candidate, build, baselines, self._operands, protocol, names=names, beat=beat, rng=self._rng)

    def renew(self) -> None:
        """Every session and every timing has a process of its own anyway."""

    def redraw(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._cases = Cases(self._gemm, seed, CpuReferences())
        self._operands = None

    def close(self) -> None:
        self._arena.close()
