"""Times CUDA candidates against NVIDIA's libraries: graphs of back-to-back launches, or single ones on a cold cache.

The candidate is launched in its own process, the baselines in this one, on the same operands in the same memory, in
turns. Device time: CUDA events around a graph's replay, or CUPTI around a single launch.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from cuda_l2 import contract
from cuda_l2.contract.cuda import Plan
from cuda_l2.errors import UserError
from cuda_l2.execute.cuda_driver import Graph
from cuda_l2.execute.cuda_worker import CudaWorkers
from cuda_l2.execute.cupti import KernelTrace
from cuda_l2.execute.fills import POISON
from cuda_l2.execute.worker import Fault
from cuda_l2.measure.cuda_baselines import Baselines
from cuda_l2.measure.cuda_outputs import CudaOperands
from cuda_l2.measure.gpu_state import Drift, GpuState
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Rounds
from cuda_l2.records import Accumulate, Build, Candidate, Layout, Timing, TimingStatus

MAX_LAUNCHES = 512
SLOWEST_GFLOPS = 100.0
START_S = 10.0
HOST_ROUNDS = 15
LARGEST_EMPTY_DIFFERENCE_US = 0.06
NO_PLAN = Plan((), (), ())


@dataclass(frozen=True)
class Gpu:
    """What every measurement on a GPU shares."""

    baselines: Baselines
    workers: CudaWorkers
    sms: int
    l2_bytes: int


def measure_cuda(
    gpu: Gpu,
    kernel: tuple[Candidate, Build] | None,
    operands: CudaOperands,
    protocol: Protocol,
    rng: np.random.Generator,
    names: Sequence[str],
    beat: float = 0.0,
) -> Timing:
    """Time one candidate that was found correct against the named baselines.

    The reference is the strongest of those that read B in the task's own layout; the others are timed beside them.
    Without a candidate the first of the names stands in its place.
    """
    start = time.perf_counter()
    rounds: CudaRounds | None = None
    try:
        rounds = CudaRounds(gpu, kernel, operands, protocol, rng, names, beat)
        rounds.run()
        timing = rounds.finish(time.perf_counter() - start)
        reason = rounds.drift.reason or _uneven(timing.conditions)
        if reason:
            timing.conditions["drifted"] = reason
        return timing
    except Fault as fault:
        gpu.workers.renew()
        status = TimingStatus(fault.status)  # a fault ends verification and timing under the same names
        return Timing(status, protocol.name, reason=fault.reason, seconds=time.perf_counter() - start)
    except WrongOutput as wrong:
        gpu.workers.renew()
        return Timing(TimingStatus.WRONG_OUTPUT, protocol.name, reason=str(wrong), seconds=time.perf_counter() - start)
    finally:
        if rounds:
            rounds.close()


@functools.cache
def _state() -> GpuState:
    return GpuState()


def _uneven(conditions: dict[str, Any]) -> str:
    """Why the two processes do not launch alike, in one line; empty where they do."""
    times = conditions.get("empty_us", {})
    if times and max(times.values()) - min(times.values()) > LARGEST_EMPTY_DIFFERENCE_US:
        return "an empty kernel takes " + ", ".join(
            f"{us:.2f} us in the process of {name}" for name, us in times.items()
        )
    return ""


class CudaRounds(Rounds):
    def __init__(
        self,
        gpu: Gpu,
        kernel: tuple[Candidate, Build] | None,
        operands: CudaOperands,
        protocol: Protocol,
        rng: np.random.Generator,
        names: Sequence[str],
        beat: float,
    ) -> None:
        gemm, arena = operands.gemm, operands.arena
        other = Layout.TN if gemm.layout is Layout.NN else Layout.NN
        own = [name for name in names if not name.endswith(f" {other.upper()}")]
        arms = [*names, CANDIDATE] if kernel else list(names)
        subject = CANDIDATE if kernel else names[0]
        super().__init__(arms, protocol, rng, beat=beat, references=own, subject=subject)
        if len(own) < len(names):
            operands.use_other_layout()
        self.operands, self.arena, self.gemm, self.baselines = operands, arena, gemm, gpu.baselines
        self.drift = Drift()
        self.evicted = torch.empty(2 * gpu.l2_bytes if protocol.evict else 0, dtype=torch.uint8, device="cuda")
        self._graphs: dict[int, tuple[int, list[int]]] = {}
        """The candidate's, by number of launches: the worker's index of the graph, and the windows."""
        self._stream = operands.stream
        arena.place(snug=False)
        self.plan = contract.plan_cuda(kernel[0].source, gemm, gpu.sms) if kernel else NO_PLAN
        self.places = [arena.places(self.plan, window) for window in range(arena.windows)]
        self._workers, self.worker = gpu.workers, gpu.workers.get(arena)
        if kernel:
            self.worker.load(Path(kernel[1].artifact), self.plan, self.places)
        arena.fill_workspaces(self.plan, persistent=True)
        self.worker.call("traced", START_S, on=not protocol.round_s)
        self._trace = None if protocol.round_s else KernelTrace()
        self.timeout_s = START_S

    @property
    def most(self) -> int:
        return MAX_LAUNCHES

    def count(self, wanted: float) -> int:
        """A power of two: the baselines' graphs of one candidate serve the next."""
        return min(self.most, 1 << max(0, round(math.log2(max(wanted, 1)))))

    def begin_round(self) -> None:
        self.operands.refresh()

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        self.timeout_s = START_S + 2 * count * self.gemm.flops / SLOWEST_GFLOPS * 1e-9
        sequence = self._sequence(name, count)
        self._poison(name)
        seconds = self._replay(name, count, warm) / count if self.protocol.round_s else self._single(name, count)
        if not self.protocol.selects:
            self.drift.add(name, _state().sample())
        elif name != CANDIDATE and not self.check_elements:
            return seconds  # a library's result is looked at less often where many candidates wait
        # where they rotate, the outputs of the last few launches, else the last one's
        windows = list(dict.fromkeys(sequence[::-1]))[:4][::-1] if self._rotates else [sequence[-1]]
        try:
            outputs = torch.stack([self._output(name, window) for window in windows])
            # NVIDIA's split-K may round partial sums to fp16 also in the fp32 class: theirs to do, not a candidate's
            least = self.gemm.accumulate if name == CANDIDATE else Accumulate.FP16
            difference = self.operands.check(outputs, windows, self.check_elements, least)
        except WrongOutput as wrong:
            if name == CANDIDATE:
                raise
            self.operands.require_untouched()  # else it is the candidate that spoilt what both read
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this GPU sound?"
            ) from None
        if name == CANDIDATE and self.check_elements:
            self.max_difference = max(self.max_difference, difference)
        return seconds

    def finish(self, seconds: float) -> Timing:
        """Look at every launch of a round like the timed ones, at what must not have changed, and sum up."""
        self.operands.require_untouched()
        damage = self.arena.damage(self.plan)
        if damage:
            raise WrongOutput(f"{damage} in a timed round")
        self._audit()
        if self.protocol.selects:
            return self.timing(float("nan"), seconds)
        empty, stream = self.worker.call("empty", self.timeout_s), self._stream.cuda_stream
        empty_s = empty["graph_s"] if self.protocol.round_s else empty["alone_s"]
        conditions = self.drift.summary()
        conditions["empty_us"] = {"baselines": self._workers.helpers.empty_s(stream) * 1e6}
        if CANDIDATE in self.arms:
            conditions["empty_us"][CANDIDATE] = empty["graph_s"] * 1e6
        if not self.protocol.round_s:
            conditions["host_call_to_done_us"] = self._host_us()
        return replace(self.timing(empty_s * 1e6, seconds), conditions=conditions)

    def close(self) -> None:
        if not self.protocol.round_s:  # CUPTI slows what comes after it in the same process
            if self._trace:
                self._trace.close(detach=True)
            self._workers.renew()

    def _host_us(self) -> dict[str, float]:
        """Median microseconds from the host's call to the end of the launch, without CUPTI, whose records cost time."""
        assert self._trace is not None
        self._trace.close(detach=True)
        self._trace = None
        self.worker.call("traced", self.timeout_s, on=False)
        samples: dict[str, list[float]] = {name: [] for name in self.arms}
        for _ in range(HOST_ROUNDS):
            for name, times in samples.items():
                times.append(self._single(name, 1) * 1e6)
        alone = self.worker.call("empty", self.timeout_s)["alone_s"] * 1e6
        return {name: median(times) for name, times in samples.items()} | {"empty kernel": alone}

    @property
    def _rotates(self) -> bool:
        return self.arena.windows > 1 and self.places[0]["c"] != self.places[1]["c"]

    def _audit(self) -> None:
        """A round like the timed ones, in which the outputs of many launches are kept and each is looked at.

        Nothing tells the candidate that it is this round, so what it skips elsewhere it skips here.
        """
        if not self.protocol.round_s or CANDIDATE not in self.arms:
            return
        count = max(self._graphs)
        sequence = self._windows(count)
        kept = sorted(int(i) for i in self.rng.permutation(count)[: self.arena.records])
        self.operands.refresh()
        self._poison(CANDIDATE)
        self.arena.recorded(len(kept)).view(torch.int16).fill_(POISON)
        torch.cuda.synchronize()
        sources = [[self.places[sequence[i]]["c"].buffer, self.places[sequence[i]]["c"].offset] for i in kept]
        size = 2 * self.gemm.m * self.gemm.n
        self.worker.call("record", self.timeout_s, bindings=sequence, kept=kept, source=sources, size=size)
        self.operands.check(self.arena.recorded(len(kept)), [sequence[i] for i in kept], element_wise=True)

    def _sequence(self, name: str, count: int) -> list[int]:
        """The windows of an arm's launches; its graph is made with them."""
        key = (name, count)
        if name == CANDIDATE:
            if count not in self._graphs:
                sequence = self._windows(count)
                answer = self.worker.call("capture", self.timeout_s, bindings=sequence)
                self._graphs[count] = (int(answer["graph"]), sequence)
            return self._graphs[count][1]
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
            own = arena.address(self.places[window]["b"])
            other = operands.other_b[min(window, len(operands.other_b) - 1)].data_ptr() if operands.other_b else own
            b_nn, b_tn = (own, other) if self.gemm.layout is Layout.NN else (other, own)
            launch(stream, arena.address(self.places[window]["a"]), b_nn, b_tn, operands.output(window).data_ptr())

        return on_window

    def _replay(self, name: str, count: int, warm: bool) -> float:
        if name != CANDIDATE:
            self._workers.helpers.settle(self._stream.cuda_stream)
            return self.operands.graphs[name, count][0].time(int(warm))[0]
        graph, _ = self._graphs[count]
        return float(self.worker.call("time", self.timeout_s, graph=graph, warm=int(warm))["device_s"])

    def _single(self, name: str, count: int) -> float:
        """Seconds of one launch: the cache emptied by the arm's own process, then the gap, then the launch."""
        self._sequence(name, count)
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        if name != CANDIDATE:
            graph, _ = self.operands.graphs[name, count]
            self.evicted.add_(1)
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
        return float(self.worker.call("once", self.timeout_s, graph=self._graphs[count][0])["seconds"])

    def _poison(self, name: str) -> None:
        if name == CANDIDATE:
            self.arena.poison_outputs()
            self.arena.fill_workspaces(self.plan, persistent=False)
        else:
            self.operands.poison_outputs()
        torch.cuda.synchronize()

    def _output(self, name: str, window: int) -> torch.Tensor:
        return self.arena.c(window) if name == CANDIDATE else self.operands.output(window)
