"""The contract of a CUDA candidate, and the plan it gives for one shape on one device.

A candidate is device code; this text says what our runtime allocates, encodes and launches for it. Everything is
data: expressions over m, n, k, the device's number of multiprocessors (sms) and names the contract defines.
docs/contract.md specifies every field. Limits are those of the CUDA driver API (cuTensorMapEncodeTiled,
cuLaunchKernelEx) and are checked here, so that a wrong contract is refused with a reason and not by an error code.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cuda_l2.contract.expressions import ContractError, evaluate

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""The least architecture a candidate asks for; an `a` one runs on that generation alone."""
TENSORS = ("a", "b", "c")
SIZES = ("m", "n", "k")
SCALARS = {"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f"}
TABLE_DTYPES = {"uint8": "B", "uint16": "H", "int32": "i", "uint32": "I"}
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "uint16": 2, "float32": 4, "uint32": 4, "int32": 4, "uint8": 1}
SWIZZLE_BYTES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}
INTERLEAVES = ("none", "16B", "32B")
PROMOTIONS = ("none", "64B", "128B", "256B")
OUT_OF_BOUNDS = ("zeros", "nan")
EDGES = ("plain", "programmatic")
MAX_LAUNCHES = 16
MAX_WORKSPACES = 16
MAX_THREADS = 1024
MAX_CLUSTER = 16
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
MAX_PARAMETER_BYTES = 32764
MAX_TABLE_BYTES = 16384
MAX_TABLE_TEXT = 1 << 19
"""Entries of a table times characters of its expression: the trusted process makes the plan."""
TENSOR_MAP_BYTES = 128
_NAME = re.compile(r"[A-Za-z_]\w{0,62}")


@dataclass(frozen=True, slots=True)
class Workspace:
    """Device memory beside the operands. scratch: garbage on entry. persistent: filled once, found and left so."""

    name: str
    bytes: str
    kind: str = "scratch"
    fill: int = 0  # 32-bit word


@dataclass(frozen=True, slots=True)
class Table:
    """Constants passed by value as `const __grid_constant__ struct`: value(i) for i below length."""

    name: str
    dtype: str
    length: str
    value: str


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A CUtensorMap over an operand or a workspace, dimensions innermost first."""

    name: str
    tensor: str
    dims: tuple[str, ...]
    strides: tuple[str, ...]  # bytes, of every dimension but the innermost
    box: tuple[str, ...]
    element_strides: tuple[str, ...]
    dtype: str = "float16"
    swizzle: str = "none"
    interleave: str = "none"
    l2_promotion: str = "none"
    out_of_bounds: str = "zeros"


@dataclass(frozen=True, slots=True)
class Argument:
    """pointer, tensor_map and table name what is passed; scalar kinds hold an expression."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch. Grids count blocks, also where blocks form clusters."""

    kernel: str
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    cluster: tuple[str, str, str]
    shared_bytes: str
    arguments: tuple[Argument, ...]
    coresident: bool = False
    edge: str = "plain"


@dataclass(frozen=True, slots=True)
class MapPlan:
    """A tensor map with its numbers."""

    name: str
    tensor: str
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str
    interleave: str
    l2_promotion: str
    out_of_bounds: str


@dataclass(frozen=True, slots=True)
class WorkspacePlan:
    name: str
    bytes: int
    persistent: bool
    fill: int


