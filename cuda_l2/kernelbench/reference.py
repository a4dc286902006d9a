"""A file in KernelBench's format as a reference: run, checked for being one, with tolerances. Inside the sandbox."""

import contextlib
import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from cuda_l2.kernelbench.arguments import structure
from cuda_l2.kernelbench.examined import Effort, Examined, Readiness, Refused
from cuda_l2.kernelbench.file import Loaded, Need, clean, failing, is_symmetric, raise_if_memory, structured
from cuda_l2.records import DTYPE_BYTES, Operation, Tensor
from cuda_l2.system.text import line_of
from cuda_l2.tasks.tolerance import Bounds, bounds
from cuda_l2.tasks.values import Distribution, distributions
from cuda_l2.tasks.warm import warm_vector_math

OTHER_INPUTS = 4
"""Seeds of inputs whose results must all pass for the first ones' where a reference is called constant."""

MODULE_ATTRIBUTES = vars(nn.Module()).keys()

ROUNDINGS = 16
"""Steps of the type, at the largest result, by which equal runs may differ."""


@dataclass(frozen=True)
class Reference:
    """A model on its inputs as a function of named tensors, and the task that this is."""

    task: Operation
    function: Callable[..., tuple[torch.Tensor, ...]]
    tensors: dict[str, torch.Tensor]
    model: nn.Module
    inputs: list[Any]
    seconds: float  # of one run
    moves_buffers: bool
    keys: dict[str, str]  # of the module's state, by the names of the weights
    result: str  # structure of what forward returns

    def values(self) -> dict[str, Any]:
        """Inputs by name, numbers among them as numbers."""
        return {tensor.name: value for tensor, value in zip(self.task.inputs, self.inputs, strict=True)}

    def bounds(self) -> tuple[Bounds, ...]:
        try:
            return bounds(self.function, self.tensors)
        except Exception as error:  # noqa: BLE001 - whatever the module raises
            raise_if_memory(error)
            raise Refused(Readiness.NOT_EXACT, f"does not run in fp64: {line_of(error)}") from None


