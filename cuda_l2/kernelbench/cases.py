"""Cases of a task that comes from a KernelBench file: drawn and computed in its sandbox, kept here as data.

Usual values are what the file itself draws, which is often of one sign, and weights as its module makes them; those of
every distribution on which its reference is finite come beside them. A file that always gives the same inputs is
judged on normal numbers. Numbers among the inputs are the file's own and never change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cuda_l2.kernelbench.checkout import foreign
from cuda_l2.kernelbench.examined import Examined, Readiness, Refused
from cuda_l2.kernelbench.opened import ForeignCase
from cuda_l2.records import Task
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import LARGER, SMALLER, Tensors
from cuda_l2.tasks.cases import CACHE_BYTES, SPECIAL, Case, Cases
from cuda_l2.tasks.values import Distribution

MULTIPLES = {"cpu": (1,), "cuda": (1, 32)}
"""What sizes for other shapes are multiples of: a GPU's kernel that loads vectors may refuse odd ones."""
FACTORS = (LARGER, SMALLER)
"""Ranges of factors for other shapes, in turn."""
AHEAD, AHEAD_BYTES = 8, 1 << 30
"""Cases for timing that one run of the file makes, and what their tensors take together at most, one case more."""
BROKEN = (Readiness.CRASHED, Readiness.TIMED_OUT, Readiness.TOO_LARGE)
"""Statuses of a missing case that say nothing of the values that were asked for."""


