"""The rounds of a timing run: all arms in random order, intervals over paired rounds, few looks at them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_l2.machine._base import Fault
from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.quiet import Busy
from cuda_l2.measure.sampler import Sampler
from cuda_l2.records import Arm, Build, Candidate, Interval, Layout, Timing, TimingStatus

CANDIDATE = "candidate"
SLOW_FACTOR = 5.0
"""A baseline this many times slower than the best is left out of the rounds, after one sample or five short ones."""
CLOSE_FACTOR = 2.0
"""An arm that is at most so much slower than the best needs no second sample where that decides nothing else: where it
is timed seldom, or a round has one launch anyway."""
SHORT_S = 1.0
PATIENCE_S = 20.0
"""Time that a timing without a limit may wait for others to leave the cores alone."""
LEAST_ROUNDS = 6
"""Fewer leave no 95 % interval."""
LOOKS_S = (0.003, 0.01, 0.03)
"""Pauses before what looks slow is sampled again."""


@dataclass(frozen=True)
class Kernel:
    """A candidate that was built. layout: in which it reads B, the task's own if not given."""

    candidate: Candidate
    build: Build
    layout: Layout | None = None


@dataclass(frozen=True)
class Limits:
    """When a measurement ends before its protocol does.

    beat: stop early once the speedup is surely below this; for searches, where a poor candidate needs no digits.
    within_s: how long it may take, waiting for others to leave the cores alone included. Rounds end then, but not
    before there are `LEAST_ROUNDS`.
    """

    beat: float = 0.0
    within_s: float = math.inf


@dataclass(frozen=True)
class Terms:
    """How a measurement is taken."""

    protocol: Protocol
    rng: np.random.Generator
    limits: Limits = Limits()
    clock: Clock = CLOCK

    @property
    def patience_s(self) -> float:
        """How long to wait, all in all, while other work has the cores."""
        within_s = self.limits.within_s
        return max(0.0, within_s) if math.isfinite(within_s) else PATIENCE_S


def failed(error: Exception, protocol: Protocol, start: float, clock: Clock = CLOCK) -> Timing:
    """The timing of a measurement that a fault or a wrong output ended. start: when it began, by the clock."""
    status = TimingStatus.WRONG_OUTPUT
    if isinstance(error, Fault) and str(error.status) in list(TimingStatus):
        status = TimingStatus(error.status)  # a fault ends verification and timing under the same names
    return Timing(status, protocol.name, reason=str(error), seconds=clock.now() - start)