def reference(
    loaded: Loaded,
    name: str,
    revision: str,
    sizes: Mapping[str, int],
    seed: int,
    distribution: Distribution | None = None,
    weights_seed: int | None = None,
) -> Reference:
    """Run the model: twice with other random numbers, then as at first. Refused where that does not agree.

    weights_seed: of the module's weights, where not `seed`.
    """
    warm_vector_math()
    model = loaded.model(seed if weights_seed is None else weights_seed)
    inputs = loaded.inputs(seed + 1, distribution)
    before = {key: _copy_of(key, value) for key, value in model.state_dict().items()}
    start = time.perf_counter()
    output = _output(model, inputs, seed=1)
    first, result = _results(output), structure(output, torch.Tensor)
    seconds = time.perf_counter() - start
    moves = any(not _same(before[key], value) for key, value in model.state_dict().items())
    if not _all_near(first, _run(model, inputs, seed=2)):
        again = _run(model, inputs, seed=1)
        if _all_near(first, again):
            raise Refused(Readiness.RANDOM, "gives other results with other random numbers")
        raise Refused(Readiness.STATEFUL, f"gives another result when it runs again{_apart(first, again)}")
    model.load_state_dict(before)
    parameters = parameter_names(model, len(inputs))
    tensors = {parameters[i]: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    keys = {_free(key.replace(".", "_"), parameters): key for key in before}
    tensors |= {name: before[key].detach().clone() for name, key in keys.items()}

    def function(**given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        double = any(tensor.dtype == torch.float64 for tensor in given.values())
        arguments = [given.get(name, value) for name, value in zip(parameters, inputs, strict=True)]
        with _default_dtype(torch.float64 if double else torch.get_default_dtype()):
            state = {key: given[name] for name, key in keys.items()}
            with _attributes_kept(model, torch.float64 if double else None):
                return _results(torch.func.functional_call(model, state, tuple(arguments), tie_weights=False))

    task = Operation(
        name,
        tuple(sizes.items()),
        revision=revision,
        inputs=tuple(_tensor(n, value) for n, value in zip(parameters, inputs, strict=True)),
        weights=tuple(_tensor(n, tensors[n]) for n in keys),
        outputs=tuple(_tensor(_free(f"out{i or ''}", [*parameters, *keys]), value) for i, value in enumerate(first)),
        flops=loaded.flops(),
    )
    if not any(bool(value.isfinite().any()) for value in first):
        raise Refused(Readiness.REFERENCE_FAILS, "its reference gives no finite number")
    return Reference(task, function, tensors, model, inputs, seconds, moves, keys, result)


def changed(tensor: torch.Tensor, seed: int, *, wholly: bool, weight: bool = False) -> torch.Tensor:
    """Other real numbers in place of all or of one; zeros and symmetry that look meant stay. Refused where none.

    weight: zeros all over are where a bias begins, and as good as any number.
    """
    if not tensor.dtype.is_floating_point or not (weight or bool(tensor.any())):
        raise Refused(Readiness.UNSUPPORTED, "only real numbers can be changed")
    if not bool(tensor.any()):
        whole = torch.ones_like(tensor, memory_format=torch.contiguous_format)
        return whole if wholly else changed(whole, seed, wholly=False) - 1
    if wholly:
        return structured(tensor, 1 - tensor)
    new = tensor.clone(memory_format=torch.contiguous_format)
    places = new.flatten().nonzero().flatten()
    at = int(places[torch.randint(len(places), (), generator=torch.Generator().manual_seed(seed))])
    new.view(-1)[at] = 4 - 2 * new.view(-1)[at]
    return _mirrored(tensor, new, at)


def _mirrored(tensor: torch.Tensor, new: torch.Tensor, at: int) -> torch.Tensor:
    """Where the tensor is symmetric, the changed one is too."""
    if is_symmetric(tensor):
        row, column = divmod(at, tensor.shape[1])
        new[column, row] = new[row, column]
    return new


def examine(path: Path, name: str, revision: str, *, sizes: Mapping[str, int], seed: int, effort: Effort) -> Examined:
    """All that is to be known of a file before it is worked on; never raises but for a lack of memory in itself."""
    written: Need | None = None
    try:
        loaded = Loaded(path, sizes, effort.device)
        written = loaded.need()
        chosen = dict(sizes)
        if effort.budget_bytes and not sizes:
            chosen |= loaded.shrink(effort.budget_bytes, effort.budget_flops)
        need = loaded.need() if chosen else written
        most = effort.memory_bytes
        if need and need.peak_bytes > most:
            reason = f"takes about {need.peak_bytes / 2**30:.1f} GiB to verify, {most / 2**30:.1f} are allowed"
            raise Refused(Readiness.TOO_LARGE, reason)
        found = reference(loaded, name, revision, chosen, seed)
        allowed = found.bounds()
        for limit, result in zip(allowed, found.function(**_copied(found.tensors)), strict=True):
            wrong = limit.violation(result)
            if wrong:
                raise Refused(Readiness.REFERENCE_FAILS, f"its own result {wrong}")
        _refuse_kept(found, loaded, seed)
        if _is_constant(found, loaded, allowed, seed):
            errors = f"off by up to {max(limit.eager_max for limit in allowed):.2g}"
            reason = f"gives the same result whatever its inputs are, within its own rounding ({errors})"
            raise Refused(Readiness.CONSTANT, reason)
        return Examined(
            *(name, Readiness.READY, ""),
            task=found.task,
            written_bytes=written.given_bytes + written.made_bytes if written else 0,
            sizes=tuple((loaded.written | chosen).items()),
            variable=loaded.variable(),
            seconds=found.seconds,
            moves_buffers=found.moves_buffers,
            keeps_numbers=_keeps_numbers(found, loaded, seed),
            distributions=tuple(str(d) for d in distributions("float32") if _serves(found, loaded, seed, d)),
            eager_max=max(limit.eager_max for limit in allowed),
            max_allowed=max(limit.max_allowed for limit in allowed),
        )
    except Refused as refused:
        bytes_ = written.given_bytes + written.made_bytes if written else 0
        return Examined(name, refused.status, clean(refused.reason), written_bytes=bytes_)


def _remade(found: Reference, loaded: Loaded, seed: int) -> nn.Module:
    """A new module, made under a seed, with the state of the one that was run."""
    model = loaded.model(seed)
    with failing("its state cannot be set"):
        model.load_state_dict({key: found.tensors[name] for name, key in found.keys.items()})
    return model


def _keeps_numbers(found: Reference, loaded: Loaded, seed: int) -> bool:
    """Whether a module made under another seed gives something else with the same state."""
    other = _run(_remade(found, loaded, seed + 1), found.inputs, seed)
    return not _all_near(found.function(**_copied(found.tensors)), other)


def _is_constant(found: Reference, loaded: Loaded, allowed: Sequence[Bounds], seed: int) -> bool:
    """Whether results for other inputs pass for those of these: a kernel that computes nothing would be right."""
    tried = False
    for other in range(seed + 2, seed + 2 + OTHER_INPUTS):
        for distribution in (None, Distribution.NORMAL, Distribution.WIDE):
            inputs = loaded.inputs(other, distribution)
            if all(_equal(new, old) for new, old in zip(inputs, found.inputs, strict=False)):
                continue
            with contextlib.suppress(Refused):
                results = _run(found.model, inputs, seed)
                if len(results) != len(allowed):
                    return False
                if any(result.isnan().any() for result in results):
                    continue
                if any(limit.violation(result) for limit, result in zip(allowed, results, strict=True)):
                    return False
                tried = True
    return tried


def _refuse_kept(found: Reference, loaded: Loaded, seed: int) -> None:
    """Refused where the module that was run before gives something else for other inputs than a new one does."""
    inputs = loaded.inputs(seed + 2)
    if not _all_near(_run(found.model, inputs, seed), _run(_remade(found, loaded, seed), inputs, seed)):
        raise Refused(Readiness.STATEFUL, "gives another result where it ran on other inputs before")


def _serves(found: Reference, loaded: Loaded, seed: int, distribution: Distribution) -> bool:
    """Whether the reference gives finite numbers on these values."""
    try:
        results = _run(found.model, loaded.inputs(seed, distribution), seed)
    except Refused:
        return False
    return all(bool(result.isfinite().all()) for result in results)


def warm_up() -> None:
    """Load what PyTorch loads on first use, so that children of this process need not; starts no threads."""
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with FakeTensorMode():  # imports torch's compiler for its settings
        torch.empty(1)
    torch.func.functional_call(model, dict(model.state_dict()), (x,))


def _output(model: nn.Module, inputs: Sequence[Any], seed: int) -> Any:
    """The result of forward, as it is."""
    torch.manual_seed(seed)
    with failing("its reference fails"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(*[v.clone() if isinstance(v, torch.Tensor) else v for v in inputs])


def _run(model: nn.Module, inputs: Sequence[Any], seed: int) -> tuple[torch.Tensor, ...]:
    return _results(_output(model, inputs, seed))


def _copy_of(key: str, value: Any) -> torch.Tensor:
    """A copy of one part of a module's state."""
    if not isinstance(value, torch.Tensor):
        raise Refused(Readiness.UNSUPPORTED, f"its state {key} is a {type(value).__name__}, no tensor")
    if is_lazy(value):
        raise Refused(Readiness.UNSUPPORTED, f"its weight {key} has no shape before it runs")
    return value.clone()


def _results(output: Any) -> tuple[torch.Tensor, ...]:
    leaves = tree_leaves(output)
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves})) or "nothing"
        raise Refused(Readiness.UNSUPPORTED, f"gives {kinds}, not tensors alone")
    return tuple(_real(leaf.detach()).clone() for leaf in leaves)  # it may lie in what the module keeps


