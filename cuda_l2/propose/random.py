"""The search baseline: each choice uniform over its valid values."""

from collections.abc import Callable

import numpy as np

from cuda_l2.propose._base import Proposer, Space, draw
from cuda_l2.records import Candidate, Trial


class RandomProposer(Proposer):
    """Uniform over valid values, choice by choice."""

    name = "random"

    def __init__(self, space: Space, trials: Callable[[], list[Trial]], rng: np.random.Generator) -> None:
        self._space, self._rng = space, rng

    def propose(self, count: int) -> list[Candidate]:
        return [self._space.render(draw(self._space, self._rng), self.name) for _ in range(count)]


PROPOSER = RandomProposer
