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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.contract.fields import NAME, Fields
from cuda_l2.records import DTYPE_BYTES, SHORT_DTYPES, Task

KINDS = ("input", "weight", "output")
RESERVED = ("sms", "threads", "i", "min", "max", "cdiv")
"""Names that expressions have from elsewhere."""
MAX_BUFFERS = 128
MAX_RANK = 8


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
        dims = (dim for buffer in self.buffers for dim in buffer.shape if NAME.fullmatch(dim))
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
            if self != PRODUCTS[task.dtype]:
                raise ContractError(
                    f"the contract declares elements of {self.buffers[0].dtype}, {task} has others: the header needs"
                    f' dtype = "{task.dtype}"'
                )
            return dict(task.sizes)
        given = dict(task.sizes)
        values: dict[str, int] = {}
        for name in self.own_sizes:
            if name not in given:
                raise ContractError(f"the task {task} has no size {name}; it has {_listed(list(given))}")
            values[name] = given[name]
        tensors = {tensor.name: (kind, tensor) for kind, tensor in task.parts}
        for buffer in self.buffers:
            if buffer.name not in tensors:
                raise ContractError(f"the task {task} has no tensor {buffer.name}; it has {_listed(list(tensors))}")
            kind, tensor = tensors[buffer.name]
            if (buffer.kind, buffer.dtype, len(buffer.shape)) != (kind, tensor.dtype, len(tensor.shape)):
                declared = f"{buffer.kind} {buffer.name} of {buffer.dtype} and rank {len(buffer.shape)}"
                raise ContractError(f"the contract declares the {declared}; the task has the {kind} {tensor}")
            for dim, size in zip(buffer.shape, tensor.shape, strict=True):
                if NAME.fullmatch(dim) and values.setdefault(dim, size) != size:
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


def take(reader: Fields) -> Interface:
    """The interface that a contract's fields declare, taken off them; ContractError where it cannot be."""
    own_sizes = reader.pop("sizes", [])
    if not reader.has("buffer"):
        if own_sizes:
            reader.fail("sizes: only a contract with [[buffer]] entries has sizes of its own")
        return PRODUCTS[reader.one_of("dtype", list(PRODUCTS), "float16")]
    if reader.has("dtype"):
        reader.fail("dtype: each [[buffer]] has its own")
    listed = reader.list_of("buffer")
    if not 1 <= len(listed) <= MAX_BUFFERS:
        reader.fail(f"write 1 to {MAX_BUFFERS} [[buffer]] entries")
    if not isinstance(own_sizes, list):
        reader.fail("sizes must be a list of names")
    interface = Interface(tuple(map(_buffer, listed)), tuple(reader.identifier(size, "sizes") for size in own_sizes))
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
    return interface


def _buffer(reader: Fields) -> Buffer:
    buffer = Buffer(
        reader.name("name"),
        reader.one_of("dtype", list(DTYPE_BYTES), "float32"),
        reader.expressions("shape", range(MAX_RANK + 1)),
        reader.one_of("kind", KINDS, "input"),
    )
    reader.finish()
    return buffer


def _check(dim: str, ones: Mapping[str, int], buffer: str) -> None:
    """ContractError where an expression cannot be read. With every size 1 it may still divide by zero."""
    try:
        evaluate(dim, ones)
    except ContractError as error:
        if "divides by zero" not in str(error) and "negative" not in str(error):
            raise ContractError(f"{buffer}: {error}") from None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