def _real(value: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts of a complex tensor in a last dimension of 2; any other as it is."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def _tensor(name: str, value: Any) -> Tensor:
    """A number is a tensor of rank 0."""
    value = torch.as_tensor(value)
    dtype = str(value.dtype).removeprefix("torch.")
    if value.is_complex():
        reason = f"{name} is of {dtype}: inputs and weights are real; take real and imaginary parts instead"
        raise Refused(Readiness.UNSUPPORTED, reason)
    if dtype not in DTYPE_BYTES:
        raise Refused(Readiness.UNSUPPORTED, f"{name} is of {dtype}")
    return Tensor(name, dtype, tuple(value.shape))


def parameter_names(model: nn.Module, count: int) -> list[str]:
    """Names of forward's parameters in order; numbered where it does not name them."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]
    return [named[i] if i < len(named) else f"input{i}" for i in range(count)]


def _free(name: str, taken: Sequence[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _equal(a: Any, b: Any) -> bool:
    """Whether two inputs, tensors or numbers, are equal."""
    return _same(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


def _same(a: torch.Tensor, b: torch.Tensor, step: float = 0.0) -> bool:
    """Equal, or no further apart than a step, a NaN to a NaN too."""
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=step, equal_nan=True).all())


def _all_near(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(_near(x, y) for x, y in zip(a, b, strict=True))


def _apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> str:
    """By how much, where that can be said."""
    if [x.shape for x in a] != [x.shape for x in b]:
        return ""
    apart = [float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True) if x.numel()]
    return f", up to {max(apart):.3g} apart" if apart else ""


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal but for rounding: sums on several threads need not be the same bit for bit."""
    if a.shape != b.shape or not a.dtype.is_floating_point or not a.isfinite().any():
        return _same(a, b)
    return _same(a, b, ROUNDINGS * torch.finfo(a.dtype).eps * float(a[a.isfinite()].abs().max()))


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: copy.deepcopy(tensor) for name, tensor in tensors.items()}


@contextlib.contextmanager
def _attributes_kept(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Attributes of a module beside its state, a hidden state say, are restored afterwards; in between of this type."""
    copies: dict[int, Any] = {}  # what two parts share they go on to share

    def copied(value: Any) -> Any:
        if id(value) not in copies:
            copies[id(value)] = value
            if isinstance(value, torch.Tensor) and dtype and value.dtype.is_floating_point:
                copies[id(value)] = value.to(dtype)
            elif type(value) in (list, tuple):
                copies[id(value)] = type(value)(map(copied, value))
            elif type(value) is dict:
                copies[id(value)] = {key: copied(part) for key, part in value.items()}
        return copies[id(value)]

    before = []
    for part in model.modules():
        kept = {name: value for name, value in vars(part).items() if name not in MODULE_ATTRIBUTES}
        buffers = {name: value for name, value in part._buffers.items() if name in part._non_persistent_buffers_set}
        before.append((part, kept, buffers))
    try:
        for part, kept, buffers in before:
            vars(part).update({name: copied(value) for name, value in kept.items()})
            part._buffers.update({name: copied(value) for name, value in buffers.items()})
        yield
    finally:
        for part, kept, buffers in before:
            for name in vars(part).keys() - kept.keys() - MODULE_ATTRIBUTES:
                del vars(part)[name]
            vars(part).update(kept)
            part._buffers.update(buffers)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The type of tensors that the module makes without naming one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
