"""The memory that timed launches on a GPU work on: how baselines launch there, and whether launches gave their results.

Windows are sets of tensors that successive launches take in turn. There is one kind for matrix products, whose windows
overlap in one buffer, and one for other tasks, whose windows hold cases of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.driver import Graph, Replays, check
from cuda_l2.machine.cuda.worker import slowest_s
from cuda_l2.machine.fills import POISON_WORDS
from cuda_l2.measure.baselines._base import Baseline, LibraryProduct
from cuda_l2.measure.cuda_operands import CudaCaseOperands, CudaProductOperands, other_layout
from cuda_l2.measure.cuda_played import Played
from cuda_l2.measure.cuda_task_baselines import CudaTaskBaselines, results_by_name
from cuda_l2.measure.libraries import Libraries
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import Accumulate, Layout

SLOWEST_GFLOPS = 100.0
AUDITED = 64
"""At most so many launches of a task's round are kept, each looked at by itself."""
Output = list[Any]
"""As the worker takes one: buffer, offset, bytes, the word that poisons it, where it lies in a record."""
Record = Callable[[int, int], list[int]]
"""Launches a kernel as in a timed round and keeps outputs: bytes of one, how many; the windows of those kept."""


class ProductMemory:
    """Operands of a matrix product."""

    draws_power = True
    """Whether launches take as much power as the heater's products, which then run while results are checked."""

    def __init__(self, operands: CudaProductOperands, libraries: Libraries) -> None:
        self._operands, self._libraries = operands, libraries
        self.arena, self.stream, self.gemm = operands.arena, operands.stream, operands.gemm
        self.layout = self.gemm.layout

    def begin(self, *, both_layouts: bool) -> None:
        """Lay the memory out for a measurement. both_layouts: B is read in both."""
        if both_layouts:
            self._operands.use_other_layout()
        self.arena.select(self.gemm)
        windows = range(self.arena.windows)
        self._places = [{each.name: self.arena.place(each, window) for each in self.gemm.tensors} for window in windows]

    def plan(self, kernel: Kernel, sms: int) -> Plan:
        return contract.plan_cuda(kernel.candidate.source, replace(self.gemm, layout=kernel.layout), sms)

    def places(self, plan: Plan, kernel: Kernel, slot: int) -> list[dict[str, Place]]:
        """Where a kernel's tensors lie in every window."""
        arena = self.arena
        found = [arena.places(plan, window, slot=slot) for window in range(arena.windows)]
        if kernel.layout is self.layout:
            return found
        other = other_layout(self.gemm)
        return [{**places, "b": arena.place(other, window)} for window, places in enumerate(found)]

    def refresh(self) -> None:
        """Other inputs in the windows than in the round before."""
        self._operands.refresh()

    def require_untouched(self) -> None:
        """WrongOutput where what baselines and kernels read is not what it was."""
        self._operands.require_untouched()

    @property
    def slowest_launch_s(self) -> float:
        """A kernel's launch that takes longer is taken to hang."""
        return self.gemm.flops / SLOWEST_GFLOPS * 1e-9

    @property
    def rotates(self) -> bool:
        """Whether every window has an output of its own."""
        return self.arena.sharing.rotates

    def windows(self, count: int, rng: np.random.Generator) -> list[int]:
        """In random order; where they rotate each in its turn, so that none is in the cache when it comes again."""
        if self.rotates:
            return [i % self.arena.windows for i in range(count)]
        return [int(window) for window in rng.integers(0, self.arena.windows, count)]

    def written(self, window: int) -> list[Output]:
        """A kernel's outputs in a window."""
        return self.arena.written(window)

    def played(self, baseline: Any, count: int, rng: np.random.Generator) -> tuple[Replays, list[int]]:
        """A baseline's launches and their windows; made on first use."""
        graphs, key, stream = self._operands.graphs, (baseline.name, count), self.stream
        if key not in graphs:
            sequence = self.windows(count, rng)
            launch = self._launcher(baseline)

            def enqueue(stream: int) -> None:
                for window in sequence:
                    launch(stream, window)

            with torch.cuda.stream(stream):
                launch(stream.cuda_stream, 0)  # what a library sets up on first use is not captured
                stream.synchronize()
                graphs[key] = (Graph(stream.cuda_stream, enqueue), sequence)
        return graphs[key]

    def poison_kernels_outputs(self) -> None:
        self._operands.poison_outputs()

    def poison_baselines_outputs(self) -> None:
        self._operands.poison_baselines()

    def poisoning(self, window: int) -> Callable[[], None]:
        """Enqueues poison for the baselines' output in one window."""
        output, handle = self._operands.output(window), driver.CUstream(self.stream.cuda_stream)
        word = POISON_WORDS[self.gemm.outputs[0].dtype] & 0xFFFF

        def poison() -> None:
            check("cuMemsetD16Async", driver.cuMemsetD16Async(output.data_ptr(), word, output.numel(), handle))

        return poison

    def check_kernel(self, windows: Sequence[int], element_wise: bool) -> float:
        """WrongOutput where the last launches on these windows did not give their results; the largest error or NaN."""
        outputs = [self.arena.outputs(window)["c"] for window in windows]
        return self._operands.check(outputs, windows, element_wise, self.gemm.accumulate)

    def check_baseline(self, baseline: Baseline, windows: Sequence[int], element_wise: bool) -> float:
        # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
        outputs = [self._operands.output(window) for window in windows]
        return self._operands.check(outputs, windows, element_wise, Accumulate.FP16)

    def audit(self, record: Record) -> None:
        """WrongOutput where one of many launches of a round like the timed ones did not give its own result."""
        arena = self.arena
        self._operands.refresh()
        arena.forget_records()
        windows = record(arena.record_stride, arena.records)
        outputs = [arena.recorded(number)["c"] for number in range(len(windows))]
        self._operands.check(outputs, windows, element_wise=True)

    def _launcher(self, baseline: LibraryProduct) -> Callable[[int, int], None]:
        launch = baseline.launcher(self._libraries, self.gemm)
        operands, arena = self._operands, self.arena

        def on_window(stream: int, window: int) -> None:
            place = self._places[window]
            own = arena.address(place["b"])
            other = operands.other_b[min(window, len(operands.other_b) - 1)].data_ptr() if operands.other_b else own
            b_nn, b_tn = (own, other) if self.layout is Layout.NN else (other, own)
            launch(stream, arena.address(place["a"]), b_nn, b_tn, operands.output(window).data_ptr())

        return on_window


