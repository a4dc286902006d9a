"""The families' own analytic models: schedules in the order of their modelled time, then random ones."""

from collections.abc import Callable, Iterator

import numpy as np

from cuda_l2.propose._base import Proposer, Space, Values, draw
from cuda_l2.records import Candidate, Trial

MOST = 512
"""Schedules in the order of the models; the defaults alone where a family has no model."""


class RankedProposer(Proposer):
    """The best by the models first."""

    name = "ranked"

    def __init__(self, space: Space, trials: Callable[[], list[Trial]], rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng
        self._order = self._ordered()

    def propose(self, count: int) -> list[Candidate]:
        return [self._space.render(next(self._order), self.name) for _ in range(count)]

    def _ordered(self) -> Iterator[Values]:
        yield from self._space.ranked(MOST)
        while True:
            yield draw(self._space, self._rng)


PROPOSER = RankedProposer
