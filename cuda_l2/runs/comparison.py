"""Searchers compared on the tasks of a world that are held out: regret against the number of measurements."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cuda_l2.evaluator import Evaluator
from cuda_l2.propose._recorded import RecordedSpace, recorded_space
from cuda_l2.records import Candidate, Interval, Task, Trial
from cuda_l2.rigs.recorded import RecordedRig
from cuda_l2.runs.replay import Replay
from cuda_l2.runs.searchers import Known, searcher
from cuda_l2.system.errors import UserError
from cuda_l2.worlds.world import World

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of measurements at which regret is reported."""
NEAR = 0.01
"""A search has arrived once it is within this share of the best recorded time."""
RESAMPLES = 1000


@dataclass(frozen=True)
class Curve:
    """One search: the regret of the best so far after 1, 2, ... measurements, as a share of the best time."""

    searcher: str
    task: str
    seed: int
    regrets: tuple[float, ...]

    def after(self, count: int) -> float:
        """Regret after `count` measurements; a search that ended before stays where it was."""
        return self.regrets[min(count, len(self.regrets)) - 1]

    @property
    def arrived(self) -> float:
        """Measurements until it was within 1 % of the best; infinite where it never was."""
        return next((n for n, regret in enumerate(self.regrets, 1) if regret <= NEAR), math.inf)


def compare(
    world: World,
    learnt: Sequence[Task],
    held_out: Sequence[Task],
    searchers: Sequence[str],
    seeds: int,
    most: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Curve]:
    """Searches of every searcher on every held-out task, over the same seeds.

    learnt: tasks whose measurements searchers may know. most: measurements a search.
    """
    if not held_out:
        raise UserError("no task is held out: name some with --held-out, or give their number")
    if seeds < 1 or most < 1:
        raise UserError("a comparison needs at least 1 seed and 1 measurement")
    known = Known([recorded_space(world, task) for task in learnt])
    makers = {name: searcher(name, known, held_out) for name in searchers}
    curves = []
    with RecordedRig(world) as rig:
        for task in held_out:
            space = recorded_space(world, task)
            with Evaluator(task, rig, seed=0) as evaluator:
                judge = functools.cache(functools.partial(_judged, evaluator))
                for name, seed in itertools.product(makers, range(seeds)):
                    replay = Replay(space, judge, most)
                    makers[name](replay, np.random.default_rng(seed))
                    curves.append(Curve(name, str(task), seed, _regrets(space, replay)))
            say(f"{task}: {len(makers)} searchers, {seeds} seeds")
    return curves


def _judged(evaluator: Evaluator, candidate: Candidate) -> Trial:
    (trial,) = evaluator.evaluate([candidate])
    return trial


def _regrets(space: RecordedSpace, replay: Replay) -> tuple[float, ...]:
    """Before anything has a time, the regret is that of the slowest recorded schedule."""
    slowest = space.worst_us / space.best_us - 1
    found = [min(space.regret(values), slowest) for values in replay.order]
    return tuple(np.minimum.accumulate(found or [slowest]).tolist())


Statistic = Callable[[Sequence[float]], float]


def over_tasks(curves: Sequence[Curve], value: Callable[[Curve], float], statistic: Statistic) -> Interval:
    """A statistic over tasks, mean over seeds, with a 95 % bootstrap interval over seeds.

    Seeds are drawn with replacement, all tasks of a seed together. Infinite values count as greater than all others;
    where the mean is infinite so is the estimate.
    """
    by_seed: dict[int, list[float]] = {}
    for curve in curves:
        by_seed.setdefault(curve.seed, []).append(value(curve))
    each = np.array([statistic(values) for values in by_seed.values()])
    drawn = np.random.default_rng(0).integers(len(each), size=(RESAMPLES, len(each)))
    means = np.sort(each[drawn].mean(1))
    estimate = float(each.mean())
    low, high = float(means[round(0.025 * (RESAMPLES - 1))]), float(means[round(0.975 * (RESAMPLES - 1))])
    return Interval(estimate, min(low, estimate), max(high, estimate))


def by_searcher(curves: Sequence[Curve]) -> Mapping[str, list[Curve]]:
    found: dict[str, list[Curve]] = {}
    for curve in curves:
        found.setdefault(curve.searcher, []).append(curve)
    return found


def counts(curves: Sequence[Curve]) -> list[int]:
    """The numbers of measurements that the searches reach."""
    longest = max(len(curve.regrets) for curve in curves)
    return [count for count in COUNTS if count <= longest]
