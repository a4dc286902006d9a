"""Rivals that know the measurements of other tasks: nearest-neighbour transfer, and a cost model fitted on them."""

import math
from collections.abc import Sequence

import numpy as np

from cuda_l2.propose._base import Ordered, Space, Trials, Values
from cuda_l2.propose._cost_model import CostModel, features
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.tasks.kinds import kind_of

NEIGHBOURS = 4
"""Tasks whose measurements are averaged."""
UNTIMED = math.log(4)
"""How much slower than the best a schedule without a time is taken to be, in the logarithm."""
MOST_EXAMPLES = 20_000
"""Measurements that the cost model is fitted on, drawn of all."""


def slowness(space: RecordedSpace) -> dict[Values, float]:
    """The logarithm of each schedule's time over the task's best."""
    found = {values: space.regret(values) for values in space.by_values}
    return {values: math.log1p(regret) if math.isfinite(regret) else UNTIMED for values, regret in found.items()}


def place(space: Space) -> np.ndarray:
    """Where a task lies for its distance from others: the logarithms of its sizes, and what else differs."""
    sizes, marks = kind_of(space.task).policy_features(space.task)
    alike = [float(space.task.dtype == dtype) for dtype in ("float16", "bfloat16")] if space.task.product else []
    return np.array([*(math.log2(size) for size in sizes), *(2 * mark for mark in marks), *alike])


class NearestProposer(Ordered):
    """What was fastest on the nearest tasks first, weighted by their nearness."""

    name = "nearest"

    def __init__(self, space: Space, trials: Trials, rng: np.random.Generator, known: Sequence[RecordedSpace]) -> None:
        super().__init__(space, trials, rng)
        self._known = [other for other in known if other.task.product is space.task.product]

    def first(self) -> Sequence[Values]:
        known = self._known
        here = place(self._space)
        distances = [float(np.abs(place(other) - here).sum()) for other in known]
        nearest = sorted(range(len(known)), key=distances.__getitem__)[:NEIGHBOURS]
        shares = {i: 1 / (0.1 + distances[i]) for i in nearest}
        measured = {i: slowness(known[i]) for i in nearest}
        total = sum(shares.values())
        scores: dict[Values, float] = {}
        for values in dict.fromkeys(values for i in nearest for values in measured[i]):
            found = sum(share * measured[i].get(values, UNTIMED) for i, share in shares.items())
            if self._valid(values):
                scores[values] = found / total
        return sorted(scores, key=scores.__getitem__)

    def _valid(self, values: Values) -> bool:
        """Whether another task's schedule is one of this task."""
        try:
            return all(value in self._space.valid(values[:i]) for i, value in enumerate(values))
        except KeyError:  # of a recorded space, no schedule begins so
            return False


def fitted_on(known: Sequence[RecordedSpace], seed: int) -> CostModel:
    """A cost model of other tasks' measurements. Its score is the negative logarithm of the time over the best's."""
    rng = np.random.default_rng(seed)
    each = max(1, MOST_EXAMPLES // max(1, len(known)))
    parts, scores = [], []
    for space in known:
        slow = slowness(space)
        schedules = list(slow)
        picked = rng.permutation(len(schedules))[:each]
        chosen = [schedules[i] for i in picked]
        parts.append(features(space, chosen))
        scores += [-slow[values] for values in chosen]
    model = CostModel(seed)
    model.fit(np.concatenate(parts), np.array(scores))
    return model
