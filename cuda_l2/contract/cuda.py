"""The contract of a CUDA candidate, and the plan it gives for one shape on one device.

A candidate is device code; this text says what our runtime allocates, encodes and launches for it. Everything is
data: expressions over m, n, k or a task's own sizes, the device's number of multiprocessors (sms) and names the
contract defines. docs/contract.md specifies every field. Limits are those of the CUDA driver API
(cuTensorMapEncodeTiled, cuLaunchKernelEx) and are checked here, so that a wrong contract is refused with a reason and
not by an error code.
"""

import functools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, TypeVar

from cuda_l2.contract.buffers import GEMM, Interface
from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.records import Layout, Task
from cuda_l2.system.text import counted

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""The least architecture a candidate asks for; an `a` one runs on that generation alone."""
LAYOUTS = tuple(Layout)
"""Layouts of B that a candidate may read."""
SCALARS = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f"}
TABLE_DTYPES = {"uint8": "B", "uint16": "H", "int32": "i", "uint32": "I"}
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "uint16": 2, "float32": 4, "uint32": 4, "int32": 4, "uint8": 1}
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
MAX_THREADS = 1024
MAX_CLUSTER = 16
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
MAX_PARAMETER_BYTES = 32764
MAX_TABLE_BYTES = 16384
MAX_TABLE_TEXT = 1 << 19
"""Entries of a table times characters of its expression: the trusted process makes the plan."""
TENSOR_MAP_BYTES = 128
Size = TypeVar("Size", str, int)
"""An expression in a contract, a number in a plan."""


@dataclass(frozen=True, slots=True)
class Workspace(Generic[Size]):
    """Device memory beside the operands: garbage on entry, or persistent, that is filled once, found and left so."""

    name: str
    bytes: Size
    persistent: bool = False
    fill: int = 0  # 32-bit word


@dataclass(frozen=True, slots=True)
class Table:
    """Constants passed by value as `const __grid_constant__ struct`: value(i) for i below length."""

    name: str
    dtype: str
    length: str
    value: str


@dataclass(frozen=True, slots=True)
class TensorMap(Generic[Size]):
    """A CUtensorMap over an operand or a workspace, dimensions innermost first."""

    name: str
    tensor: str
    dims: tuple[Size, ...]
    strides: tuple[Size, ...]  # bytes, of every dimension but the innermost
    box: tuple[Size, ...]
    element_strides: tuple[Size, ...]
    dtype: str = "float16"
    swizzle: str = "none"
    interleave: str = "none"
    l2_promotion: str = "none"
    out_of_bounds: str = "zeros"


@dataclass(frozen=True, slots=True)
class Argument:
    """name: of the pointer, tensor_map or table; of a scalar the expression.

    data: in a plan, the bytes of a table or scalar in hexadecimal.
    """

    kind: str
    name: str
    data: str = ""


@dataclass(frozen=True, slots=True)
class Launch(Generic[Size]):
    """One kernel launch. Grids count blocks, also where blocks form clusters; each has three sizes."""

    kernel: str
    grid: tuple[Size, ...]
    block: tuple[Size, ...]
    cluster: tuple[Size, ...]
    shared_bytes: Size
    arguments: tuple[Argument, ...]
    coresident: bool = False
    programmatic: bool = False


MapPlan = TensorMap[int]
LaunchPlan = Launch[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the runtime does for one shape: every expression of a contract evaluated. Plain data."""

    workspaces: tuple[Workspace[int], ...]
    tensor_maps: tuple[MapPlan, ...]
    launches: tuple[LaunchPlan, ...]

    @property
    def workspace_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.workspaces)

    @property
    def programmatic(self) -> bool:
        """Whether any launch may begin before the one ahead of it has ended."""
        return any(launch.programmatic for launch in self.launches)


@dataclass(frozen=True)
class CudaContract:
    """What the runtime must know to launch a CUDA candidate."""

    arch: str
    names: tuple[tuple[str, str], ...]
    workspaces: tuple[Workspace[str], ...]
    tables: tuple[Table, ...]
    tensor_maps: tuple[TensorMap[str], ...]
    launches: tuple[Launch[str], ...]
    layouts: tuple[str, ...] = LAYOUTS
    interface: Interface = GEMM
    constant: tuple[str, ...] = ()
    """Inputs that a dependent launch may read before it waits for the launch before it."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels launched, each once."""
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))

    @property
    def programmatic(self) -> bool:
        """Whether any launch may begin before the one ahead of it has ended."""
        return any(launch.programmatic for launch in self.launches)

    def plan(self, task: Task, sms: int) -> Plan:
        """Evaluate every expression for one task on a device with this number of multiprocessors.

        ContractError where a result breaks a limit, or the task's tensors are not the ones declared.
        """
        values = {**self.interface.bind(task), "sms": sms}
        self._require_layout(task)
        for name, expression in self.names:
            values[name] = evaluate(expression, values)
        tables = {table.name: _table_bytes(table, values) for table in self.tables}
        return Plan(
            tuple(Workspace(w.name, evaluate(w.bytes, values), w.persistent, w.fill) for w in self.workspaces),
            tuple(_map_plan(tensor_map, values) for tensor_map in self.tensor_maps),
            tuple(_launch_plan(launch, values, tables) for launch in self.launches),
        )

    def _require_layout(self, task: Task) -> None:
        """ContractError where the kernel does not read B as it lies."""
        layout = Layout.TN if any(tensor.column_major for tensor in task.given) else Layout.NN
        if layout not in self.layouts:
            shape = "x".join(str(size) for _, size in task.sizes)
            raise ContractError(
                f"the kernel reads B as {' or '.join(self.layouts)} alone, as its contract says;"
                f" the shape has {layout}: write {shape}:{self.layouts[0]}"
            )


