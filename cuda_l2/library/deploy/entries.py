"""Packs the plan of one shape for the op: numbers in the order in which entries.h reads them."""

import struct
from collections.abc import Sequence

from cuda_l2.contract.cuda import Argument, LaunchPlan, MapPlan, Plan
from cuda_l2.records import Gemm, Layout

VERSION = 3
MAX_DIMS = 5
DTYPES = ("float16", "bfloat16")
"""Element types by the number that a key has."""
LAYOUTS = (Layout.NN, Layout.TN)
OPERANDS = ("a", "b", "c")
# members of the driver's enums, by the contract's words
MAP_DTYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "float16": 6, "float32": 7, "bfloat16": 9}
INTERLEAVES = {"none": 0, "16B": 1, "32B": 2}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
PROMOTIONS = {"none": 0, "64B": 1, "128B": 2, "256B": 3}
FILLS = {"zeros": 0, "nan": 1}
POINTER, MAP, BYTES = range(3)
TUNED, DETERMINISTIC, INVARIANT, AHEAD = range(4)
"""Rules by which a kernel is chosen: tuning; the table that this package ships; one kernel for every M; tuning where B
is declared constant."""

Key = tuple[int, int, int, int, int, int, int]
"""Device, element type, layout of B, rule, M, N, K."""


def key_of(gemm: Gemm, device: int, rule: int = TUNED) -> Key:
    return device, DTYPES.index(gemm.dtype), LAYOUTS.index(gemm.layout), rule, gemm.m, gemm.n, gemm.k


def gemm_of(key: Key) -> Gemm:
    _, dtype, layout, _, m, n, k = key
    return Gemm(m, n, k, LAYOUTS[layout], dtype=DTYPES[dtype])


def packed(plan: Plan, gemm: Gemm, device: int, rule: int = TUNED) -> bytes:
    """A plan for a shape on a device, by CUDA's number of it, for calls under a rule."""
    tensors = [*OPERANDS, *(workspace.name for workspace in plan.workspaces)]
    maps = [tensor_map.name for tensor_map in plan.tensor_maps]
    parts = [struct.pack("<Iiiiiqqq", VERSION, *key_of(gemm, device, rule)), struct.pack("<I", len(plan.workspaces))]
    parts += [struct.pack("<QII", each.bytes, each.persistent, each.fill) for each in plan.workspaces]
    parts.append(struct.pack("<I", len(maps)))
    parts += [_map(tensor_map, tensors) for tensor_map in plan.tensor_maps]
    parts.append(struct.pack("<I", len(plan.launches)))
    for launch in plan.launches:
        parts += [_launch(launch), *(_argument(argument, tensors, maps) for argument in launch.arguments)]
    return b"".join([*parts, _text(b"") * 2])


def packed_algorithm(
    gemm: Gemm, device: int, algorithm: bytes, workspace_bytes: int, library: str, rule: int = TUNED
) -> bytes:
    """One of cuBLASLt's algorithms for a shape on a device, in place of a plan. library: its file."""
    workspaces = [struct.pack("<QII", workspace_bytes, 0, 0)] if workspace_bytes else []
    head = (
        struct.pack("<Iiiiiqqq", VERSION, *key_of(gemm, device, rule)),
        struct.pack("<I", len(workspaces)),
        *workspaces,
    )
    return b"".join([*head, struct.pack("<II", 0, 0), _text(algorithm), _text(library.encode())])


def _map(tensor_map: MapPlan, tensors: Sequence[str]) -> bytes:
    head = (
        *(tensors.index(tensor_map.tensor), len(tensor_map.dims), MAP_DTYPES[tensor_map.dtype]),
        *(INTERLEAVES[tensor_map.interleave], SWIZZLES[tensor_map.swizzle]),
        *(PROMOTIONS[tensor_map.l2_promotion], FILLS[tensor_map.out_of_bounds]),
    )
    sizes = _filled(tensor_map.dims, MAX_DIMS), _filled(tensor_map.strides, MAX_DIMS - 1)
    boxes = _filled(tensor_map.box, MAX_DIMS), _filled(tensor_map.element_strides, MAX_DIMS)
    return struct.pack("<7I5Q4Q5I5I", *head, *sizes[0], *sizes[1], *boxes[0], *boxes[1])


def _launch(launch: LaunchPlan) -> bytes:
    flags = launch.programmatic, launch.coresident
    numbers = *launch.grid, *launch.block, *launch.cluster, launch.shared_bytes, *flags, len(launch.arguments)
    return _text(launch.kernel.encode()) + struct.pack("<13I", *numbers)


def _argument(argument: Argument, tensors: Sequence[str], maps: Sequence[str]) -> bytes:
    match argument.kind:
        case "pointer":
            kind, index = POINTER, tensors.index(argument.name)
        case "tensor_map":
            kind, index = MAP, maps.index(argument.name)
        case _:
            kind, index = BYTES, 0
    return struct.pack("<II", kind, index) + _text(bytes.fromhex(argument.data))


def _text(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _filled(values: Sequence[int], count: int) -> tuple[int, ...]:
    return (*values, *[0] * (count - len(values)))
