"""A file in KernelBench's format, executed in this process: its text is not ours, so only inside the sandbox.

Such a file defines a module `Model`, `get_init_inputs()` with its constructor's arguments and `get_inputs()` with what
its forward takes. Whole numbers of the file that these two read are its sizes: given other values they give other
shapes. What stands in the way of using a file as a task is a status with a reason.
"""

import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cuda_l2.kernelbench.examined import Readiness, Refused
from cuda_l2.kernelbench.sizes import MOST_PARTS, SEQUENCES, SMALL, Assignments, is_size
from cuda_l2.system.text import line_of
from cuda_l2.tasks.values import Distribution, real, seeded

COPIES = 6
"""Copies of inputs, weights and results that a judgement holds at once: fp32, and fp64 twice over."""

SLACK = 1.25
"""By how much more than the least a task may take whose least is more than its budget."""

LEAST_LARGE = 16
"""A number of the file that weights depend on and that is smaller is left alone: a window, a stride, a dimension."""

NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")
"""PyTorch's words for a lack of the machine's memory, and of a GPU's."""

MEANT_ZEROS = 0.05
"""So large a share of zeros in a file's own inputs is a triangle, a diagonal or a mask."""


@dataclass(frozen=True)
class Need:
    """Memory and work of one run of the reference, found without running it."""

    given_bytes: int  # inputs and weights
    made_bytes: int  # by all operators together
    largest_bytes: int  # by one operator
    flops: int
    inputs: tuple[tuple[int, ...], ...]  # shapes
    weights: tuple[tuple[int, ...], ...]

    @property
    def peak_bytes(self) -> int:
        """About the memory that verifying takes."""
        return COPIES * (self.given_bytes + 2 * self.largest_bytes)

    def within(self, budget_bytes: int, budget_flops: int) -> bool:
        return self.peak_bytes <= budget_bytes and self.flops <= budget_flops


