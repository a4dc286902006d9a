"""Schedules of families for tests: the default and drawn ones, and all that there are."""

from collections.abc import Iterable

import numpy as np

from cuda_l2.families._base import Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.propose._base import FamilySpace, draw
from cuda_l2.records import Candidate, Task


def default(family: Family, task: Task, target: Target) -> Schedule:
    return Schedule(family, task, target, family.default(task, target))


def drawn(
    family: Family,
    task: Task,
    target: Target,
    rng: np.random.Generator,
    seen: dict[str, set[int]] | None = None,
    **wanted: int,
) -> Schedule:
    """Any valid schedule, with the wanted values where they are valid. seen: valid values by choice, collected."""
    values: list[int] = []
    for choice in family.choices:
        valid = family.valid_values(task, target, values)
        assert valid and set(valid) <= set(choice.values), (choice.name, values)
        if seen is not None:
            seen.setdefault(choice.name, set()).update(valid)
        values.append(wanted[choice.name] if wanted.get(choice.name) in valid else int(rng.choice(valid)))
    return Schedule(family, task, target, tuple(values))


def defaults_and_drawn(families: Iterable[Family], task: Task, target: Target, count: int) -> list[Candidate]:
    """The default and some other schedules of each of four families."""
    rng, found = np.random.default_rng(0), list[Candidate]()
    for family in families:
        space = FamilySpace(family, task, target)
        chosen = (*space.defaults(), *(draw(space, rng) for _ in range(count)))
        found += [space.render(values, "test") for values in chosen]
    assert len({candidate.family for candidate in found}) == 4
    return found


def completions(family: Family, task: Task, target: Target, prefix: tuple[int, ...] = ()) -> int:
    """Number of valid schedules; the rules look at one choice after the other, and no beginning may be a dead end."""
    if len(prefix) == len(family.choices):
        return 1
    valid = family.valid_values(task, target, prefix)
    assert valid, (family.name, prefix)
    return sum(completions(family, task, target, (*prefix, value)) for value in valid)
