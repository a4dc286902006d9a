"""What a page is made from: plain records, each with the file and the row that it was read from."""

import math
from dataclasses import dataclass, field
from typing import Any

from cuda_l2.records import Gemm, Interval
from cuda_l2.runs.comparison import Curve


@dataclass(frozen=True)
class Origin:
    """A file of results, and what all of its rows share."""

    file: str
    machine: str
    environment: dict[str, Any]
    command: str

    @property
    def device(self) -> str:
        """The GPU's or the CPU's name."""
        return str(self.environment.get("gpu") or self.environment.get("cpu") or self.machine or "unknown machine")


@dataclass(frozen=True)
class Kernel:
    """One kernel of ours with its time."""

    name: str  # layout of B and launch, as in 'nn plain'
    layout: str
    us: Interval
    family: str
    schedule: str  # as in 'BM=64 BN=128'
    id: str
    tuned: Interval | None = None  # speedup over the fastest tuned baseline, from paired rounds
    tuned_alike: Interval | None = None  # the same over those that read B alike

    @property
    def choices(self) -> dict[str, int]:
        pairs = (choice.split("=") for choice in self.schedule.split() if "=" in choice)
        return {name: int(value) for name, value in pairs}


@dataclass(frozen=True)
class Rival:
    """One baseline with its time, and its time over that of our first kernel."""

    name: str
    kind: str
    layout: str  # in which it reads B; empty for the task's own
    us: Interval
    ratio: Interval | None = None


@dataclass(frozen=True)
class Case:
    """One row: one task under one protocol."""

    origin: Origin
    row: int  # of the file, its head not counted; of an archive the trial's number
    task: str
    gemm: Gemm | None  # None for tasks that are no products
    protocol: str
    status: str
    reason: str = ""
    kernels: tuple[Kernel, ...] = ()
    rivals: tuple[Rival, ...] = ()
    ours_us: float = math.nan  # of the kernel that the rivals' ratios are over
    plain: str = ""  # name of the kernel that counts: the plain one where there are both
    any_launch: str = ""  # the same with dependent launches allowed
    proposer: str = ""
    verdict: str = ""
    checks: str = ""
    measured_at: str = ""
    source: str = ""  # the kernel's text, where the file holds it

    @property
    def best(self) -> Kernel | None:
        """The kernel that counts: for plain launches where there are kernels for both, else the only one."""
        return self.kernel(self.plain)

    def kernel(self, name: str) -> Kernel | None:
        return next((kernel for kernel in self.kernels if kernel.name == name), None)

    @property
    def where(self) -> str:
        return f"{self.origin.file}, row {self.row}"


@dataclass(frozen=True)
class Search:
    """What an archive holds of the searches for one task on one machine."""

    origin: Origin
    task: str
    rewards: tuple[float | None, ...]  # in the order tried; None where a candidate was rejected
    rejected: dict[str, int]  # number of candidates by status and check
    proposers: tuple[str, ...] = ()
    first: str = ""
    last: str = ""


@dataclass(frozen=True)
class Training:
    """One run of a training stage: the groups that it sampled, in order."""

    file: str
    title: str
    about: str  # device and date, as far as they are known
    rewards: tuple[float, ...]  # a group's mean speedup, 0 for each answer that is not correct
    correct: tuple[float, ...]  # share of a group's answers that were correct


@dataclass(frozen=True)
class Verification:
    """How many cheats and mutants each check rejected."""

    file: str
    environment: dict[str, Any]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Proof:
    """The verdict of `cuda-l2 prove` on one kernel."""

    where: str
    verdict: str
    checks: str
    shapes: str  # that it was verified at


@dataclass(frozen=True)
class Sheet:
    """A table that is shown as it is."""

    file: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Compared:
    """A benchmark of torch's products beside tuned kernels: of a model's layers, or of single products."""

    origin: Origin
    date: str
    rows: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Contest:
    """Searchers compared on a recorded world."""

    origin: Origin
    date: str
    curves: tuple[Curve, ...]
    counts: tuple[int, ...]  # numbers of measurements that the file has rows for, from 1 on


@dataclass
class Found:
    """All that was read."""

    cases: list[Case] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    verifications: list[Verification] = field(default_factory=list)
    proofs: dict[str, Proof] = field(default_factory=dict)  # by the kernel's hash
    sheets: list[Sheet] = field(default_factory=list)
    models: list[Compared] = field(default_factory=list)  # of `cuda-l2 bench --model`
    products: list[Compared] = field(default_factory=list)  # of `cuda-l2 library bench`
    contests: list[Contest] = field(default_factory=list)  # of `cuda-l2 compare`
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def origins(self) -> list[Origin]:
        """Parts of the page that hold figures, in the page's order."""
        others: list[Compared | Contest] = [*self.models, *self.products, *self.contests]
        return [case.origin for case in self.cases] + [each.origin for each in others]

    @property
    def empty(self) -> bool:
        measured = self.cases, self.searches, self.models, self.products, self.contests
        return not any((*measured, self.trainings, self.verifications, self.sheets))