class Rounds(ABC):
    """One measurement: samples of every arm, taken in turn until the ratio is known well enough.

    references: the arms that compete with the candidate, all by default; others are timed beside them.
    subject: the arm whose time the ratios are taken over, a baseline where there is no candidate.
    kernels: the arms that are no baselines.
    seldom: arms that are sampled only in every `protocol.seldom_every`th round.
    processes: sets of processes that the rounds go round, as `Samples` has it.
    """

    def __init__(
        self,
        arms: Sequence[str],
        terms: Terms,
        *,
        references: Sequence[str] = (),
        subject: str = CANDIDATE,
        kernels: Collection[str] = (CANDIDATE,),
        seldom: Collection[str] = (),
        processes: int = 1,
    ) -> None:
        self.arms, self.subject, self.kernels, self.seldom = list(arms), subject, kernels, seldom
        self.protocol, self.rng, self.beat, self.clock = terms.protocol, terms.rng, terms.limits.beat, terms.clock
        self.ends = terms.clock.now() + terms.limits.within_s
        others = [[name for name in names if name != subject and name not in kernels] for names in (references, arms)]
        self.references = others[0] or others[1] or [subject]
        self._count = 1
        """Launches of a sample in the rounds."""
        self._sampler: Sampler[str] = Sampler(lambda name: self.sample(name, self._count), self.rng, processes)
        self.samples = self._sampler.samples
        """Seconds a launch. What is left out of the rounds has one sample, of round 0."""
        self.launches = dict.fromkeys(arms, 0)
        self.differences: dict[str, float] = {}
        """Largest difference of an element of every kernel's timed outputs from the reference."""
        self.check_elements = True
        self.number = 0
        """Number of the round whose samples are taken; 0 before the first."""

    @abstractmethod
    def sample(self, name: str, count: int, warm: bool = True) -> float:
        """Seconds a launch of one arm over `count` launches, their outputs checked.

        warm: whether launches that do not count come first.
        """

    @property
    @abstractmethod
    def most(self) -> int:
        """The most launches one sample can take."""

    def count(self, wanted: float) -> int:
        """How many launches a round has where so many would fill it."""
        return max(1, min(self.most, round(wanted)))

    def round_s(self, fastest_s: float) -> float:
        """How long the launches of a sample are to take, where the fastest arm's takes so long."""
        return self.protocol.round_s

    def seldom_every(self, fastest_s: float) -> int:
        """Rounds between samples of the seldom arms."""
        return self.protocol.seldom_every

    def parts(self, count: int) -> int:
        """In how many parts every arm takes its launches of a round, all arms by turns in each. What is left over where
        they do not divide is not launched. Parts of one round are no rounds of their own: moments last longer.
        """
        return 1

    def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:  # noqa: B027 - not all have something to do
        """Called before each round, in which each of these arms has so many launches, and once before the first."""

    def end_round(self) -> None:  # noqa: B027
        """Called when all launches of a round are done."""

    def begin_watch(self) -> None:  # noqa: B027
        """Samples follow; `disturbed` tells of them."""

    def disturbed(self) -> str:
        """What other work took of the machine since `begin_watch`, in a few words; empty where nothing."""
        return ""

    def wait_for_quiet(self, why: str) -> None:  # noqa: B027
        """Return when others leave the machine alone; Busy where that takes too long."""

    def _first_samples(self) -> dict[str, float]:
        """Seconds of each arm by its shortest sample, enough of them to tell which are slow."""
        while True:
            self.begin_watch()
            once = self._samples_once()
            why = self.disturbed()
            if not why:
                return once
            self.wait_for_quiet(why)

    def run(self) -> None:
        protocol = self.protocol
        once = self._first_samples()
        slowest = SLOW_FACTOR * min(seconds for name, seconds in once.items() if name not in self.kernels)
        left_out = [name for name in self.arms if name != self.subject and once[name] > slowest]
        active = [name for name in self.arms if name not in left_out]
        for name in self.arms:
            if name not in active:
                self.samples.add(name, 0, once[name])
                self.launches[name] += 1
        fastest = min(once.values())
        count = self.count(self.round_s(fastest) / fastest) if protocol.round_s else 1
        parts = self.parts(count)
        self._count = count = count // parts
        started = self.clock.now()
        while self.clock.now() - started < protocol.warmup_s:
            for name in active:
                self.sample(name, count)
        started = self.clock.now()
        every = self.seldom_every(fastest)
        # few looks at the interval: stopping at the first tight one of many would make it too narrow
        looks = {round(protocol.min_rounds * 1.5**i) for i in range(40)}
        number = 0
        while number < protocol.max_rounds:
            number += 1
            self.number, self.check_elements = number, number % protocol.check_every == 0
            names = [name for name in active if name not in self.seldom or number % every == 1 % every]
            self.begin_round(names, parts * count)
            self.begin_watch()
            self._sampler.round(names, parts=parts)
            self.end_round()
            if why := self.disturbed():
                self._sampler.withdraw()
                number -= 1
                try:
                    self.wait_for_quiet(why)
                except Busy:
                    if number < min(LEAST_ROUNDS, protocol.min_rounds):
                        raise
                    break
                continue
            for name in names:
                self.launches[name] += parts * count
            if number >= LEAST_ROUNDS and math.isfinite(self.ends) and self.clock.now() >= self.ends:
                break
            if protocol.measure_s:
                if self.clock.now() - started >= protocol.measure_s and number >= protocol.min_rounds:
                    break
            elif number in looks:
                ratio = self.ratio(self.reference())
                if ratio.relative_halfwidth <= protocol.halfwidth or ratio.high < self.beat:
                    break

    def _samples_once(self) -> dict[str, float]:
        protocol = self.protocol
        self.begin_round()
        once = {name: self.sample(name, 1, warm=False) for name in self.arms}
        unsure = set(self.arms)  # of one sample, which may have been the warm-up

        def again(name: str) -> None:
            once[name] = min(once[name], self.sample(name, 1))
            unsure.discard(name)

        def slow() -> list[str]:
            best = min(seconds for name, seconds in once.items() if name not in self.kernels)
            return [name for name in self.arms if name != self.subject and once[name] > SLOW_FACTOR * best]

        for name in self.arms:
            close = once[name] < CLOSE_FACTOR * min(once.values())
            needless = close and (name in self.seldom or not protocol.round_s)
            if not needless and (close or once[name] < SHORT_S):
                again(name)
        while short := [name for name in slow() if name in unsure and once[name] < SHORT_S]:
            for name in short:
                again(name)
        for pause_s in LOOKS_S:  # a machine that was busy for a moment must not cost a run its strongest baseline
            short = [name for name in slow() if once[name] < SHORT_S]
            if short:
                self.clock.sleep(pause_s)
            for name in short:
                again(name)
        return once

    def reference(self) -> str:
        """The strongest baseline so far: the one whose time, as `timing` gives it, is the least."""
        return min(self.references, key=self.samples.median)

    def ratio(self, baseline: str, subject: str = "") -> Interval:
        """t_baseline / t_subject over the rounds that both were sampled in."""
        return self.samples.ratio(baseline, subject or self.subject, mean=self.protocol.mean)

    def timing(self, empty_call_us: float, seconds: float, subject: str = "") -> Timing:
        """What was found about the subject, or about another of the kernels timed beside it."""
        subject = subject or self.subject
        arms = {}
        for name in self.arms:
            seconds_of = self.samples.interval(name)
            latency_us = Interval(*(1e6 * bound for bound in (seconds_of.estimate, seconds_of.low, seconds_of.high)))
            arms[name] = Arm(name, latency_us, len(self.samples.of(name)), self.launches[name])
        reference = self.reference()
        names = [name for name in arms if name != subject and name not in self.kernels]
        return Timing(
            status=TimingStatus.MEASURED,
            protocol=self.protocol.name,
            candidate=arms[subject],
            baselines=tuple(arms[name] for name in names),
            reference=reference,
            speedup=self.ratio(reference, subject),
            speedups=tuple((name, self.ratio(name, subject)) for name in names),
            max_difference=self.differences.get(subject, 0.0),
            empty_call_us=empty_call_us,
            seconds=seconds,
        )
