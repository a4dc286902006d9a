"""Reads the contract of a CUDA candidate from its fields, as TOML gave them; errors name the place."""

from collections.abc import Mapping, Sequence
from typing import Any

from cuda_l2.contract import buffers
from cuda_l2.contract.cuda import (
    ARCHITECTURES,
    ELEMENT_BYTES,
    LAYOUTS,
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
from cuda_l2.contract.fields import Fields

INTERLEAVES = ("none", "16B", "32B")
PROMOTIONS = ("none", "64B", "128B", "256B")
OUT_OF_BOUNDS = ("zeros", "nan")
EDGES = ("plain", "programmatic")
MAX_LAUNCHES = 16
MAX_WORKSPACES = 16


def parse(reader: Fields) -> CudaContract:
    """The contract from its fields, target taken off; ContractError where they cannot be."""
    interface = buffers.take(reader)
    arch = reader.one_of("arch", ARCHITECTURES)
    product = interface in buffers.PRODUCTS.values()
    if reader.has("layouts") and not product:
        raise ContractError("layouts: only a matrix product's B has them")
    layouts = reader.some_of("layouts", LAYOUTS)
    inputs = [buffer.name for buffer in interface.buffers if buffer.kind != "output"]
    constant = reader.some_of("constant", inputs) if reader.has("constant") else ()
    names = tuple(
        (reader.identifier(name, "names"), reader.read_expression(value, f"names.{name}"))
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
    return CudaContract(arch, names, workspaces, tables, maps, launches, layouts, interface, constant)


def _workspace(reader: Fields) -> Workspace[str]:
    name, size = reader.name("name"), reader.expression("bytes")
    persistent = reader.one_of("kind", ("scratch", "persistent"), "scratch") == "persistent"
    fill = reader.number("fill", 0, 0, (1 << 32) - 1)
    if fill and not persistent:
        reader.fail("only a persistent workspace is filled")
    reader.finish()
    return Workspace(name, size, persistent, fill)


def _table(reader: Fields) -> Table:
    table = Table(
        reader.name("name"),
        reader.one_of("dtype", tuple(TABLE_DTYPES), "uint16"),
        reader.expression("length"),
        reader.expression("value"),
    )
    reader.finish()
    return table


def _tensor_map(reader: Fields, tensors: Sequence[str], element: str) -> TensorMap[str]:
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


def _launch(reader: Fields, kinds: Mapping[str, str]) -> Launch[str]:
    arguments = reader.pop("args")
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
        programmatic=reader.one_of("edge", EDGES, "plain") == "programmatic",
    )
    reader.finish()
    return launch


def _argument(value: Any, kinds: Mapping[str, str], reader: Fields) -> Argument:
    if isinstance(value, str) and value in kinds:
        return Argument(kinds[value], value)
    if isinstance(value, dict) and len(value) == 1:
        ((kind, expression),) = value.items()
        if kind in SCALARS:
            return Argument(kind, reader.read_expression(expression, "args"))
    reader.fail(
        f"cannot pass {value!r}: write the name of a tensor, workspace, tensor map or table, a size (int32),"
        f' or a scalar such as {{int32 = "k / 64"}}; kinds: {", ".join(SCALARS)}'
    )


def _three(values: tuple[str, ...]) -> tuple[str, str, str]:
    x, y, z = (*values, "1", "1")[:3]
    return x, y, z