class TaskMemory:
    """Cases of a task other than a matrix product. rotates: whether every window has outputs of its own."""

    layout = Layout.NN
    draws_power = False  # most tasks move data

    def __init__(self, operands: CudaCaseOperands, baselines: CudaTaskBaselines, *, rotates: bool) -> None:
        self._operands, self._baselines, self.rotates = operands, baselines, rotates
        self.arena, self.stream, self.task = operands.arena, operands.stream, operands.cases.task
        self._last_played: dict[str, Played] = {}
        """What each baseline launched last."""

    def begin(self, *, both_layouts: bool) -> None:
        self.arena.select(self.task)

    def plan(self, kernel: Kernel, sms: int) -> Plan:
        return contract.plan_cuda(kernel.candidate.source, self.task, sms)

    def places(self, plan: Plan, kernel: Kernel, slot: int) -> list[dict[str, Place]]:
        return [self.arena.places(plan, window) for window in range(self.arena.windows)]

    def refresh(self) -> None:
        self._operands.refresh()

    def require_untouched(self) -> None:
        self._operands.require_untouched()

    @property
    def slowest_launch_s(self) -> float:
        return slowest_s(self.arena.task)

    def windows(self, count: int, rng: np.random.Generator) -> list[int]:
        """At random, never the same twice running, nor from one replay to the next; each in its turn where they rotate.

        So none of several launches finds its own result in outputs that windows share, and none that rotates finds its
        tensors in the cache.
        """
        several = self.arena.windows
        if self.rotates or several == 1:
            return [i % several for i in range(count)]
        found = [int(rng.integers(several))]
        for _ in range(count - 1):
            found.append((found[-1] + int(rng.integers(1, several))) % several)
        if count > 1 and found[-1] == found[0]:
            others = set(range(several)) - {found[0], found[-2]}
            found[-1] = min(others, default=found[-1])
        return found

    def written(self, window: int) -> list[Output]:
        return self.arena.written(window)

    def played(self, baseline: Any, count: int, rng: np.random.Generator) -> tuple[Replays, list[int]]:
        known, key = self._operands.played, (baseline.name, count)
        if key not in known:
            windows = self.windows(count, rng)
            known[key] = (self._baselines.play(baseline, self._operands, windows), windows)
        played, windows = known[key]
        self._last_played[baseline.name] = played
        return played, windows

    def poison_kernels_outputs(self) -> None:
        self._operands.poison_outputs()

    def poison_baselines_outputs(self) -> None:
        """PyTorch's results are new tensors, or lie where its graphs have them."""

    def poisoning(self, window: int) -> Callable[[], None]:
        return lambda: None

    def check_kernel(self, windows: Sequence[int], element_wise: bool) -> float:
        found = [self.arena.outputs(window) for window in windows]
        return self._operands.check(found, windows, element_wise=element_wise)

    def check_baseline(self, baseline: Baseline, windows: Sequence[int], element_wise: bool) -> float:
        results = results_by_name(self.arena.task, self._last_played[baseline.name].results)
        return self._operands.check([results], windows[-1:], element_wise=element_wise)

    def audit(self, record: Record) -> None:
        arena = self.arena
        self._operands.refresh()
        arena.forget_records()
        windows = record(arena.record_stride, min(AUDITED, arena.records))
        found = [arena.recorded(number) for number in range(len(windows))]
        self._operands.check(found, windows, element_wise=True)


TimedMemory = ProductMemory | TaskMemory
"""What rounds on a GPU work on; both answer to the same calls."""
