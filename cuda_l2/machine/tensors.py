"""Tensors in memory: a task's tensor as a logical view of its storage, whatever its type and layout."""

from collections.abc import Mapping

import torch

from cuda_l2.machine.fills import POISONS
from cuda_l2.records import DTYPE_BYTES, Task, Tensor

Tensors = Mapping[str, torch.Tensor]
"""Values by the names of tensors."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes: tensors are compared bit for bit as these."""


def rounded_up(value: int, multiple: int) -> int:
    """The next multiple from here, of bytes."""
    return -(-value // multiple) * multiple


def dtype_of(tensor: Tensor | Task) -> torch.dtype:
    """torch's type for a tensor's elements, or for those whose type a task leaves open."""
    found: torch.dtype = getattr(torch, tensor.dtype)
    return found


def view(storage: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """Bytes of memory as a tensor of its logical shape.

    As uint8 where the tensor should be bool and holds something else.
    """
    if not tensor.elements:
        return torch.empty(tensor.shape, dtype=dtype_of(tensor), device=storage.device)
    if tensor.dtype == "bool" and bool((storage > 1).any()):
        return storage.reshape(tensor.shape)
    return storage.view(dtype_of(tensor)).as_strided(tensor.shape, tensor.strides)


def laid_out(values: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The values with a tensor's strides and type; a copy where they have others."""
    return _in_memory(values.to(dtype_of(tensor)), tensor).as_strided(tensor.shape, tensor.strides)


def stored(values: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """The values' bytes in the order of the tensor's memory; a copy where they lie otherwise."""
    return _in_memory(values, tensor).flatten().view(torch.uint8)


def words(values: torch.Tensor) -> torch.Tensor:
    """The elements' bits as integers of the same size."""
    return values.view(WORDS[values.dtype.itemsize])


def poisoned(tensor: Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor as it lies before a launch: every element holds what nothing computes."""
    poison = torch.frombuffer(bytearray(POISONS[tensor.dtype]), dtype=WORDS[DTYPE_BYTES[tensor.dtype]]).to(device)
    return poison.expand(tensor.elements).contiguous().view(dtype_of(tensor)).reshape(tensor.shape)


def _in_memory(values: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    """Contiguous, dimensions in the order of the tensor's memory."""
    return (values.t() if tensor.column_major else values).contiguous()