class Loaded:
    """One file, executed. sizes: its whole numbers to change, by name; what the file makes of them follows. device:
    where its modules and inputs lie.
    """

    def __init__(self, path: Path, sizes: Mapping[str, int], device: str = "cpu") -> None:
        self._path, self._sizes, self._device = path, dict(sizes), device
        self._flops: int | None = None
        self.namespace = _execute(path)
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(getattr(self.namespace, name, None)):
                raise Refused(Readiness.MALFORMED, f"the file has no {name}")
        self._assignments = Assignments(path.read_bytes())
        self.written = self._read_by("get_inputs", "get_init_inputs")
        self._of_weights = self._read_by("get_init_inputs").keys()
        for name in self._sizes:
            if name not in self.written:
                raise Refused(Readiness.MALFORMED, f"the file has no size {name}; it has {', '.join(self.written)}")
        if self._sizes:
            self._use(self._sizes)

    def need(self) -> Need | None:
        """Memory and work of a run at the present sizes; None where that cannot be found without one."""
        return self._need(self._sizes)

    def flops(self) -> int:
        """FLOP of the contractions of a run, as PyTorch counts them; 0 where they cannot be found without one."""
        if self._flops is None:
            need = self.need()
            self._flops = need.flops if need else 0
        return self._flops

    def arguments(self) -> Any:
        """Arguments of the module's constructor: a list, or a dictionary of keywords."""
        with failing("its model cannot be made"):
            return self.namespace.get_init_inputs()

    def model(self, seed: int) -> nn.Module:
        return _model(self.namespace, seed).to(self._device)

    def inputs(self, seed: int, distribution: Distribution | None = None) -> list[Any]:
        """Tensors and numbers: the file's own, or real numbers of a distribution in their place."""
        inputs = _inputs(self.namespace, seed)
        if distribution is not None:
            inputs = [_redrawn(value, seeded(seed, str(i)), distribution) for i, value in enumerate(inputs)]
        return [value.to(self._device) if isinstance(value, torch.Tensor) else value for value in inputs]

    def shrink(self, budget_bytes: int, budget_flops: int) -> dict[str, int]:
        """Halve sizes until verifying fits the budgets; what was changed.

        Those go first that no weight depends on; of the others only large ones, since small ones may be no sizes. What
        that did not help comes back: as much as fits, or, where nothing fits, as costs little beside the least.
        """
        need = self.need()
        sizes = self.written | self._sizes
        rigid: set[str] = set()
        while need and not need.within(budget_bytes, budget_flops):
            present = {name: value for name, value in sizes.items() if name not in rigid}
            free = {name: value for name, value in present.items() if value > SMALL and name not in self._of_weights}
            free = free or {name: value for name, value in present.items() if value >= LEAST_LARGE}
            free = free or {
                name: value for name, value in present.items() if value > 1 and name not in self._of_weights
            }
            if not free:
                break
            largest = max(free.values())
            alike = [name for name, value in free.items() if value == largest]
            for names in (alike[:1], alike):  # sizes that must agree have the same value
                tried = sizes | dict.fromkeys(names, largest // 2)
                smaller = self._need(tried)
                if smaller and (smaller.peak_bytes, smaller.flops) < (need.peak_bytes, need.flops):
                    sizes, need = tried, smaller
                    break
            else:
                rigid.add(alike[0])
        changed = self._changed(sizes)
        of_inputs = [name for name in changed if name not in self._of_weights]
        if need and not need.within(budget_bytes, budget_flops):
            limits = max(budget_bytes, int(SLACK * need.peak_bytes)), max(budget_flops, int(SLACK * need.flops))
            sizes = self._grown(sizes, of_inputs, *limits)
            sizes = self._grown(sizes, [name for name in changed if name in self._of_weights], *limits)
        elif len(of_inputs) < len(changed):
            sizes = self._grown(sizes, of_inputs, budget_bytes, budget_flops)
        if self._changed(sizes) != self._sizes:
            self._use(self._changed(sizes))
        return self._sizes

    def variable(self) -> tuple[str, ...]:
        """Sizes that may change while the weights stay, equal ones together: other shapes for the same task."""
        found: dict[str, None] = {}
        sizes = self.written | self._sizes
        now = self.need()
        values = {name: value for name, value in sizes.items() if name not in self._of_weights}

        def may_be(names: Sequence[str], value: int) -> bool:
            need = self._need(sizes | dict.fromkeys(names, value))
            return bool(need and now and need.weights == now.weights and need.inputs != now.inputs)

        for name, value in values.items():
            for names in ([name], [other for other in values if values[other] == value]):
                if may_be(names, value + 1) and (value == 1 or may_be(names, value // 2)):
                    found |= dict.fromkeys(names)
                    break
        return tuple(name for name in self.written if name in found)

    def _use(self, sizes: dict[str, int]) -> None:
        self._sizes, self._flops = sizes, None
        self.namespace = _execute(self._path, self._assignments, sizes) if sizes else _execute(self._path)

    def _changed(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: value for name, value in sizes.items() if value != self.written[name]}

    def _need(self, sizes: Mapping[str, int]) -> Need | None:
        """Executed anew, so that nothing of fake tensors stays in what the file keeps."""
        made, flops = _Made(), FlopCounterMode(display=False)
        torch.distributions.Distribution.set_default_validate_args(False)  # it would look at values
        try:
            namespace = _execute(self._path, self._assignments, self._changed(sizes))
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                model, inputs = _model(namespace, seed=0), _inputs(namespace, seed=0)
                with made, flops:
                    model(*inputs)
                tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
                weights = [*model.parameters(), *model.buffers()]
                given = [*tensors, *weights]
                if not all(tensor.numel() for tensor in given):
                    return None
                shapes = (tuple(tuple(tensor.shape) for tensor in some) for some in (tensors, weights))
                return Need(sum(map(_bytes, given)), made.total, made.largest, int(flops.get_total_flops()), *shapes)
        except Exception:  # noqa: BLE001 - fake tensors do not serve every module; running it will tell
            return None
        finally:
            torch.distributions.Distribution.set_default_validate_args(True)

    def _grown(self, sizes: dict[str, int], names: list[str], budget_bytes: int, budget_flops: int) -> dict[str, int]:
        """Double sizes that were halved, the smallest first, while that fits."""
        while names:
            least = min(sizes[name] for name in names)
            alike = [name for name in names if sizes[name] == least]
            for together in (alike[:1], alike):
                tried = sizes | {name: _halved_less(self.written[name], least) for name in together}
                need = self._need(tried)
                if need and need.within(budget_bytes, budget_flops):
                    sizes = tried
                    break
            else:
                names = [name for name in names if name != alike[0]]
            names = [name for name in names if sizes[name] < self.written[name]]
        return sizes

    def _read_by(self, *functions: str) -> dict[str, int]:
        """Whole numbers of the file that these functions read; those of a tuple or list are named shape_0, shape_1.

        Where the file makes them of others, those others.
        """
        globals_ = vars(self.namespace)
        names: list[str] = []
        for function in functions:
            names += self._names_read(function, set())
        sizes: dict[str, int] = {}
        for name in self._assignments.with_sources(names):
            value = globals_.get(name)
            if value is not None and type(value) in SEQUENCES and len(value) <= MOST_PARTS:  # no named tuples
                parts = {f"{name}_{i}": part for i, part in enumerate(value) if is_size(part)}
                sizes |= {part: size for part, size in parts.items() if part not in globals_}
            elif is_size(value):
                sizes[name] = value
        derived = self._assignments.derived(globals_)
        return {name: value for name, value in sizes.items() if name.isascii() and name not in derived}

    def _names_read(self, function: str, seen: set[str]) -> list[str]:
        """Global names that a function of the file reads, and those it calls."""
        names = _names_read(getattr(getattr(self.namespace, function, None), "__code__", None))
        seen.add(function)
        for name in names.copy():
            if name not in seen and isinstance(getattr(self.namespace, name, None), types.FunctionType):
                names += self._names_read(name, seen)
        return names


def _model(namespace: types.ModuleType, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with failing("its model cannot be made"):
        arguments = namespace.get_init_inputs()
        keywords = arguments if isinstance(arguments, dict) else {}
        model = namespace.Model(*([] if keywords else arguments), **keywords)
    if not isinstance(model, nn.Module):
        raise Refused(Readiness.MALFORMED, "Model is no torch module")
    return model


def _inputs(namespace: types.ModuleType, seed: int) -> list[Any]:
    torch.manual_seed(seed)
    with failing("its inputs cannot be made"):
        inputs = list(namespace.get_inputs())
    for value in inputs:
        if not isinstance(value, torch.Tensor | bool | int | float):
            raise Refused(Readiness.UNSUPPORTED, f"takes a {type(value).__name__} as input")
    return inputs


def _halved_less(written: int, value: int) -> int:
    """The size before it was halved to this value."""
    while written // 2 > value:
        written //= 2
    return written


def _redrawn(value: Any, generator: torch.Generator, distribution: Distribution) -> Any:
    """Other real numbers in the same shape; what looks like a choice, a share or a label stays."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.numel() < 2:
        return value
    if bool((value.abs().eq(1) | value.eq(0)).all()) or torch.allclose(value.sum(-1), torch.ones(()).to(value)):
        return value
    return structured(value, real(tuple(value.shape), generator, distribution).to(value.dtype)).contiguous()


def structured(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Other numbers with the zeros and the symmetry of a tensor, which may be part of what is computed."""
    if int((value == 0).sum()) > MEANT_ZEROS * value.numel():
        other = torch.where(value == 0, 0, other)
    return other.tril() + other.tril(-1).mT if is_symmetric(value) else other


def is_symmetric(value: torch.Tensor) -> bool:
    return value.ndim == 2 and value.shape[0] == value.shape[1] > 1 and bool((value == value.mT).all())


def _execute(path: Path, assignments: Assignments | None = None, sizes: Mapping[str, int] = {}) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("kernelbench_task", path)
    assert spec and spec.loader
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if assignments and sizes:
                assignments.execute(namespace, sizes)
            else:
                spec.loader.exec_module(namespace)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
        raise _refusal(error, Readiness.IMPORT_ERROR, "cannot be imported") from None
    return namespace


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Turn what the file raises into a refusal."""
    try:
        yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
        raise _refusal(error, Readiness.REFERENCE_FAILS, what) from None


def _refusal(error: BaseException, status: Readiness, what: str) -> Refused:
    """What the file raised as a refusal; files import within their functions too."""
    if isinstance(error, ModuleNotFoundError):
        return Refused(Readiness.NEEDS_PACKAGE, f"needs the package {error.name}")
    raise_if_memory(error)
    if "cuda" in str(error).lower() or "NVIDIA" in str(error):
        return Refused(Readiness.NEEDS_GPU, f"runs on a GPU alone: {line_of(error)}")
    return Refused(status, f"{what}: {line_of(error)}")


def raise_if_memory(error: BaseException) -> None:
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        raise Refused(Readiness.TOO_LARGE, f"does not fit in memory: {line_of(error)}") from None


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(value.alias_info for value in func._schema.returns):  # a view, or in place
            return result
        made = sum(_bytes(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.total, self.largest = self.total + made, max(self.largest, made)
        return result


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _names_read(code: types.CodeType | None) -> list[str]:
    """Global names that a function reads, those inside it included."""
    if code is None:
        return []
    inner = [
        name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names_read(constant)
    ]
    return [*code.co_names, *inner]


def clean(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "".join(c for c in line if c.isprintable())[:300]
