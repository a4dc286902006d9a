"""CUDA candidates: launches in a worker process on shared device memory, references in this one.

References are computed on the CPU where that takes well under a second, else by an fp32 product on the GPU with TF32
off, some of whose rows are computed again on the CPU and must agree.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cuda_l2 import contract
from cuda_l2.errors import UserError
from cuda_l2.execute.cuda_arena import POISON, CudaArena
from cuda_l2.execute.cuda_worker import CudaWorkers
from cuda_l2.records import Build, Candidate, Gemm, VerdictStatus
from cuda_l2.tolerances import SUMMATION_NOISE
from cuda_l2.verify._base import Case, Cases, CheckFailed, GpuSession, References, logical_b, require_written

LAUNCH_TIMEOUT_S = 2.0
SLOWEST_GFLOPS = 200.0
"""A launch slower than this is taken to hang."""
CPU_FLOPS = 1 << 29
"""Products up to here are computed on the CPU."""
SPOT_ROWS = 4
"""Rows of a larger one that are computed there too."""
PRODUCER_NS = 40_000
BESIDE_NS = 300_000


class CudaReferences(References):
    """baselines: what NVIDIA's libraries compute for operands on the GPU, fp16 M x N each."""

    def __init__(self, baselines: Callable[[Gemm, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]) -> None:
        self.device = torch.device("cuda")
        self.exact_flops = 1 << 37
        self._baselines = baselines

    def product_fp32(self, gemm: Gemm, case: Case) -> torch.Tensor:
        a, b = case.a, logical_b(gemm, case)
        if gemm.flops <= CPU_FLOPS:
            return (a.cpu().float() @ b.cpu().float()).to(self.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        product = a.float() @ b.float()
        rows = torch.linspace(0, gemm.m - 1, min(SPOT_ROWS, gemm.m)).long()
        theirs = a[rows.to(self.device)].cpu().float() @ b.cpu().float()
        ours = product[rows.to(self.device)].cpu()
        slack = SUMMATION_NOISE * gemm.k**0.5 * max(1.0, float(case.a.float().nan_to_num(0, 0, 0).abs().max()))
        agree = torch.isclose(ours, theirs, rtol=1e-4, atol=slack, equal_nan=True) | (ours == theirs)
        if not agree.all():
            raise UserError(f"the GPU's fp32 product of {gemm} differs from the CPU's: is the GPU's memory sound?")
        return product

    def baselines(self, gemm: Gemm, case: Case, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        return [output[rows] for output in self._baselines(gemm, case.a, case.b)]


class CudaSession(GpuSession):
    """One candidate loaded in a worker, operands snug against unmapped memory."""

    def __init__(
        self, candidate: Candidate, build: Build, arena: CudaArena, workers: CudaWorkers, cases: Cases, sms: int
    ) -> None:
        self.gemm, self.build, self.arena, self.cases = cases.gemm, build, arena, cases
        self.candidate, self._workers = candidate, workers
        self.plan = contract.parse_cuda(candidate.source).plan(self.gemm.m, self.gemm.n, self.gemm.k, sms)
        if self.plan.workspace_bytes > arena.workspace_bytes:
            limit = arena.workspace_bytes >> 20
            asked = f"asks for {self.plan.workspace_bytes} bytes of workspace; at most {limit} MiB"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, asked)
        self.programmatic = self.plan.programmatic
        self.timeout_s = LAUNCH_TIMEOUT_S + self.gemm.flops / SLOWEST_GFLOPS * 1e-9
        arena.place(snug=True)
        self.worker = workers.get(arena)
        places = arena.places(self.plan)
        self.worker.load(Path(build.artifact), self.plan, [places])
        arena.fill_workspaces(self.plan, persistent=True)

    def launch(self, case: Case, prefill: torch.Tensor | None = None) -> torch.Tensor:
        self._fill(case, prefill)
        self.worker.call("launch", self.timeout_s)
        return self._result(case)

    def launch_behind_producer(self, old: Case, case: Case) -> torch.Tensor:
        """C of `case`, where A holds `old`'s until a slow kernel before, which lets the candidate begin, writes it."""
        self._fill(old, None)
        self.arena.b().copy_(case.b)
        self.arena.stage(case.a)
        self._synchronize()
        places = self.arena.places(self.plan)
        source, target = (["staging", 0], [places["a"].buffer, places["a"].offset])
        size = 2 * case.a.numel()
        self.worker.call("after_slow", self.timeout_s, source=source, target=target, size=size, ns=PRODUCER_NS)
        return self._result(case)

    def launch_beside_load(self, case: Case, count: int) -> torch.Tensor:
        """C after several launches while another stream holds half of the multiprocessors for a while."""
        self._fill(case, None)
        self.worker.call("loaded_launches", self.timeout_s * count, count=count, occupied=0.5, ns=BESIDE_NS)
        return self._result(case)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._workers.renew()  # whatever failed may have left something behind

    def _fill(self, case: Case, prefill: torch.Tensor | None) -> None:
        arena = self.arena
        arena.a().copy_(case.a)
        arena.b().copy_(case.b)
        if prefill is None:
            arena.c().view(torch.int16).fill_(POISON)
        else:
            arena.c().copy_(prefill)
        arena.fill_workspaces(self.plan, persistent=False)
        self._synchronize()

    def _result(self, case: Case) -> torch.Tensor:
        arena = self.arena
        damage = arena.damage(self.plan)
        if damage:
            raise CheckFailed(VerdictStatus.UNHYGIENIC, damage)
        same = [
            (x.view(torch.int16) == y.view(torch.int16)).all() for x, y in ((arena.a(), case.a), (arena.b(), case.b))
        ]
        found = arena.c().clone()
        unwritten = (found.view(torch.int16) == POISON).any()
        a_same, b_same, poison = torch.stack([*same, unwritten]).tolist()
        if not (a_same and b_same):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs")
        if poison:
            require_written(found)
        return found

    @staticmethod
    def _synchronize() -> None:
        torch.cuda.synchronize()
