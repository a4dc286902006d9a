"""Interleaved samples of several arms in random order, and the intervals that follow from them.

Searches, reports, the tuning of libraries and the choice of a table's kernels all take their samples here. What one
sample is, a process's turn or a graph's replay, is the caller's.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from cuda_l2.measure.intervals import mean_interval, median_interval
from cuda_l2.records import Interval

A = TypeVar("A")


class Samples(Generic[A]):
    """Samples by arm and round, all in one unit.

    processes: rounds go round this many sets of processes, the round's number modulo this. What makes one process slow
    as long as it lives is then in one set's samples alone, and intervals are over the sets' medians.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._by_round: dict[A, dict[int, float]] = defaultdict(dict)

    def add(self, arm: A, number: int, value: float) -> None:
        """number: of the round. An arm has one sample in it."""
        self._by_round[arm][number] = value

    def of(self, arm: A) -> list[float]:
        """An arm's samples in the order of their rounds."""
        return list(self._by_round[arm].values())

    def median(self, arm: A) -> float:
        """The estimate of `interval`."""
        return statistics.median(self._of_sets(self._by_round[arm]))

    def interval(self, arm: A) -> Interval:
        """The median of an arm's samples, or of the medians of the sets of processes where there are several."""
        return median_interval(self._of_sets(self._by_round[arm]))

    def withdraw(self, number: int) -> None:
        """Take back a round's samples."""
        for samples in self._by_round.values():
            samples.pop(number, None)

    def forget(self, arms: Collection[A]) -> None:
        for arm in arms:
            self._by_round.pop(arm, None)

    def ratio(self, theirs: A, ours: A, *, mean: bool = False) -> Interval:
        """Their time over ours in the rounds that hold both, so that drift of the clock cancels.

        The median, or the mean as the paper has it. Infinite bounds where no round holds both.
        """
        own = self._by_round[ours]
        paired = {number: value / own[number] for number, value in self._by_round[theirs].items() if number in own}
        if not paired:  # one was sampled once
            return Interval(self.median(theirs) / self.median(ours), -math.inf, math.inf)
        return mean_interval(list(paired.values())) if mean else median_interval(self._of_sets(paired))

    def _of_sets(self, by_round: Mapping[int, float]) -> list[float]:
        """A value for each round, or the median of each set of processes where there are several."""
        sets: dict[int, list[float]] = defaultdict(list)
        for number, value in by_round.items():
            sets[number % self._processes if self._processes > 1 else number].append(value)
        return [statistics.median(values) for values in sets.values()]


class Sampler(Generic[A]):
    """Takes rounds of samples. take: one sample of an arm. processes: as `Samples` has it."""

    def __init__(self, take: Callable[[A], float], rng: np.random.Generator, processes: int = 1) -> None:
        self._take, self._rng = take, rng
        self.samples: Samples[A] = Samples(processes)
        self.rounds = 0
        """Number of rounds that were kept."""

    def round(self, arms: Sequence[A], *, parts: int = 1, kept: bool = True) -> None:
        """One sample of each arm in random order; in several parts all arms by turns in each, and their mean counts.

        kept: whether the samples count; not those of a warm-up.
        """
        taken: dict[A, list[float]] = {arm: [] for arm in arms}
        for _ in range(parts):
            for index in self._rng.permutation(len(arms)):
                arm = arms[int(index)]
                taken[arm].append(self._take(arm))
        if kept:
            self.rounds += 1
            for arm, values in taken.items():
                self.samples.add(arm, self.rounds, statistics.fmean(values))

    def withdraw(self) -> None:
        """Take back the last round that was kept."""
        self.samples.withdraw(self.rounds)
        self.rounds -= 1
