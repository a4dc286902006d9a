"""The families' own analytic models: schedules in the order of their modelled time, then random ones."""

from collections.abc import Sequence

from cuda_l2.propose._base import Ordered, Values

MOST = 512
"""Schedules in the order of the models; the defaults alone where a family has no model."""


class RankedProposer(Ordered):
    """The best by the models first."""

    name = "ranked"

    def first(self) -> Sequence[Values]:
        return self._space.ranked(MOST)


PROPOSER = RankedProposer
