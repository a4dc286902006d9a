"""What every check needs: launches with hygiene watched, and cases whose references are computed once.

A check is one file here with a CHECK; it is picked up without edits elsewhere. Checks run in the order of
their `order`, cheap and telling ones first, and the first failure ends the verdict.
"""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from cuda_l2.execute.arena import POISON, Arena
from cuda_l2.execute.worker import Worker
from cuda_l2.records import Element, Gemm, Layout, VerdictStatus

CACHE_BYTES = 2 << 30
LAUNCH_TIMEOUT_S = 2.0
SLOWEST_GFLOPS = 0.5
"""A launch slower than this is taken to hang."""


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


class Cases:
    """Inputs and references of one Gemm, made on first use from a seed nobody outside knows, kept while they fit."""

    def __init__(self, gemm: Gemm, seed: int) -> None:
        self.gemm, self._seed = gemm, seed
        self.generator = torch.Generator().manual_seed(seed)
        """Randomness of the checks themselves: the caller's own generator is left alone."""
        self._cases: OrderedDict[tuple[str, int], Case] = OrderedDict()

    def get(self, name: str, index: int, make: Callable[[Gemm, torch.Generator], Case]) -> Case:
        key = (name, index)
        if key not in self._cases:
            mixed = np.random.SeedSequence([self._seed, index, *name.encode()]).generate_state(1, np.uint64)[0]
            self._cases[key] = make(self.gemm, torch.Generator().manual_seed(int(mixed >> 1)))
        self._cases.move_to_end(key)
        while len(self._cases) > 1 and sum(case.bytes for case in self._cases.values()) > CACHE_BYTES:
            self._cases.popitem(last=False)
        return self._cases[key]


@dataclass
class Session:
    """One candidate in its worker, ready to be launched on cases."""

    gemm: Gemm
    arena: Arena
    worker: Worker
    workspace_bytes: int
    cases: Cases
    rms_error: float = float("nan")
    max_error: float = float("nan")
    baseline_deviation: float = float("nan")

    def launch(self, case: Case, prefill: torch.Tensor | None = None) -> torch.Tensor:
        """C of one launch, fp16 M x N; CheckFailed where it touched what it must not or left elements unwritten.

        prefill: what C holds before the launch, poison if not given.
        """
        gemm, arena = self.gemm, self.arena
        a, b = _words(case.a), _words(case.b)
        inputs = [(arena.operands["a"][0], a), (arena.operands["b"][0], b)]
        for row, words in inputs:
            row[: words.size] = words
            row[words.size :] = POISON
        arena.poison_outputs()
        if prefill is not None:
            arena.output()[:] = _words(prefill).reshape(gemm.m, gemm.n)
        arena.poison_workspace(self.workspace_bytes)
        self.worker.launch(0, LAUNCH_TIMEOUT_S + gemm.flops / SLOWEST_GFLOPS * 1e-9)
        if not all(
            np.array_equal(row[: words.size], words) and (row[words.size :] == POISON).all() for row, words in inputs
        ):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs")
        if not arena.gaps_intact() or not arena.guards_intact():
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "wrote outside C and its workspace")
        found = arena.output().copy()
        unwritten = found == POISON
        if unwritten.any():
            row, column = (int(i) for i in np.argwhere(unwritten)[0])
            count = int(unwritten.sum())
            raise CheckFailed(
                VerdictStatus.INCORRECT,
                f"left {count} of {found.size} elements unwritten, the first at C[{row}, {column}]",
            )
        return torch.from_numpy(found.view(np.float16))


class Check(ABC):
    """One property that a correct candidate has."""

    name: str
    order: int

    @abstractmethod
    def run(self, session: Session) -> None:
        """Launch as needed; raise CheckFailed where the property does not hold."""

    def applies(self, gemm: Gemm) -> bool:
        return True


def all_checks() -> list[Check]:
    """Every check in this folder, in order."""
    package = importlib.import_module(__package__ or "")
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


def product_fp32(gemm: Gemm, case: Case) -> torch.Tensor:
    """A B in fp32 on this CPU: exact for integers whose partial sums stay below 2^24."""
    return case.a.float() @ logical_b(gemm, case).float()


def first_difference(found: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> Element:
    """The first element that `wrong` marks."""
    row, column = (int(i) for i in wrong.nonzero()[0])
    return Element(row, column, float(expected[row, column]), float(found[row, column]))


def _words(tensor: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16).ravel()
