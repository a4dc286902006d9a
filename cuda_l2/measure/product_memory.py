"""What timed launches of a matrix product on a GPU read and write, and what NVIDIA's libraries are launched on.

Every output that is looked at is checked by a random projection, see measure/outputs.py, and the last one row by row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from cuda.bindings import driver

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.driver import Graph, Replays, check
from cuda_l2.machine.cuda.helpers import Helpers, Projection
from cuda_l2.machine.fills import POISON_WORDS, POISONS
from cuda_l2.machine.tensors import dtype_of, view, words
from cuda_l2.measure.baselines._base import LibraryProduct, library_baselines
from cuda_l2.measure.launches import Buffers
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.outputs import WrongOutput, require_own, require_precise, rounding_step
from cuda_l2.measure.rounds import Kernel
from cuda_l2.measure.timed_memory import Outputs, TimedMemory
from cuda_l2.records import Accumulate, Gemm, Layout, Task, Tensor
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

COMPARED_FLOPS = 1 << 33
"""Rows of an output that are compared element by element cost at most about this."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a product in fp32, their numbers, and the RMS of what rounding them to C's type changes."""

    numbers_R: torch.Tensor
    reference_RN: torch.Tensor
    rounding: torch.Tensor
    """On the GPU: read when all comparisons of an output are enqueued, so that the host waits once."""


def other_layout(product: Task) -> Tensor:
    """B in the layout that is not the product's own."""
    b = product.inputs[1]
    return replace(b, name="b_other", column_major=not b.column_major)