class ForeignCases(Cases):
    """Cases of one file's task, which `checkout.read` or `checkout.admit` knows. UserError where its file fails.

    device: where tensors lie; the file's effort says where its references run.
    """

    def __init__(
        self, task: Task, seed: int, device: torch.device | str = "cpu", cache_bytes: int = CACHE_BYTES
    ) -> None:
        super().__init__(task, seed, device, cache_bytes)
        found = foreign(task)
        self._file, self._examined = found.file, found.examined
        self.distributions = tuple(Distribution(each) for each in self._examined.distributions)
        self._usual = self._usual_values()
        self.moves_buffers = found.examined.moves_buffers
        self.usual = f"{self._usual} values" if self._usual else "the file's own inputs"
        self._ahead: list[Case] = []
        self.others = self._others(np.random.default_rng([seed, 2]))

    def drawn(
        self, name: str, distribution: Distribution | None = None, task: Task | None = None, weights: int | None = None
    ) -> ForeignCase:
        """weights: number of those that its module is made with; else each case has its own."""
        return self._kept(*self._recipe(name, distribution, task or self.task, weights))

    def suitable(self, name: str, distribution: Distribution, weights: int) -> ForeignCase | None:
        """The same; None where the file gives no such case."""
        return self._or_none(*self._recipe(name, distribution, self.task, weights))

    def fresh(self, seeds: Sequence[int]) -> list[Tensors]:
        """Usual inputs by name for each of these seeds."""
        return self._file.inputs(seeds=seeds, sizes=dict(self.task.sizes), distribution=self._usual)

    def timed(self, index: int) -> Case:
        while len(self._ahead) <= index:
            self._ahead += self._alike(self.drawn("seed 0"), len(self._ahead))
        return self._ahead[index]

    def exactly(self, case: Case) -> Case:
        assert isinstance(case, ForeignCase)
        return self._made(case.asked)

    def changed(self, case: Case, tensor: str, *, wholly: bool) -> ForeignCase | None:
        assert isinstance(case, ForeignCase)
        given = case.tensors[tensor]
        if tensor in case.numbers or not given.is_floating_point() or not (tensor in case.keys or bool(given.any())):
            return None
        key = f"{case.task} {case.asked['seed']} {case.weights_seed} changed {tensor} {wholly}"
        return self._or_none(key, {**case.asked, "changed": tensor, "wholly": wholly})

    @property
    def real_tensors(self) -> list[str]:
        case = self.drawn("seed 0")
        return [name for name, given in case.tensors.items() if given.is_floating_point() and name not in case.numbers]

    def special(self, tensor: str, kind: str) -> Case | None:
        base, key = self.drawn("special"), f"special {tensor} {kind}"
        count = base.tensors[tensor].numel()
        if not count:
            return None
        places = np.random.default_rng(self._mixed(key)).integers(count, size=5)
        standing = [(tensor, int(place), value) for place, value in zip(places, SPECIAL[kind], strict=False)]
        return self._or_none(key, {**base.asked, "special": standing})

    def close(self) -> None:
        super().close()
        self._ahead = []

    def _usual_values(self) -> Distribution | None:
        """None for the file's own, unless it always draws the same; UserError where nothing of a case would vary."""
        for values in (None, *({Distribution.NORMAL} & set(self.distributions))):
            first, second = self._file.inputs(seeds=[1, 2], sizes=dict(self.task.sizes), distribution=values)
            if not all(torch.equal(tensor, second[name]) for name, tensor in first.items()):
                return values
        if not self.task.weights:
            raise UserError(f"{self.task} always has the same inputs: a kernel could know its results by heart")
        return None

    def _others(self, rng: np.random.Generator) -> tuple[Task, ...]:
        found: list[Task] = []
        wanted = [(*factors, multiple) for multiple in MULTIPLES[self.device.type] for factors in FACTORS]
        for low, high, multiple in wanted if self._examined.variable else ():
            factors: dict[int, float] = {}
            sizes = other_sizes(
                self._examined,
                lambda value: factors.setdefault(value, float(rng.uniform(low, high))),  # noqa: B023
                multiple,
            )
            try:
                found.append(self._file.case(seed=0, sizes=dict(self.task.sizes) | sizes).task)
            except UserError:  # sizes that go together
                continue
        return tuple(other for other in dict.fromkeys(found) if other != self.task)

    def _recipe(
        self, name: str, distribution: Distribution | None, task: Task, weights: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The key of a case, and what the file makes it from."""
        values = distribution or self._usual
        key = f"{task} {values} {name}"
        seed = self._mixed(key) >> 32
        weights_seed = seed if weights is None else self._mixed(f"weights {weights}") >> 32
        made = {"sizes": dict(task.sizes), "distribution": values, "weights_seed": weights_seed}
        return f"{key} {weights}", {"seed": seed, **made}

    def _alike(self, known: ForeignCase, start: int) -> list[Case]:
        """Cases whose results may be what those of a known one may be; of integers, and beside what is not finite,
        each its own.
        """
        count = max(1, min(AHEAD, AHEAD_BYTES // max(1, self.task.bytes)))
        recipes = [self._recipe(f"timed {index}", None, self.task)[1] for index in range(start, start + count)]
        if not all(bound.dtype.is_floating_point and not bound.free.any() for bound in known.bounds):
            return [self._made(recipe) for recipe in recipes]
        seeds, sizes = [recipe["seed"] for recipe in recipes], dict(self.task.sizes)
        sets = self._file.inputs(seeds=seeds, sizes=sizes, distribution=self._usual, results=True)
        pairs = list(zip(self.task.outputs, known.bounds, strict=True))
        found: list[Case] = []
        for recipe, tensors in zip(recipes, sets, strict=True):
            try:
                bounds = tuple(
                    replace(bound, exact=tensors.pop(output.name).double().to(self.device)) for output, bound in pairs
                )
            except KeyError:
                raise UserError(f"{self._file.entry.path} leaves no result of {self.task}") from None
            found.append(replace(known, tensors=self._placed(tensors), bounds=bounds, asked=recipe))
        return found

    def _kept(self, key: str, recipe: Mapping[str, Any]) -> ForeignCase:
        case = self._get(key, lambda: self._made(recipe))
        assert isinstance(case, ForeignCase)
        return case

    def _or_none(self, key: str, recipe: Mapping[str, Any]) -> ForeignCase | None:
        try:
            return self._kept(key, recipe)
        except Refused as none:
            if none.status in BROKEN:
                raise
            return None

    def _made(self, recipe: Mapping[str, Any]) -> ForeignCase:
        case = self._file.case(**recipe)
        bounds = tuple(bound.to(self.device) for bound in case.bounds)
        return replace(case, tensors=self._placed(case.tensors), bounds=bounds)


def other_sizes(examined: Examined, factor: Callable[[int], float], multiple: int) -> dict[str, int]:
    """Those of a file's sizes that may vary, odd, multiplied by a factor for their value: equal ones stay equal.

    multiple: those that are not smaller than this become multiples of it instead, beyond what they were.
    """

    def other(value: int) -> int:
        near = value * factor(value)
        if 1 < multiple <= value:
            return max(1, (math.ceil if near > value else math.floor)(near / multiple)) * multiple
        return max(1, round(near) // 2 * 2 + 1)

    return {name: other(value) for name, value in examined.sizes if name in examined.variable}
