"""One search of a recorded task: what was measured, in order."""

from collections.abc import Callable

from cuda_l2.propose._base import Values
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.records import Candidate, Trial


class Replay:
    """The schedules that a searcher has measured, in order. One that comes again counts once."""

    def __init__(self, space: RecordedSpace, judge: Callable[[Candidate], Trial], most: int) -> None:
        """most: measurements after which the search ends; no more than there are schedules."""
        self.space, self._judge = space, judge
        self.most = min(most, len(space.by_values))
        self.order: dict[Values, Trial] = {}

    @property
    def left(self) -> int:
        return self.most - len(self.order)

    def measure(self, candidate: Candidate) -> Trial:
        """The recorded trial of a candidate."""
        trial = self._judge(candidate)
        self.order.setdefault(self.space.values_of(trial), trial)
        return trial
