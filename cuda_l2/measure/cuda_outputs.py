"""What timed launches on the GPU read and write: fresh operands every round, outputs checked by projection and by rows.

The projection is Freivalds' check: C x = A (B x) for a random x of signs. Rounding C to fp16 moves (C x)_i by
about 2^-11 of the row's norm, so stale, missing and narrowed results all stand out. All references are computed
here, in the trusted process, from private copies.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cuda_l2.machine.cuda.arena import OTHER_B, CudaArena
from cuda_l2.machine.cuda.driver import Graph
from cuda_l2.machine.cuda.helpers import Helpers, Projection
from cuda_l2.machine.fills import POISON
from cuda_l2.measure.outputs import LARGEST_DEVIATION, ROUNDING_STEP, WrongOutput, largest_rms, rms_over_rounding
from cuda_l2.records import Accumulate, Layout
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

COMPARED_FLOPS = 1 << 33
"""Rows of an output that are compared element by element cost at most about this."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a product in fp32, their numbers, and the RMS of what rounding them to fp16 changes."""

    numbers_R: torch.Tensor
    reference_RN: torch.Tensor
    rounding_on_gpu: torch.Tensor

    @functools.cached_property
    def rounding(self) -> float:
        """Asked for when all that looks at an output is enqueued, so that the host waits once."""
        return float(self.rounding_on_gpu.item())


