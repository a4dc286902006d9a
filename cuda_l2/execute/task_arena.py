"""The memory that a candidate for any task shares with us: its tensors by name and its workspace, between guard bands.

As for matrix products there are several slots, each with every tensor, so that each launch of a timed round has inputs
and outputs of its own. The same memory is laid out anew for other sizes of the task.
"""

import mmap
import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuda_l2.contract import CpuContract
from cuda_l2.execute.arena import ALIGN, GUARD_BYTES, LINE, Region
from cuda_l2.execute.fills import GUARD_BYTE, POISONS, SCRATCH_BYTE
from cuda_l2.records import Operation, Tensor

Bytes = npt.NDArray[np.uint8]
Tensors = Mapping[str, torch.Tensor]
GAP_BYTES = LINE
"""At least so many lie behind every tensor, guarded."""


class TaskArena:
    """Shared memory for one Operation, at its own sizes and at others. A context manager; views die with it.

    slots: launches that can have tensors at once at the first task's sizes, the others have one. workspace_bytes: the
    most a candidate may ask for.
    """

    def __init__(self, tasks: Sequence[Operation], *, slots: int, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self._most_slots = {str(task): slots if task == tasks[0] else 1 for task in reversed(tasks)}
        self.size = max(self._plan(task) for task in tasks)
        self.fd = os.memfd_create("cuda-l2-task-arena")
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.select(tasks[0])

    def _plan(self, task: Operation) -> int:
        """Lay out a task's tensors; the size of it all."""
        self.task, self.slots = task, self._most_slots[str(task)]
        self._end, self._guards = 0, list[Region]()
        tensors = [*task.inputs, *task.weights, *task.outputs]
        # the most words a launch can have: sizes that a contract can name, pointers, the workspace
        words = len(task.sizes) + sum(len(tensor.shape) for tensor in tensors) + len(tensors) + 1
        self._table = self._region(8 * words * self.slots)
        self._strides = {tensor.name: _up(tensor.bytes + GAP_BYTES, LINE) for tensor in tensors}
        self._regions = {tensor.name: self._region(self.slots * self._strides[tensor.name]) for tensor in tensors}
        self._workspace = self._region(self.workspace_bytes)
        self._guards.append(Region(self._end, GUARD_BYTES))
        return _up(self._end + GUARD_BYTES, ALIGN)

    def _region(self, size: int) -> Region:
        offset = _up(self._end + GUARD_BYTES, ALIGN)
        self._guards.append(Region(self._end, offset - self._end))
        self._end = offset + size
        return Region(offset, size)

    def select(self, task: Operation) -> None:
        """Lay the memory out for this task, one of those given; what it held before is of no meaning."""
        self._plan(task)
        for tensor in (*task.inputs, *task.weights, *task.outputs):
            self._rows(tensor)[:, tensor.bytes :] = GUARD_BYTE
        self.poison_workspace(0)

    @property
    def touched_bytes(self) -> int:
        """From the start to the workspace: what every launch may meet."""
        return self._workspace.offset

    def _rows(self, tensor: Tensor) -> Bytes:
        """Bytes of a tensor, slots x its stride; the gap lies behind each."""
        region = self._regions[tensor.name]
        return self._bytes[region.offset : region.offset + region.size].reshape(self.slots, -1)

    def write(self, slot: int, tensors: Tensors) -> None:
        """Put inputs and weights into a slot."""
        for tensor in (*self.task.inputs, *self.task.weights):
            self._rows(tensor)[slot, : tensor.bytes] = raw(tensors[tensor.name])

    def clear(self) -> None:
        """Leave nothing that a launch could have kept: inputs and weights zero, outputs poisoned, no table."""
        for tensor in (*self.task.inputs, *self.task.weights):
            self._rows(tensor)[:, : tensor.bytes] = 0
        self.poison_outputs(range(self.slots))
        self._bytes[self._table.offset : self._table.offset + self._table.size] = 0

    def untouched(self, slot: int, tensors: Tensors) -> bool:
        """Whether a slot's inputs and weights still hold these values."""
        return all(
            np.array_equal(self._rows(tensor)[slot, : tensor.bytes], raw(tensors[tensor.name]))
            for tensor in (*self.task.inputs, *self.task.weights)
        )

    def output(self, slot: int, tensor: Tensor) -> torch.Tensor:
        """A view of one output; as uint8 where it should be bool and holds something else."""
        data = torch.from_numpy(self._rows(tensor)[slot, : tensor.bytes])
        if tensor.dtype == "bool" and bool((data > 1).any()):
            return data.reshape(tensor.shape)
        return data.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)

    def given(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of a slot's inputs and weights, by name."""
        return {tensor.name: self.output(slot, tensor) for tensor in (*self.task.inputs, *self.task.weights)}

    def poison_outputs(self, slots: Sequence[int], prefill: Tensors | None = None) -> None:
        """Fill these slots' outputs with what nothing computes, or with given values."""
        for tensor in self.task.outputs:
            poison = np.frombuffer(POISONS[tensor.dtype], dtype=f"u{len(POISONS[tensor.dtype])}")
            values = poison if prefill is None else raw(prefill[tensor.name]).view(poison.dtype)
            for slot in slots:
                self._rows(tensor)[slot, : tensor.bytes].view(poison.dtype)[:] = values

    def gaps_intact(self) -> bool:
        """Whether the gap behind every tensor of every slot still holds its guards."""
        tensors = (*self.task.inputs, *self.task.weights, *self.task.outputs)
        return all(bool((self._rows(tensor)[:, tensor.bytes :] == GUARD_BYTE).all()) for tensor in tensors)

    def poison_workspace(self, used_bytes: int) -> None:
        """Fill a candidate's workspace with garbage and set the guards, the workspace's own end among them.

        What lies behind is given back to the system: a page of it that is there afterwards was written to.
        """
        start = self._workspace.offset
        os.ftruncate(self.fd, _up(start + used_bytes + GUARD_BYTES, ALIGN))
        os.ftruncate(self.fd, self.size)
        self._bytes[start : start + used_bytes] = SCRATCH_BYTE
        behind = min(GUARD_BYTES, self._end - start - used_bytes)
        self._workspace_guard = Region(start + used_bytes, behind)
        for guard in [*self._guards, self._workspace_guard]:
            self._bytes[guard.offset : guard.offset + guard.size] = GUARD_BYTE
        self._blocks = os.fstat(self.fd).st_blocks

    def guards_intact(self) -> bool:
        if os.fstat(self.fd).st_blocks != self._blocks:
            return False
        return all(
            bool((self._bytes[guard.offset : guard.offset + guard.size] == GUARD_BYTE).all())
            for guard in [*self._guards, self._workspace_guard]
        )

    def offset(self, name: str, slot: int) -> int:
        """Where a tensor of a slot begins, in bytes."""
        return self._regions[name].offset + slot * self._strides[name]

    def write_table(self, rows: Sequence[Sequence[int]]) -> int:
        """Put launches into the table that the runner reads; returns the table's offset."""
        words = np.asarray(rows, dtype=np.int64).ravel()
        self._bytes[self._table.offset : self._table.offset + words.nbytes].view(np.int64)[:] = words
        return self._table.offset

    @property
    def workspace_offset(self) -> int:
        return self._workspace.offset

    def close(self) -> None:
        """Give the memory back once no view is left."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "TaskArena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TaskMemory:
    """The arena as one candidate's worker needs it: launches in the words of its contract, whatever sizes are selected.

    ContractError where the contract's tensors are not those of the task that is selected.
    """

    def __init__(self, arena: TaskArena, contract: CpuContract) -> None:
        self.arena, self.contract = arena, contract
        interface = contract.interface
        self.arguments = (len(interface.sizes), len(interface.buffers), arena.touched_bytes)
        interface.bind(arena.task)

    @property
    def size(self) -> int:
        return self.arena.size

    @property
    def fd(self) -> int:
        return self.arena.fd

    def write_calls(self, slots: Sequence[int]) -> int:
        arena, interface = self.arena, self.contract.interface
        values = interface.bind(arena.task)
        sizes = [values[name] for name in interface.sizes]
        return arena.write_table(
            [
                (*sizes, *(arena.offset(name, slot) for name in interface.names), arena.workspace_offset)
                for slot in slots
            ]
        )


def raw(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes."""
    data: Bytes = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return data


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
