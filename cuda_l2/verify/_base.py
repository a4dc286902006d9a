"""What every check needs: launches with hygiene watched, and cases whose references are computed once.

A check is one file here with a CHECK; it is picked up without edits elsewhere. Checks run in the order of
their `order`, cheap and telling ones first, and the first failure ends the verdict. Checks do not know where a
candidate runs: tensors lie on the device of the case, and a Session launches.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cuda.sanitizer import Tool
from cuda_l2.machine.fills import POISON
from cuda_l2.records import Build, Element, Gemm, Layout, VerdictStatus
from cuda_l2.system.errors import MachineError

S_contra = TypeVar("S_contra", contravariant=True)

CACHE_BYTES = {"cpu": 2 << 30, "cuda": 16 << 30}


class CheckFailed(Exception):
    """The candidate does not pass; ends its verification."""

    def __init__(self, status: VerdictStatus, reason: str, element: Element | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.element = status, reason, element


@dataclass(frozen=True)
class Case:
    """Operands as the task lays them out, with what the checks compare against."""

    a: torch.Tensor  # fp16, M x K
    b: torch.Tensor  # fp16, K x N (nn) or N x K (tn)
    expected: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.a, self.b, *self.expected.values()))


class References(ABC):
    """Who computes what a candidate's results are compared with, and on which device. Never the candidate's process."""

    device: torch.device
    exact_flops: int
    """Beyond this an fp64 product takes about a second: then a random set of rows is compared."""

    @abstractmethod
    def product_fp32(self, gemm: Gemm, case: Case) -> torch.Tensor:
        """A B, fp32 M x N, summed in fp32: exact for integers whose partial sums stay below 2^24."""

    @abstractmethod
    def baselines(self, gemm: Gemm, case: Case, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """What each baseline of the task's class computes, fp16, the given rows of C."""