@dataclass(frozen=True, slots=True)
class ArgumentPlan:
    """pointer and tensor_map: the name. Others: the bytes to pass, in hexadecimal, and their alignment."""

    kind: str
    name: str = ""
    data: str = ""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared_bytes: int
    arguments: tuple[ArgumentPlan, ...]
    coresident: bool
    programmatic: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What the runtime does for one shape: every expression of a contract evaluated. Plain data."""

    workspaces: tuple[WorkspacePlan, ...]
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
    workspaces: tuple[Workspace, ...]
    tables: tuple[Table, ...]
    tensor_maps: tuple[TensorMap, ...]
    launches: tuple[Launch, ...]

    @property
    def kernels(self) -> tuple[str, ...]:
        """The kernels launched, each once."""
        return tuple(dict.fromkeys(launch.kernel for launch in self.launches))

    @property
    def programmatic(self) -> bool:
        """Whether any launch may begin before the one ahead of it has ended."""
        return any(launch.edge == "programmatic" for launch in self.launches)

    def plan(self, m: int, n: int, k: int, sms: int) -> Plan:
        """Evaluate every expression for one shape; ContractError where a result breaks a limit."""
        values = {"m": m, "n": n, "k": k, "sms": sms}
        for name, expression in self.names:
            values[name] = evaluate(expression, values)
        tables = {table.name: _table_bytes(table, values) for table in self.tables}
        return Plan(
            tuple(
                WorkspacePlan(w.name, evaluate(w.bytes, values), w.kind == "persistent", w.fill)
                for w in self.workspaces
            ),
            tuple(_map_plan(tensor_map, values) for tensor_map in self.tensor_maps),
            tuple(_launch_plan(launch, values, tables) for launch in self.launches),
        )


def parse(fields: dict[str, Any]) -> CudaContract:
    """The contract from its fields, target taken off; ContractError where they cannot be."""
    reader = _Fields(fields, "the contract")
    arch = reader.one_of("arch", ARCHITECTURES)
    names = tuple((_name(name, "names"), _expression(value, f"names.{name}")) for name, value in reader.table("names"))
    workspaces = tuple(_workspace(item) for item in reader.list_of("workspace"))
    tables = tuple(_table(item) for item in reader.list_of("table"))
    maps = tuple(_tensor_map(item, [w.name for w in workspaces]) for item in reader.list_of("tensor_map"))
    taken = [*TENSORS, *SIZES, "sms", "i"]
    defined = [name for name, _ in names] + [w.name for w in workspaces] + [t.name for t in tables]
    for name in defined + [tensor_map.name for tensor_map in maps]:
        if name in taken:
            raise ContractError(f"the name {name} is used twice or reserved")
        taken.append(name)
    kinds = dict.fromkeys((*TENSORS, *(w.name for w in workspaces)), "pointer")
    kinds |= {table.name: "table" for table in tables} | {item.name: "tensor_map" for item in maps}
    launches = tuple(_launch(item, kinds) for item in reader.list_of("launch"))
    if len(workspaces) > MAX_WORKSPACES:
        raise ContractError(f"the contract has {len(workspaces)} workspaces; at most {MAX_WORKSPACES}")
    if not 1 <= len(launches) <= MAX_LAUNCHES:
        raise ContractError(f"the contract needs between 1 and {MAX_LAUNCHES} [[launch]] entries")
    reader.finish()
    return CudaContract(arch, names, workspaces, tables, maps, launches)


class _Fields:
    """Typed access to one TOML table; what is left over at the end is an error."""

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise ContractError(f"{where} must be a table")
        self.fields, self.where = dict(fields), where

    def fail(self, what: str) -> NoReturn:
        raise ContractError(f"{self.where}: {what}")

    def one_of(self, key: str, values: Sequence[str], default: str | None = None) -> str:
        value = self.fields.pop(key, default)
        if value not in values:
            self.fail(f"{key} must be one of {', '.join(values)}" + ("" if value is None else f", not {value!r}"))
        return str(value)

    def name(self, key: str) -> str:
        return _name(self.fields.pop(key, None), f"{self.where}: {key}")

    def boolean(self, key: str) -> bool:
        value = self.fields.pop(key, False)
        if not isinstance(value, bool):
            self.fail(f"{key} must be true or false")
        return bool(value)

    def expression(self, key: str, default: int | None = None) -> str:
        return _expression(self.fields.pop(key, default), f"{self.where}: {key}")

    def expressions(self, key: str, count: range, default: Sequence[int] | None = None) -> tuple[str, ...]:
        values = self.fields.pop(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) not in count:
            self.fail(f"{key} must be a list of {_count(count)} numbers or expressions")
        return tuple(_expression(value, f"{self.where}: {key}") for value in values)

    def table(self, key: str) -> list[tuple[str, Any]]:
        value = self.fields.pop(key, {})
        if not isinstance(value, dict):
            self.fail(f"[{key}] must be a table")
        return list(value.items())

    def list_of(self, key: str) -> list["_Fields"]:
        values = self.fields.pop(key, [])
        if not isinstance(values, list):
            self.fail(f"write [[{key}]] with double brackets")
        return [_Fields(value, f"[[{key}]] {index + 1}") for index, value in enumerate(values)]

    def finish(self) -> None:
        if self.fields:
            self.fail(f"unknown fields: {', '.join(sorted(self.fields))}")


def _workspace(reader: _Fields) -> Workspace:
    name, size = reader.name("name"), reader.expression("bytes")
    kind = reader.one_of("kind", ("scratch", "persistent"), "scratch")
    fill = reader.fields.pop("fill", 0)
    if not isinstance(fill, int) or isinstance(fill, bool) or not 0 <= fill < 1 << 32:
        reader.fail("fill must be a 32-bit word")
    if fill and kind == "scratch":
        reader.fail("only a persistent workspace is filled")
    reader.finish()
    return Workspace(name, size, kind, fill)


def _table(reader: _Fields) -> Table:
    table = Table(
        reader.name("name"),
        reader.one_of("dtype", tuple(TABLE_DTYPES), "uint16"),
        reader.expression("length"),
        reader.expression("value"),
    )
    reader.finish()
    return table


def _tensor_map(reader: _Fields, workspaces: Sequence[str]) -> TensorMap:
    name = reader.name("name")
    tensor = reader.one_of("tensor", (*TENSORS, *workspaces))
    dims = reader.expressions("dims", range(1, 6))
    rank = len(dims)
    same, less = range(rank, rank + 1), range(rank - 1, rank)
    tensor_map = TensorMap(
        name=name,
        tensor=tensor,
        dims=dims,
        strides=reader.expressions("strides", less),
        box=reader.expressions("box", same),
        element_strides=reader.expressions("element_strides", same, [1] * rank),
        dtype=reader.one_of("dtype", tuple(ELEMENT_BYTES), "float16"),
        swizzle=reader.one_of("swizzle", tuple(SWIZZLE_BYTES), "none"),
        interleave=reader.one_of("interleave", INTERLEAVES, "none"),
        l2_promotion=reader.one_of("l2_promotion", PROMOTIONS, "none"),
        out_of_bounds=reader.one_of("out_of_bounds", OUT_OF_BOUNDS, "zeros"),
    )
    reader.finish()
    return tensor_map


def _launch(reader: _Fields, kinds: Mapping[str, str]) -> Launch:
    arguments = reader.fields.pop("args", None)
    if not isinstance(arguments, list):
        reader.fail("args must be a list, in the order of the kernel's parameters")
    launch = Launch(
        kernel=reader.name("kernel"),
        grid=_three(reader.expressions("grid", range(1, 4))),
        block=_three(reader.expressions("block", range(1, 4))),
        cluster=_three(reader.expressions("cluster", range(1, 4), [1])),
        shared_bytes=reader.expression("shared_bytes", 0),
        arguments=tuple(_argument(argument, kinds, reader) for argument in arguments),
        coresident=reader.boolean("coresident"),
        edge=reader.one_of("edge", EDGES, "plain"),
    )
    reader.finish()
    return launch


def _argument(value: Any, kinds: Mapping[str, str], reader: _Fields) -> Argument:
    if isinstance(value, str) and value in kinds:
        return Argument(kinds[value], value)
    if isinstance(value, str) and value in SIZES:
        return Argument("int32", value)
    if isinstance(value, dict) and len(value) == 1:
        ((kind, expression),) = value.items()
        if kind in SCALARS:
            return Argument(kind, _expression(expression, f"{reader.where}: args"))
    reader.fail(
        f"cannot pass {value!r}: write the name of a tensor, workspace, tensor map or table, one of m, n, k (int32),"
        f' or a scalar such as {{int32 = "k / 64"}}; kinds: {", ".join(SCALARS)}'
    )


def _three(values: tuple[str, ...]) -> tuple[str, str, str]:
    x, y, z = (*values, "1", "1")[:3]
    return x, y, z


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ContractError(f"{where} must be a C identifier, not {value!r}")
    return value


def _expression(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ContractError(f"{where} must be a whole number or an expression in quotes, not {value!r}")
    return str(value)


def _count(count: range) -> str:
    return str(count[0]) if len(count) == 1 else f"{count[0]} to {count[-1]}"


def _table_bytes(table: Table, values: Mapping[str, int]) -> str:
    code = TABLE_DTYPES[table.dtype]
    length = evaluate(table.length, values)
    if not 1 <= length * struct.calcsize(code) <= MAX_TABLE_BYTES:
        raise ContractError(f"the table {table.name} has {length} entries; it must take 1 to {MAX_TABLE_BYTES} bytes")
    if length * len(table.value) > MAX_TABLE_TEXT:
        raise ContractError(f"the table {table.name} is too long for its expression: {length} entries")
    entries = [evaluate(table.value, {**values, "i": i}) for i in range(length)]
    try:
        return struct.pack(f"<{length}{code}", *entries).hex()
    except struct.error:
        raise ContractError(f"an entry of the table {table.name} does not fit {table.dtype}") from None


def _map_plan(tensor_map: TensorMap, values: Mapping[str, int]) -> MapPlan:
    def numbers(expressions: Sequence[str]) -> tuple[int, ...]:
        return tuple(evaluate(expression, values) for expression in expressions)

    dims, strides, box = numbers(tensor_map.dims), numbers(tensor_map.strides), numbers(tensor_map.box)
    element_strides = numbers(tensor_map.element_strides)

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
    return MapPlan(
        *(tensor_map.name, tensor_map.tensor, tensor_map.dtype, dims, strides, box, element_strides),
        *(tensor_map.swizzle, tensor_map.interleave, tensor_map.l2_promotion, tensor_map.out_of_bounds),
    )


def _launch_plan(launch: Launch, values: Mapping[str, int], tables: Mapping[str, str]) -> LaunchPlan:
    def numbers(expressions: Sequence[str]) -> tuple[int, ...]:
        return tuple(evaluate(expression, values) for expression in expressions)

    grid, block, cluster = numbers(launch.grid), numbers(launch.block), numbers(launch.cluster)

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
    return LaunchPlan(
        *(launch.kernel, grid, block, cluster, evaluate(launch.shared_bytes, values), arguments),
        *(launch.coresident, launch.edge == "programmatic"),
    )


def _argument_plan(argument: Argument, values: Mapping[str, int], tables: Mapping[str, str]) -> ArgumentPlan:
    if argument.kind in ("pointer", "tensor_map"):
        return ArgumentPlan(argument.kind, argument.value)
    if argument.kind == "table":
        return ArgumentPlan("table", argument.value, tables[argument.value])
    value = evaluate(argument.value, values)
    try:
        data = struct.pack(f"<{SCALARS[argument.kind]}", value)
    except struct.error:
        raise ContractError(f"{argument.value!r} is {value}, which does not fit {argument.kind}") from None
    return ArgumentPlan(argument.kind, data=data.hex())
