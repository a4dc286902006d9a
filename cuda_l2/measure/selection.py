"""Which of several arms is fastest, from interleaved rounds: few for all, then more for the best that are close."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cuda_l2.measure.intervals import median_interval
from cuda_l2.records import Interval

TimeRound = Callable[[Sequence[int]], Sequence[float]]
"""Times each of these arms once, interleaved in an order of its own; microseconds in the order asked for."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look."""

    first_rounds: int = 3  # of all arms
    finalists: int = 4  # the best of these are timed again, in rounds of their own
    near: float = 1.05  # but only those up to this many times slower than the best
    batch_rounds: int = 4  # rounds between looks at the intervals
    max_rounds: int = 32  # of the finalists
    clear: float = 0.005  # stop once no other arm can be faster than the choice by more than this


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice, and what it was made from."""

    chosen: int
    times_us: tuple[float, ...]  # medians
    rounds: tuple[int, ...]  # that the medians are of
    regret: float  # how much faster the best other arm may be: upper end of 95 % intervals over paired rounds


def select(time_round: TimeRound, count: int, effort: Effort) -> Selection:
    """The fastest of `count` arms. One round more than is counted warms up.

    Finalists are judged by their later rounds alone: which arm wins can depend on how warm the chip is.
    """
    everyone = list(range(count))
    samples: list[list[float]] = [[] for _ in everyone]

    def run(arms: Sequence[int], rounds: int) -> None:
        for _ in range(rounds):
            for arm, time_us in zip(arms, time_round(arms), strict=True):
                samples[arm].append(time_us)

    def fastest(arms: Sequence[int]) -> int:
        return min(arms, key=lambda arm: statistics.median(samples[arm]))

    time_round(everyone)
    run(everyone, effort.first_rounds)
    ranked = sorted(everyone, key=lambda arm: statistics.median(samples[arm]))
    limit = effort.near * statistics.median(samples[ranked[0]])
    close = [arm for arm in ranked[: effort.finalists] if statistics.median(samples[arm]) <= limit]
    chosen, regret = close[0], 0.0
    if len(close) > 1:
        for arm in close:
            samples[arm] = []
    while len(close) > 1:
        rounds = min(effort.batch_rounds, effort.max_rounds - len(samples[close[0]]))
        if rounds <= 0:
            break
        run(close, rounds)
        chosen = fastest(close)
        # the choice's time over the other's in the same rounds: drift of the clock cancels
        ratios = {arm: _ratio(samples[chosen], samples[arm]) for arm in close if arm != chosen}
        regret = max(0.0, *(ratio.high - 1 for ratio in ratios.values()))
        if regret <= effort.clear:
            break
        close = [arm for arm in close if arm == chosen or ratios[arm].high > 1]
    else:
        regret = 0.0  # one is left: all others are surely slower
    return Selection(
        chosen,
        tuple(statistics.median(times) for times in samples),
        tuple(len(times) for times in samples),
        regret,
    )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Our time over theirs, paired by round: all that are still close were in every round."""
    return median_interval([our / their for our, their in zip(ours, theirs, strict=True)])
