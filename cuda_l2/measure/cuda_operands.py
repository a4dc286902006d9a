"""What timed launches on the GPU read and write: other inputs every round, outputs checked against references.

All references are computed here, in the trusted process, from private copies. Of a matrix product every output that is
looked at is checked by a random projection, see measure/outputs.py, and the last one row by row; of another task every
one by the task's tolerance.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.driver import Graph
from cuda_l2.machine.cuda.helpers import Helpers, Projection
from cuda_l2.machine.cuda.segments import Segments
from cuda_l2.machine.fills import POISONS
from cuda_l2.machine.tensors import dtype_of, view, words
from cuda_l2.measure.cuda_played import Played
from cuda_l2.measure.operands import require_own_result, why_not
from cuda_l2.measure.outputs import LARGEST_DEVIATION, WrongOutput, largest_rms, rms_over_rounding, rounding_step
from cuda_l2.records import Accumulate, Gemm, Tensor
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

COMPARED_FLOPS = 1 << 33
"""Rows of an output that are compared element by element cost at most about this."""
SPARE = 2
"""Cases beside those that lie in windows, so that a round brings others."""


class CudaOperands(ABC):
    """The tensors in the arena's windows, with private copies where candidates cannot reach."""

    def __init__(self, arena: CudaArena) -> None:
        self.arena = arena
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        """Where the baselines run."""

    @abstractmethod
    def refresh(self) -> None:
        """Other inputs in every window."""

    @abstractmethod
    def poison_outputs(self) -> None:
        """Fill the kernels' outputs in every window with what nothing computes."""

    @abstractmethod
    def require_untouched(self) -> None:
        """WrongOutput where a launch changed inputs or weights."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the baselines' launches hold, and the memory of copies."""


class CudaCaseOperands(CudaOperands):
    """Cases in the windows."""

    def __init__(self, arena: CudaArena, cases: Cases, rng: np.random.Generator, helpers: Helpers) -> None:
        super().__init__(arena)
        self.cases, self._rng = cases, rng
        self.played: dict[tuple[str, int], tuple[Played, list[int]]] = {}
        """The baselines' launches by name and number, with their windows: the same for every candidate."""
        self._segments = Segments(helpers)
        self._pool: list[Case] = []
        self.current: list[Case] = []
        """The case in each window, another list after every change."""

    def refresh(self) -> None:
        """The cases are drawn from a few more."""
        while len(self._pool) < self.arena.windows + SPARE:
            self._pool.append(self.cases.timed(len(self._pool)))
        chosen = self._rng.permutation(len(self._pool))[: self.arena.windows]
        self.current = [self._pool[int(index)] for index in chosen]
        self._segments.fill(
            [segment for window, case in enumerate(self.current) for segment in self.arena.held(case.tensors, window)]
        )

    def poison_outputs(self) -> None:
        self._segments.fill(self.arena.poisons())

    def violation(self, window: int, found: Mapping[str, torch.Tensor]) -> str:
        """Why these are not the outputs of a window's case; empty where they are."""
        return why_not(self.cases, self.current[window], found)

    def check(
        self, outputs: Sequence[Mapping[str, torch.Tensor]], windows: Sequence[int], *, element_wise: bool
    ) -> float:
        """WrongOutput where launches on these windows did not give these; the last one's largest error or NaN."""
        for found, window in zip(outputs, windows, strict=True):
            require_own_result(self.cases, self.current[window], found)
        return self.current[windows[-1]].errors(outputs[-1])[1] if element_wise else float("nan")

    def require_untouched(self) -> None:
        for window, case in enumerate(self.current):
            if not all(self._segments.hold(self.arena.held(case.tensors, window))):
                raise WrongOutput("changed its inputs or weights in a timed round")

    def close(self) -> None:
        for replays, _ in self.played.values():
            replays.destroy()
        self.played = {}


@dataclass(frozen=True)
class Rows:
    """Some rows of a product in fp32, their numbers, and the RMS of what rounding them to C's type changes."""

    numbers_R: torch.Tensor
    reference_RN: torch.Tensor
    rounding_on_gpu: torch.Tensor

    @functools.cached_property
    def rounding(self) -> float:
        """Read when all comparisons of an output are enqueued, so that the host waits once."""
        return float(self.rounding_on_gpu.item())


def other_layout(gemm: Gemm) -> Tensor:
    """B in the layout that is not the task's."""
    b = gemm.inputs[1]
    return replace(b, name="b_other", column_major=not b.column_major)


