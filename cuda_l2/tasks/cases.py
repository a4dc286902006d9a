"""What candidates for a task are judged on: inputs from a seed nobody outside knows, and what each result may be.

Matrix products, definitions of our own and files of others each draw their cases in their own way.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cuda_l2.records import Element, Operation, Task
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import Tensors, definition
from cuda_l2.tasks.other_sizes import far, others
from cuda_l2.tasks.tolerance import Bounds, bounds, widened
from cuda_l2.tasks.values import Distribution, Domain, distributions, put, put_far_below, seeded
from cuda_l2.tasks.warm import in_full_precision

CACHE_BYTES = 2 << 30
CHAIN_NOISE = 128.0
"""The most times as far inputs are moved, to see what rounding may do: at sizes far from those shown."""
NOISE = {Distribution.CONSTANT: CHAIN_NOISE, Distribution.SPARSE: CHAIN_NOISE, Distribution.DISTANT: 8.0}
"""Times as far where most values are the same, or nearly: the terms of one chain round the same way there."""
MANY_FLOPS = 1 << 30
INFINITY, NAN = float("inf"), float("nan")
SPECIAL = {
    **{"NaN": (NAN, -NAN), "infinity": (INFINITY,), "minus infinity": (-INFINITY,)},
    "NaN and infinities": (INFINITY, -INFINITY, NAN, -INFINITY, INFINITY),
}
"""What stands in place of elements by what it is called: each at a random place, NaN among others at the very last, but
for one with a sign."""
BESIDE_ZEROS = {"NaN beside zeros": 1.0, "NaN beside numbers and zeros": 0.5}
"""Where a task has other tensors of real numbers: the share of them that is zero, which saves no work beside NaN."""
MINUS_INFINITY = ("a row of minus infinity", "a row of minus infinity before its end", "a column of minus infinity")
FAR_BELOW, LEAST, SEARCHING = "a row far below zero", "the least number", ("reduction", "sampling")
"""What masks write, and the groups of tasks that have it in matrices of their inputs: an activation's last digit would
count beside it."""
CPU_WORK = 1 << 22
"""Bytes or FLOP. References up to here run on the CPU where cases are on a GPU: some two hundred times in a
verification, about a second."""
CLOSE = 1e-9
"""Between fp64 results of two devices, relative to the largest: sums in another order, functions rounded otherwise."""
EXCHANGES_TRIED = 8
ALONE = (Domain.REAL, Domain.POSITIVE, Domain.SQUARES, Domain.UNIT, Domain.INTEGERS, Domain.BOOLEANS)
"""Where one element may change without the others."""
IMPRECISE = 0.02
"""An error below this share of the largest result is one of precision."""
Index = tuple[int | slice | torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Inputs and weights by name, and what each output may be, in the order of the task's outputs.

    alters: in a case that was changed from another one, where outputs may differ from the other's, by name. Outputs
    that are not named may differ anywhere.
    """

    task: Task
    tensors: Tensors
    bounds: tuple[Bounds, ...] = ()
    alters: Mapping[str, Index] = field(default_factory=dict, kw_only=True)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors and of what each output may be: in fp64, rounded, and which elements are free."""
        return self.task.bytes + sum((9 + bound.dtype.itemsize) * bound.exact.numel() for bound in self.bounds)

    def wrong(self, found: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Marks something where these outputs are not the case's."""
        device = next(tensor.device for tensor in found.values())
        return torch.tensor(bool(self.violation(found)), device=device)

    def violation(self, found: Mapping[str, torch.Tensor]) -> str:
        """Why these outputs are not the case's, in one line; empty where they are."""
        for output, limit in zip(self.task.outputs, self.bounds, strict=True):
            violation = limit.violation(found[output.name])
            if violation:
                return f"{output.name} {violation}"
        return ""

    def first_wrong(self, found: Mapping[str, torch.Tensor]) -> Element | None:
        """The element that `violation` names; None where it names none, or the task is no matrix product."""
        return None

    def hint(self, found: Mapping[str, torch.Tensor]) -> str:
        """What outputs that are wrong are right for, to end a sentence with; empty where nothing is known."""
        return ""

    def imprecise(self, found: Mapping[str, torch.Tensor]) -> bool:
        """Whether the first output that is wrong is off by little: its sums were kept in too little precision."""
        for output, limit in zip(self.task.outputs, self.bounds, strict=True):
            result = found[output.name]
            if limit.violation(result):
                if (
                    not result.dtype.is_floating_point
                    or not result.isfinite().all()
                    or not limit.exact.isfinite().all()
                ):
                    return False
                return bool((result.double() - limit.exact).abs().max() <= IMPRECISE * limit.exact.abs().max())
        return False

    def errors(self, found: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """The largest RMS error and the largest error against fp64 of any output."""
        pairs = zip(self.task.outputs, self.bounds, strict=True)
        each = [limit.errors(found[output.name]) for output, limit in pairs]
        return max(rms for rms, _ in each), max(largest for _, largest in each)


class Cases(ABC):
    """Cases of one task, made on first use and kept while they fit. The same name gives the same case."""

    usual: str
    """What stands in cases whose values nobody chose, for reasons."""
    distributions: tuple[Distribution, ...]
    """Distributions of values, beside the usual ones, that candidates are judged on."""
    others: Sequence[Task]
    """The task at sizes that nobody was shown: odd ones first, then multiples of more and more."""
    far: Sequence[Task] = ()
    """The task with one size several times as large as shown, each in turn."""
    special_kinds: Sequence[str] = tuple(SPECIAL)
    """What `special` is asked for."""
    element_changes = 1
    """How often one element of each tensor is changed."""

    def __init__(self, task: Task, seed: int, device: torch.device | str, cache_bytes: int) -> None:
        """device: where tensors lie."""
        self.task: Task = task
        self._seed, self._cache_bytes = seed, cache_bytes
        self.device = torch.device(device)
        self.rng = np.random.default_rng([seed, 1])
        self._cases: dict[str, Case] = {}
        self._kept_bytes = 0  # of these, as they were when they were made

    @abstractmethod
    def drawn(self, name: str, distribution: Distribution | None = None, task: Task | None = None) -> Case:
        """A case of fresh values, the usual ones where no distribution is given. task: at other sizes."""

    @abstractmethod
    def timed(self, index: int) -> Case:
        """A case of usual values for one launch of a timed round; the caller keeps it.

        Its floating-point results may be what those of a case drawn alike may be: `exactly` asks more of the reference.
        """

    @abstractmethod
    def exactly(self, case: Case) -> Case:
        """The same case with the tolerance that is its own."""

    @abstractmethod
    def changed(self, case: Case, tensor: str, *, wholly: bool) -> Case | None:
        """A case that differs in one tensor, or in one element of it where elements stand for themselves.

        Its results may be what the given case's may be, as `timed` has it. None where the tensor has no other value.
        """

    def exchanged(self, case: Case, tensor: str) -> Case | None:
        """A case in which two elements of a tensor stand in each other's place: sums over all elements stay.

        Its results may be what the given case's may be. None where elements do not stand for themselves, or are alike.
        """
        return None

    @property
    @abstractmethod
    def real_tensors(self) -> list[str]:
        """Inputs and weights of real numbers in which special values are judged."""

    @abstractmethod
    def special(self, tensor: str, kind: str) -> Case | None:
        """A case with NaN or infinities in a tensor, by `special_kinds`; None where the reference refuses them."""

    def alone(self, task: Task) -> Case | None:
        """A case, maybe at other sizes, for a process that launches alone; None where it may draw normal numbers."""
        return self.drawn("races", task=task)

    def close(self) -> None:
        """Give the memory of every case back."""
        self._cases.clear()
        self._kept_bytes = 0

    def _get(self, key: str, make: Callable[[], Case]) -> Case:
        if key in self._cases:
            return self._cases[key]
        case = make()
        # the first ones stay: every candidate meets all of them in the same order
        if self._kept_bytes + case.bytes <= self._cache_bytes:
            self._cases[key] = case
            self._kept_bytes += case.bytes
        return case

    def _placed(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device).contiguous() for name, tensor in tensors.items()}

    def _mixed(self, key: str) -> int:
        return int(np.random.SeedSequence([self._seed, *key.encode()]).generate_state(1, np.uint64)[0] >> 1)


