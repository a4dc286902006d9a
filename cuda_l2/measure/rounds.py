"""The rounds of a timing run: all arms in random order, operands and outputs of their own for every launch."""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol as Interface

import numpy as np

from cuda_l2 import contract
from cuda_l2.errors import UserError
from cuda_l2.execute.worker import Fault, Worker
from cuda_l2.measure.baselines import TorchBaselines
from cuda_l2.measure.intervals import mean_interval, median_interval
from cuda_l2.measure.outputs import Operands, WrongOutput, check_outputs
from cuda_l2.measure.protocols import Protocol
from cuda_l2.records import Arm, Build, Candidate, Interval, Timing, TimingStatus
from cuda_l2.targets.cpu import detect

CANDIDATE = "candidate"
SLOW_FACTOR = 5.0
"""A baseline this many times slower than the best is left out of the rounds, after one sample or two short ones."""
SETTLE_S = {"passive": 0.0005, "active": 0.008}
"""Idle time before each timed run. Unless its wait policy is passive, OpenMP's threads in this process, which
checks outputs with torch, spin for milliseconds after their last work and would take a core from the arm."""
SLOWEST_GFLOPS = 0.2
LAST_LEVEL_BYTES = 32 << 20  # where the system does not say


class Contestant(Interface):
    """What a round asks of an arm: a candidate's worker or a baseline."""

    def prepare(self, slots: Sequence[int]) -> None: ...
    def run(self, timeout_s: float) -> float: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


def measure(
    candidate: Candidate,
    build: Build,
    baselines: TorchBaselines,
    operands: Operands,
    protocol: Protocol,
    *,
    names: Sequence[str] | None = None,
    beat: float = 0.0,
    rng: np.random.Generator,
) -> Timing:
    """Time one candidate that was found correct.

    names: the baselines to run, all by default. The reference is the strongest of them in this run.
    beat: stop early once the speedup is surely below this; for searches, where a poor candidate needs no digits.
    """
    start = time.perf_counter()
    arena = operands.arena
    gemm = arena.gemm
    terms = contract.parse_cpu(candidate.source)
    arena.poison_workspace(terms.workspace_bytes(gemm.m, gemm.n, gemm.k))
    try:
        with Worker(arena, Path(build.artifact), terms) as worker:
            worker.freeze()
            arms: dict[str, Contestant] = {name: baselines.arm(name) for name in names or baselines.names}
            arms[CANDIDATE] = worker
            run = _Run(operands, arms, protocol, rng, beat)
            run.rounds()
            worker.thaw()
            empty_call_us = statistics.median(worker.empty() for _ in range(9)) * 1e6
    except Fault as fault:
        status = TimingStatus(fault.status)  # a fault ends verification and timing under the same names
        return Timing(status, protocol.name, reason=fault.reason, seconds=time.perf_counter() - start)
    except WrongOutput as wrong:
        return Timing(TimingStatus.WRONG_OUTPUT, protocol.name, reason=str(wrong), seconds=time.perf_counter() - start)
    return run.timing(empty_call_us, time.perf_counter() - start)


