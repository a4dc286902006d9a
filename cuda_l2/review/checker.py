"""Somebody else's opinion on a kernel whose reward jumps, and what becomes of the kernel then."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2.llm._base import is_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine._base import Target
from cuda_l2.records import Review, ReviewStatus, Timing, TimingStatus, Trial
from cuda_l2.review.jumps import withheld
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.errors import UserError


@dataclass(frozen=True, slots=True)
class Opinion:
    """Whether a kernel cheats, and why, in one line; that it is unknown counts as not."""

    cheat: bool
    text: str


class Checker(ABC):
    """Who is asked. Never raises for what is wrong with the one that answers."""

    name: str

    @abstractmethod
    def opinion(self, trial: Trial, target: Target) -> Opinion:
        """On a kernel that is correct, with its timing and its review as they stand so far."""

    @abstractmethod
    def summary(self) -> str:
        """What was asked and spent, in a few words."""

    @abstractmethod
    def close(self) -> None: ...


def open_checker(review: ReviewSettings, settings: ModelSettings, archive: Path) -> Checker | None:
    """The checker asked for, None where none is; UserError where it cannot be used. archive: one that is there."""
    if not review.checker:
        if review.cheats or review.checker_key_variable:
            raise UserError("--cheats and --checker-key-variable go with --checker")
        return None
    if not is_model(review.checker):
        raise UserError(f"{review.checker!r} is no language model: write --checker openai:MODEL@URL or hf:PATH_OR_ID")
    from cuda_l2.review.model_checker import ModelChecker  # noqa: PLC0415 - parts of it are optional

    return ModelChecker(review, settings, archive)


def weigh(timing: Timing, review: Review, name: str, opinion: Opinion) -> tuple[Timing, Review]:
    """Timing and review after a checker's opinion: what it calls a cheat does not count."""
    review = replace(review, checker=name, opinion=opinion.text)
    if not opinion.cheat:
        return timing, review
    reason = f"{name} calls it a cheat: {opinion.text}"
    return withheld(timing, TimingStatus.SUSPECT, reason), replace(review, status=ReviewStatus.SUSPECT, reason=reason)
