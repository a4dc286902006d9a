"""A file in KernelBench's format, executed in this process: its text is not ours, so only inside the sandbox.

Such a file defines a module `Model`, `get_init_inputs()` with its constructor's arguments and `get_inputs()` with what
its forward takes. Whole numbers of the file that these two read are its sizes: given other values they give other
shapes. What stands in the way of using a file as a task is a status with a reason.
"""

import ast
import contextlib
import importlib.util
import sys
import types
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from cuda_l2.plain import line_of
from cuda_l2.tasks.examined import Readiness
from cuda_l2.tasks.values import Distribution, real, seeded

COPIES = 6
"""What a judgement holds at once of inputs, weights and results: fp32, and fp64 twice over."""

SLACK = 1.25
"""By how much more than the least a task may take whose least is more than its budget."""

LEAST_LARGE = 16
"""A number of the file that weights depend on and that is smaller is left alone: a window, a stride, a dimension."""

NO_MEMORY = ("allocate memory", "not enough memory", "out of memory")
"""What PyTorch says of the machine's memory, and of a GPU's."""

MEANT_ZEROS = 0.05
"""So large a share of zeros in a file's own inputs is a triangle, a diagonal or a mask."""


class Refused(Exception):
    """The file is no task for us."""

    def __init__(self, status: Readiness, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Need:
    """What one run of the reference takes, found without running it."""

    given_bytes: int  # inputs and weights
    made_bytes: int  # by all operators together
    largest_bytes: int  # by one operator
    flops: int

    @property
    def peak_bytes(self) -> int:
        """About the memory that verifying takes."""
        return COPIES * (self.given_bytes + 2 * self.largest_bytes)

    def within(self, budget_bytes: int, budget_flops: int) -> bool:
        return self.peak_bytes <= budget_bytes and self.flops <= budget_flops


class Loaded:
    """One file, executed. sizes: its whole numbers to change, by name."""

    def __init__(self, path: Path, sizes: Mapping[str, int] | None = None) -> None:
        self.namespace = _execute(path)
        self._derived = _derived(path.read_bytes())
        for name in ("Model", "get_inputs", "get_init_inputs"):
            if not callable(getattr(self.namespace, name, None)):
                raise Refused(Readiness.MALFORMED, f"the file has no {name}")
        self.written = self._sizes("get_inputs", "get_init_inputs")
        for name, value in (sizes or {}).items():
            if name not in self.written:
                raise Refused(Readiness.MALFORMED, f"the file has no size {name}; it has {', '.join(self.written)}")
            self._set(name, value)

    def need(self) -> Need | None:
        """What a run takes at the present sizes; None where that cannot be found without one."""
        made, flops = _Made(), FlopCounterMode(display=False)
        torch.distributions.Distribution.set_default_validate_args(False)  # it would look at values
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                model, inputs = self.model(seed=0), self.inputs(seed=0)
                with made, flops:
                    model(*inputs)
                given = [*model.parameters(), *model.buffers(), *inputs]
        except Exception:  # noqa: BLE001 - fake tensors do not serve every module; running it will tell
            return None
        finally:
            torch.distributions.Distribution.set_default_validate_args(True)
        size = sum(_bytes(tensor) for tensor in given if isinstance(tensor, torch.Tensor))
        return Need(size, made.total, made.largest, int(flops.get_total_flops()))

    def arguments(self) -> Any:
        """Of the module's constructor: a list, or a dictionary of keywords."""
        with failing("its model cannot be made"):
            return self.namespace.get_init_inputs()

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with failing("its model cannot be made"):
            arguments = self.namespace.get_init_inputs()
            keywords = arguments if isinstance(arguments, dict) else {}
            model = self.namespace.Model(*([] if keywords else arguments), **keywords)
        if not isinstance(model, nn.Module):
            raise Refused(Readiness.MALFORMED, "Model is no torch module")
        return model

    def inputs(self, seed: int, distribution: Distribution | None = None) -> list[Any]:
        """Tensors and numbers: the file's own, or real numbers of a distribution in their place."""
        torch.manual_seed(seed)
        with failing("its inputs cannot be made"):
            inputs = list(self.namespace.get_inputs())
        for value in inputs:
            if not isinstance(value, torch.Tensor | bool | int | float):
                raise Refused(Readiness.UNSUPPORTED, f"takes a {type(value).__name__} as input")
        if distribution is None:
            return inputs
        return [_redrawn(value, seeded(seed, str(i)), distribution) for i, value in enumerate(inputs)]

    def shrink(self, budget_bytes: int, budget_flops: int) -> dict[str, int]:
        """Halve sizes until verifying fits the budgets; what was changed.

        Those go first that no weight depends on; of the others only large ones, since small ones may be no sizes.
        What that did not help comes back: as much as fits, or, where nothing fits, as costs little beside the least.
        """
        need = self.need()
        weights = self._sizes("get_init_inputs")
        changed: dict[str, int] = {}
        rigid: set[str] = set()
        while need and not need.within(budget_bytes, budget_flops):
            present = {name: self._get(name) for name in self.written if name not in rigid}
            free = {name: value for name, value in present.items() if value > 1 and name not in weights}
            free = free or {name: value for name, value in present.items() if value >= LEAST_LARGE}
            if not free:
                break
            largest = max(free.values())
            alike = [name for name, value in free.items() if value == largest]
            smaller = None
            for names in (alike[:1], alike):  # sizes that must agree have the same value
                for name in names:
                    self._set(name, largest // 2)
                smaller = self.need()
                if smaller and (smaller.peak_bytes, smaller.flops) < (need.peak_bytes, need.flops):
                    break
                smaller = None
                for name in names:
                    self._set(name, largest)
            if smaller is None:
                rigid.add(alike[0])
                continue
            changed |= dict.fromkeys(names, largest // 2)
            need = smaller
        first = [name for name in changed if name not in weights]
        if need and not need.within(budget_bytes, budget_flops):
            limits = max(budget_bytes, int(SLACK * need.peak_bytes)), max(budget_flops, int(SLACK * need.flops))
            self._grow(changed, first, *limits)
            self._grow(changed, [name for name in changed if name in weights], *limits)
        elif len(first) < len(changed):
            self._grow(changed, first, budget_bytes, budget_flops)
        return {name: value for name, value in changed.items() if value != self.written[name]}

    def _grow(self, changed: dict[str, int], names: list[str], budget_bytes: int, budget_flops: int) -> None:
        """Double sizes that were halved, the smallest first, while that fits."""
        while names:
            least = min(changed[name] for name in names)
            alike = [name for name in names if changed[name] == least]
            for together in (alike[:1], alike):
                for name in together:
                    self._set(name, _halved_less(self.written[name], least))
                need = self.need()
                if need and need.within(budget_bytes, budget_flops):
                    changed |= {name: self._get(name) for name in together}
                    break
                for name in together:
                    self._set(name, least)
            else:
                names.remove(alike[0])
            names = [name for name in names if changed[name] < self.written[name]]

    def variable(self) -> tuple[str, ...]:
        """Sizes that may change while the weights stay: other shapes for the same task."""
        found = []
        weights = self._sizes("get_init_inputs")
        for name in self.written:
            value = self._get(name)
            if name in weights or value < 2:
                continue
            tried = []
            for other in (value + 1, value // 2):
                self._set(name, other)
                tried.append(self.need() is not None)
            self._set(name, value)
            if all(tried):
                found.append(name)
        return tuple(found)

    def _sizes(self, *functions: str) -> dict[str, int]:
        """Whole numbers of the file that these functions read; those of a tuple or list are named shape_0, shape_1.

        Where the file makes them of others, those others.
        """
        derived = {place.name if place.index is None else f"{place.name}_{place.index}" for place in self._derived}
        names: list[str] = []
        for function in functions:
            names += self._names_read(function, set())
        for place in reversed(self._derived):
            names += place.expression.co_names if place.name in names else ()
        sizes: dict[str, int] = {}
        for name in dict.fromkeys(names):
            value = getattr(self.namespace, name, None)
            if isinstance(value, tuple | list):
                sizes |= {f"{name}_{i}": part for i, part in enumerate(value) if _is_size(part)}
            elif _is_size(value):
                sizes[name] = value
        return {name: value for name, value in sizes.items() if name not in derived}

    def _names_read(self, function: str, seen: set[str]) -> list[str]:
        """Global names that a function of the file reads, and those it calls."""
        names = _names_read(getattr(getattr(self.namespace, function, None), "__code__", None))
        seen.add(function)
        for name in names.copy():
            if name not in seen and isinstance(getattr(self.namespace, name, None), types.FunctionType):
                names += self._names_read(name, seen)
        return names

    def _get(self, name: str) -> int:
        return self._sizes("get_inputs", "get_init_inputs")[name]

    def _set(self, name: str, value: int) -> None:
        """What the file makes of it changes too."""
        if hasattr(self.namespace, name):
            self._put(name, None, value)
        else:
            name, _, index = name.rpartition("_")
            self._put(name, int(index), value)
        for place in self._derived:
            with contextlib.suppress(Exception):  # the file's own expression
                self._put(place.name, place.index, eval(place.expression, vars(self.namespace)))

    def _put(self, name: str, index: int | None, value: Any) -> None:
        if index is not None:
            whole = getattr(self.namespace, name)
            value = type(whole)([*whole[:index], value, *whole[index + 1 :]])
        setattr(self.namespace, name, value)


@dataclass(frozen=True)
class _Derived:
    """A global name, or one part of a tuple, that a file makes of its other global names."""

    name: str
    index: int | None
    expression: types.CodeType


def _derived(text: bytes) -> list[_Derived]:
    """In the file's order; calls are not among them, since they may take long, or give something else again."""
    tree = ast.parse(text)
    assigned = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    found: list[_Derived] = []
    known: set[str] = set()

    def add(name: str, index: int | None, value: ast.expr) -> None:
        parts = list(ast.walk(value))
        reads = {part.id for part in parts if isinstance(part, ast.Name)}
        calls = any(isinstance(part, ast.Call | ast.Lambda | ast.NamedExpr) for part in parts)
        if assigned[name] == 1 and reads & known and not calls:
            found.append(_Derived(name, index, compile(ast.Expression(value), "<size>", "eval")))

    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            names = [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]
            parts = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else []
            if isinstance(target, ast.Name) and not parts:
                add(target.id, None, node.value)
            elif isinstance(target, ast.Name):
                for index, part in enumerate(parts):
                    add(target.id, index, part)
            elif len(names) == len(parts):
                for name, part in zip(names, parts, strict=True):
                    add(name, None, part)
            known |= set(names)
    return found


def _halved_less(written: int, value: int) -> int:
    """What a size was before it was halved to this value."""
    while written // 2 > value:
        written //= 2
    return written


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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


def _execute(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("kernelbench_task", path)
    assert spec and spec.loader
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            spec.loader.exec_module(namespace)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
        _raise_if_package(error)
        raise_if_memory(error)
        _raise_if_gpu(error)
        raise Refused(Readiness.IMPORT_ERROR, f"cannot be imported: {line_of(error)}") from None
    return namespace


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Turn what the file raises into a refusal."""
    try:
        yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the file's own
        _raise_if_package(error)
        raise_if_memory(error)
        _raise_if_gpu(error)
        raise Refused(Readiness.REFERENCE_FAILS, f"{what}: {line_of(error)}") from None


def _raise_if_package(error: BaseException) -> None:
    """Files import within their functions too."""
    if isinstance(error, ModuleNotFoundError):
        raise Refused(Readiness.NEEDS_PACKAGE, f"needs the package {error.name}") from None


def raise_if_memory(error: BaseException) -> None:
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        raise Refused(Readiness.TOO_LARGE, f"does not fit in memory: {line_of(error)}") from None


def _raise_if_gpu(error: BaseException) -> None:
    if "cuda" in str(error).lower() or "NVIDIA" in str(error):
        raise Refused(Readiness.NEEDS_GPU, f"runs on a GPU alone: {line_of(error)}") from None


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
