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
from cuda_l2.machine.cuda.driver import Graph, check
from cuda_l2.machine.cuda.helpers import Helpers, Projection
from cuda_l2.machine.fills import POISON_WORDS, POISONS
from cuda_l2.machine.tensors import dtype_of, view, words
from cuda_l2.measure.baselines._base import LibraryProduct, library_baselines
from cuda_l2.measure.cublas import Launch
from cuda_l2.measure.launches import Buffers
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.outputs import WrongOutput, require_own, require_precise, rounding_step
from cuda_l2.measure.rounds import Kernel
from cuda_l2.measure.timed_memory import Launches, Outputs, TimedMemory
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
        """Bytes of A and B of every window; of B in the other layout too once it is asked for."""
        self._outputs = torch.empty_like(arena.span(self._c))
        """Bytes of C of every window for the baselines."""
        self._other = other_layout(gemm)
        """B in the layout that is not the task's: other numbers, in windows of its own."""
        self._forget()

    @property
    def tuned(self) -> bool:  # type: ignore[override] # where libraries tune it is no constant
        return self._libraries.is_tuned(self.gemm) and self._libraries.is_searched(self.gemm)

    def tune(self) -> None:
        """Let cuBLASLt choose its best algorithms for both layouts of B, and search beyond them where asked for."""
        if self.tuned:
            return
        self._use_other_layout()
        self.refresh()
        b_nn, b_tn = (self.b(0, self._b_of(layout)) for layout in (Layout.NN, Layout.TN))
        pointers = (self.a(0), b_nn, b_tn, self.output(0))
        buffers = Buffers(*(tensor.data_ptr() for tensor in pointers))
        self._libraries.tune(self.gemm, buffers)
        self._libraries.search(self.gemm, buffers, self._right)

    def _right(self, layout: Layout, launch: Launch, launches: int) -> bool:
        """Whether launches on the windows in turn give the product, in the precision of the task's class."""
        b, stream = self._b_of(layout), self.stream
        for place in (number % self.arena.windows for number in range(launches)):
            self.poisoning(place)()
            address = self.b(place, b).data_ptr()
            launch(stream.cuda_stream, self.a(place).data_ptr(), address, address, self.output(place).data_ptr())
            stream.synchronize()
            try:
                self._check([self.output(place)], [place], False, b, self.gemm.accumulate)
            except WrongOutput:
                return False
        return True

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
        own = self._b_of(kernel.layout)
        return [places | {"b": self.arena.place(own, place)} for place, places in enumerate(found)]

    def play(self, baseline: LibraryProduct, places: Sequence[int]) -> Graph:
        launch, arena = baseline.launcher(self._libraries, self.gemm), self.arena
        read = self._b_of(baseline.layout)

        def on_place(stream: int, place: int) -> None:
            a = arena.address(arena.place(self._a, place))
            # what a candidate can read is what it could change too; B is read in one layout alone
            b = arena.address(arena.place(read, place)) if arena.holds(read) else self.b(place, read).data_ptr()
            launch(stream, a, b, b, self.output(place).data_ptr())

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
        for tensor in self._read:
            private = self._private[tensor.name]
            private.view(dtype_of(tensor)).normal_(generator=self._generator)
            if self.arena.holds(tensor):
                self.arena.span(tensor).copy_(private)

    @property
    def _read(self) -> list[Tensor]:
        """A, B, and B in the other layout where something reads it so."""
        return [tensor for tensor in (self._a, self._b, self._other) if tensor.name in self._private]

    def _use_other_layout(self) -> None:
        """Keep B in the other layout too, for what reads it so."""
        if self._other.name not in self._private:
            size = self._other.bytes + (self.arena.windows - 1) * self._shift(self._other)
            self._private[self._other.name] = torch.empty(size, dtype=torch.uint8, device=self._outputs.device)

    def _b_of(self, layout: Layout | None) -> Tensor:
        """B as something reads it that names this layout."""
        return self._b if layout in (None, self.layout) else self._other

    def _shift(self, tensor: Tensor) -> int:
        return self.arena.sharing.shift(self.gemm, tensor)

    def a(self, place: int) -> torch.Tensor:
        """A, M x K, from the private copy."""
        return self._at(self._private["a"], self._a, place)

    def b(self, place: int, b: Tensor) -> torch.Tensor:
        """B, K x N in the layout that `b` has, from the private copy."""
        return self._at(self._private[b.name], b, place)

    def output(self, place: int) -> torch.Tensor:
        """The baselines' C of a place, M x N."""
        return self._at(self._outputs, self._c, place)

    def _at(self, storage: torch.Tensor, tensor: Tensor, place: int) -> torch.Tensor:
        start = self.arena.window_of(tensor, place) * self._shift(tensor)
        return view(storage[start : start + tensor.bytes], tensor)

    def poison_baselines(self) -> None:
        words(self._outputs.view(dtype_of(self._c))).fill_(int.from_bytes(POISONS[self._c.dtype], "little"))

    def poisoning(self, place: int) -> Callable[[], None]:
        output, handle = self.output(place), driver.CUstream(self.stream.cuda_stream)
        word = POISON_WORDS[self._c.dtype] & 0xFFFF

        def poison() -> None:
            check("cuMemsetD16Async", driver.cuMemsetD16Async(output.data_ptr(), word, output.numel(), handle))

        return poison

    def close(self) -> None:
        """Give back what the baselines' launches hold, and the memory of copies."""
        super().close()
        self._private = {}
        self._forget()
        self._outputs = self._outputs[:0].clone()

    def _forget(self) -> None:
        """Drop what was computed from operands that are no more."""
        self._signs_N: torch.Tensor | None = None
        self._wide_b: tuple[tuple[str, int], torch.Tensor] | None = None
        """The B that was used last in fp32, K x N, and which it is."""
        self._products: dict[tuple[str, int], torch.Tensor] = {}
        """B x of each, for the signs x of this refresh."""
        self._projections: dict[tuple[str, int], Projection] = {}
        """A (B x) by the name of B and the place."""
        self._rows: dict[tuple[str, int], Rows] = {}
        """By the same."""

    def require_untouched(self) -> None:
        for tensor in self._read:
            if not self.arena.holds(tensor):
                continue
            if not torch.equal(self.arena.span(tensor), self._private[tensor.name]):
                raise WrongOutput(f"changed its input {tensor.name[0].upper()} in a timed round")

    def check(
        self, outputs: Sequence[Outputs], places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        """The last launch is checked row by row too, where asked for."""
        found = [output["c"] for output in outputs]
        return self._check(found, places, element_wise, self._b_of(layout), self.gemm.accumulate)

    def check_baseline(
        self, played: Launches, places: Sequence[int], *, element_wise: bool, layout: Layout | None = None
    ) -> float:
        # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
        found = [self.output(place) for place in places]
        return self._check(found, places, element_wise, self._b_of(layout), Accumulate.FP16)

    def _check(
        self,
        outputs: Sequence[torch.Tensor],
        places: Sequence[int],
        element_wise: bool,
        b: Tensor,
        accumulate: Accumulate,
    ) -> float:
        """`check` of C alone, in the precision of a class. b: which one was read."""
        gemm = self.gemm
        stream, found_L4 = torch.cuda.current_stream().cuda_stream, torch.zeros(len(places), 4, device="cuda")
        self._helpers.look_at_rows(stream, outputs, [self._projected(b, place) for place in places], found_L4)
        if element_wise:
            rows = self._compared(b, places[-1])
            self._helpers.compare_rows(stream, outputs[-1], rows.numbers_R, rows.reference_RN, found_L4[-1][2:])
        found = found_L4.tolist()
        deviations = ((math.sqrt(squares / gemm.m), largest) for squares, largest, *_ in found)
        require_own(deviations, accumulate, gemm.m, gemm.k)
        if not element_wise:
            return float("nan")
        rms = math.sqrt(found[-1][2] / rows.reference_RN.numel())
        require_precise(accumulate, gemm.k, rms, float(rows.rounding))
        return float(found[-1][3])

    def _compared(self, b: Tensor, place: int) -> Rows:
        """Some rows of a place's product, the same for all launches on the same operands."""
        gemm, key = self.gemm, (b.name, place)
        if key not in self._rows:
            count = max(1, min(gemm.m, COMPARED_FLOPS // (2 * gemm.n * gemm.k)))
            numbers = torch.randperm(gemm.m, generator=self._generator, device="cuda")[:count]
            reference = self.a(place)[numbers].float() @ self._wide(b, place)
            rounding = (reference.to(dtype_of(self._c)).float() - reference).square().mean().sqrt()
            self._rows[key] = Rows(numbers, reference, rounding)
        return self._rows[key]

    def _projected(self, b: Tensor, place: int) -> Projection:
        """What C of a place times signs is to be; for all launches on the same operands once."""
        gemm, key = self.gemm, (b.name, place)
        if self._signs_N is None:
            self._signs_N = torch.randint(0, 2, (gemm.n,), generator=self._generator, device="cuda").float() * 2 - 1
        if key not in self._projections:
            own = (b.name, self.arena.window_of(b, place))
            if own not in self._products:
                self._products[own] = self._wide(b, place) @ self._signs_N
            expected_M = self.a(place).float() @ self._products[own]
            summation = SUMMATION_NOISE * (gemm.k * gemm.n) ** 0.5  # where C is near zero
            self._projections[key] = Projection(self._signs_N, expected_M, rounding_step(dtype_of(self._c)), summation)
        return self._projections[key]

    def _wide(self, b: Tensor, place: int) -> torch.Tensor:
        """A place's B in fp32, K x N."""
        key = (b.name, self.arena.window_of(b, place))
        if self._wide_b is None or self._wide_b[0] != key:
            self._wide_b = None  # not two at once
            self._wide_b = (key, self.b(place, b).float())
        return self._wide_b[1]


def library_outputs(libraries: Libraries, gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> Sequence[torch.Tensor]:
    """What every NVIDIA library computes for A, M x K, and B, K x N: M x N each; cuBLASLt's best only if tuned."""
    b_nn, b_tn, outputs = b.contiguous(), b.t().contiguous(), []
    for baseline in library_baselines(libraries, gemm):
        skipped = baseline.tuned and not libraries.is_tuned(gemm)
        # the compiler's kernels are not NVIDIA's, and the heuristic knows why it leaves a configuration out
        if not (baseline.compiled or baseline.searched or skipped):
            outputs.append(torch.empty(gemm.m, gemm.n, dtype=a.dtype, device=a.device))
            launch, stream = baseline.launcher(libraries, gemm), torch.cuda.current_stream().cuda_stream
            launch(stream, *(tensor.data_ptr() for tensor in (a, b_nn, b_tn, outputs[-1])))
    torch.cuda.synchronize()
    return outputs
