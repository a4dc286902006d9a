"""Interfaces of policies and proposers, and the spaces that schedule-writing proposers choose from.

A proposer is one module here with a PROPOSER, named on the command line by --policy.
"""

import importlib
import itertools
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.llm._base import Messages
from cuda_l2.machine._base import Target
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.system.errors import UserError

Values = tuple[int, ...]


class Space(Protocol):
    """The schedules a proposer may write for one task."""

    @property
    def task(self) -> Task: ...
    @property
    def target(self) -> Target: ...
    @property
    def choices(self) -> tuple[Choice, ...]: ...

    def valid(self, prefix: Sequence[int]) -> Values:
        """Values of the next choice after `prefix`; never empty on a valid prefix."""

    def render(self, values: Values, proposer: str) -> Candidate: ...
    def values_of(self, trial: Trial) -> Values:
        """The values a trial's candidate was written from; empty where it was not written in this space."""

    def ranked(self, count: int) -> list[Values]:
        """Up to `count` schedules, the best by the families' own models first; the defaults where there is no model."""

    def estimate_us(self, values: Values) -> float:
        """The family's modelled microseconds of a launch; infinite without a model."""

    def some(self, count: int, rng: np.random.Generator) -> list[Values]:
        """Up to `count` different schedules, drawn choice by choice; all where the space is known to have no more."""


@dataclass(frozen=True)
class FamilySpace:
    """All of one family's schedules for a task on a target."""

    family: Family
    task: Task
    target: Target

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.family.choices

    def valid(self, prefix: Sequence[int]) -> Values:
        return self.family.valid_values(self.task, self.target, prefix)

    def render(self, values: Values, proposer: str) -> Candidate:
        return self.family.render(Schedule(self.family, self.task, self.target, values), proposer)

    def values_of(self, trial: Trial) -> Values:
        if trial.candidate.family not in ("", self.family.name):
            return ()
        return tuple(value for _, value in trial.candidate.schedule)

    def whole(self, family: str, own: Values) -> Values:
        """A family's schedule as one of this space; ValueError for another family's."""
        if family != self.family.name:
            raise ValueError(f"{family} is not in this space")
        return own

    def split(self, values: Values) -> tuple[Family, Values]:
        """The family of a schedule of this space, and the family's own values."""
        return self.family, values

    def defaults(self) -> list[Values]:
        """The schedules that an engineer would try first."""
        return self.family.defaults(self.task, self.target)

    def ranked(self, count: int) -> list[Values]:
        return self.family.ranked(self.task, self.target, count)

    def estimate_us(self, values: Values) -> float:
        return self.family.estimate_us(self.task, self.target, self.family.named(values))

    def some(self, count: int, rng: np.random.Generator) -> list[Values]:
        return drawn(self, count, rng)


ABSENT = -1
"""The value of a choice that belongs to another family."""


@dataclass(frozen=True)
class UnionSpace:
    """The schedules of several families: which one comes first, then the choices of all, those of others absent."""

    families: tuple[Family, ...]
    task: Task
    target: Target

    @property
    def choices(self) -> tuple[Choice, ...]:
        named = [(f"{family.name}.{choice.name}", choice) for family in self.families for choice in family.choices]
        others = [Choice(name, (ABSENT, *choice.values), choice.help) for name, choice in named]
        return (Choice("FAMILY", tuple(range(len(self.families))), "which kernel"), *others)

    def valid(self, prefix: Sequence[int]) -> Values:
        if not prefix:
            return self._serving
        start = 1
        for index, family in enumerate(self.families):
            end = start + len(family.choices)
            if len(prefix) < end:
                own = index == prefix[0]
                return family.valid_values(self.task, self.target, prefix[start:]) if own else (ABSENT,)
            start = end
        raise ValueError("the schedule is complete")

    def render(self, values: Values, proposer: str) -> Candidate:
        family, own = self.split(values)
        return family.render(Schedule(family, self.task, self.target, own), proposer)

    def values_of(self, trial: Trial) -> Values:
        try:
            return self.whole(trial.candidate.family, tuple(value for _, value in trial.candidate.schedule))
        except ValueError:
            return ()

    def split(self, values: Values) -> tuple[Family, Values]:
        """The family of a schedule of this space, and the family's own values."""
        family = self.families[values[0]]
        start = 1 + sum(len(other.choices) for other in self.families[: values[0]])
        return family, values[start : start + len(family.choices)]

    def defaults(self) -> list[Values]:
        """The schedules of each family that an engineer would try first."""
        own = [(i, self.families[i].defaults(self.task, self.target)) for i in self._serving]
        return [self._whole(i, values) for i, each in own for values in each]

    def ranked(self, count: int) -> list[Values]:
        own = [(i, self.families[i].ranked(self.task, self.target, count)) for i in self._serving]
        found = [self._whole(i, values) for i, each in own for values in each]
        return sorted(found, key=self.estimate_us)[:count]

    def estimate_us(self, values: Values) -> float:
        family, own = self.split(values)
        return family.estimate_us(self.task, self.target, family.named(own))

    def some(self, count: int, rng: np.random.Generator) -> list[Values]:
        return drawn(self, count, rng)

    def whole(self, family: str, own: Values) -> Values:
        """A family's schedule as one of this space; ValueError for another family's."""
        return self._whole([each.name for each in self.families].index(family), own)

    @cached_property
    def _serving(self) -> Values:
        """Indices of the families that serve the task."""
        return tuple(
            i
            for i, family in enumerate(self.families)
            if family.products is self.task.product and family.serves(self.task, self.target)
        )

    def _whole(self, chosen: int, own: Values) -> Values:
        parts = [own if i == chosen else (ABSENT,) * len(family.choices) for i, family in enumerate(self.families)]
        return (chosen, *(value for part in parts for value in part))


