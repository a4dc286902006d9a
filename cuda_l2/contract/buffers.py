"""The tensors that a candidate takes, by name: what its contract declares, held against a task.

    sizes = ["groups"]

    [[buffer]]
    name = "x"
    dtype = "float32"
    shape = ["rows", "groups * columns"]

    [[buffer]]
    name = "out"
    dtype = "float32"
    shape = ["rows"]
    kind = "output"

A dimension that is a name alone takes its value from the task's tensor, everywhere the same one; `sizes` names those
that the task itself has. A contract without buffers is that of a matrix product: a, b and c, of float16 unless it says
dtype = "bfloat16".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.records import DTYPE_BYTES, SHORT_DTYPES, Task

KINDS = ("input", "weight", "output")
RESERVED = ("sms", "threads", "i", "min", "max", "cdiv")
"""Names that expressions have from elsewhere."""
MAX_BUFFERS = 128
MAX_RANK = 8
_NAME = re.compile(r"[A-Za-z_]\w{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A row-major tensor; dimensions outermost first, none for a single number. Only outputs may be written."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    kind: str = "input"


@dataclass(frozen=True, slots=True)
class Interface:
    """All that a candidate is given. own_sizes: names of sizes that the task defines beside its tensors."""

    buffers: tuple[Buffer, ...]
    own_sizes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers."""
        return tuple(buffer.name for buffer in self.buffers)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Names that expressions may use: the task's own sizes, then dimensions in the order they appear."""
        dims = (dim for buffer in self.buffers for dim in buffer.shape if _NAME.fullmatch(dim))
        return tuple(dict.fromkeys((*self.own_sizes, *dims)))

    def bind(self, task: Task) -> dict[str, int]:
        """The sizes' values for a task, in the order of `sizes`, a matrix product's as m, n and k.

        ContractError where the task's tensors are not the ones declared.
        """
        if task.product:
            if self not in PRODUCTS.values():
                raise ContractError(
                    f"the contract declares the buffers {', '.join(self.names)};"
                    " a matrix product's are a, b and c, declared by leaving [[buffer]] out"
                )
            if self == PRODUCTS[task.dtype]:
                return dict(task.sizes)
        given = dict(task.sizes)
        values: dict[str, int] = {}
        for name in self.own_sizes:
            if name not in given:
                raise ContractError(f"the task {task} has no size {name}; it has {_listed(list(given))}")
            values[name] = given[name]
        tensors = {
            tensor.name: (kind, tensor)
            for kind, group in zip(KINDS, (task.inputs, task.weights, task.outputs), strict=True)
            for tensor in group
        }
        for buffer in self.buffers:
            if buffer.name not in tensors:
                raise ContractError(f"the task {task} has no tensor {buffer.name}; it has {_listed(list(tensors))}")
            kind, tensor = tensors[buffer.name]
            if (buffer.kind, buffer.dtype, len(buffer.shape)) != (kind, tensor.dtype, len(tensor.shape)):
                declared = f"{buffer.kind} {buffer.name} of {buffer.dtype} and rank {len(buffer.shape)}"
                raise ContractError(f"the contract declares the {declared}; the task has the {kind} {tensor}")
            for dim, size in zip(buffer.shape, tensor.shape, strict=True):
                if _NAME.fullmatch(dim) and values.setdefault(dim, size) != size:
                    raise ContractError(f"{dim} is {values[dim]}, but {size} in {tensor}")
        for buffer in self.buffers:
            shape = tuple(evaluate(dim, values) for dim in buffer.shape)
            if shape != tensors[buffer.name][1].shape:
                raise ContractError(
                    f"{buffer.name} is declared as {list(shape)}; the task has {tensors[buffer.name][1]}"
                )
        missing = [tensor.name for tensor in task.outputs if tensor.name not in self.names]
        if missing:
            raise ContractError(f"the contract declares no output {_listed(missing)}")
        return values


def _product(dtype: str) -> Interface:
    b = Buffer("b", dtype, ("k", "n"))  # as logical rows and columns; the shape's layout says how it lies
    return Interface((Buffer("a", dtype, ("m", "k")), b, Buffer("c", dtype, ("m", "n"), "output")))


PRODUCTS = {dtype: _product(dtype) for dtype in SHORT_DTYPES}
"""Interfaces of matrix products by element type: those of contracts that declare no buffers."""
GEMM = PRODUCTS["float16"]


def take(fields: dict[str, Any]) -> tuple[Interface, dict[str, Any]]:
    """The interface that a contract's fields declare, and the other fields; ContractError where it cannot be."""
    rest = dict(fields)
    listed, own_sizes, dtype = rest.pop("buffer", None), rest.pop("sizes", []), rest.pop("dtype", None)
    if listed is None:
        if own_sizes:
            raise ContractError("sizes: only a contract with [[buffer]] entries has sizes of its own")
        if dtype is not None and dtype not in list(PRODUCTS):
            raise ContractError(f"dtype must be one of {', '.join(PRODUCTS)}, not {dtype!r}")
        return PRODUCTS[dtype or "float16"], rest
    if dtype is not None:
        raise ContractError("dtype: each [[buffer]] has its own")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_BUFFERS:
        raise ContractError(f"write 1 to {MAX_BUFFERS} [[buffer]] entries, with double brackets")
    if not isinstance(own_sizes, list):
        raise ContractError("sizes must be a list of names")
    interface = Interface(
        tuple(_buffer(item, f"[[buffer]] {index + 1}") for index, item in enumerate(listed)),
        tuple(identifier(size, "sizes") for size in own_sizes),
    )
    taken = list(RESERVED)
    for name in (*interface.sizes, *interface.names):
        if name in taken:
            raise ContractError(f"the name {name} is used twice or reserved")
        taken.append(name)
    if not any(buffer.kind == "output" for buffer in interface.buffers):
        raise ContractError('no [[buffer]] has kind = "output"')
    ones = dict.fromkeys(interface.sizes, 1)
    for buffer in interface.buffers:
        for dim in buffer.shape:
            _check(dim, ones, buffer.name)
    return interface, rest


def _buffer(item: Any, where: str) -> Buffer:
    if not isinstance(item, Mapping):
        raise ContractError(f"{where} must be a table")
    fields = dict(item)
    name, dtype = identifier(fields.pop("name", None), f"{where}: name"), fields.pop("dtype", "float32")
    shape, kind = fields.pop("shape", None), fields.pop("kind", "input")
    if dtype not in DTYPE_BYTES:
        raise ContractError(f"{where}: dtype must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    if kind not in KINDS:
        raise ContractError(f"{where}: kind must be one of {', '.join(KINDS)}, not {kind!r}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK:
        raise ContractError(f"{where}: shape must be a list of at most {MAX_RANK} numbers or expressions")
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, int | str) or dim == "":
            raise ContractError(f"{where}: shape: {dim!r} is neither a whole number nor an expression in quotes")
    if fields:
        raise ContractError(f"{where}: unknown fields: {', '.join(sorted(fields))}")
    return Buffer(name, dtype, tuple(str(dim).strip() for dim in shape), kind)


def _check(dim: str, ones: Mapping[str, int], buffer: str) -> None:
    """ContractError where an expression cannot be read. With every size 1 it may still divide by zero."""
    try:
        evaluate(dim, ones)
    except ContractError as error:
        if "divides by zero" not in str(error) and "negative" not in str(error):
            raise ContractError(f"{buffer}: {error}") from None


def identifier(value: Any, where: str) -> str:
    """A name that C takes; ContractError for anything else."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ContractError(f"{where} must be a C identifier, not {value!r}")
    return value


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
