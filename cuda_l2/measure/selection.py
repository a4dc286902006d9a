"""Which of several arms is fastest, from interleaved rounds: few for all, then more for the best that are close."""

from collections.abc import Sequence
from dataclasses import dataclass

from cuda_l2.measure.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of rounds, and when they end."""

    first_rounds: int = 3  # of all arms
    finalists: int = 4  # the best of these are timed again, in rounds of their own
    near: float = 1.05  # but only those up to this many times slower than the best
    batch_rounds: int = 4  # rounds between looks at the intervals
    max_rounds: int = 32  # of the finalists
    clear: float = 0.005  # stop once no other arm can be faster than the choice by more than this


@dataclass(frozen=True, slots=True)
class Selection:
    """The choice, and the times that it was made from."""

    chosen: int
    times_us: tuple[float, ...]  # medians
    rounds: tuple[int, ...]  # that the medians are of
    regret: float  # how much faster the best other arm may be: upper end of 95 % intervals over paired rounds


def select(sampler: Sampler[int], count: int, effort: Effort) -> Selection:
    """The fastest of `count` arms; samples in microseconds. One round more than is counted warms up.

    Finalists are judged by their later rounds alone: which arm wins can depend on how warm the chip is.
    """
    everyone, samples = list(range(count)), sampler.samples

    def run(arms: Sequence[int], rounds: int) -> None:
        for _ in range(rounds):
            sampler.round(arms)

    sampler.round(everyone, kept=False)
    run(everyone, effort.first_rounds)
    ranked = sorted(everyone, key=samples.median)
    limit = effort.near * samples.median(ranked[0])
    close = [arm for arm in ranked[: effort.finalists] if samples.median(arm) <= limit]
    chosen, regret = close[0], 0.0
    if len(close) > 1:
        samples.forget(close)
    while len(close) > 1:
        rounds = min(effort.batch_rounds, effort.max_rounds - len(samples.of(close[0])))
        if rounds <= 0:
            break
        run(close, rounds)
        chosen = min(close, key=samples.median)
        ratios = {arm: samples.ratio(chosen, arm) for arm in close if arm != chosen}
        regret = max(0.0, *(ratio.high - 1 for ratio in ratios.values()))
        if regret <= effort.clear:
            break
        close = [arm for arm in close if arm == chosen or ratios[arm].high > 1]
    else:
        regret = 0.0  # one is left: all others are surely slower
    medians = tuple(samples.median(arm) for arm in everyone)
    return Selection(chosen, medians, tuple(len(samples.of(arm)) for arm in everyone), regret)
