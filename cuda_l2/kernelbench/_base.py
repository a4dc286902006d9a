"""Session of a module in KernelBench's style: launches on cases whose exact results are computed elsewhere."""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cuda_l2.kernelbench.cases import FACTORS
from cuda_l2.kernelbench.examined import Examined
from cuda_l2.kernelbench.opened import Case, OpenedFile, Tensors
from cuda_l2.kernelbench.process import Module
from cuda_l2.records import VerdictStatus
from cuda_l2.system.errors import UserError
from cuda_l2.verify._base import CheckFailed, CheckOf, Judged, checks_in

CACHE_BYTES = 2 << 30
IMPRECISE = 0.05
"""An error below this share of the largest exact value is one of precision."""


class CaseBook:
    """Cases of one file, made on first use from seeds that nobody outside knows, and kept while they fit."""

    def __init__(self, file: OpenedFile, examined: Examined) -> None:
        assert examined.task
        self.file, self.examined = file, examined
        self.sizes = dict(examined.task.sizes)
        self.secret = secrets.randbits(32)
        self.rng = np.random.default_rng(self.secret)
        self._cases: OrderedDict[str, Case | None] = OrderedDict()
        self._factors: dict[tuple[int, int], float] = {}

    def factor(self, index: int, value: int) -> float:
        """Factor for sizes of a value in one choice of other shapes, larger and smaller ones by turns."""
        return self._factors.setdefault((index, value), float(self.rng.uniform(*FACTORS[index % len(FACTORS)])))

    def weights_seed(self, number: int) -> int:
        """Seed of the weights with a number: another one each time, since a candidate may ask for its seed."""
        return int(np.random.SeedSequence([self.secret, number]).generate_state(1, np.uint32)[0]) >> 1

    def get(self, name: str, **wanted: Any) -> Case:
        """A case by a name, its seed's, and what `OpenedFile.case` takes; UserError where the file gives none."""
        found = self.find(name, **wanted)
        if found is None:
            raise UserError(f"{self.file.entry.name} gives no case: {wanted}")
        return found

    def find(self, name: str, **wanted: Any) -> Case | None:
        """The same; None where the file gives none."""
        key = f"{name} {sorted(wanted.items())}"
        if key not in self._cases:
            seed = int(np.random.SeedSequence([self.secret, *name.encode()]).generate_state(1, np.uint32)[0])
            if "weights_seed" in wanted:
                wanted["weights_seed"] = self.weights_seed(wanted["weights_seed"])
            try:
                self._cases[key] = self.file.case(seed=seed, **{"sizes": self.sizes, **wanted})
            except UserError:
                self._cases[key] = None
        self._cases.move_to_end(key)
        while len(self._cases) > 1 and sum(_bytes(case) for case in self._cases.values()) > CACHE_BYTES:
            self._cases.popitem(last=False)
        return self._cases[key]


def _bytes(case: Case | None) -> int:
    return case.task.bytes + sum(9 * bound.exact.numel() for bound in case.bounds.values()) if case else 0


@dataclass
class ModuleSession(Judged):
    """One candidate in its process.

    allowed: PyTorch's operators that it may call, without `aten::`, `torch.compile`, or `all`. own_weights: its weights
    are never set. timed: its present instance was timed.
    """

    module: Module
    cases: CaseBook
    allowed: frozenset[str] = frozenset()
    one_shape: bool = False
    own_weights: bool = False
    timed: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Say this with the verdict, once."""
        if text not in self.notes:
            self.notes.append(text)

    def make(self, case: Case, weights_seed: int) -> None:
        """A new instance for a case's arguments, under the seed of the weights with a number."""
        self.module.make(self.cases.weights_seed(weights_seed), case.initial)

    def launch(self, *cases: Case, load: bool = True) -> list[Tensors]:
        """Results of launches on these cases in one run; CheckFailed where an input was changed.

        load: set the weights whose names agree before.
        """
        weights = self.weights_of(cases[0]) if load else {}
        self.module.prepare([case.call() for case in cases], weights)
        self.module.run()
        found = [self.module.output(index) for index in range(len(cases))]
        self.module.require_untouched()
        return found

    def weights_of(self, case: Case) -> Tensors:
        """Values that its weights are set to, by their keys."""
        return {} if self.own_weights else case.weights

    def unnamed(self, case: Case) -> list[str]:
        """Weights of the module that the candidate has under no such name."""
        return sorted(set(case.keys.values()) - self.module.state)


class ModuleCheck(CheckOf[ModuleSession]):
    """A check of modules. late: it runs after the timing, on a CPU before it too."""

    late = False


def module_checks() -> Sequence[ModuleCheck]:
    """Every check in `checks/`, in order."""
    checks: list[ModuleCheck] = checks_in("cuda_l2.kernelbench.checks")
    return checks


def require_right(case: Case, found: Tensors, where: str) -> None:
    """CheckFailed where a result is not within the task's tolerance; where: on which inputs, for the reason."""
    for name, limit in case.bounds.items():
        violation = limit.violation(found[name])
        if violation:
            status = VerdictStatus.INCORRECT
            result = found[name]
            if result.dtype.is_floating_point and bool(result.isfinite().all()) and bool(limit.exact.isfinite().all()):
                error, largest = (result.double() - limit.exact).abs().max(), limit.exact.abs().max()
                if error <= IMPRECISE * largest:
                    status = VerdictStatus.IMPRECISE
            raise CheckFailed(status, f"{name} {violation} ({where})")


def same(found: Tensors, right: Tensors) -> bool:
    """Whether results are equal bit for bit. PyTorch's own are not always."""
    return all(torch.equal(_bits(found[name]), _bits(tensor)) for name, tensor in right.items())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