class OwnCases(Cases):
    """Cases of one of our own tasks.

    device: where tensors lie. Large references run there too, in fp64 and in the task's type without TF32; UserError
    where such a GPU does not compute what the CPU does.
    """

    task: Operation
    usual = "normal numbers"

    def __init__(
        self, task: Operation, seed: int, device: torch.device | str = "cpu", cache_bytes: int = CACHE_BYTES
    ) -> None:
        super().__init__(task, seed, device, cache_bytes)
        self._known = definition(task.name)
        self.distributions = tuple(each for each in distributions(task.dtype) if each is not Distribution.NORMAL)
        self.others = others(task, self.device.type, np.random.default_rng([seed, 2]))
        self.far = far(task, self.device.type, np.random.default_rng([seed, 3]))
        beside = BESIDE_ZEROS if len(self._of_real_numbers) > 1 else ()
        masked = MINUS_INFINITY[: 2 if beside else 3] if self.device.type == "cpu" else ()
        masked += (FAR_BELOW, LEAST) if masked and self._known.group in SEARCHING else ()
        self.special_kinds = (*SPECIAL, *beside, *masked)
        self._compared = self._computes_on(task).type == "cpu"

    def drawn(self, name: str, distribution: Distribution | None = None, task: Task | None = None) -> Case:
        of, values = task or self.task, distribution or Distribution.NORMAL
        key = f"{of} {values} {name}"
        noise = NOISE.get(values, 1.0)
        if of in self.far:  # the error of one chain grows with its terms
            times = [size / shown for (_, size), (_, shown) in zip(of.sizes, self.task.sizes, strict=True)]
            noise = min(CHAIN_NOISE, max(noise, *times))
        return self._get(key, lambda: self._case(of, self._draw(of, key, values), noise))

    def timed(self, index: int) -> Case:
        return self._alike(self.drawn("seed 0"), self._draw(self.task, f"timed {index}"))

    def exactly(self, case: Case) -> Case:
        return self._case(case.task, case.tensors)

    def changed(self, case: Case, tensor: str, *, wholly: bool) -> Case:
        values = {**self._known.inputs, **self._known.weights}[tensor]
        key = f"{case.task} changed {tensor} {wholly}"

        def make() -> Case:
            other = self._draw(case.task, key)[tensor]
            old = case.tensors[tensor].to(other.device)
            if not wholly and values.domain in ALONE and old.numel():
                at = int(np.random.default_rng(self._mixed(key)).integers(old.numel()))
                new = old.clone().flatten()
                new[at] = _other(new[at], other.flatten()[at], values.domain)
                other = new.reshape(old.shape)
            return self._alike(case, {**case.tensors, tensor: other})

        return self._get(key, make)

    def exchanged(self, case: Case, tensor: str) -> Case | None:
        values = {**self._known.inputs, **self._known.weights}[tensor]
        key = f"{case.task} exchanged {tensor}"
        flat = case.tensors[tensor].flatten().clone()
        if values.domain not in ALONE or not flat.numel():
            return None
        rng = np.random.default_rng(self._mixed(key))
        pairs = rng.integers(flat.numel(), size=(EXCHANGES_TRIED, 2)).tolist()
        pair = next((pair for pair in pairs if bool(flat[pair[0]] != flat[pair[1]])), None)
        if pair is None:
            return None
        flat[pair] = flat[pair[::-1]]
        return self._get(key, lambda: self._alike(case, {**case.tensors, tensor: flat.view_as(case.tensors[tensor])}))

    @property
    def real_tensors(self) -> list[str]:
        return [name for name in self._of_real_numbers if name not in self._known.indefinite]

    @property
    def _of_real_numbers(self) -> list[str]:
        tensors = {**self._known.inputs, **self._known.weights}
        return [name for name, values in tensors.items() if values.domain is Domain.REAL]

    def special(self, tensor: str, kind: str) -> Case | None:
        base, key = self.drawn("special"), f"special {tensor} {kind}"
        new, beside = base.tensors[tensor].clone(), dict[str, torch.Tensor]()
        masked = new.dim() > 1 and tensor in self._known.inputs  # no shift and no gain is
        if not new.numel() or (kind in (FAR_BELOW, LEAST) and not masked):
            return None
        places = np.random.default_rng(self._mixed(key)).integers(new.numel(), size=5)
        if kind in BESIDE_ZEROS:
            new.view(-1)[int(places[0])] = NAN
            for name in (name for name in self._of_real_numbers if name != tensor):
                given = base.tensors[name]
                generator = seeded(self._mixed(key), name, given.device)
                drawn = torch.rand(given.shape, generator=generator, device=given.device)
                beside[name] = given.masked_fill(drawn < BESIDE_ZEROS[kind], 0)
        elif kind == FAR_BELOW:
            rows = new.view(-1, new.shape[-1] if new.dim() else 1)
            put_far_below(rows[int(places[0]) % len(rows)], seeded(self._mixed(key), tensor, new.device))
        elif kind == LEAST:
            new.view(-1)[int(places[0])] = torch.finfo(new.dtype).min
        elif kind in MINUS_INFINITY:
            rows = new.view(-1, new.shape[-1] if new.dim() else 1)
            row, column = divmod(int(places[0]), rows.shape[1])
            most = max(1, rows.shape[1] - 3)  # of a short row at least one
            (rows[row], rows[row, :most], rows[:, column])[MINUS_INFINITY.index(kind)].fill_(-INFINITY)
        else:
            if len(SPECIAL[kind]) > 1:  # where a loop over vectors has an end of its own
                places[SPECIAL[kind].index(NAN)] = new.numel() - 1
            for place, value in zip(places, SPECIAL[kind], strict=False):
                put(new.view(-1)[int(place)], value)
        try:
            case = self._get(key, lambda: self._case(self.task, {**base.tensors, **beside, tensor: new}))
        except RuntimeError:  # a factorisation that finds no numbers
            return None
        if kind == LEAST and not all(_eager_is_good(bound) for bound in case.bounds):  # its square is no number of fp32
            return None
        return case

    def _case(self, task: Task, tensors: Tensors, noise: float = 1.0) -> Case:
        home = self._computes_on(task)
        given = {name: tensor.to(home) for name, tensor in tensors.items()}
        if home.type != "cpu":
            self._require_same_as_on_the_cpu()
        with _threads_for(task), in_full_precision():
            found = bounds(self._known.bind(dict(task.sizes)), given, noise)
        among = [given.get(self._known.among.get(output.name, "")) for output in task.outputs]
        found = tuple(replace(bound, among=tensor) for bound, tensor in zip(found, among, strict=True))
        return Case(task, self._placed(given), tuple(bound.to(self.device) for bound in found))

    def _alike(self, known: Case, tensors: Tensors) -> Case:
        """A case with a tolerance that is known; its own where a result is no floating-point number, or not finite."""
        if not all(bound.dtype.is_floating_point and not bound.free.any() for bound in known.bounds):
            return self._case(known.task, tensors)
        home = self._computes_on(known.task)
        given = {name: tensor.to(home) for name, tensor in tensors.items()}
        with torch.no_grad(), _threads_for(known.task), in_full_precision():
            results = self._known.bind(dict(known.task.sizes))(**widened(given))
        pairs = zip(known.bounds, results, strict=True)
        found = tuple(replace(bound, exact=exact.to(self.device)) for bound, exact in pairs)
        return Case(known.task, self._placed(given), found)

    def _draw(self, task: Task, key: str, distribution: Distribution = Distribution.NORMAL) -> Tensors:
        """Fresh values where the task's references run."""
        return self._known.draw(task, self._mixed(key), distribution, self._computes_on(task))

    def _computes_on(self, task: Task) -> torch.device:
        return self.device if max(task.flops, task.bytes) > CPU_WORK else torch.device("cpu")

    def _require_same_as_on_the_cpu(self) -> None:
        """UserError where the reference at a CPU's sizes gives something else there; looked at once."""
        if self._compared:
            return
        small = self._known.task(dtype=self.task.dtype)
        function = self._known.bind(dict(small.sizes))
        given = widened(self._known.draw(small, self._mixed("compared")))
        with torch.no_grad(), in_full_precision():
            here = function(**given)
            there = function(**{name: tensor.to(self.device) for name, tensor in given.items()})
        for output, ours, theirs in zip(small.outputs, here, there, strict=True):
            ours, theirs = ours.double(), theirs.cpu().double()
            largest = float(ours.nan_to_num(0, 0, 0).abs().max()) if ours.numel() else 0.0
            close = torch.isclose(theirs, ours, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)
            if not close.all():
                raise UserError(
                    f"the reference of {small} gives another {output.name} on the GPU than on the CPU;"
                    " is the GPU's memory sound?"
                )
        self._compared = True


@contextlib.contextmanager
def _threads_for(task: Task) -> Iterator[None]:
    """Small references run on one thread: waiting for others costs more, ten times so where the machine is busy."""
    threads = torch.get_num_threads()
    if task.flops < MANY_FLOPS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _eager_is_good(bound: Bounds) -> bool:
    """Whether PyTorch's own result is right to a few digits, and all of it are numbers of its type."""
    if not bound.dtype.is_floating_point:
        return True
    largest = float(bound.exact.abs().max())
    return largest <= torch.finfo(bound.dtype).max and bound.eager_max <= IMPRECISE * largest


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
