"""Reads the contract of a CUDA candidate from its fields, as TOML gave them; errors name the place."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from cuda_l2.contract import buffers
from cuda_l2.contract.cuda import (
    ARCHITECTURES,
    EDGES,
    ELEMENT_BYTES,
    INTERLEAVES,
    LAYOUTS,
    MAX_LAUNCHES,
    MAX_WORKSPACES,
    OUT_OF_BOUNDS,
    PROMOTIONS,
    SCALARS,
    SWIZZLE_BYTES,
    TABLE_DTYPES,
    Argument,
    CudaContract,
    Launch,
    Table,
    TensorMap,
    Workspace,
)
from cuda_l2.contract.expressions import ContractError


def parse(fields: dict[str, Any]) -> CudaContract:
    """The contract from its fields, target taken off; ContractError where they cannot be."""
    interface, fields = buffers.take(fields)
    reader = _Fields(fields, "the contract")
    arch = reader.one_of("arch", ARCHITECTURES)
    product = interface in buffers.PRODUCTS.values()
    if not product and "layouts" in fields:
        raise ContractError("layouts: only a matrix product's B has them")
    layouts = reader.some_of("layouts", LAYOUTS)
    names = tuple(
        (buffers.identifier(name, "names"), _expression(value, f"names.{name}"))
        for name, value in reader.table("names")
    )
    workspaces = tuple(_workspace(item) for item in reader.list_of("workspace"))
    tables = tuple(_table(item) for item in reader.list_of("table"))
    tensors = (*interface.names, *(w.name for w in workspaces))
    element = interface.buffers[0].dtype if product else "float16"
    maps = tuple(_tensor_map(item, tensors, element) for item in reader.list_of("tensor_map"))
    taken = [*interface.names, *interface.sizes, "sms", "i"]
    defined = [name for name, _ in names] + [w.name for w in workspaces] + [t.name for t in tables]
    for name in defined + [tensor_map.name for tensor_map in maps]:
        if name in taken:
            raise ContractError(f"the name {name} is used twice or reserved")
        taken.append(name)
    kinds = dict.fromkeys(interface.sizes, "int32") | dict.fromkeys(tensors, "pointer")
    kinds |= {table.name: "table" for table in tables} | {item.name: "tensor_map" for item in maps}
    launches = tuple(_launch(item, kinds) for item in reader.list_of("launch"))
    if len(workspaces) > MAX_WORKSPACES:
        raise ContractError(f"the contract has {len(workspaces)} workspaces; at most {MAX_WORKSPACES}")
    if not 1 <= len(launches) <= MAX_LAUNCHES:
        raise ContractError(f"the contract needs between 1 and {MAX_LAUNCHES} [[launch]] entries")
    reader.finish()
    return CudaContract(arch, names, workspaces, tables, maps, launches, layouts, interface)


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

    def some_of(self, key: str, values: Sequence[str]) -> tuple[str, ...]:
        """A list of some of these, in their order; all where it is left out."""
        found = self.fields.pop(key, list(values))
        if not isinstance(found, list) or not found or not all(value in values for value in found):
            self.fail(f"{key} must be a list of some of {', '.join(values)}, not {found!r}")
        return tuple(value for value in values if value in found)

    def name(self, key: str) -> str:
        return buffers.identifier(self.fields.pop(key, None), f"{self.where}: {key}")

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


def _tensor_map(reader: _Fields, tensors: Sequence[str], element: str) -> TensorMap:
    """element: the type where the entry says none."""
    name = reader.name("name")
    tensor = reader.one_of("tensor", tensors)
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
        dtype=reader.one_of("dtype", tuple(ELEMENT_BYTES), element),
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
    if isinstance(value, dict) and len(value) == 1:
        ((kind, expression),) = value.items()
        if kind in SCALARS:
            return Argument(kind, _expression(expression, f"{reader.where}: args"))
    reader.fail(
        f"cannot pass {value!r}: write the name of a tensor, workspace, tensor map or table, a size (int32),"
        f' or a scalar such as {{int32 = "k / 64"}}; kinds: {", ".join(SCALARS)}'
    )


def _three(values: tuple[str, ...]) -> tuple[str, str, str]:
    x, y, z = (*values, "1", "1")[:3]
    return x, y, z


def _expression(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise ContractError(f"{where} must be a whole number or an expression in quotes, not {value!r}")
    return str(value)


def _count(count: range) -> str:
    return str(count[0]) if len(count) == 1 else f"{count[0]} to {count[-1]}"
