"""The interface of a checker: its opinion on a kernel whose reward jumps, and the effect on timing and review."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

from cuda_l2.machine._base import Target
from cuda_l2.records import Review, ReviewStatus, Timing, TimingStatus, Trial
from cuda_l2.review.jumps import withheld


@dataclass(frozen=True, slots=True)
class Opinion:
    """Whether a kernel cheats, with the reason in one line. A checker that is unsure says that it does not."""

    cheat: bool
    text: str


class Checker(ABC):
    """A review model. It never raises for a fault of the model or its endpoint."""

    name: str

    @abstractmethod
    def opinion(self, trial: Trial, target: Target) -> Opinion:
        """The opinion on a correct kernel, given its timing and its review so far."""

    @abstractmethod
    def summary(self) -> str:
        """Questions asked and budget spent, in one line."""

    @abstractmethod
    def close(self) -> None: ...


def weigh(timing: Timing, review: Review, name: str, opinion: Opinion) -> tuple[Timing, Review]:
    """Timing and review after a checker's opinion: the timing of a cheat does not count."""
    review = replace(review, checker=name, opinion=opinion.text)
    if not opinion.cheat:
        return timing, review
    reason = f"{name} calls it a cheat: {opinion.text}"
    return withheld(timing, TimingStatus.SUSPECT, reason), replace(review, status=ReviewStatus.SUSPECT, reason=reason)
