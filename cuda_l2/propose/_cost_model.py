"""A gradient-boosted model of the time of a schedule, as Ansor's: what it reads, and how it is fitted."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuda_l2.propose._base import Space, Values
from cuda_l2.system.files import imported
from cuda_l2.tasks.kinds import kind_of

LEAST_EXAMPLES = 8
"""With fewer nothing is fitted."""
UNMODELLED = -20.0
"""Stands for the logarithm of an estimate where a family has no model."""
ITERATIONS, LEAST_LEAF = 60, 5


def features(space: Space, schedules: Sequence[Values]) -> np.ndarray:
    """What the model reads of schedules, N x F: their values, the family's own estimate, the task and the machine."""
    sizes, marks = kind_of(space.task).policy_features(space.task)
    shared = [*(math.log2(size) for size in sizes), *marks, *space.target.features]
    estimates = [space.estimate_us(values) for values in schedules]
    rows = [
        [*values, math.log(estimate) if 0 < estimate < math.inf else UNMODELLED, *shared]
        for values, estimate in zip(schedules, estimates, strict=True)
    ]
    return np.array(rows, dtype=np.float64)


class CostModel:
    """Predicts a score, greater for faster schedules. prior: a fitted model whose errors this one learns."""

    def __init__(self, seed: int, prior: "CostModel | None" = None) -> None:
        self._seed, self._prior = seed, prior
        self._model: Any = None

    def fit(self, features_NF: np.ndarray, scores_N: np.ndarray) -> None:
        """Fit anew; with too few examples, or none that differ, only the prior predicts."""
        if len(scores_N) < LEAST_EXAMPLES or np.ptp(scores_N) == 0:
            return
        ensemble = imported("sklearn.ensemble", "the policy boosted needs", "worlds")
        least_leaf = max(2, min(LEAST_LEAF, len(scores_N) // 8))
        model = ensemble.HistGradientBoostingRegressor(
            max_iter=ITERATIONS, min_samples_leaf=least_leaf, early_stopping=False, random_state=self._seed
        )
        targets_N = scores_N - self._prior.predict(features_NF) if self._prior else scores_N
        with _one_thread():
            self._model = model.fit(features_NF, targets_N)

    def predict(self, features_NF: np.ndarray) -> np.ndarray:
        """Scores, N."""
        scores_N = self._prior.predict(features_NF) if self._prior else np.zeros(len(features_NF))
        if self._model is not None:
            with _one_thread():
                scores_N += self._model.predict(features_NF)
        return scores_N

    @property
    def fitted(self) -> bool:
        return self._model is not None or (self._prior is not None and self._prior.fitted)


def _one_thread() -> Any:
    """OpenMP on one thread: several made a model this small tens of times slower."""
    return imported("threadpoolctl", "the policy boosted needs", "worlds").threadpool_limits(1)
