"""How a task's tensors share device memory: windows of timed launches, records of outputs, and the bytes of all."""

import enum
import itertools
import math

import numpy as np

from cuda_l2.machine.tensors import rounded_up
from cuda_l2.records import Task, Tensor

PRODUCT_WINDOWS = 4
"""Windows of each of a matrix product's A, B and C: no timed launch finds in C what its own A and B give."""
MOST_PAIRINGS = 4
"""Ways to pair windows of inputs and outputs, at most; B of a product has a window for each."""
TENSOR_ALIGN = 16
"""What the contract promises of a pointer."""
WINDOW_ALIGN = 256
ALLOCATED_ALIGN = 512
"""Torch's allocator lets tensors begin at multiples of this number of bytes."""
RECORD_BYTES = 64 << 20
MAX_RECORDS = 256
STAGED_BYTES = 32 << 20
"""What launches in a row read that the first of them does not."""
ORDERS, ORDERS_OF_TWO = 6, 2
"""In which all tensors lie side by side, at most, and in which two of more do."""


class Sharing(enum.StrEnum):
    """How the windows of timed launches share memory. Every window begins at a multiple of WINDOW_ALIGN bytes."""

    OVERLAPPING = "overlapping"  # versions of an input a few rows apart in one buffer, each with all of another input's
    SEPARATE = "separate"  # all lie apart, guards between them
    ROTATING = "rotating"  # all lie apart, guards between them
    PACKED = "packed"  # all lie apart, one right behind the other

    @property
    def rotates(self) -> bool:
        """Whether windows are met in turn, so that none is in the cache when it comes again."""
        return self in (Sharing.ROTATING, Sharing.PACKED)

    def shift(self, task: Task, tensor: Tensor) -> int:
        """Bytes from one window of a tensor to the next; 0 where they share it."""
        match self:
            case Sharing.OVERLAPPING:  # the fewest rows that keep every window aligned: they cost the cache nothing
                if tensor not in task.outputs:
                    return math.lcm(tensor.bytes // tensor.shape[tensor.column_major], WINDOW_ALIGN)
            case Sharing.PACKED:
                return rounded_up(tensor.bytes, WINDOW_ALIGN)
        return rounded_up(tensor.bytes + TENSOR_ALIGN, WINDOW_ALIGN)


def buffer_name(tensor: Tensor) -> str:
    """Name of the buffer that holds a tensor: no other buffer has it, whatever the task calls the tensor."""
    return f"tensor {tensor.name}"


def arena_bytes(task: Task, workspace_bytes: int, windows: int, sharing: Sharing) -> int:
    """About what an arena takes."""
    spans = [tensor.bytes + (windows - 1) * sharing.shift(task, tensor) for tensor in task.tensors]
    stride = record_stride(task)
    return sum(spans) + staged_bytes(task) + stride * records(stride) + workspace_bytes


def record_stride(task: Task) -> int:
    """Bytes from one record of a task's outputs to the next."""
    return sum(rounded_up(output.bytes, TENSOR_ALIGN) for output in task.outputs)


def staged_bytes(task: Task) -> int:
    """Bytes that a slow producer copies, that launches in a row are given, or where tensors lie side by side."""
    return max(STAGED_BYTES, sum(rounded_up(tensor.bytes, ALLOCATED_ALIGN) for tensor in task.tensors))


def records(stride: int) -> int:
    """Number of records that there is room for, `stride` bytes each."""
    return max(2, min(MAX_RECORDS, RECORD_BYTES // max(1, stride)))


def side_by_side(task: Task, rng: np.random.Generator) -> list[dict[str, int]]:
    """Offsets of tensors that lie one right behind the other: all of a task's in several orders, and two in some drawn.

    In all six orders of three tensors. A product's begin at multiples of 16 bytes; another task's at those of 512, as a
    kernel may choose its loads, and with them the order of its sums, by addresses.
    """
    step = TENSOR_ALIGN if task.product else ALLOCATED_ALIGN
    tensors, found = [task.tensors[i] for i in rng.permutation(len(task.tensors))], []
    for count, most in {len(tensors): ORDERS, min(2, len(tensors)): ORDERS_OF_TWO}.items():
        for order in itertools.islice(itertools.permutations(tensors, count), most):
            starts = itertools.accumulate((rounded_up(tensor.bytes, step) for tensor in order), initial=0)
            found.append({tensor.name: start for tensor, start in zip(order, starts, strict=False)})
    return found
