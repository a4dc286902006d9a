"""The schedules of a world as a space of one task, so that proposers search it without building or timing anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cuda_l2.families._base import Choice, Family
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import FamilySpace, UnionSpace, Values, drawn, space_for
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.reward import RewardSettings, reward
from cuda_l2.worlds.rows import Row
from cuda_l2.worlds.world import World


@dataclass(frozen=True)
class RecordedSpace:
    """The schedules that were recorded for one task: only they are valid. Implements Space.

    families: all of the world, so that every task's schedules are written in the same choices.
    """

    task: Task
    target: Target
    families: tuple[Family, ...]
    rows: Sequence[Row]
    _rendered: dict[Values, Candidate] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def inner(self) -> FamilySpace | UnionSpace:
        return space_for(self.families, self.task, self.target)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        return self.inner.choices

    @cached_property
    def by_values(self) -> dict[Values, Row]:
        """The measurement of every schedule."""
        return {self.inner.whole(row.family, row.schedule): row for row in self.rows}

    @cached_property
    def best_us(self) -> float:
        """The least recorded time."""
        return min((row.latency_us for row in self.rows if row.measured), default=math.inf)

    @cached_property
    def worst_us(self) -> float:
        """The greatest recorded time."""
        return max((row.latency_us for row in self.rows if row.measured), default=math.inf)

    def valid(self, prefix: Sequence[int]) -> Values:
        return self._next[tuple(prefix)]

    def render(self, values: Values, proposer: str) -> Candidate:
        if values not in self._rendered:
            self._rendered[values] = self.inner.render(values, proposer)
        return self._rendered[values]

    def values_of(self, trial: Trial) -> Values:
        return self.inner.values_of(trial)

    def defaults(self) -> list[Values]:
        """The recorded ones of the schedules that an engineer would try first."""
        return [values for values in self.inner.defaults() if values in self.by_values]

    def ranked(self, count: int) -> list[Values]:
        """Recorded schedules by the families' own models; the defaults where there is no model."""
        modelled = [values for values in self.by_values if math.isfinite(self._estimates[values])]
        return sorted(modelled, key=self._estimates.__getitem__)[:count] if modelled else self.defaults()[:count]

    def estimate_us(self, values: Values) -> float:
        return self._estimates[values]

    def some(self, count: int, rng: np.random.Generator) -> list[Values]:
        if count >= len(self.by_values):
            return list(self.by_values)
        return drawn(self, count, rng)

    def regret(self, values: Values) -> float:
        """Time over the least recorded one, less 1; infinite where the schedule has no time."""
        return self.by_values[values].latency_us / self.best_us - 1 if self.by_values[values].measured else math.inf

    @cached_property
    def _estimates(self) -> dict[Values, float]:
        return {values: self.inner.estimate_us(values) for values in self.by_values}

    @cached_property
    def _next(self) -> dict[Values, Values]:
        """Recorded values of the next choice, by those before."""
        found: dict[Values, set[int]] = {}
        for values in self.by_values:
            for i, value in enumerate(values):
                found.setdefault(values[:i], set()).add(value)
        return {prefix: tuple(sorted(values)) for prefix, values in found.items()}


def recorded_space(world: World, task: Task) -> RecordedSpace:
    return RecordedSpace(task, world.target, world.families, world.by_task[str(task)])


def recorded_reward(row: Row, settings: RewardSettings = RewardSettings()) -> float:
    """The reward of a recorded measurement."""
    return reward(row.build.status, row.verdict, row.timing("search"), row.tokens, settings)
