"""CPU candidates: launches in the sandboxed worker, references by torch on this CPU."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.machine.fills import POISON
from cuda_l2.records import Accumulate, Build, Candidate, Gemm, VerdictStatus
from cuda_l2.verify._base import Case, Cases, CheckFailed, References, Session, logical_b, require_written

LAUNCH_TIMEOUT_S = 2.0
SLOWEST_GFLOPS = 0.5
"""A launch slower than this is taken to hang."""
NATIVE_FP16_FLOPS = 1 << 26
"""torch.matmul in fp16 joins the baselines up to here; CPUs without fp16 arithmetic take minutes beyond."""


class CpuReferences(References):
    device = torch.device("cpu")
    exact_flops = 1 << 31

    def product_fp32(self, gemm: Gemm, case: Case) -> torch.Tensor:
        return case.a.float() @ logical_b(gemm, case).float()

    def baselines(self, gemm: Gemm, case: Case, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        b = logical_b(gemm, case)
        outputs = [self.product_fp32(gemm, case)[rows].half()]
        if gemm.flops <= NATIVE_FP16_FLOPS:
            outputs.append((case.a @ b)[rows])
        if gemm.accumulate is Accumulate.FP16:
            outputs.append(_summed_in_fp16(case.a[rows], b))
        return outputs


class CpuSession(Session):
    """One candidate in its sandboxed worker on an arena."""

    def __init__(self, candidate: Candidate, build: Build, arena: Arena, cases: Cases) -> None:
        self.gemm, self.build, self.arena, self.cases = cases.gemm, build, arena, cases
        terms = contract.parse_cpu(candidate.source)
        self.workspace_bytes = terms.workspace_bytes(self.gemm)
        if self.workspace_bytes > arena.workspace_bytes:
            limit = arena.workspace_bytes >> 20
            asked = f"asks for {self.workspace_bytes} bytes of workspace; at most {limit} MiB"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, asked)
        self.worker = Worker(arena, Path(build.artifact), terms)

    def launch(self, case: Case, prefill: torch.Tensor | None = None, *, keep: bool = False) -> torch.Tensor:
        gemm, arena = self.gemm, self.arena
        inputs = [(arena.operands["a"][0], _words(case.a)), (arena.operands["b"][0], _words(case.b))]
        for row, words in inputs:
            row[: words.size] = words
            row[words.size :] = POISON
        arena.poison_outputs()
        if prefill is not None:
            arena.output()[:] = _words(prefill).reshape(gemm.m, gemm.n)
        if not keep:
            arena.poison_workspace(self.workspace_bytes)
        self.worker.launch(0, LAUNCH_TIMEOUT_S + gemm.flops / SLOWEST_GFLOPS * 1e-9)
        if not all(
            np.array_equal(row[: words.size], words) and (row[words.size :] == POISON).all() for row, words in inputs
        ):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs")
        if not arena.gaps_intact() or not arena.guards_intact():
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "wrote outside C and its workspace")
        found = torch.from_numpy(arena.output().copy().view(np.float16))
        require_written(found)
        return found

    def __exit__(self, *_: object) -> None:
        self.worker.close()


def _words(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()


def _summed_in_fp16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A B with every product and every sum rounded to fp16, in the order of K."""
    c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
    for p in range(a.shape[1]):
        c = c + a[:, p, None] * b[None, p]
    return c