class _Run:
    """The rounds of one measurement."""

    def __init__(
        self, operands: Operands, arms: dict[str, Contestant], protocol: Protocol, rng: np.random.Generator, beat: float
    ) -> None:
        self.beat = beat
        self.operands, self.arena, self.arms, self.protocol, self.rng = operands, operands.arena, arms, protocol, rng
        self.timeout_s = 5.0 + 64 * self.arena.gemm.flops / SLOWEST_GFLOPS * 1e-9
        self.samples: dict[str, list[float]] = {name: [] for name in arms}  # seconds a launch
        self.launches = dict.fromkeys(arms, 0)
        self.max_difference = 0.0
        self.check_elements = True
        self.evicted = (
            np.zeros(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), dtype=np.uint8) if protocol.evict else None
        )

    def rounds(self) -> None:
        protocol = self.protocol
        self.operands.refresh(self.arena.slots)  # others may have used the arena since
        once = {name: self._sample(name, 1, warm=False) for name in self.arms}
        for name in self.arms:
            if once[name] < SLOW_FACTOR * min(once.values()) or once[name] < 1.0:
                once[name] = min(once[name], self._sample(name, 1))  # the first was the warm-up
        best_baseline = min(seconds for name, seconds in once.items() if name != CANDIDATE)
        active = [name for name in self.arms if name == CANDIDATE or once[name] <= SLOW_FACTOR * best_baseline]
        for name in self.arms.keys() - set(active):
            self.samples[name].append(once[name])
            self.launches[name] = 1
        count, fastest = 1, min(once.values())
        if protocol.round_s:
            count = max(1, min(self.arena.slots, round(protocol.round_s / fastest)))
        started = time.perf_counter()
        while time.perf_counter() - started < protocol.warmup_s:
            for name in active:
                self._sample(name, count)
        started = time.perf_counter()
        # few looks at the interval: stopping at the first tight one of many would make it too narrow
        looks = {round(protocol.min_rounds * 1.5**i) for i in range(40)}
        for number in range(1, protocol.max_rounds + 1):
            self.check_elements = number % protocol.check_every == 0
            for index in self.rng.permutation(len(active)):
                name = active[int(index)]
                self.samples[name].append(self._sample(name, count))
                self.launches[name] += count
            if protocol.measure_s:
                if time.perf_counter() - started >= protocol.measure_s and number >= protocol.min_rounds:
                    break
            elif number in looks:
                ratio = self._ratio(self._reference())
                if ratio.relative_halfwidth <= protocol.halfwidth or ratio.high < self.beat:
                    break

    def _sample(self, name: str, count: int, warm: bool = True) -> float:
        """Seconds a launch over `count` back-to-back launches, each on operands and an output of its own, checked.

        The arm is stopped while operands change and until the clock starts; the warm-up met other operands.
        """
        arm = self.arms[name]
        if warm:
            arm.thaw()
            arm.prepare([0])
            arm.run(self.timeout_s)
        arm.freeze()
        self.operands.refresh(count)
        self.arena.poison_outputs(count)
        arm.prepare([int(slot) for slot in self.rng.permutation(count)])
        arm.freeze()
        if self.evicted is not None:
            self.evicted += 1
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        time.sleep(SETTLE_S.get(os.environ.get("OMP_WAIT_POLICY", "").lower(), SETTLE_S["active"]) + gap)
        arm.thaw()
        seconds = arm.run(self.timeout_s) / count
        arm.freeze()
        try:
            difference = check_outputs(self.operands, count, element_wise=self.check_elements)
            self.operands.require_untouched(count)
        except WrongOutput as wrong:
            if name == CANDIDATE:
                raise
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this machine sound?"
            ) from None
        if name == CANDIDATE and self.check_elements:
            self.max_difference = max(self.max_difference, difference)
        return seconds

    def _reference(self) -> str:
        """The strongest baseline so far."""
        return min(
            (name for name in self.arms if name != CANDIDATE), key=lambda name: statistics.median(self.samples[name])
        )

    def _ratio(self, baseline: str) -> Interval:
        """t_baseline / t_candidate over paired rounds."""
        ours, theirs = self.samples[CANDIDATE], self.samples[baseline]
        if len(theirs) < len(ours):  # timed once
            middle = theirs[0] / statistics.median(ours)
            return Interval(middle, -float("inf"), float("inf"))
        interval = mean_interval if self.protocol.mean else median_interval
        return interval([t / o for t, o in zip(theirs, ours, strict=True)])

    def timing(self, empty_call_us: float, seconds: float) -> Timing:
        arms = {
            name: Arm(name, median_interval([s * 1e6 for s in samples]), len(samples), self.launches[name])
            for name, samples in self.samples.items()
        }
        reference = self._reference()
        names = [name for name in arms if name != CANDIDATE]
        return Timing(
            status=TimingStatus.MEASURED,
            protocol=self.protocol.name,
            candidate=arms[CANDIDATE],
            baselines=tuple(arms[name] for name in names),
            reference=reference,
            speedup=self._ratio(reference),
            speedups=tuple((name, self._ratio(name)) for name in names),
            max_difference=self.max_difference,
            empty_call_us=empty_call_us,
            seconds=seconds,
        )