def draw(space: Space, rng: np.random.Generator) -> Values:
    """Values of a schedule, each uniform over those valid after the ones before."""
    values: list[int] = []
    for _ in space.choices:
        valid = space.valid(values)
        values.append(valid[int(rng.integers(len(valid)))])
    return tuple(values)


def mutated(space: Space, values: Values, rng: np.random.Generator) -> Values:
    """A schedule with one to three choices drawn anew, and those after them that are not valid any more."""
    own = [i for i, value in enumerate(values) if value != ABSENT]
    changed = set(rng.choice(own, min(len(own), int(rng.integers(1, 4))), replace=False).tolist())
    found: list[int] = []
    for i, value in enumerate(values):
        valid = space.valid(found)
        found.append(valid[int(rng.integers(len(valid)))] if i in changed or value not in valid else value)
    return tuple(found)


def drawn(space: Space, count: int, rng: np.random.Generator) -> list[Values]:
    """Up to `count` different schedules of a space: what as many draws give."""
    return list(dict.fromkeys(draw(space, rng) for _ in range(count)))


def space_for(families: Sequence[Family], task: Task, target: Target) -> "FamilySpace | UnionSpace":
    """All schedules of these families for a task; UserError where no family serves it."""
    if not families:
        raise UserError(
            f"no kernel family serves {task} on {target.machine}; a language model can write for it:"
            " --policy openai:MODEL@URL or hf:PATH (docs/llm.md)"
        )
    if len(families) == 1:
        return FamilySpace(families[0], task, target)
    return UnionSpace(tuple(families), task, target)


class Proposer(ABC):
    """Writes candidates and learns from their trials."""

    name: str
    group: int | None = None
    """Candidates it proposes at once; the rig's number where None."""
    deadline: float = math.inf
    """When the search ends, in time.perf_counter(); the search sets it."""
    waited_s: float = 0.0
    """Time spent waiting for something outside this program."""

    @abstractmethod
    def propose(self, count: int) -> list[Candidate]:
        """A group of at most `count` candidates, known ones included; an empty group ends the search."""

    def observe(self, trials: Sequence[Trial]) -> None:  # noqa: B027 - many do not learn
        """Take the trials of the last group, in order."""

    @property
    def fruitless(self) -> int:
        """Answers so far that held no candidate."""
        return 0

    def conversations(self) -> list[Messages]:
        """The conversation behind each candidate of the last group, the answer last; empty where no model was asked."""
        return []

    def summary(self) -> str:
        """Its updates or questions so far, in one line; empty if there are none."""
        return ""

    def state(self) -> bytes:
        """The state that the archive keeps for the next search; empty if there is none."""
        return b""

    def load_state(self, state: bytes) -> None:  # noqa: B027 - one without memory has nothing to do
        """Go on from a kept state."""


Trials = Callable[[], list[Trial]]
"""The task's trials so far."""


class Ordered(Proposer):
    """Proposes schedules in an order that no trial changes, then random ones."""

    def __init__(self, space: Space, trials: Trials, rng: np.random.Generator) -> None:
        del trials
        self._space, self._rng = space, rng
        self._order: Iterator[Values] | None = None

    def propose(self, count: int) -> list[Candidate]:
        if self._order is None:  # as long as the first ones could not be had
            self._order = itertools.chain(self.first(), self._drawn())
        return [self._space.render(next(self._order), self.name) for _ in range(count)]

    def first(self) -> Sequence[Values]:
        """Those before the random ones."""
        return ()

    def _drawn(self) -> Iterator[Values]:
        while True:
            yield draw(self._space, self._rng)


@dataclass(frozen=True)
class Hooks:
    """What a proposer may call.

    profile: the hardware's counters of a trial's kernel as text, empty where there are none. on_stage: called with a
    few words before the proposer waits for something outside this program.
    """

    profile: Callable[[Trial], str] = lambda trial: ""
    on_stage: Callable[[str], None] = lambda stage: None


class Policy(ABC):
    """Makes a proposer for each task."""

    name: str

    @abstractmethod
    def proposer(
        self, task: Task, target: Target, trials: Trials, rng: np.random.Generator, hooks: Hooks = Hooks()
    ) -> Proposer:
        """The proposer for one task; UserError where the policy cannot propose for it."""

    def summary(self) -> str:
        """Questions asked and budget spent, in one line; empty for a policy that spends nothing."""
        return ""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what the policy holds."""


Maker = Callable[[Space, Trials, np.random.Generator], Proposer]
"""Makes a proposer from its space, the task's trials so far, and a source of randomness."""


def proposer_names() -> list[str]:
    package = importlib.import_module(__package__ or "")
    return sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))


def require_proposer(name: str) -> None:
    """UserError where there is no proposer of this name."""
    if name not in proposer_names():
        models = "a language model as openai:NAME@URL or hf:PATH_OR_ID"
        raise UserError(f"there is no policy {name!r}; choose from {', '.join(proposer_names())}, or {models}")


def proposer_maker(name: str) -> Maker:
    """The maker of a proposer by name; UserError where there is none or what it needs is not installed."""
    require_proposer(name)
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name == "torch":
            raise
        raise UserError(f"the policy {name} needs the package {error.name}: pip install {error.name}") from None
    maker: Maker = module.PROPOSER
    return maker