class CudaOperands:
    """What the arena's A and B hold, with private copies where candidates cannot reach, and outputs for baselines."""

    def __init__(self, arena: CudaArena, generator: torch.Generator, helpers: Helpers) -> None:
        self.arena, self.gemm, self.generator, self._helpers = arena, arena.gemm, generator, helpers
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """Where the baselines run."""
        self.graphs: dict[tuple[str, int], tuple[Graph, list[int]]] = {}
        """The baselines' launches by name and number, with their windows: the same for every candidate."""
        self._private = {name: torch.empty_like(arena.span(name)) for name in ("a", "b")}
        self.outputs = torch.empty_like(arena.span("c"))
        """C of every window for the baselines: no candidate can read theirs."""
        self._projections: dict[int, Projection] = {}
        """A (B x) of a window, for the signs x of this refresh."""
        self._signs_N: torch.Tensor | None = None
        self._product_K: torch.Tensor | None = None
        """B times the signs: of all windows, or where each has its own of the one looked at last."""
        self._wide_b: torch.Tensor | None = None
        """The same B in fp32, K x N."""
        self._rows: dict[int, Rows] = {}
        self.other_b: list[torch.Tensor] = []
        """B of every window in the layout that is not the task's; empty until asked for."""
        self._shift = arena.window_words
        self._shared_other = OTHER_B in self._shift
        """Whether candidates can have B in the other layout."""

    def refresh(self) -> None:
        """New standard normal operands in every window."""
        self._forget()
        for name, words in self._private.items():
            words.normal_(generator=self.generator)
            self.arena.span(name).copy_(words)
        for window, other in enumerate(self.other_b):
            other.copy_(self.b(window).t())

    def use_other_layout(self) -> None:
        """Keep B in the other layout too, for baselines that read it so."""
        if not self.other_b:
            count = self.arena.windows if self._shift["b"] else 1
            if self._shared_other:
                self.other_b = [self.arena.other_b(window) for window in range(count)]
            else:
                shape = self.b(0).t().shape
                self.other_b = [torch.empty(shape, dtype=torch.float16, device="cuda") for _ in range(count)]
            for window, other in enumerate(self.other_b):
                other.copy_(self.b(window).t())

    def a(self, window: int) -> torch.Tensor:
        """A, fp16 M x K, from the private copy."""
        gemm = self.gemm
        start = window * self._shift["a"]
        return self._private["a"][start : start + gemm.m * gemm.k].view(gemm.m, gemm.k)

    def b(self, window: int) -> torch.Tensor:
        """B as the task lays it out, fp16, from the private copy."""
        gemm = self.gemm
        start = window * self._shift["b"]
        shape = (gemm.k, gemm.n) if gemm.layout is Layout.NN else (gemm.n, gemm.k)
        return self._private["b"][start : start + gemm.k * gemm.n].view(shape)

    def output(self, window: int) -> torch.Tensor:
        """The baselines' C of a window, fp16 M x N."""
        gemm = self.gemm
        start = window * self._shift["c"]
        return self.outputs[start : start + gemm.m * gemm.n].view(gemm.m, gemm.n)

    def poison_outputs(self) -> None:
        self.outputs.view(torch.int16).fill_(POISON)

    def close(self) -> None:
        """Give the graphs and the memory back."""
        for graph, _ in self.graphs.values():
            graph.destroy()
        self.graphs, self._private, self.other_b = {}, {}, []
        self._forget()
        self.outputs = self.outputs[:0].clone()

    def _forget(self) -> None:
        """What was computed from operands that are no more."""
        self._signs_N = self._product_K = self._wide_b = None
        self._projections, self._rows = {}, {}

    def require_untouched(self) -> None:
        """WrongOutput where a launch changed operands."""
        for name, words in self._private.items():
            if not torch.equal(self.arena.span(name).view(torch.int16), words.view(torch.int16)):
                raise WrongOutput(f"changed its input {name.upper()} in a timed round")
        for window, other in enumerate(self.other_b if self._shared_other else ()):
            if not torch.equal(other.view(torch.int16), self.b(window).t().contiguous().view(torch.int16)):
                raise WrongOutput("changed its input B in a timed round")

    def check(
        self,
        outputs: Sequence[torch.Tensor],
        windows: Sequence[int],
        element_wise: bool,
        accumulate: Accumulate | None = None,
    ) -> float:
        """Check fp16 outputs of launches on these windows, the last also row by row: its largest error, or NaN.

        accumulate: the class whose precision is asked for, the task's if not given.
        """
        gemm, accumulate = self.gemm, accumulate or self.gemm.accumulate
        stream, found_L4 = torch.cuda.current_stream().cuda_stream, torch.zeros(len(windows), 4, device="cuda")
        for c_MN, projection, found in zip(outputs, self._projected(windows), found_L4, strict=True):
            self._helpers.look_at_rows(stream, c_MN, projection, found[:2])
        if element_wise:
            rows = self._compared(windows[-1])
            self._helpers.compare_rows(stream, outputs[-1], rows.numbers_R, rows.reference_RN, found_L4[-1][2:])
        found = found_L4.tolist()
        allowed = largest_rms(accumulate, gemm.k)
        for number, (squares, largest, *_) in enumerate(found, 1):  # false for NaN
            rms = math.sqrt(squares / gemm.m)
            if not (rms <= allowed * (1 + 4 / gemm.m**0.5) and largest <= LARGEST_DEVIATION * allowed):
                which = f"timed launch {number} of the {len(windows)} looked at"
                raise WrongOutput(f"{which} did not produce its own result")
        if not element_wise:
            return float("nan")
        rms = math.sqrt(found[-1][2] / rows.reference_RN.numel())
        if not rms <= rms_over_rounding(accumulate, gemm.k) * rows.rounding + SUMMATION_NOISE * gemm.k**0.5:
            raise WrongOutput(f"a timed launch is less precise than the checked ones: RMS {rms:.3g} against fp32")
        return float(found[-1][3])

    def _compared(self, window: int) -> Rows:
        """Some rows of a window's product, the same for all launches on the same operands."""
        gemm = self.gemm
        if window not in self._rows:
            count = max(1, min(gemm.m, COMPARED_FLOPS // (2 * gemm.n * gemm.k)))
            numbers = torch.randperm(gemm.m, generator=self.generator, device="cuda")[:count]
            reference = self.a(window)[numbers].float() @ self._wide(window)
            rounding = (reference.half().float() - reference).square().mean().sqrt()
            self._rows[window] = Rows(numbers, reference, rounding)
        return self._rows[window]

    def _projected(self, windows: Sequence[int]) -> list[Projection]:
        """What C of each window times signs is to be; for all launches on the same operands once."""
        if self._signs_N is None:
            signs = torch.randint(0, 2, (self.gemm.n,), generator=self.generator, device="cuda")
            self._signs_N = signs.float() * 2 - 1
        summation = SUMMATION_NOISE * (self.gemm.k * self.gemm.n) ** 0.5  # where C is near zero
        for w in sorted(set(windows) - self._projections.keys()):
            if self._product_K is None or self._own_b:
                self._product_K = self._wide(w) @ self._signs_N
            expected_M = self.a(w).float() @ self._product_K
            self._projections[w] = Projection(self._signs_N, expected_M, ROUNDING_STEP, summation)
        return [self._projections[w] for w in windows]

    @property
    def _own_b(self) -> bool:
        """Whether every window has a B of its own."""
        return self._shift["b"] > 0

    def _wide(self, window: int) -> torch.Tensor:
        """A window's B in fp32, K x N; kept where it serves all of them."""
        if self._wide_b is not None and not self._own_b:
            return self._wide_b
        b = self.b(window)
        wide = (b if self.gemm.layout is Layout.NN else b.t()).float()
        if not self._own_b:
            self._wide_b = wide
        return wide
