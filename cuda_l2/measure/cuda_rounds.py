"""Times CUDA candidates for a matrix product against NVIDIA's libraries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from cuda.bindings import driver

from cuda_l2 import contract
from cuda_l2.machine.cuda.driver import Graph, Replays, check
from cuda_l2.machine.fills import POISON_WORDS
from cuda_l2.measure.cuda_arms import AUTOTUNED, COMPILED
from cuda_l2.measure.cuda_baselines import Baselines
from cuda_l2.measure.cuda_operands import CudaProductOperands, other_layout
from cuda_l2.measure.graph_rounds import Gpu, GraphRounds, Output, measured
from cuda_l2.measure.rounds import Kernel, Terms
from cuda_l2.records import Accumulate, Layout, Timing

SLOWEST_GFLOPS = 100.0


def measure_cuda(
    gpu: Gpu,
    baselines: Baselines,
    names: Sequence[str],
    kernels: Mapping[str, Kernel],
    operands: CudaProductOperands,
    terms: Terms,
) -> dict[str, Timing]:
    """Time kernels that were found correct against the named baselines; one timing a kernel.

    The reference is the strongest of those that read B as one of the kernels does; the others are timed beside them.
    Without kernels the first of the names stands in their place. Rounds end when the first kernel's ratio is known.
    """
    rounds = partial(CudaRounds, gpu, baselines, names, kernels, operands, terms)
    return measured(gpu, rounds, list(kernels) or names[:1], terms.protocol)


class CudaRounds(GraphRounds):
    def __init__(
        self,
        gpu: Gpu,
        baselines: Baselines,
        names: Sequence[str],
        kernels: Mapping[str, Kernel],
        operands: CudaProductOperands,
        terms: Terms,
    ) -> None:
        gemm, arena = operands.gemm, operands.arena
        read = {kernel.layout for kernel in kernels.values()} or {gemm.layout}
        unread = tuple(f" {layout.upper()}" for layout in Layout if layout not in read)
        references = [name for name in names if not name.endswith(unread)]
        subject = next(iter(kernels), names[0])
        strong = [name for name in names if name.startswith(AUTOTUNED)]
        seldom = [name for name in names if strong and name not in (*strong, COMPILED)]
        if len(references) < len(names) or len(read) > 1:
            operands.use_other_layout()
        self.operands, self.arena, self.gemm, self.baselines = operands, arena, gemm, baselines
        arena.select(gemm)
        self.operand_places = [
            {tensor.name: arena.place(tensor, window) for tensor in gemm.tensors} for window in range(arena.windows)
        ]
        roles: dict[str, Any] = {"references": references, "subject": subject, "kernels": kernels, "seldom": seldom}
        super().__init__(gpu, operands, [*names, *kernels], terms, **roles)
        for name, kernel in kernels.items():
            plan = contract.plan_cuda(kernel.candidate.source, replace(gemm, layout=kernel.layout), gpu.sms)
            places = [arena.places(plan, window, slot=self.slots[name]) for window in range(arena.windows)]
            if kernel.layout is not gemm.layout:
                other = other_layout(gemm)
                places = [{**place, "b": arena.place(other, window)} for window, place in enumerate(places)]
            self.load(name, kernel.build, plan, places)
        self.trace()

    @property
    def slowest_launch_s(self) -> float:
        return self.gemm.flops / SLOWEST_GFLOPS * 1e-9

    @property
    def rotates(self) -> bool:
        return self.arena.sharing.rotates

    def windows(self, count: int) -> list[int]:
        """In random order; where they rotate each in its turn, so that none is in the cache when it comes again."""
        if self.rotates:
            return [i % self.arena.windows for i in range(count)]
        return [int(window) for window in self.rng.integers(0, self.arena.windows, count)]

    def written(self, window: int) -> list[Output]:
        return self.arena.written(window)

    def played(self, name: str, count: int) -> tuple[Replays, list[int]]:
        key = (name, count)
        if key not in self.operands.graphs:
            sequence = self.windows(count)
            launch = self._launcher(name)

            def enqueue(stream: int) -> None:
                for window in sequence:
                    launch(stream, window)

            with torch.cuda.stream(self._stream):
                launch(self._stream.cuda_stream, 0)  # what a library sets up on first use is not captured
                self._stream.synchronize()
                self.operands.graphs[key] = (Graph(self._stream.cuda_stream, enqueue), sequence)
        return self.operands.graphs[key]

    def poison(self, name: str) -> None:
        if name in self.slots:
            self.operands.poison_outputs()
            self.arena.fill_workspaces(self._plans[name], persistent=False, slot=self.slots[name])
        else:
            self.operands.poison_baselines()

    def poison_between(self, name: str, window: int) -> Callable[[], None]:
        output, handle = self.operands.output(window), driver.CUstream(self._stream.cuda_stream)
        word = POISON_WORDS[self.gemm.dtype] & 0xFFFF

        def poison() -> None:
            check("cuMemsetD16Async", driver.cuMemsetD16Async(output.data_ptr(), word, output.numel(), handle))

        return poison

    def check(self, name: str, windows: Sequence[int], element_wise: bool) -> float:
        outputs = [self._output(name, window) for window in windows]
        # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
        least = self.gemm.accumulate if name in self.kernels else Accumulate.FP16
        return self.operands.check(outputs, windows, element_wise, least)

    def audit(self, name: str) -> None:
        arena = self.arena
        self.operands.refresh()
        arena.forget_records()
        windows = self.record(name, self.written, arena.record_stride, arena.records)
        outputs = [arena.recorded(number)["c"] for number in range(len(windows))]
        self.operands.check(outputs, windows, element_wise=True)

    def _launcher(self, name: str) -> Callable[[int, int], None]:
        launch = self.baselines.launcher(name, self.gemm)
        operands, arena = self.operands, self.arena

        def on_window(stream: int, window: int) -> None:
            place = self.operand_places[window]
            own = arena.address(place["b"])
            other = operands.other_b[min(window, len(operands.other_b) - 1)].data_ptr() if operands.other_b else own
            b_nn, b_tn = (own, other) if self.gemm.layout is Layout.NN else (other, own)
            launch(stream, arena.address(place["a"]), b_nn, b_tn, operands.output(window).data_ptr())

        return on_window

    def _output(self, name: str, window: int) -> torch.Tensor:
        return self.arena.outputs(window)["c"] if name in self.slots else self.operands.output(window)
