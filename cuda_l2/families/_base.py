"""A family: one kernel source with macros, and the schedule space that sets them.

A schedule is the family's choices in a fixed order, the small language in which policies write. A family
says, choice by choice, which values are valid after the ones before; a schedule that breaks this cannot
be constructed. A new family is one source and one module here with a FAMILY.
"""

import functools
import importlib
import math
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from cuda_l2.machine._base import Target
from cuda_l2.records import Candidate, Gemm, Task


@dataclass(frozen=True, slots=True)
class Choice:
    """One position of a schedule and every value it can take on any target.

    A compiled choice sets the macro of its name. The others are arguments of the launch: one kernel serves all values.
    """

    name: str
    values: tuple[int, ...]
    help: str
    compiled: bool = True


class Family(ABC):
    """A parametrised kernel. Its methods get tasks that are products or not, as it says, and targets it serves."""

    name: str
    choices: tuple[Choice, ...]
    products: ClassVar[bool] = True
    reads_ahead: ClassVar[bool] = False
    """Whether its kernels declare inputs constant: for callers who opted in."""
    searched: ClassVar[bool] = True
    """Whether searches propose its schedules: recorded worlds and trained weights know a fixed set of families."""
    replaced: ClassVar[Mapping[str, str]] = {}
    """Files that are included in place of others, by the others' names."""
    suffix: ClassVar[str] = ".cu"
    """The kernel's file has the family's name and this ending."""

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the choices that are compiled into the kernel."""
        return tuple(choice.name for choice in self.choices if choice.compiled)

    @property
    def launched(self) -> tuple[str, ...]:
        """Names of the choices that are arguments of the launch, EDGE apart."""
        return tuple(choice.name for choice in self.choices if not choice.compiled and choice.name != "EDGE")

    def values(self, named: Mapping[str, int]) -> tuple[int, ...]:
        """A schedule's values in the order of the choices; ValueError where `named` is not one value for each."""
        if set(named) != {choice.name for choice in self.choices}:
            raise ValueError(f"the schedule does not name each choice of {self.name} once")
        return tuple(named[choice.name] for choice in self.choices)

    def named(self, values: Sequence[int]) -> dict[str, int]:
        """The first choices of a schedule by name, as many as there are values."""
        return {choice.name: value for choice, value in zip(self.choices, values, strict=False)}

    @abstractmethod
    def serves(self, task: Any, target: Target) -> bool:
        """Whether this family can compute the task on the target, which is any machine's, at all."""

    def fits(self, name: str, value: int, chosen: dict[str, int], task: Any, target: Any) -> bool:
        """Whether a choice may take a value after the ones chosen; every choice always has one that it may take."""
        return True

    def valid_values(self, task: Any, target: Any, prefix: Sequence[int]) -> tuple[int, ...]:
        """Values of the next choice that keep a schedule valid after `prefix`; never empty on a valid prefix."""
        chosen = self.named(prefix)
        choice = self.choices[len(prefix)]
        return tuple(value for value in choice.values if self.fits(choice.name, value, chosen, task, target))

    def takes(self, task: Any, target: Any, prefix: tuple[int, ...], value: int) -> bool:
        """Whether a value of the next choice keeps a schedule valid after `prefix`."""
        return value in self.choices[len(prefix)].values and self._fits_after(task, target, prefix, value)

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - families live as long as the process
    def _fits_after(self, task: Any, target: Any, prefix: tuple[int, ...], value: int) -> bool:
        return self.fits(self.choices[len(prefix)].name, value, self.named(prefix), task, target)

    def nearest(self, wanted: Mapping[str, int], task: Any, target: Any) -> tuple[int, ...]:
        """The valid schedule nearest to these values, choice by choice."""
        values: list[int] = []
        for choice in self.choices:
            valid = self.valid_values(task, target, values)
            values.append(min(valid, key=lambda value: abs(value - wanted[choice.name])))
        return tuple(values)

    @abstractmethod
    def default(self, task: Any, target: Any) -> tuple[int, ...]:
        """Values of the schedule that an engineer would try first."""

    def defaults(self, task: Any, target: Any) -> list[tuple[int, ...]]:
        """Schedules that a search tries before it proposes: the default, then others that win on some machines."""
        return [self.default(task, target)]

    def ranked(self, task: Any, target: Any, count: int) -> list[tuple[int, ...]]:
        """Values of up to `count` schedules: the default, then others, by the family's own model."""
        return [self.default(task, target)][:count]

    def estimate_us(self, task: Any, target: Any, chosen: dict[str, int]) -> float:
        """Modelled microseconds of a launch, which sort schedules of all families; infinite without a model."""
        return math.inf

    def launches(self, task: Any, target: Any, chosen: dict[str, int]) -> list[dict[str, int]]:
        """Values of the `launched` choices, most promising first; some may not be valid."""
        return [{}]

    def general(self, task: Any, chosen: dict[str, int]) -> Any:
        """A task near this one whose kernel computes this one too, and more others than the kernel made for this one.

        The same task where a kernel says nothing of sizes but what it must.
        """
        return task

    @abstractmethod
    def contract(self, schedule: "Schedule") -> str:
        """The TOML text of the launch contract."""

    @abstractmethod
    def macros(self, schedule: "Schedule") -> dict[str, int]:
        """Macros the source needs beside the choices."""

    def generated(self, schedule: "Schedule") -> str:
        """Code of this schedule alone, placed between the macros and the source."""
        return ""

    @property
    def source(self) -> Path:
        """The kernel's file. It may #include files of this folder, and needs macros() and generated() beside them."""
        return Path(__file__).with_name(self.name + self.suffix)

    def render(self, schedule: "Schedule", proposer: str = "schedule") -> Candidate:
        """The candidate of a schedule, one text: contract, macros, generated code, source with its includes inlined."""
        defines = {**self.macros(schedule), **{name: schedule.named[name] for name in self.compiled}}
        lines = [f"#define {name} {value}" for name, value in defines.items()]
        text = f"/* cuda-l2\n{self.contract(schedule).strip()}\n*/\n" + "\n".join(lines) + "\n\n"
        text += self.generated(schedule) + inlined(self.source, tuple(self.replaced.items()))
        return Candidate(text, proposer, tuple(schedule.named.items()), self.name)