def _table_bytes(table: Table, values: Mapping[str, int]) -> str:
    code = TABLE_DTYPES[table.dtype]
    length = evaluate(table.length, values)
    if not 1 <= length * struct.calcsize(code) <= MAX_TABLE_BYTES:
        has = counted(length, "entry", "entries")
        raise ContractError(f"the table {table.name} has {has}; it must take 1 to {MAX_TABLE_BYTES} bytes")
    if length * len(table.value) > MAX_TABLE_TEXT:
        raise ContractError(f"the table {table.name} is too long for its expression: {length} entries")
    try:
        return _entries(table.value, length, code, tuple(values.items()))
    except struct.error:
        raise ContractError(f"an entry of the table {table.name} does not fit {table.dtype}") from None


@functools.lru_cache(maxsize=64)
def _entries(value: str, length: int, code: str, names: tuple[tuple[str, int], ...]) -> str:
    """A table's bytes. Kept, since the launches of one shape that tuning tries share their tables."""
    known = dict(names)
    return struct.pack(f"<{length}{code}", *(evaluate(value, {**known, "i": i}) for i in range(length))).hex()


def _numbers(values: Mapping[str, int], *lists: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The value of each expression of each list."""
    return (tuple(evaluate(expression, values) for expression in expressions) for expressions in lists)


def _map_plan(tensor_map: TensorMap[str], values: Mapping[str, int]) -> MapPlan:
    lists = tensor_map.dims, tensor_map.strides, tensor_map.box, tensor_map.element_strides
    dims, strides, box, element_strides = _numbers(values, *lists)

    def fail(what: str) -> NoReturn:
        raise ContractError(f"the tensor map {tensor_map.name} cannot be encoded: {what}")

    if not all(1 <= dim <= 1 << 32 for dim in dims):
        fail(f"dims {dims} must lie between 1 and 2^32")
    if not all(stride % 16 == 0 and 0 < stride < 1 << 40 for stride in strides):
        fail(f"strides {strides} must be multiples of 16 bytes below 2^40")
    if not all(1 <= size <= 256 for size in box):
        fail(f"box {box} must lie between 1 and 256 a side")
    if not all(1 <= step <= 8 for step in element_strides):
        fail(f"element_strides {element_strides} must lie between 1 and 8")
    inner, span = box[0] * ELEMENT_BYTES[tensor_map.dtype], SWIZZLE_BYTES[tensor_map.swizzle]
    if tensor_map.interleave == "none" and inner % 16:
        fail(f"the box's inner side takes {inner} bytes, which must be a multiple of 16")
    if span and inner > span:
        fail(f"the box's inner side takes {inner} bytes; a {tensor_map.swizzle} swizzle allows {span}")
    return TensorMap(
        *(tensor_map.name, tensor_map.tensor, dims, strides, box, element_strides, tensor_map.dtype),
        *(tensor_map.swizzle, tensor_map.interleave, tensor_map.l2_promotion, tensor_map.out_of_bounds),
    )


def _launch_plan(launch: Launch[str], values: Mapping[str, int], tables: Mapping[str, str]) -> LaunchPlan:
    grid, block, cluster = _numbers(values, launch.grid, launch.block, launch.cluster)

    def fail(what: str) -> NoReturn:
        raise ContractError(f"{launch.kernel} cannot be launched: {what}")

    if not all(1 <= size <= limit for size, limit in zip(grid, MAX_GRID, strict=True)):
        fail(f"a grid of {grid} blocks; limits {MAX_GRID}")
    threads, blocks = block[0] * block[1] * block[2], cluster[0] * cluster[1] * cluster[2]
    if not 1 <= threads <= MAX_THREADS:
        fail(f"a block of {block} is {threads} threads; limit {MAX_THREADS}")
    if not 1 <= blocks <= MAX_CLUSTER:
        fail(f"a cluster of {cluster} is {blocks} blocks; limit {MAX_CLUSTER}")
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        fail(f"the grid {grid} is not a multiple of the cluster {cluster}")
    arguments = tuple(_argument_plan(argument, values, tables) for argument in launch.arguments)
    size = sum(
        8 if a.kind == "pointer" else TENSOR_MAP_BYTES if a.kind == "tensor_map" else len(a.data) // 2
        for a in arguments
    )
    if size > MAX_PARAMETER_BYTES:
        fail(f"{size} bytes of parameters; limit {MAX_PARAMETER_BYTES}")
    return Launch(
        *(launch.kernel, grid, block, cluster, evaluate(launch.shared_bytes, values), arguments),
        *(launch.coresident, launch.programmatic),
    )


def _argument_plan(argument: Argument, values: Mapping[str, int], tables: Mapping[str, str]) -> Argument:
    if argument.kind in ("pointer", "tensor_map"):
        return argument
    if argument.kind == "table":
        return replace(argument, data=tables[argument.name])
    value = evaluate(argument.name, values)
    try:
        data = struct.pack(f"<{SCALARS[argument.kind]}", value)
    except struct.error:
        raise ContractError(f"{argument.name!r} is {value}, which does not fit {argument.kind}") from None
    return replace(argument, data=data.hex())
