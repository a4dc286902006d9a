"""Times CUDA candidates against NVIDIA's libraries: graphs of back-to-back launches, or single ones on a cold cache.

The candidate is launched in its own process, the baselines in this one, on the same operands in the same memory, in
turns. Device time: CUDA events around a graph's replay, or CUPTI around a single launch.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.errors import UserError
from cuda_l2.execute.cuda_arena import Place
from cuda_l2.execute.cuda_driver import Graph, bus_id, check
from cuda_l2.execute.cuda_worker import CudaWorkers
from cuda_l2.execute.cupti import KernelTrace
from cuda_l2.execute.fills import POISON
from cuda_l2.execute.worker import Fault
from cuda_l2.measure.cuda_baselines import AUTOTUNED, Baselines
from cuda_l2.measure.cuda_outputs import CudaOperands
from cuda_l2.measure.gpu_state import Drift, GpuState
from cuda_l2.measure.heater import Heater
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Rounds
from cuda_l2.records import Accumulate, Layout, Timing, TimingStatus

MAX_LAUNCHES = 512
SLOWEST_GFLOPS = 100.0
START_S = 10.0
HOST_ROUNDS = 15
HEAVY_S = 30e-6
"""Launches this long draw what power the chip may, and then its clock depends on what ran before: with a protocol that
heats they follow a while of the same, and between samples the chip is kept at work."""
MAX_WARM_REPLAYS = 64
LARGEST_EMPTY_DIFFERENCE_US = 0.06


@dataclass(frozen=True)
class Gpu:
    """What every measurement on a GPU shares."""

    baselines: Baselines
    workers: CudaWorkers
    sms: int
    l2_bytes: int


def measure_cuda(
    gpu: Gpu,
    kernels: Mapping[str, Kernel],
    operands: CudaOperands,
    protocol: Protocol,
    rng: np.random.Generator,
    names: Sequence[str],
    beat: float = 0.0,
) -> dict[str, Timing]:
    """Time kernels that were found correct against the named baselines; one timing a kernel.

    The reference is the strongest of those that read B as one of the kernels does; the others are timed beside them.
    Without kernels the first of the names stands in their place. Rounds end when the first kernel's ratio is known.
    """
    start = time.perf_counter()
    rounds: CudaRounds | None = None
    try:
        rounds = CudaRounds(gpu, kernels, operands, protocol, rng, names, beat)
        rounds.run()
        return rounds.finish(start)
    except Fault as fault:
        gpu.workers.renew()
        # a fault ends verification and timing under the same names
        failed = Timing(TimingStatus(fault.status), protocol.name, fault.reason, seconds=time.perf_counter() - start)
    except WrongOutput as wrong:
        gpu.workers.renew()
        spent = time.perf_counter() - start
        failed = Timing(TimingStatus.WRONG_OUTPUT, protocol.name, str(wrong), seconds=spent)
    finally:
        if rounds:
            rounds.close()
    return dict.fromkeys(kernels or names[:1], failed)


def _poison(output: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Enqueue it, as the candidate's process does."""
    words, handle = output.numel(), driver.CUstream(stream.cuda_stream)
    check("cuMemsetD16Async", driver.cuMemsetD16Async(output.data_ptr(), POISON, words, handle))


@functools.cache
def _state() -> GpuState:
    return GpuState(bus_id())


@functools.cache
def _heater() -> Heater:
    return Heater()


def _uneven(conditions: dict[str, Any]) -> str:
    """Why the two processes do not launch alike, in one line; empty where they do."""
    times = conditions.get("empty_us", {})
    if times and max(times.values()) - min(times.values()) > LARGEST_EMPTY_DIFFERENCE_US:
        return "an empty kernel takes " + ", ".join(
            f"{us:.2f} us in the process of {name}" for name, us in times.items()
        )
    return ""


def heavy_round_s(launch_s: float, protocol: Protocol) -> float:
    """How long a timed replay is to take: of launches that heat the chip long enough to tell what it takes hot."""
    return max(protocol.round_s, protocol.heat_s if launch_s >= HEAVY_S else 0.0)


