"""Rounds on a GPU: graphs of back-to-back launches, or single ones on a cold cache, of any task.

The candidate is launched in its own process, the baselines in this one, on the same operands in the same memory, in
turns. Device time: CUDA events around a replay, or CUPTI around a single launch.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cuda.bindings import driver

from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda.cupti import KernelTrace
from cuda_l2.machine.cuda.driver import Replays, bus_id, check
from cuda_l2.machine.cuda.worker import CudaWorkers, slowest_s
from cuda_l2.measure.baselines._base import Baseline
from cuda_l2.measure.gpu_state import Drift, GpuState
from cuda_l2.measure.heater import Heater
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Kernel, Rounds, Terms, failed
from cuda_l2.measure.timed_memory import VARIANTS, TimedMemory
from cuda_l2.records import Interval, Timing
from cuda_l2.system.errors import UserError
from cuda_l2.system.turns import ALONE, Turns

MAX_LAUNCHES = 512
START_S = 10.0
HOST_ROUNDS = 15
HEAVY_S = 30e-6
"""Launches this long draw what power the chip may, and then its clock depends on what ran before: with a protocol that
heats they follow some of the same, and between samples the chip is kept at work."""
MAX_WARM_LAUNCHES = 64
VARIED = 8
"""A kernel's replay has up to this fraction (1/VARIED) of its launches fewer than a baseline's."""
LOOKED_AT = 4
"""Outputs of a sample that are compared, of different windows."""
LARGEST_EMPTY_DIFFERENCE_US = 0.06


class WrongSearchedError(Exception):
    """A baseline that a search found, by name, gave a wrong result in a timed round."""


@dataclass(frozen=True)
class Gpu:
    """What every measurement on a GPU shares."""

    workers: CudaWorkers
    sms: int
    l2_bytes: int
    turns: Turns = ALONE


def measure_cuda(
    gpu: Gpu,
    baselines: Sequence[Baseline],
    kernels: Mapping[str, Kernel],
    memory: TimedMemory,
    terms: Terms,
) -> dict[str, Timing]:
    """Time kernels that were found correct against baselines; one timing a kernel.

    The reference is the strongest baseline of those that read B as one of the kernels does; the others are timed beside
    them. Without kernels the first baseline stands in their place. Rounds end when the first kernel's ratio is known.
    Where they fail, every kernel has the same failure. A baseline from a search that gives a wrong result is left out.
    """
    start = terms.clock.now()
    try:
        rounds = GraphRounds(gpu, baselines, kernels, memory, terms)
        with contextlib.closing(rounds), gpu.turns.taken(alone=True):
            rounds.run()
            return rounds.finish(start)
    except WrongSearchedError as wrong:
        left = [each for each in baselines if each.name != str(wrong)]
        if not left:
            raise UserError(f"{wrong} was right when it was searched and wrong in a timed round") from None
        return measure_cuda(gpu, left, kernels, memory, terms)
    except (Fault, WrongOutput) as error:
        gpu.workers.renew()
        names = list(kernels) or [baselines[0].name]
        return dict.fromkeys(names, failed(error, terms.protocol, start, terms.clock))


@functools.cache
def _state() -> GpuState:
    return GpuState(bus_id())


@functools.cache
def _heater() -> Heater:
    return Heater()


def _uneven(times: Mapping[str, float]) -> str:
    """Why two processes do not launch alike, in one line; empty where they do. times: of an empty kernel."""
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
    """What is timed lies in the windows of a memory; kernels are loaded in the worker's slots, in their order."""

    def __init__(
        self,
        gpu: Gpu,
        baselines: Sequence[Baseline],
        kernels: Mapping[str, Kernel],
        memory: TimedMemory,
        terms: Terms,
    ) -> None:
        self._baselines = {baseline.name: baseline for baseline in baselines}
        read = {kernel.layout or memory.layout for kernel in kernels.values()} or {memory.layout}
        references = [baseline.name for baseline in baselines if baseline.reads(read)]
        tuned = any(baseline.tuned for baseline in baselines)
        seldom = [each.name for each in baselines if tuned and not (each.tuned or each.compiled)]
        memory.begin(both_layouts=len(references) < len(baselines) or len(read) > 1)
        subject = next(iter(kernels), baselines[0].name)
        arms = [*self._baselines, *kernels]
        super().__init__(arms, terms, references=references, subject=subject, kernels=kernels, seldom=seldom)
        protocol, stream = terms.protocol, memory.stream
        self._layouts = {each.name: each.layout for each in baselines} | {
            name: kernel.layout for name, kernel in kernels.items()
        }
        """In which every arm reads B, if not the task's own."""
        self._memory, self._stream = memory, stream
        self.drift = Drift()
        evicted_bytes = 2 * gpu.l2_bytes if protocol.evict else 0
        self.evicted = torch.empty(evicted_bytes, dtype=torch.uint8, device=stream.device)
        self._graphs: dict[tuple[str, int, int], tuple[int, list[int]]] = {}
        """The kernels', by number of launches and variant: the worker's index of the graph, and the places."""
        self.evictions = 0
        self._launch_s: dict[str, float] = {}
        """Seconds of a launch of every arm, as last seen."""
        self._sampled_at, self._pause_s = self.clock.now(), 0.0
        """When the last sample ended, and how long after it the next one began."""
        self._heated = False
        """Whether the heater was set to work behind the last sample."""
        self.slots = {name: slot for slot, name in enumerate(kernels)}
        if protocol.round_s:
            KernelTrace.detach()  # CUPTI slows what comes after it in the same process
        self._workers = gpu.workers
        self.worker = gpu.workers.get(memory.arena, traced=not protocol.round_s)
        self.timeout_s = START_S
        for name, kernel in kernels.items():  # bound to every window; workspaces are laid out in the arena already
            slot = self.slots[name]
            plan = memory.plan(kernel, gpu.sms)
            self.worker.load(Path(kernel.build.artifact), plan, memory.places(plan, kernel, slot), slot)
            memory.arena.fill_workspaces(persistent=True, slot=slot)
        # once all is loaded single launches are traced, in both processes
        self.worker.call("traced", START_S, on=not protocol.round_s)
        self._trace: KernelTrace | None = None if protocol.round_s else KernelTrace()

    def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:
        self._memory.refresh()

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
        self.timeout_s = START_S + (before + count) * slowest_s(self._memory.task)
        variant = int(self.rng.integers(VARIANTS))
        sequence = self._sequence(name, count, variant)
        self._pause_s = self.clock.now() - self._sampled_at
        if self._heated:
            _heater().pause_ended()
        self._poison(name)
        torch.cuda.synchronize()
        if self.protocol.round_s:
            seconds = self._replay(name, count, before, variant) / len(sequence)
            if self.number:
                self.launches[name] += len(sequence) - count
        else:
            seconds = self._single(name, count, variant)
        self._launch_s[name], self._sampled_at = seconds, self.clock.now()
        self._heated = seconds >= HEAVY_S and self.protocol.heat_s > 0 and self._memory.draws_power
        if self._heated:
            _heater().run(self._pause_s)
        if not self.protocol.selects:
            if self.number:
                self.drift.add(name, self.number, _state().sample())
        elif name not in self.kernels and not self.check_elements:
            return seconds  # a library's result is looked at less often where many candidates wait
        whole = self.check_elements or (name in self.kernels and not self.protocol.selects)
        looked = self._looked_at(sequence)
        try:
            if name in self.slots:
                difference = self._memory.check_kernel(looked, element_wise=whole, layout=self._layouts[name])
                if whole:
                    self.differences[name] = max(self.differences.get(name, 0.0), difference)
            else:
                played = self._played(name, count, variant)
                self._memory.check_baseline(played, looked, element_wise=whole, layout=self._layouts[name])
        except WrongOutput as wrong:
            if name in self.kernels:
                raise
            self._memory.require_untouched()  # else it is the candidate that spoilt what both read
            if self._baselines[name].searched:
                raise WrongSearchedError(name) from None
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this GPU sound?"
            ) from None
        return seconds

    def finish(self, start: float) -> dict[str, Timing]:
        """Look at every launch of a round like the timed ones, at what must not have changed, and sum up.

        start: when the measurement began, by the clock.
        """
        self._memory.require_untouched()
        for name, slot in self.slots.items():
            damage = self._memory.arena.damage(slot)
            if damage:
                raise WrongOutput(f"{damage} in a timed round")
            if self.protocol.round_s:
                # as timed ones, but for copies between launches, no replay ahead, and at times garbage between them
                self._memory.audit(partial(self._record, name), self._layouts[name])
        subjects = list(self.slots) or [self.subject]
        if self.protocol.selects:
            seconds = self.clock.now() - start
            return {name: self.timing(float("nan"), seconds, name) for name in subjects}
        empty, stream = self.worker.call("empty", self.timeout_s), self._stream.cuda_stream
        empty_s = empty["graph_s"] if self.protocol.round_s else empty["alone_s"]
        conditions = self.drift.conditions()
        if self.protocol.round_s:
            empty_us = {"baselines": self._workers.helpers.empty_s(stream) * 1e6}
            if self.slots:
                empty_us[CANDIDATE] = empty["graph_s"] * 1e6
            conditions = replace(conditions, empty_us=empty_us, drifted=conditions.drifted or _uneven(empty_us))
        else:  # under a trace a graph of empty kernels says nothing
            conditions = replace(conditions, host_call_to_done_us=self._host_us())
        seconds = self.clock.now() - start
        shared: dict[str, Any] = {"conditions": conditions, "among": self._among()}
        return {name: replace(self.timing(empty_s * 1e6, seconds, name), **shared) for name in subjects}

    def _among(self) -> tuple[tuple[str, str, Interval], ...]:
        """Tuned baselines over the ones from a search, where both read B alike."""
        return tuple(
            (tuned.name, searched.name, self.ratio(tuned.name, searched.name))
            for searched in self._baselines.values()
            for tuned in self._baselines.values()
            if searched.searched and tuned.autotuned and tuned.layout is searched.layout
        )

    def close(self) -> None:
        if self._trace:
            self._trace.close()

    def _poison(self, name: str) -> None:
        """Fill an arm's outputs with what nothing computes, and a kernel's scratch with garbage."""
        if name in self.slots:
            self._memory.poison_outputs()
            self._memory.arena.fill_workspaces(persistent=False, slot=self.slots[name])
        else:
            self._memory.poison_baselines()

    def _looked_at(self, sequence: Sequence[int]) -> list[int]:
        """The last place, behind a few random ones among those whose outputs no later launch wrote."""
        last = {self._memory.outputs_of(place): place for place in sequence}
        others = [place for place in last.values() if place != sequence[-1]]
        chosen = self.rng.permutation(len(others))[: LOOKED_AT - 1]
        return [*(others[int(index)] for index in chosen), sequence[-1]]

    def _played(self, name: str, count: int, variant: int) -> tuple[Replays, list[int]]:
        """A baseline's launches and their places; made on first use."""
        return self._memory.played(self._baselines[name], count, self.rng, variant)

    def _record(self, name: str, stride: int, records: int) -> list[int]:
        """Launch a kernel as in its longest round and keep outputs, `stride` bytes each; the places of those kept."""
        count = max(count for kernel, count, _ in self._graphs if kernel == name)
        sequence = self._memory.sequence(self._varied(count), self.rng, int(self.rng.integers(VARIANTS)))
        kept = sorted(int(i) for i in self.rng.permutation(len(sequence))[:records])
        self._poison(name)
        torch.cuda.synchronize()
        terms: dict[str, Any] = {"bindings": sequence, "kept": kept, "slot": self.slots[name], "stride": stride}
        outputs = [self._memory.arena.written(sequence[i]) for i in kept]
        self.worker.call("record", self.timeout_s, outputs=outputs, **terms)
        return [sequence[i] for i in kept]

    def _varied(self, count: int) -> int:
        """Number of a kernel's launches where a baseline has `count`."""
        return count - int(self.rng.integers(count // VARIED + 1))

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
                times.append(self._single(name, 1, 0) * 1e6)
        alone = self.worker.call("empty", self.timeout_s)["alone_s"] * 1e6
        return {name: median(times) for name, times in samples.items()} | {"empty kernel": alone}

    def _sequence(self, name: str, count: int, variant: int) -> list[int]:
        """The places of an arm's launches; its graph is made with them."""
        if name not in self.slots:
            return self._played(name, count, variant)[1]
        key = (name, count, variant)
        if key not in self._graphs:
            sequence = self._memory.sequence(self._varied(count), self.rng, variant)
            answer = self.worker.call("capture", self.timeout_s, bindings=sequence, slot=self.slots[name])
            self._graphs[key] = (int(answer["graph"]), sequence)
        return self._graphs[key][1]

    def _replay(self, name: str, count: int, before: int, variant: int) -> float:
        """Seconds of a replay that follows so many launches of the other variant, in one replay or one by one.

        What those left is wrong wherever this one should have written. With too few windows for that its outputs are
        poisoned in between, as are those of a single launch.
        """
        memory, other = self._memory, VARIANTS - 1 - variant
        sequence = self._sequence(name, count, variant)
        warm, unit = (1, count) if before == count else (before, 1)
        self._sequence(name, unit, other)
        poisoned = sequence if before and not memory.distinct else sequence[-1:] if before and count == 1 else []
        if name not in self.slots:
            self._workers.helpers.settle(self._stream.cuda_stream)
            between = memory.poisoning(sequence[-1]) if poisoned else None
            first = self._played(name, unit, other)[0]
            return self._played(name, count, variant)[0].time(warm, between, first)
        (graph, _), (alone, _) = self._graphs[name, count, variant], self._graphs[name, unit, other]
        written = sorted({memory.outputs_of(place) for place in poisoned})
        terms: dict[str, Any] = {"graph": graph, "warm": warm, "before": alone, "slot": self.slots[name]}
        terms["poisoned"] = [output for window in written for output in memory.arena.written(window)]
        return float(self.worker.call("time", self.timeout_s, **terms)["seconds"])

    def _single(self, name: str, count: int, variant: int) -> float:
        """Seconds of one launch: the cache emptied by the arm's own process, then the gap, then the launch."""
        self._sequence(name, count, variant)
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        if name not in self.slots:
            replays, _ = self._played(name, count, variant)
            self._evict()
            self._workers.helpers.settle(self._stream.cuda_stream)
            torch.cuda.synchronize()
            self.clock.sleep(gap)
            if self._trace is None:
                return replays.once()
            self._trace.clear()
            replays.once()
            return self._trace.span_s()
        self.worker.call("evict", self.timeout_s, size=self.evicted.numel())
        self.clock.sleep(gap)
        graph = self._graphs[name, count, variant][0]
        return float(self.worker.call("once", self.timeout_s, graph=graph)["seconds"])

    def _evict(self) -> None:
        """Write what pushes the operands out of the cache, as the candidate's process does."""
        self.evictions = (self.evictions + 1) % 256
        stream, size = driver.CUstream(self._stream.cuda_stream), self.evicted.numel()
        if size:
            check("cuMemsetD8Async", driver.cuMemsetD8Async(self.evicted.data_ptr(), self.evictions, size, stream))
