"""CUDA candidates: launches in a worker process on shared device memory, references in this one.

References are computed on the CPU where that takes well under a second, else by an fp32 product on the GPU with TF32
off, some of whose rows are computed again on the CPU and must agree.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.device_arena import NOT_RESTORED, OUTSIDE
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.cuda.segments import Copied, Segment
from cuda_l2.machine.fills import POISON
from cuda_l2.records import Build, Candidate, Gemm, VerdictStatus
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.tolerances import SUMMATION_NOISE
from cuda_l2.verify._base import Case, Cases, CheckFailed, GpuSession, References, logical_b, require_written
from cuda_l2.verify._gpu import BESIDE_NS, PRODUCER_NS, Facilities, LoadedCandidate

SLOWEST_GFLOPS = 200.0
"""A launch slower than this is taken to hang."""
CPU_FLOPS = 1 << 29
"""Products up to here are computed on the CPU."""
SPOT_ROWS = 4
"""Rows of a larger one that are computed there too."""
USUAL_GFLOPS = 200e3


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


class CudaSession(LoadedCandidate, GpuSession):
    """One candidate loaded in a worker, operands snug against unmapped memory until `as_timed`."""

    def __init__(
        self, candidate: Candidate, build: Build, arena: CudaArena, cases: Cases, facilities: Facilities
    ) -> None:
        super().__init__(candidate, build, arena, facilities)
        self.gemm, self.arena, self.cases = cases.gemm, arena, cases
        self.plan = self.plan_for(self.gemm)
        self.require_workspace(self.plan)
        self.programmatic = self.plan.programmatic
        self._work_s = self.gemm.flops / SLOWEST_GFLOPS * 1e-9
        self.timeout_s = self.limit_s(self._work_s)
        arena.place(snug=True)
        self.places = arena.places(self.plan)
        self.use(build)
        arena.fill_workspaces(self.plan, persistent=True)

    def launch(self, case: Case, prefill: torch.Tensor | None = None, *, keep: bool = False) -> torch.Tensor:
        self._fill(case, prefill, keep)
        self.worker.call("launch", self.timeout_s)
        return self._result(case)

    def as_timed(self) -> None:
        self.arena.place(snug=False)
        self.places = self.arena.places(self.plan)
        self.worker.bind([self.places])
        self.arena.fill_workspaces(self.plan, persistent=True)

    def launch_behind_producer(self, old: Case, case: Case) -> torch.Tensor:
        """C of `case`, where A holds `old`'s until a slow kernel before, which lets the candidate begin, writes it."""
        self._fill(old, None)
        self.arena.b().copy_(case.b)
        self.arena.stage(case.a)
        torch.cuda.synchronize()
        source, target = (["staging", 0], [self.places["a"].buffer, self.places["a"].offset])
        size = 2 * case.a.numel()
        self.worker.call("after_slow", self.timeout_s, source=source, target=target, size=size, ns=PRODUCER_NS)
        return self._result(case)

    def launch_beside_load(self, case: Case, count: int) -> torch.Tensor:
        """C after several launches while another stream holds half of the multiprocessors for a while."""
        self._fill(case, None)
        self.worker.call("loaded_launches", self.timeout_s * count, count=count, occupied=0.5, ns=BESIDE_NS)
        return self._result(case)

    def launch_stressed(self, case: Case, seeds: Sequence[int], count: int) -> Iterator[torch.Tensor]:
        """C of so many launches of builds with delays, one build a seed, beside load: several x M x N at a time.

        The last of each seed's is that of several launches with nothing between them.
        """
        outputs, usual_ns = [self.arena.written()], int(2 * self.gemm.flops / USUAL_GFLOPS)
        fill = partial(self._fill, case, None)
        for recorded in self.stressed(fill, seeds, count, outputs, self._work_s, usual_ns):
            found = self._result(case)
            yield self.arena.recorded(recorded) if recorded else found[None]

    def plan_for(self, gemm: Gemm) -> Plan:
        """What would be launched for another shape; ContractError where the contract refuses it."""
        return contract.plan_cuda(self.candidate.source, gemm, self.sms)

    def sanitize(self, tool: Tool, gemm: Gemm) -> str:
        """What one of its tools finds in launches for this shape, in one line; empty where nothing."""
        return self.found_by(tool, sanitizer.job(tool, Path(self.build.artifact), self.plan_for(gemm), gemm))

    def _fill(self, case: Case, prefill: torch.Tensor | None, keep: bool = False) -> None:
        """Operands, and what all else holds before a launch. keep: leave workspaces as they are."""
        first, *others = self.arena.before_launch(self.plan, scratch=not keep)
        if prefill is not None:
            first = first._replace(source=prefill.data_ptr())
        self._segments.fill([*self._operands(case), first, *others])

    def _result(self, case: Case) -> torch.Tensor:
        """C, once everything else is found as it must be."""
        arena = self.arena
        guards, persistent = arena.after_launch(self.plan)
        c = arena.c()
        found = torch.empty_like(c)
        copied = Copied(c.data_ptr(), 2 * c.numel(), POISON, found.data_ptr())
        kept, unwritten = self._segments.look([*guards, *persistent, *self._operands(case)], copied)
        if not all(kept[: len(guards)]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, OUTSIDE)
        if not all(kept[len(guards) : -2]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, NOT_RESTORED)
        if not all(kept[-2:]):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs")
        if unwritten:
            require_written(found)
        return found

    def _operands(self, case: Case) -> list[Segment]:
        """A and B in shared memory, and what they are to hold."""
        pairs = ((self.arena.a(), case.a), (self.arena.b(), case.b))
        return [Segment(there.data_ptr(), 2 * there.numel(), source=here.data_ptr()) for there, here in pairs]
