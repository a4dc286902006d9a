"""Recorded trials of a schedule space, so that searches replay without building or timing anything."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.propose._base import Values
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Trial
from cuda_l2.system.errors import UserError


@dataclass(frozen=True)
class RecordedSpace:
    """The schedules that were recorded for one task: only they are valid. Implements Space."""

    task: Gemm
    target: Target
    choices: tuple[Choice, ...]
    rewards: Mapping[Values, float]

    @cached_property
    def _children(self) -> dict[Values, set[int]]:
        """Recorded values of the next choice, by those before."""
        children: dict[Values, set[int]] = {}
        for values in self.rewards:
            for i, value in enumerate(values):
                children.setdefault(values[:i], set()).add(value)
        return children

    def valid(self, prefix: Sequence[int]) -> Values:
        return tuple(sorted(self._children[tuple(prefix)]))

    def render(self, values: Values, proposer: str) -> Candidate:
        named = tuple((choice.name, value) for choice, value in zip(self.choices, values, strict=True))
        return Candidate(" ".join(map(str, values)), proposer, named)

    def values_of(self, trial: Trial) -> Values:
        return tuple(value for _, value in trial.candidate.schedule)

    def trial(self, candidate: Candidate) -> Trial:
        """The recorded outcome of a candidate, with its reward."""
        values = tuple(value for _, value in candidate.schedule)
        build = Build(candidate.id, BuildStatus.BUILT, artifact="recorded")
        return Trial(self.task, candidate, "recorded", "recorded", build, reward=self.rewards[values])


def grid(
    family: Family, gemm: Gemm, target: Target, fixed: Mapping[str, int], values_a_choice: int
) -> Iterator[Values]:
    """Schedules on a grid: fixed choices keep their value, others take a few, spread over the valid ones."""
    unknown = set(fixed) - {choice.name for choice in family.choices}
    if unknown:
        names = ", ".join(choice.name for choice in family.choices)
        raise UserError(f"{family.name} has no choice {', '.join(sorted(unknown))}; choose from {names}")
    for choice in family.choices:
        if fixed.get(choice.name, choice.values[0]) not in choice.values:
            values = ", ".join(map(str, choice.values))
            raise UserError(f"{choice.name} of {family.name} cannot be {fixed[choice.name]}; choose from {values}")

    def extend(prefix: Values) -> Iterator[Values]:
        if len(prefix) == len(family.choices):
            Schedule(family, gemm, target, prefix)
            yield prefix
            return
        choice = family.choices[len(prefix)]
        valid = family.valid_values(gemm, target, prefix)
        if choice.name in fixed:
            valid = tuple(value for value in valid if value == fixed[choice.name])
        elif len(valid) > values_a_choice:
            step = (len(valid) - 1) / (values_a_choice - 1) if values_a_choice > 1 else 0
            valid = tuple(valid[round(i * step)] for i in range(values_a_choice))
        yield from itertools.chain.from_iterable(extend((*prefix, value)) for value in valid)

    return extend(())


def save(path: Path, space: RecordedSpace, environment: Mapping[str, object]) -> None:
    """Write a recording as JSON, one trial a line."""
    assert isinstance(space.target, CpuTarget)
    target = {"model": space.target.model, "cores": space.target.cores, "vector_bits": space.target.vector_bits}
    target["cache_bytes"] = list(space.target.cache_bytes)
    head = {
        "gemm": str(space.task),
        "target": target,
        "choices": [[choice.name, list(choice.values)] for choice in space.choices],
        "environment": environment,
    }
    lines = [json.dumps(head)] + [json.dumps([*values, round(r, 4)]) for values, r in sorted(space.rewards.items())]
    path.write_text("\n".join(lines) + "\n")


def load(path: Path) -> RecordedSpace:
    """Read a recording; UserError where the file is not one."""
    try:
        head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in head["target"].items()
        }
        target = CpuTarget(**fields)
        choices = tuple(Choice(name, tuple(values), "") for name, values in head["choices"])
        rewards = {tuple(row[:-1]): float(row[-1]) for row in rows}
        return RecordedSpace(Gemm.parse(head["gemm"]), target, choices, rewards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a recording ({error}); make one with `cuda-l2 record`") from None
