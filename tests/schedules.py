"""Schedules of families for tests: the default and drawn ones."""

import numpy as np

from cuda_l2.families._base import Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.records import Task


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