class CudaProductOperands(CudaOperands):
    """Standard normal A and B in the windows, and outputs for baselines, which no candidate can read."""

    def __init__(self, arena: CudaArena, gemm: Gemm, generator: torch.Generator, helpers: Helpers) -> None:
        super().__init__(arena)
        self.gemm, self.generator, self._helpers = gemm, generator, helpers
        self.graphs: dict[tuple[str, int], tuple[Graph, list[int]]] = {}
        """The baselines' launches by name and number, with their windows: the same for every candidate."""
        self._a, self._b = gemm.inputs
        (self._c,) = gemm.outputs
        self._private = {tensor.name: torch.empty_like(arena.span(tensor)) for tensor in gemm.inputs}
        """Bytes of A and B of every window."""
        self._outputs = torch.empty_like(arena.span(self._c))
        """Bytes of C of every window for the baselines."""
        self._projections: dict[int, Projection] = {}
        """A (B x) of a window, for the signs x of this refresh."""
        self._signs_N: torch.Tensor | None = None
        self._product_K: torch.Tensor | None = None
        """B times the signs: of all windows, or of the last one used where each has its own B."""
        self._wide_b: torch.Tensor | None = None
        """The same B in fp32, K x N."""
        self._rows: dict[int, Rows] = {}
        self.other_b: list[torch.Tensor] = []
        """B of every window, K x N in the layout that is not the task's; empty until asked for."""
        self._other = other_layout(gemm)
        self._shared_other = arena.holds(self._other)
        """Whether candidates can have B in the other layout."""

    def refresh(self) -> None:
        """New numbers in every window."""
        self._forget()
        for tensor in self.gemm.inputs:
            private = self._private[tensor.name]
            private.view(dtype_of(tensor)).normal_(generator=self.generator)
            self.arena.span(tensor).copy_(private)
        for window, other in enumerate(self.other_b):
            other.copy_(self.b(window))

    def use_other_layout(self) -> None:
        """Keep B in the other layout too, for baselines that read it so."""
        if not self.other_b:
            windows = range(self.arena.windows if self._own_b else 1)
            if self._shared_other:
                self.other_b = [self.arena.tensor(self._other, window) for window in windows]
            else:
                room = [torch.empty(self._other.bytes, dtype=torch.uint8, device=self._outputs.device) for _ in windows]
                self.other_b = [view(storage, self._other) for storage in room]
            for window, other in enumerate(self.other_b):
                other.copy_(self.b(window))

    def a(self, window: int) -> torch.Tensor:
        """A, M x K, from the private copy."""
        return self._of_window(self._private["a"], self._a, window)

    def b(self, window: int) -> torch.Tensor:
        """B, K x N as the task lays it out, from the private copy."""
        return self._of_window(self._private["b"], self._b, window)

    def output(self, window: int) -> torch.Tensor:
        """The baselines' C of a window, M x N."""
        return self._of_window(self._outputs, self._c, window)

    def _of_window(self, storage: torch.Tensor, tensor: Tensor, window: int) -> torch.Tensor:
        start = window * self.arena.shift(tensor)
        return view(storage[start : start + tensor.bytes], tensor)

    def poison_outputs(self) -> None:
        self._poison(self.arena.span(self._c))

    def poison_baselines(self) -> None:
        """The same for the baselines' outputs."""
        self._poison(self._outputs)

    def _poison(self, storage: torch.Tensor) -> None:
        words(storage.view(dtype_of(self._c))).fill_(int.from_bytes(POISONS[self._c.dtype], "little"))

    def close(self) -> None:
        for graph, _ in self.graphs.values():
            graph.destroy()
        self.graphs, self._private, self.other_b = {}, {}, []
        self._forget()
        self._outputs = self._outputs[:0].clone()

    def _forget(self) -> None:
        """Drop what was computed from operands that are no more."""
        self._signs_N = self._product_K = self._wide_b = None
        self._projections, self._rows = {}, {}

    def require_untouched(self) -> None:
        for tensor in self.gemm.inputs:
            if not torch.equal(self.arena.span(tensor), self._private[tensor.name]):
                raise WrongOutput(f"changed its input {tensor.name.upper()} in a timed round")
        for window, other in enumerate(self.other_b if self._shared_other else ()):
            if not torch.equal(words(other), words(self.b(window))):
                raise WrongOutput("changed its input B in a timed round")

    def check(
        self,
        outputs: Sequence[torch.Tensor],
        windows: Sequence[int],
        element_wise: bool,
        accumulate: Accumulate | None = None,
    ) -> float:
        """Check C of launches on these windows, the last also row by row: its largest error, or NaN.

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
            rounding = (reference.to(dtype_of(self._c)).float() - reference).square().mean().sqrt()
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
            self._projections[w] = Projection(self._signs_N, expected_M, rounding_step(dtype_of(self._c)), summation)
        return [self._projections[w] for w in windows]

    @property
    def _own_b(self) -> bool:
        """Whether every window has a B of its own."""
        return self.arena.shift(self._b) > 0

    def _wide(self, window: int) -> torch.Tensor:
        """A window's B in fp32, K x N; kept where it serves all of them."""
        if self._wide_b is not None and not self._own_b:
            return self._wide_b
        wide = self.b(window).float()
        if not self._own_b:
            self._wide_b = wide
        return wide
