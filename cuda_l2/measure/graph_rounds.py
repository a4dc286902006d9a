"""Rounds on a GPU: graphs of back-to-back launches, or single ones on a cold cache, of whatever is computed.

The candidate is launched in its own process, the baselines in this one, on the same operands in the same memory, in
turns. Device time: CUDA events around a replay, or CUPTI around a single launch.
"""

import functools
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from typing import Protocol as Interface

import torch
from cuda.bindings import driver

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.cupti import KernelTrace
from cuda_l2.machine.cuda.driver import Replays, bus_id, check
from cuda_l2.machine.cuda.worker import CudaWorkers
from cuda_l2.measure.gpu_state import Drift, GpuState
from cuda_l2.measure.heater import Heater
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Build, Timing
from cuda_l2.system.errors import UserError

MAX_LAUNCHES = 512
START_S = 10.0
HOST_ROUNDS = 15
HEAVY_S = 30e-6
"""Launches this long draw what power the chip may, and then its clock depends on what ran before: with a protocol that
heats they follow some of the same, and between samples the chip is kept at work."""
MAX_WARM_LAUNCHES = 64
LARGEST_EMPTY_DIFFERENCE_US = 0.06
Output = list[Any]
"""As the worker takes one: buffer, offset, bytes, the word that poisons it, where it lies in a record."""


@dataclass(frozen=True)
class Gpu:
    """What every measurement on a GPU shares."""

    workers: CudaWorkers
    sms: int
    l2_bytes: int


class TimedOperands(Interface):
    """What the launches of a run work on."""

    @property
    def arena(self) -> CudaArena: ...
    @property
    def stream(self) -> torch.cuda.Stream:
        """Where the baselines run."""

    def refresh(self) -> None:
        """Others in the windows than in the round before."""

    def require_untouched(self) -> None:
        """WrongOutput where what baselines and kernels read is not what it was."""


def measured(
    gpu: Gpu, open_rounds: Callable[[], "GraphRounds"], names: Sequence[str], protocol: Protocol
) -> dict[str, Timing]:
    """The timings of rounds that are opened here; the same failure for each of these names where they fail."""
    start = time.perf_counter()
    rounds: GraphRounds | None = None
    try:
        rounds = open_rounds()
        rounds.run()
        return rounds.finish(start)
    except (Fault, WrongOutput) as error:
        gpu.workers.renew()
        return dict.fromkeys(names, failed(error, protocol, start))
    finally:
        if rounds:
            rounds.close()


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


def warm_launches(launch_s: float, count: int, heat_s: float) -> int:
    """How many launches come before a timed replay of so many.

    Of light ones as many. Heavy ones follow the heater, so that few are needed.
    """
    if launch_s < HEAVY_S or not heat_s:
        return count
    return min(MAX_WARM_LAUNCHES, math.ceil(heat_s / 2 / launch_s))


