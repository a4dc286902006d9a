"""The rival of cost models: as Ansor, measure what a gradient-boosted model of the time says is fastest, then refit.

The first group is half the families' own ranking and half random. Later ones hold the model's best of many drawn
schedules, a few random ones among them.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from cuda_l2.propose._base import Proposer, Space, Values, draw
from cuda_l2.propose._cost_model import CostModel, features
from cuda_l2.records import Candidate, Trial
from cuda_l2.system.files import imported

POOL = 1024
"""Drawn schedules that the model sorts for one group."""
EXPLORED = 0.1
"""Share of random schedules in a group, rounded up."""
WORSE = math.log(2)
"""A failure's score lies this much below the slowest correct schedule's."""


class BoostedProposer(Proposer):
    """Sorts by a model of the trials so far. prior: fitted on other tasks; then no random group comes first."""

    name = "boosted"

    def __init__(
        self, space: Space, trials: Callable[[], list[Trial]], rng: np.random.Generator, prior: CostModel | None = None
    ) -> None:
        imported("sklearn", "the policy boosted needs", "worlds")
        self._space, self._trials, self._rng = space, trials, rng
        self._model = CostModel(int(rng.integers(1 << 31)), prior)
        self._seen: set[Values] = set()

    def propose(self, count: int) -> list[Candidate]:
        chosen = self._chosen(count)
        self._seen.update(chosen)
        return [self._space.render(values, self.name) for values in chosen]

    def observe(self, trials: Sequence[Trial]) -> None:
        history = {self._space.values_of(trial): trial.speedup for trial in self._trials()}
        history.pop((), None)
        self._seen.update(history)
        timed = [math.log(speedup) for speedup in history.values() if speedup]
        if timed:
            scores = [math.log(speedup) if speedup else min(timed) - WORSE for speedup in history.values()]
            self._model.fit(features(self._space, list(history)), np.array(scores))

    def _chosen(self, count: int) -> list[Values]:
        fitted = self._model.fitted
        explored = max(1, round(EXPLORED * count)) if fitted else count // 2
        explored = min(explored, count - 1)
        best = self._sorted() if fitted else [v for v in self._space.ranked(count) if v not in self._seen]
        chosen = best[: count - explored]
        return [*chosen, *(draw(self._space, self._rng) for _ in range(count - len(chosen)))]

    def _sorted(self) -> list[Values]:
        """New schedules, the best by the model first."""
        pool = [values for values in self._space.some(POOL, self._rng) if values not in self._seen]
        if not pool:
            return []
        order = np.argsort(-self._model.predict(features(self._space, pool)), kind="stable")
        return [pool[i] for i in order]


PROPOSER = BoostedProposer