@dataclass(frozen=True)
class Schedule:
    """A family's choices for one task on one target; ValueError where they are not valid."""

    family: Family
    task: Any
    target: Any
    values: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.family.choices):
            raise ValueError(f"{self.family.name} has {len(self.family.choices)} choices, not {len(self.values)}")
        for i, choice in enumerate(self.family.choices):
            if not self.family.takes(self.task, self.target, self.values[:i], self.values[i]):
                valid = self.family.valid_values(self.task, self.target, self.values[:i])
                raise ValueError(f"{choice.name}={self.values[i]} is not valid here; choose from {valid}")

    @property
    def named(self) -> dict[str, int]:
        """The values by the names of their choices."""
        return self.family.named(self.values)


def element(gemm: Gemm) -> list[str]:
    """The line of a contract that gives the type of A, B and C, where it is not the default."""
    return [] if gemm.dtype == "float16" else [f'dtype = "{gemm.dtype}"']


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def toml_list(values: Iterable[str | int | dict[str, int]]) -> str:
    """Numbers, strings and tables of a number as TOML."""

    def text(value: str | int | dict[str, int]) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{name} = {number}" for name, number in value.items()) + "}"
        return f'"{value}"' if isinstance(value, str) else str(value)

    return "[" + ", ".join(map(text, values)) + "]"


@functools.cache
def all_families() -> tuple[Family, ...]:
    """Every family in this folder."""
    package = importlib.import_module(__package__ or "")
    names = sorted(info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return tuple(module.FAMILY for module in modules)


def families_for(task: Task, target: Target) -> tuple[Family, ...]:
    """The families that can compute the task on the target."""
    families = (each for each in all_families() if each.products is task.product and each.searched)
    return tuple(family for family in families if family.serves(task, target))


_INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@functools.cache
def inlined(path: Path, replaced: tuple[tuple[str, str], ...] = ()) -> str:
    """A family's source with every `#include "x"` line replaced by that file of this folder, each file once.

    replaced: names of files, and of those that stand in their place.
    """
    seen: set[str] = set()

    def expand(text: str) -> str:
        return _INCLUDE.sub(insert, text)

    def insert(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return expand((path.parent / dict(replaced).get(name, name)).read_text().removeprefix("#pragma once\n"))

    return expand(path.read_text())
