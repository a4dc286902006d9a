"""What candidates for a task are judged on: inputs from a seed nobody outside knows, and what each result may be."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuda_l2.errors import UserError
from cuda_l2.records import Operation
from cuda_l2.tasks._base import Tensors, definition
from cuda_l2.tasks.tolerance import Bounds, bounds, widened
from cuda_l2.tasks.values import Distribution, Domain

CACHE_BYTES = 2 << 30
OTHER_SIZES = 2
MANY_FLOPS = 1 << 30
INFINITY, NAN = float("inf"), float("nan")
SPECIAL = {
    **{"NaN": (NAN,), "infinity": (INFINITY,), "minus infinity": (-INFINITY,)},
    "NaN and infinities": (INFINITY, -INFINITY, NAN, -INFINITY, INFINITY),
}
"""What stands in place of elements, each at a random place, by what it is called."""
ALONE = (Domain.REAL, Domain.POSITIVE, Domain.UNIT, Domain.INTEGERS, Domain.BOOLEANS)
"""Where one element may change without the others."""


@dataclass(frozen=True)
class TaskCase:
    """Inputs and weights by name, and what each output may be, in the order of the task's outputs."""

    task: Operation
    tensors: Tensors
    bounds: tuple[Bounds, ...]

    @property
    def bytes(self) -> int:
        return self.task.bytes + sum(8 * bound.exact.numel() for bound in self.bounds)


class TaskCases:
    """Cases of one of our own tasks, made on first use and kept while they fit."""

    def __init__(self, task: Operation, seed: int) -> None:
        self.task, self._seed = task, seed
        self._known = definition(task.name)
        self.rng = np.random.default_rng([seed, 1])
        self.others = self._others(np.random.default_rng([seed, 2]))
        """The task at sizes that nobody was shown."""
        self._cases: OrderedDict[str, TaskCase] = OrderedDict()

    def _others(self, rng: np.random.Generator) -> tuple[Operation, ...]:
        found = []
        for _ in range(OTHER_SIZES):
            sizes = dict(self.task.sizes) | {
                name: size for name, size in self._known.other_sizes(rng).items() if name not in self._known.rigid
            }
            try:
                found.append(self._known.task(sizes, self.task.dtype))
            except UserError:  # sizes that go together
                continue
        return tuple(dict.fromkeys(found))

    def drawn(
        self, name: str, distribution: Distribution = Distribution.NORMAL, task: Operation | None = None
    ) -> TaskCase:
        """A case of fresh values; the same name gives the same one."""
        of = task or self.task
        key = f"{of} {distribution} {name}"
        return self._get(key, lambda: self._case(of, self._known.draw(of, self._mixed(key), distribution)))

    def timed(self, index: int) -> TaskCase:
        """A case of normal numbers for one launch of a timed round; the caller keeps it.

        Its floating-point results may be what those of a case drawn alike may be: `exactly` asks more of the reference.
        """
        alike, tensors = self.drawn("seed 0"), self._known.draw(self.task, self._mixed(f"timed {index}"))
        if not all(bound.dtype.is_floating_point and not bound.free.any() for bound in alike.bounds):
            return self._case(self.task, tensors)
        with torch.no_grad(), _threads_for(self.task):
            results = self._known.bind(dict(self.task.sizes))(**widened(tensors))
        pairs = zip(alike.bounds, results, strict=True)
        return TaskCase(self.task, tensors, tuple(replace(bound, exact=exact) for bound, exact in pairs))

    def exactly(self, case: TaskCase) -> TaskCase:
        """The same case with the tolerance that is its own."""
        return self._case(case.task, case.tensors)

    def changed(self, case: TaskCase, tensor: str, *, wholly: bool) -> TaskCase:
        """A case that differs in one tensor, or in one element of it where elements stand for themselves."""
        values = {**self._known.inputs, **self._known.weights}[tensor]
        key = f"{case.task} changed {tensor} {wholly}"

        def make() -> TaskCase:
            other = self._known.draw(case.task, self._mixed(key))[tensor]
            old = case.tensors[tensor]
            if not wholly and values.domain in ALONE and old.numel():
                at = int(np.random.default_rng(self._mixed(key)).integers(old.numel()))
                new = old.clone().flatten()
                new[at] = _other(new[at], other.flatten()[at], values.domain)
                other = new.reshape(old.shape)
            return self._case(case.task, {**case.tensors, tensor: other})

        return self._get(key, make)

    @property
    def real_tensors(self) -> list[str]:
        """Inputs and weights in which any real number may stand."""
        return [
            name
            for name, values in {**self._known.inputs, **self._known.weights}.items()
            if values.domain is Domain.REAL
        ]

    def special(self, tensor: str, kind: str) -> TaskCase | None:
        """A case with NaN or infinities in a tensor, as SPECIAL names them; None where the reference refuses them."""
        base, key = self.drawn("special"), f"special {tensor} {kind}"
        new = base.tensors[tensor].clone()
        if not new.numel():
            return None
        for place, value in zip(
            np.random.default_rng(self._mixed(key)).integers(new.numel(), size=5), SPECIAL[kind], strict=False
        ):
            new.view(-1)[int(place)] = value
        try:
            return self._get(key, lambda: self._case(self.task, {**base.tensors, tensor: new}))
        except RuntimeError:  # a factorisation that finds no numbers
            return None

    def close(self) -> None:
        """Give the memory of every case back."""
        self._cases.clear()

    def _get(self, key: str, make: Callable[[], TaskCase]) -> TaskCase:
        if key not in self._cases:
            self._cases[key] = make()
        self._cases.move_to_end(key)
        while len(self._cases) > 1 and sum(case.bytes for case in self._cases.values()) > CACHE_BYTES:
            self._cases.popitem(last=False)
        return self._cases[key]

    def _case(self, task: Operation, tensors: Tensors) -> TaskCase:
        with _threads_for(task):
            return TaskCase(task, tensors, bounds(self._known.bind(dict(task.sizes)), tensors))

    def _mixed(self, key: str) -> int:
        return int(np.random.SeedSequence([self._seed, *key.encode()]).generate_state(1, np.uint64)[0] >> 1)


@contextlib.contextmanager
def _threads_for(task: Operation) -> Iterator[None]:
    """Small references run on one thread: waiting for others costs more, ten times so where the machine is busy."""
    threads = torch.get_num_threads()
    if task.flops < MANY_FLOPS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _other(old: torch.Tensor, drawn: torch.Tensor, domain: Domain) -> torch.Tensor:
    """Another value that may stand in an element's place, far from it where there is room."""
    match domain:
        case Domain.REAL:
            return 4 - 2 * old
        case Domain.BOOLEANS:
            return ~old
        case Domain.UNIT:
            return (old + 0.5) % 1
    return drawn if domain is Domain.INTEGERS else old + 1