class ProductMemory(TimedMemory):
    """Standard normal A and B in the windows, and outputs for baselines, which no candidate can read."""

    draws_power = True

    def __init__(
        self, arena: CudaArena, gemm: Gemm, generator: torch.Generator, helpers: Helpers, libraries: Libraries
    ) -> None:
        super().__init__(arena, gemm, helpers)
        self.gemm, self.layout = gemm, gemm.layout
        self._generator, self._helpers, self._libraries = generator, helpers, libraries
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

    @property
    def tuned(self) -> bool:  # type: ignore[override] # where libraries tune it is no constant
        return self._libraries.is_tuned(self.gemm)

    def tune(self) -> None:
        """Let cuBLASLt choose its best algorithms for both layouts of B."""
        if self.tuned:
            return
        self.refresh()
        self._use_other_layout()
        own, other = self.b(0), self.other_b[0]
        b_nn, b_tn = (own, other) if self.layout is Layout.NN else (other, own)
        pointers = (self.a(0), b_nn, b_tn, self.output(0))
        self._libraries.tune(self.gemm, Buffers(*(tensor.data_ptr() for tensor in pointers)))

    def available(self) -> list[LibraryProduct]:
        return library_baselines(self._libraries, self.gemm)

    def begin(self, *, both_layouts: bool) -> None:
        super().begin(both_layouts=both_layouts)
        if both_layouts:
            self._use_other_layout()

    def plan(self, kernel: Kernel, sms: int) -> Plan:
        gemm = replace(self.gemm, layout=kernel.layout or self.gemm.layout)
        return contract.plan_cuda(kernel.candidate.source, gemm, sms)

    def places(self, plan: Plan, kernel: Kernel, slot: int) -> list[dict[str, Place]]:
        found = super().places(plan, kernel, slot)
        if kernel.layout in (None, self.layout):
            return found
        return [
            {**places, "b": self.arena.place(self._other, self.inputs_of(place))} for place, places in enumerate(found)
        ]

    def play(self, baseline: LibraryProduct, places: Sequence[int]) -> Graph:
        launch, arena = baseline.launcher(self._libraries, self.gemm), self.arena

        def on_place(stream: int, place: int) -> None:
            window, output = self.inputs_of(place), self.output(self.outputs_of(place))
            own = arena.address(arena.place(self._b, window))
            other = self.other_b[min(window, len(self.other_b) - 1)].data_ptr() if self.other_b else own
            b_nn, b_tn = (own, other) if self.layout is Layout.NN else (other, own)
            launch(stream, arena.address(arena.place(self._a, window)), b_nn, b_tn, output.data_ptr())

        def enqueue(stream: int) -> None:
            for place in places:
                on_place(stream, place)

        with torch.cuda.stream(self.stream):
            on_place(self.stream.cuda_stream, 0)  # what a library sets up on first use is not captured
            self.stream.synchronize()
            return Graph(self.stream.cuda_stream, enqueue)

    def refresh(self) -> None:
        """New numbers in every window."""
        self._forget()
        for tensor in self.gemm.inputs:
            private = self._private[tensor.name]
            private.view(dtype_of(tensor)).normal_(generator=self._generator)
            self.arena.span(tensor).copy_(private)
        for window, other in enumerate(self.other_b):
            other.copy_(self.b(window))

    def _use_other_layout(self) -> None:
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

    def poison_baselines(self) -> None:
        words(self._outputs.view(dtype_of(self._c))).fill_(int.from_bytes(POISONS[self._c.dtype], "little"))

    def poisoning(self, place: int) -> Callable[[], None]:
        output, handle = self.output(self.outputs_of(place)), driver.CUstream(self.stream.cuda_stream)
        word = POISON_WORDS[self._c.dtype] & 0xFFFF

        def poison() -> None:
            check("cuMemsetD16Async", driver.cuMemsetD16Async(output.data_ptr(), word, output.numel(), handle))

        return poison

    def close(self) -> None:
        """Give back what the baselines' launches hold, and the memory of copies."""
        super().close()
        self._private, self.other_b = {}, []
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

    def check(self, outputs: Sequence[Outputs], windows: Sequence[int], *, element_wise: bool) -> float:
        """The last launch is checked row by row too, where asked for."""
        found = [output["c"] for output in outputs]
        return self._check(found, windows, element_wise, self.gemm.accumulate)

    def check_baseline(
        self, played: tuple[Replays, Sequence[int]], places: Sequence[int], *, element_wise: bool
    ) -> float:
        # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
        found = [self.output(self.outputs_of(place)) for place in places]
        return self._check(found, [self.inputs_of(place) for place in places], element_wise, Accumulate.FP16)

    def _check(
        self, outputs: Sequence[torch.Tensor], windows: Sequence[int], element_wise: bool, accumulate: Accumulate
    ) -> float:
        """`check` of C alone, in the precision of a class."""
        gemm = self.gemm
        stream, found_L4 = torch.cuda.current_stream().cuda_stream, torch.zeros(len(windows), 4, device="cuda")
        self._helpers.look_at_rows(stream, outputs, self._projected(windows), found_L4)
        if element_wise:
            rows = self._compared(windows[-1])
            self._helpers.compare_rows(stream, outputs[-1], rows.numbers_R, rows.reference_RN, found_L4[-1][2:])
        found = found_L4.tolist()
        deviations = ((math.sqrt(squares / gemm.m), largest) for squares, largest, *_ in found)
        require_own(deviations, accumulate, gemm.m, gemm.k)
        if not element_wise:
            return float("nan")
        rms = math.sqrt(found[-1][2] / rows.reference_RN.numel())
        require_precise(accumulate, gemm.k, rms, float(rows.rounding))
        return float(found[-1][3])

    def _compared(self, window: int) -> Rows:
        """Some rows of a window's product, the same for all launches on the same operands."""
        gemm = self.gemm
        if window not in self._rows:
            count = max(1, min(gemm.m, COMPARED_FLOPS // (2 * gemm.n * gemm.k)))
            numbers = torch.randperm(gemm.m, generator=self._generator, device="cuda")[:count]
            reference = self.a(window)[numbers].float() @ self._wide(window)
            rounding = (reference.to(dtype_of(self._c)).float() - reference).square().mean().sqrt()
            self._rows[window] = Rows(numbers, reference, rounding)
        return self._rows[window]

    def _projected(self, windows: Sequence[int]) -> list[Projection]:
        """What C of each window times signs is to be; for all launches on the same operands once."""
        if self._signs_N is None:
            signs = torch.randint(0, 2, (self.gemm.n,), generator=self._generator, device="cuda")
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


def library_outputs(libraries: Libraries, gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    """What every NVIDIA library computes for A, M x K, and B, K x N: M x N each; cuBLASLt's best only if tuned."""
    b_nn, b_tn, outputs = b.contiguous(), b.t().contiguous(), []
    for baseline in library_baselines(libraries, gemm):
        skipped = baseline.tuned and not libraries.is_tuned(gemm)
        if not baseline.compiled and not skipped:  # the compiler's kernels are not NVIDIA's
            outputs.append(torch.empty(gemm.m, gemm.n, dtype=a.dtype, device=a.device))
            launch, stream = baseline.launcher(libraries, gemm), torch.cuda.current_stream().cuda_stream
            launch(stream, *(tensor.data_ptr() for tensor in (a, b_nn, b_tn, outputs[-1])))
    torch.cuda.synchronize()
    return outputs