class GraphRounds(Rounds):
    """What is timed lies in the windows of an arena; kernels are loaded in the worker's slots, in their order."""

    draws_power = True
    """Whether what is timed takes as much as the heater's products, which then run while results are looked at."""

    def __init__(
        self,
        gpu: Gpu,
        operands: TimedOperands,
        arms: Sequence[str],
        terms: Terms,
        **roles: Any,
    ) -> None:
        """roles: of the arms, as Rounds takes them."""
        super().__init__(arms, terms, **roles)
        protocol, arena, stream = terms.protocol, operands.arena, operands.stream
        self._operands, self.device_arena, self._stream = operands, arena, stream
        self.drift = Drift()
        evicted_bytes = 2 * gpu.l2_bytes if protocol.evict else 0
        self.evicted = torch.empty(evicted_bytes, dtype=torch.uint8, device=stream.device)
        self._graphs: dict[tuple[str, int], tuple[int, list[int]]] = {}
        """The kernels', by number of launches: the worker's index of the graph, and the windows."""
        self.evictions = 0
        self._launch_s: dict[str, float] = {}
        """Of every arm, as last seen."""
        self._sampled_at, self._pause_s = time.perf_counter(), 0.0
        """When the last sample ended, and how long after it the next one began."""
        self._heated = False
        """Whether the heater was set to work behind the last sample."""
        self.slots = {name: slot for slot, name in enumerate(self.kernels)}
        self._plans: dict[str, Plan] = {}
        if protocol.round_s:
            KernelTrace.detach()  # CUPTI slows what comes after it in the same process
        self._workers, self.worker = gpu.workers, gpu.workers.get(arena, traced=not protocol.round_s)
        self._trace: KernelTrace | None = None
        self.timeout_s = START_S

    def load(self, name: str, build: Build, plan: Plan, places: Sequence[dict[str, Place]]) -> None:
        """Load a kernel in its slot, bound to every window; its workspaces are laid out in the arena already."""
        self._plans[name] = plan
        self.worker.load(Path(build.artifact), plan, places, self.slots[name])
        self.device_arena.fill_workspaces(plan, persistent=True, slot=self.slots[name])

    def trace(self) -> None:
        """Once all is loaded: have single launches traced, in both processes."""
        self.worker.call("traced", START_S, on=not self.protocol.round_s)
        self._trace = None if self.protocol.round_s else KernelTrace()

    @property
    @abstractmethod
    def slowest_launch_s(self) -> float:
        """A kernel's launch that takes longer is taken to hang."""

    @property
    @abstractmethod
    def rotates(self) -> bool:
        """Whether every window has an output of its own."""

    @abstractmethod
    def windows(self, count: int) -> list[int]:
        """What so many launches work on, in their order."""

    @abstractmethod
    def written(self, window: int) -> list[Output]:
        """A kernel's outputs in a window."""

    @abstractmethod
    def played(self, name: str, count: int) -> tuple[Replays, list[int]]:
        """A baseline's launches and their windows; made on first use."""

    @abstractmethod
    def poison(self, name: str) -> None:
        """Fill an arm's outputs with what nothing computes, and a kernel's scratch with garbage."""

    @abstractmethod
    def poison_between(self, name: str, window: int) -> Callable[[], None]:
        """Enqueues the same for a baseline's output in one window."""

    @abstractmethod
    def check(self, name: str, windows: Sequence[int], element_wise: bool) -> float:
        """WrongOutput where the last launches on these windows did not give their results; the largest error or NaN."""

    @abstractmethod
    def audit(self, name: str) -> None:
        """A kernel's round like the timed ones, in which the outputs of many launches are kept and looked at.

        Nothing tells the candidate that it is this round, so what it skips elsewhere it skips here.
        """

    def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:
        self._operands.refresh()

    @property
    def most(self) -> int:
        return MAX_LAUNCHES

    def count(self, wanted: float) -> int:
        """A power of two: the baselines' graphs of one candidate serve the next."""
        return min(self.most, 1 << max(0, round(math.log2(max(wanted, 1)))))

    def round_s(self, fastest_s: float) -> float:
        return heavy_round_s(fastest_s, self.protocol)

    def seldom_every(self, fastest_s: float) -> int:
        every = self.protocol.seldom_every
        return 2 * every if every > 1 and fastest_s >= HEAVY_S else every

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        before = warm_launches(self._launch_s.get(name, 0.0), count, self.protocol.heat_s) if warm else 0
        self.timeout_s = START_S + (before + count) * self.slowest_launch_s
        sequence = self._sequence(name, count)
        self._pause_s = time.perf_counter() - self._sampled_at
        if self._heated:
            _heater().pause_ended()
        self.poison(name)
        torch.cuda.synchronize()
        seconds = self._replay(name, count, before) / count if self.protocol.round_s else self._single(name, count)
        self._launch_s[name], self._sampled_at = seconds, time.perf_counter()
        self._heated = seconds >= HEAVY_S and self.protocol.heat_s > 0 and self.draws_power
        if self._heated:
            _heater().run(self._pause_s)
        if not self.protocol.selects:
            if self.number:
                self.drift.add(name, self.number, _state().sample())
        elif name not in self.kernels and not self.check_elements:
            return seconds  # a library's result is looked at less often where many candidates wait
        element_wise = self.check_elements or (name in self.kernels and not self.protocol.selects)
        # where they rotate, the outputs of the last few launches, else the last one's
        looked = list(dict.fromkeys(sequence[::-1]))[:4][::-1] if self.rotates else [sequence[-1]]
        try:
            difference = self.check(name, looked, element_wise)
        except WrongOutput as wrong:
            if name in self.kernels:
                raise
            self._operands.require_untouched()  # else it is the candidate that spoilt what both read
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this GPU sound?"
            ) from None
        if name in self.kernels and element_wise:
            self.differences[name] = max(self.differences.get(name, 0.0), difference)
        return seconds

    def finish(self, start: float) -> dict[str, Timing]:
        """Look at every launch of a round like the timed ones, at what must not have changed, and sum up.

        start: when the measurement began, as perf_counter gives it.
        """
        self._operands.require_untouched()
        for name, slot in self.slots.items():
            damage = self.device_arena.damage(self._plans[name], slot)
            if damage:
                raise WrongOutput(f"{damage} in a timed round")
            if self.protocol.round_s:
                self.audit(name)
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

    def record(self, name: str, outputs: Callable[[int], list[Output]], stride: int, records: int) -> list[int]:
        """Launch a kernel as in its longest round and keep outputs, `stride` bytes each; the windows of those kept."""
        count = max(count for kernel, count in self._graphs if kernel == name)
        sequence = self.windows(count)
        kept = sorted(int(i) for i in self.rng.permutation(count)[:records])
        self.poison(name)
        torch.cuda.synchronize()
        terms: dict[str, Any] = {"bindings": sequence, "kept": kept, "slot": self.slots[name], "stride": stride}
        self.worker.call("record", self.timeout_s, outputs=[outputs(sequence[i]) for i in kept], **terms)
        return [sequence[i] for i in kept]

    def _host_us(self) -> dict[str, float]:
        """Median microseconds from the host's call to the end of the launch, without CUPTI's records, which cost time.

        CUPTI is still there, in both processes: 0.2 to 0.35 us a launch, that of the empty kernel too.
        """
        assert self._trace is not None
        self._trace.close()
        self._trace = None
        self.worker.call("traced", self.timeout_s, on=False)
        samples: dict[str, list[float]] = {name: [] for name in self.arms}
        for _ in range(max(1, min(HOST_ROUNDS, self.protocol.min_rounds // 3))):
            for name, times in samples.items():
                times.append(self._single(name, 1) * 1e6)
        alone = self.worker.call("empty", self.timeout_s)["alone_s"] * 1e6
        return {name: median(times) for name, times in samples.items()} | {"empty kernel": alone}

    def _sequence(self, name: str, count: int) -> list[int]:
        """The windows of an arm's launches; its graph is made with them."""
        if name not in self.slots:
            return self.played(name, count)[1]
        key = (name, count)
        if key not in self._graphs:
            sequence = self.windows(count)
            answer = self.worker.call("capture", self.timeout_s, bindings=sequence, slot=self.slots[name])
            self._graphs[key] = (int(answer["graph"]), sequence)
        return self._graphs[key][1]

    def _replay(self, name: str, count: int, before: int) -> float:
        """Seconds of a replay behind so many launches: the same replay, or others one by one.

        A single launch finds its output poisoned, where more each find another window's. Else one that writes nothing
        would leave what those before it wrote.
        """
        window = self._sequence(name, count)[-1]
        poisoned = count == 1 and before > 0
        warm, unit = (1, count) if before == count else (before, 1)
        self._sequence(name, unit)
        if name not in self.slots:
            self._workers.helpers.settle(self._stream.cuda_stream)
            between = self.poison_between(name, window) if poisoned else None
            first = self.played(name, unit)[0]
            return self.played(name, count)[0].time(warm, between, first)[0]
        (graph, _), (alone, _) = self._graphs[name, count], self._graphs[name, unit]
        terms: dict[str, Any] = {"graph": graph, "warm": warm, "before": alone}
        terms["poisoned"] = self.written(window) if poisoned else []
        return float(self.worker.call("time", self.timeout_s, **terms)["device_s"])

    def _single(self, name: str, count: int) -> float:
        """Seconds of one launch: the cache emptied by the arm's own process, then the gap, then the launch."""
        self._sequence(name, count)
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        if name not in self.slots:
            replays, _ = self.played(name, count)
            self._evict()
            self._workers.helpers.settle(self._stream.cuda_stream)
            torch.cuda.synchronize()
            time.sleep(gap)
            if self._trace is None:
                return replays.once()
            self._trace.clear()
            replays.once()
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