class Cases:
    """Inputs and references of one Gemm, made on first use from a seed nobody outside knows, kept while they fit."""

    def __init__(self, gemm: Gemm, seed: int, references: References) -> None:
        self.gemm, self._seed, self.references = gemm, seed, references
        self.device = references.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rng = np.random.default_rng([seed, self.generator.initial_seed()])
        """Randomness of the checks themselves: the caller's own generators are left alone."""
        self._cases: OrderedDict[tuple[str, int], Case] = OrderedDict()
        self._bytes = 0  # of all of them

    def get(self, name: str, index: int, make: Callable[["Cases", torch.Generator], Case]) -> Case:
        key = (name, index)
        if key not in self._cases:
            mixed = np.random.SeedSequence([self._seed, index, *name.encode()]).generate_state(1, np.uint64)[0]
            self._cases[key] = make(self, torch.Generator(self.device).manual_seed(int(mixed >> 1)))
            self._bytes += self._cases[key].bytes
        self._cases.move_to_end(key)
        while len(self._cases) > 1 and self._bytes > CACHE_BYTES[self.device.type]:
            self._bytes -= self._cases.popitem(last=False)[1].bytes
        return self._cases[key]

    def close(self) -> None:
        """Give the memory of every case back."""
        self._cases.clear()
        self._bytes = 0

    def normal(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """A (M x K) and B (K x N) of standard normal numbers, fp32."""
        gemm = self.gemm
        a = torch.randn(gemm.m, gemm.k, generator=generator, device=self.device)
        return a, torch.randn(gemm.k, gemm.n, generator=generator, device=self.device)

    def product_fp32(self, case: Case) -> torch.Tensor:
        return self.references.product_fp32(self.gemm, case)


class Launching:
    """One candidate in its process, ready to be launched, whatever it computes. A context manager."""

    rms_error: float = float("nan")
    max_error: float = float("nan")
    baseline_deviation: float = float("nan")

    def as_timed(self) -> None:
        """From now on tensors lie where timed launches have them: a kernel must not behave there alone.

        On the CPU they always do.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Session(Launching, ABC):
    """One candidate for a matrix product, ready to be launched on cases."""

    gemm: Gemm
    build: Build
    cases: Cases

    @abstractmethod
    def launch(self, case: Case, prefill: torch.Tensor | None = None, *, keep: bool = False) -> torch.Tensor:
        """C of one launch, fp16 M x N; CheckFailed where it touched what it must not or left elements unwritten.

        prefill: what C holds before the launch, poison if not given. keep: leave workspaces as the last launch left
        them, where otherwise they hold garbage.
        """


class GpuSession(Session):
    """A CUDA candidate: what goes on around a launch can be arranged too."""

    programmatic: bool
    """Whether a launch may begin before the kernel ahead of it has ended."""

    @abstractmethod
    def launch_behind_producer(self, old: Case, case: Case) -> torch.Tensor:
        """C of `case`, where A holds `old`'s until a slow kernel before, which lets the candidate begin, writes it."""

    @abstractmethod
    def launch_beside_load(self, case: Case, count: int) -> torch.Tensor:
        """C after several launches while another stream holds half of the multiprocessors for a while."""

    @abstractmethod
    def launch_stressed(self, case: Case, seeds: Sequence[int], count: int) -> Iterator[torch.Tensor]:
        """C of so many launches of builds with delays, one build a seed, beside load: several x M x N at a time."""

    sms: int

    @abstractmethod
    def plan_for(self, gemm: Gemm) -> Plan:
        """What would be launched for another shape; ContractError where the contract refuses it."""

    @abstractmethod
    def sanitizes(self) -> bool:
        """Whether compute-sanitizer works on this machine; UserError where it is not installed."""

    @abstractmethod
    def sanitize(self, tool: Tool, gemm: Gemm) -> str:
        """What one of its tools finds in launches for this shape, in one line; empty where nothing."""


class CheckOf(ABC, Generic[S_contra]):
    """One property that a correct candidate has, of one kind of session."""

    name: str
    order: int
    full_only = False
    """Whether it runs only where a kernel may enter the library: too slow for every candidate of a search."""

    @abstractmethod
    def run(self, session: S_contra) -> None:
        """Launch as needed; raise CheckFailed where the property does not hold."""

    def applies(self, session: S_contra) -> bool:
        return True


class Check(CheckOf[Session]):
    """Of matrix products."""


def all_checks() -> list[Check]:
    """Every check of matrix products in this folder, in order."""
    checks: list[Check] = checks_in(__package__ or "")
    return checks


def checks_in(package_name: str) -> list[Any]:
    """The CHECK of every module of a package, in order."""
    package = importlib.import_module(package_name)
    names = [info.name for info in pkgutil.iter_modules(package.__path__) if not info.name.startswith("_")]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return sorted((module.CHECK for module in modules if hasattr(module, "CHECK")), key=lambda check: check.order)


def operands(gemm: Gemm, a: torch.Tensor, b: torch.Tensor) -> Case:
    """A case from logical operands (M x K and K x N), B laid out as the task asks."""
    stored = b if gemm.layout is Layout.NN else b.t()
    return Case(a.to(torch.float16).contiguous(), stored.to(torch.float16).contiguous())


def logical_b(gemm: Gemm, case: Case) -> torch.Tensor:
    """B as K x N, however it is stored."""
    return case.b if gemm.layout is Layout.NN else case.b.t()


def require_finite(gemm: Gemm, **tensors: torch.Tensor) -> None:
    """MachineError where one of these, by name, holds what is no finite number: nothing can be judged by it.

    For operands and references of inputs that give finite results only.
    """
    bad = {name: int((~tensor.isfinite()).sum()) for name, tensor in tensors.items() if not tensor.isfinite().all()}
    if bad:
        found = ", ".join(f"{count} of {tensors[name].numel()} of {name}" for name, count in bad.items())
        raise MachineError(
            f"references for {gemm} are not finite ({found}), though its inputs are drawn so that they must be: is the"
            " memory of this machine sound?"
        )


def first_difference(found: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> Element:
    """The first element that `wrong` marks."""
    row, column = (int(i) for i in wrong.nonzero()[0])
    return Element(row, column, float(expected[row, column]), float(found[row, column]))


def normal_case(cases: Cases, generator: torch.Generator) -> Case:
    """Standard normal operands, without a reference."""
    return operands(cases.gemm, *cases.normal(generator))


def require_equal(found: torch.Tensor, right: torch.Tensor, reason: str) -> None:
    """CheckFailed where a result has other bits than the right one."""
    wrong = found.view(torch.int16) != right.view(torch.int16)
    if wrong.any():
        raise CheckFailed(VerdictStatus.UNHYGIENIC, reason, first_difference(found, right, wrong))


def require_written(found: torch.Tensor) -> None:
    """CheckFailed where an output still holds its poison."""
    unwritten = found.view(torch.int16) == POISON
    if unwritten.any():
        row, column = (int(i) for i in unwritten.nonzero()[0])
        raise CheckFailed(
            VerdictStatus.INCORRECT,
            f"left {int(unwritten.sum())} of {found.numel()} elements unwritten, the first at C[{row}, {column}]",
        )