def warm_replays(launch_s: float, count: int, heat_s: float) -> int:
    """How often to replay a graph of so many launches before the replay that is timed."""
    if launch_s < HEAVY_S:
        return 1
    return max(1, min(MAX_WARM_REPLAYS, math.ceil(heat_s / (launch_s * count))))


class CudaRounds(Rounds):
    def __init__(
        self,
        gpu: Gpu,
        kernels: Mapping[str, Kernel],
        operands: CudaOperands,
        protocol: Protocol,
        rng: np.random.Generator,
        names: Sequence[str],
        beat: float,
    ) -> None:
        gemm, arena = operands.gemm, operands.arena
        read = {kernel.layout for kernel in kernels.values()} or {gemm.layout}
        unread = tuple(f" {layout.upper()}" for layout in Layout if layout not in read)
        references = [name for name in names if not name.endswith(unread)]
        arms, subject = [*names, *kernels], next(iter(kernels), names[0])
        strong = [name for name in names if name.startswith(AUTOTUNED)]
        seldom = [name for name in names if strong and name not in strong]
        terms: dict[str, Any] = {"beat": beat, "references": references, "subject": subject}
        super().__init__(arms, protocol, rng, kernels=kernels, seldom=seldom, **terms)
        if len(references) < len(names) or len(read) > 1:
            operands.use_other_layout()
        self.operands, self.arena, self.gemm, self.baselines = operands, arena, gemm, gpu.baselines
        self.drift = Drift()
        self.evicted = torch.empty(2 * gpu.l2_bytes if protocol.evict else 0, dtype=torch.uint8, device="cuda")
        self._graphs: dict[tuple[str, int], tuple[int, list[int]]] = {}
        """The kernels', by number of launches: the worker's index of the graph, and the windows."""
        self._stream = operands.stream
        arena.place(snug=False)
        self.operand_places = [arena.operands(window) for window in range(arena.windows)]
        self.evictions = 0
        self._launch_s: dict[str, float] = {}
        """Of every arm, as last seen."""
        self._sampled_at, self._pause_s = time.perf_counter(), 0.0
        """When the last sample ended, and how long after it the next one began."""
        self.slots = {name: slot for slot, name in enumerate(kernels)}
        self._plans: dict[str, Plan] = {}
        self._places: dict[str, list[dict[str, Place]]] = {}
        if protocol.round_s:
            KernelTrace.detach()  # CUPTI slows what comes after it in the same process
        self._workers, self.worker = gpu.workers, gpu.workers.get(arena, traced=not protocol.round_s)
        for name, kernel in kernels.items():
            plan = contract.plan_cuda(kernel.candidate.source, replace(gemm, layout=kernel.layout), gpu.sms)
            slot, other = self.slots[name], kernel.layout is not gemm.layout
            places = [arena.places(plan, window, slot=slot, other_layout=other) for window in range(arena.windows)]
            self._plans[name], self._places[name] = plan, places
            self.worker.load(Path(kernel.build.artifact), plan, places, slot)
            arena.fill_workspaces(plan, persistent=True, slot=slot)
        self.worker.call("traced", START_S, on=not protocol.round_s)
        self._trace = None if protocol.round_s else KernelTrace()
        self.timeout_s = START_S

    @property
    def most(self) -> int:
        return MAX_LAUNCHES

    def count(self, wanted: float) -> int:
        """A power of two: the baselines' graphs of one candidate serve the next."""
        return min(self.most, 1 << max(0, round(math.log2(max(wanted, 1)))))

    def round_s(self, fastest_s: float) -> float:
        return heavy_round_s(fastest_s, self.protocol)

    def begin_round(self) -> None:
        self.operands.refresh()

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        replays = warm_replays(self._launch_s.get(name, 0.0), count, self.protocol.heat_s) if warm else 0
        self.timeout_s = START_S + (replays + 1) * count * self.gemm.flops / SLOWEST_GFLOPS * 1e-9
        sequence = self._sequence(name, count)
        self._pause_s = time.perf_counter() - self._sampled_at
        self._poison(name)
        seconds = self._replay(name, count, replays) / count if self.protocol.round_s else self._single(name, count)
        self._launch_s[name], self._sampled_at = seconds, time.perf_counter()
        if seconds >= HEAVY_S and self.protocol.heat_s:
            _heater().run(self._pause_s)
        if not self.protocol.selects:
            self.drift.add(name, _state().sample())
        elif name not in self.kernels and not self.check_elements:
            return seconds  # a library's result is looked at less often where many candidates wait
        element_wise = self.check_elements or (name in self.kernels and not self.protocol.selects)
        # where they rotate, the outputs of the last few launches, else the last one's
        windows = list(dict.fromkeys(sequence[::-1]))[:4][::-1] if self._rotates else [sequence[-1]]
        try:
            outputs = torch.stack([self._output(name, window) for window in windows])
            # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
            least = self.gemm.accumulate if name in self.kernels else Accumulate.FP16
            difference = self.operands.check(outputs, windows, element_wise, least)
        except WrongOutput as wrong:
            if name in self.kernels:
                raise
            self.operands.require_untouched()  # else it is the candidate that spoilt what both read
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this GPU sound?"
            ) from None
        if name in self.kernels and element_wise:
            self.max_difference = max(self.max_difference, difference)
        return seconds

    def finish(self, start: float) -> dict[str, Timing]:
        """Look at every launch of a round like the timed ones, at what must not have changed, and sum up.

        start: when the measurement began, as perf_counter gives it.
        """
        self.operands.require_untouched()
        for name, slot in self.slots.items():
            damage = self.arena.damage(self._plans[name], slot)
            if damage:
                raise WrongOutput(f"{damage} in a timed round")
            self._audit(name)
        subjects = list(self.slots) or [self.subject]
        if self.protocol.selects:
            seconds = time.perf_counter() - start
            return {name: self.timing(float("nan"), seconds, name) for name in subjects}
        empty, stream = self.worker.call("empty", self.timeout_s), self._stream.cuda_stream
        empty_s = empty["graph_s"] if self.protocol.round_s else empty["alone_s"]
        conditions = self.drift.summary()
        if self.protocol.round_s:
            conditions["empty_us"] = {"baselines": self._workers.helpers.empty_s(stream) * 1e6}
            if self.slots:
                conditions["empty_us"][CANDIDATE] = empty["graph_s"] * 1e6
        else:  # under a trace a graph of empty kernels says nothing
            conditions["host_call_to_done_us"] = self._host_us()
        reason = self.drift.reason or _uneven(conditions)
        if reason:
            conditions["drifted"] = reason
        seconds = time.perf_counter() - start
        return {name: replace(self.timing(empty_s * 1e6, seconds, name), conditions=conditions) for name in subjects}

    def close(self) -> None:
        if self._trace:
            self._trace.close()

    def _host_us(self) -> dict[str, float]:
        """Median microseconds from the host's call to the end of the launch, without CUPTI's records, which cost time.

        CUPTI is still there, in both processes: 0.2 to 0.35 us a launch, that of the empty kernel too.
        """
        assert self._trace is not None
        self._trace.close()
        self._trace = None
        self.worker.call("traced", self.timeout_s, on=False)
        samples: dict[str, list[float]] = {name: [] for name in self.arms}
        for _ in range(min(HOST_ROUNDS, self.protocol.min_rounds // 2)):
            for name, times in samples.items():
                times.append(self._single(name, 1) * 1e6)
        alone = self.worker.call("empty", self.timeout_s)["alone_s"] * 1e6
        return {name: median(times) for name, times in samples.items()} | {"empty kernel": alone}

    @property
    def _rotates(self) -> bool:
        return self.arena.windows > 1 and self.operand_places[0]["c"] != self.operand_places[1]["c"]

    def _audit(self, name: str) -> None:
        """A round like the timed ones, in which the outputs of many launches are kept and each is looked at.

        Nothing tells the candidate that it is this round, so what it skips elsewhere it skips here.
        """
        if not self.protocol.round_s:
            return
        count = max(count for kernel, count in self._graphs if kernel == name)
        sequence = self._windows(count)
        kept = sorted(int(i) for i in self.rng.permutation(count)[: self.arena.records])
        self.operands.refresh()
        self._poison(name)
        self.arena.recorded(len(kept)).view(torch.int16).fill_(POISON)
        torch.cuda.synchronize()
        written = [self.operand_places[sequence[i]]["c"] for i in kept]
        sources = [[place.buffer, place.offset] for place in written]
        terms: dict[str, Any] = {"bindings": sequence, "kept": kept, "slot": self.slots[name]}
        self.worker.call("record", self.timeout_s, source=sources, size=2 * self.gemm.m * self.gemm.n, **terms)
        self.operands.check(self.arena.recorded(len(kept)), [sequence[i] for i in kept], element_wise=True)

    def _sequence(self, name: str, count: int) -> list[int]:
        """The windows of an arm's launches; its graph is made with them."""
        key = (name, count)
        if name in self.slots:
            if key not in self._graphs:
                sequence = self._windows(count)
                answer = self.worker.call("capture", self.timeout_s, bindings=sequence, slot=self.slots[name])
                self._graphs[key] = (int(answer["graph"]), sequence)
            return self._graphs[key][1]
        if key not in self.operands.graphs:
            sequence = self._windows(count)
            launch = self._launcher(name)

            def enqueue(stream: int) -> None:
                for window in sequence:
                    launch(stream, window)

            with torch.cuda.stream(self._stream):
                launch(self._stream.cuda_stream, 0)  # what a library sets up on first use is not captured
                self._stream.synchronize()
                self.operands.graphs[key] = (Graph(self._stream.cuda_stream, enqueue), sequence)
        return self.operands.graphs[key][1]

    def _windows(self, count: int) -> list[int]:
        """In random order; where they rotate each in its turn, so that none is in the cache when it comes again."""
        if self._rotates:
            return [i % self.arena.windows for i in range(count)]
        return [int(window) for window in self.rng.integers(0, self.arena.windows, count)]

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

    def _replay(self, name: str, count: int, warm: int) -> float:
        """Seconds of a replay. A single launch finds C poisoned, where more each find another window's.

        Else one that writes nothing would leave what the replays before it wrote.
        """
        window = self._sequence(name, count)[-1]
        poisoned = 2 * self.gemm.m * self.gemm.n if count == 1 and warm else 0
        if name not in self.slots:
            self._workers.helpers.settle(self._stream.cuda_stream)
            between = functools.partial(_poison, self.operands.output(window), self._stream) if poisoned else None
            return self.operands.graphs[name, count][0].time(warm, between)[0]
        graph, _ = self._graphs[name, count]
        place = self.operand_places[window]["c"]
        terms: dict[str, Any] = {"graph": graph, "warm": warm, "c": [place.buffer, place.offset], "poisoned": poisoned}
        return float(self.worker.call("time", self.timeout_s, **terms)["device_s"])

    def _single(self, name: str, count: int) -> float:
        """Seconds of one launch: the cache emptied by the arm's own process, then the gap, then the launch."""
        self._sequence(name, count)
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        if name not in self.slots:
            graph, _ = self.operands.graphs[name, count]
            self._evict()
            self._workers.helpers.settle(self._stream.cuda_stream)
            torch.cuda.synchronize()
            time.sleep(gap)
            if self._trace is None:
                return graph.once()
            self._trace.clear()
            graph.once()
            return self._trace.span_s()
        self.worker.call("evict", self.timeout_s, size=self.evicted.numel())
        time.sleep(gap)
        return float(self.worker.call("once", self.timeout_s, graph=self._graphs[name, count][0])["seconds"])

    def _evict(self) -> None:
        """Write what pushes the operands out of the cache, as the candidate's process does."""
        self.evictions = (self.evictions + 1) % 256
        stream, size = driver.CUstream(self._stream.cuda_stream), self.evicted.numel()
        if size:
            check("cuMemsetD8Async", driver.cuMemsetD8Async(self.evicted.data_ptr(), self.evictions, size, stream))

    def _poison(self, name: str) -> None:
        if name in self.slots:
            self.arena.poison_outputs()
            self.arena.fill_workspaces(self._plans[name], persistent=False, slot=self.slots[name])
        else:
            self.operands.poison_outputs()
        torch.cuda.synchronize()

    def _output(self, name: str, window: int) -> torch.Tensor:
        return self.arena.c(window) if name in self.slots else self.operands.output(window)
