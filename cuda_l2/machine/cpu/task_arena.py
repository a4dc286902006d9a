"""The memory that a candidate for any task shares with us: its tensors by name and its workspace, between guard bands.

As for matrix products there are several slots, each with every tensor, so that each launch of a timed round has inputs
and outputs of its own. The same memory is laid out anew for other sizes of the task.
"""

import os
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from cuda_l2.contract import CpuContract
from cuda_l2.machine.cpu.host_arena import ALIGN, GUARD_BYTES, LINE, Bytes, HostArena, up
from cuda_l2.machine.fills import GUARD_BYTE, POISONS
from cuda_l2.records import Operation, Tensor

Tensors = Mapping[str, torch.Tensor]
GAP_BYTES = LINE
"""At least so many lie behind every tensor, guarded."""


class TaskArena(HostArena):
    """Shared memory for one Operation, at its own sizes and at others. A context manager; views die with it.

    slots: launches that can have tensors at once at the first task's sizes, the others have one. workspace_bytes: the
    most a candidate may ask for.
    """

    def __init__(self, tasks: Sequence[Operation], *, slots: int, workspace_bytes: int) -> None:
        super().__init__(workspace_bytes)
        self._most_slots = {str(task): slots if task == tasks[0] else 1 for task in reversed(tasks)}
        self._map("cuda-l2-task-arena", max(self._plan(task) for task in tasks))
        self.select(tasks[0])

    def _plan(self, task: Operation) -> int:
        """Lay out a task's tensors; the size of it all."""
        self.task, self.slots = task, self._most_slots[str(task)]
        tensors = [*task.inputs, *task.weights, *task.outputs]
        # the most words a launch can have: sizes that a contract can name, pointers, the workspace
        words = len(task.sizes) + sum(len(tensor.shape) for tensor in tensors) + len(tensors) + 1
        self._strides = {tensor.name: up(tensor.bytes + GAP_BYTES, LINE) for tensor in tensors}
        sizes = [self.slots * stride for stride in self._strides.values()]
        size, regions = self._lay_out(8 * words * self.slots, sizes)
        self._regions = dict(zip(self._strides, regions, strict=True))
        return size

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
        os.ftruncate(self.fd, up(self.workspace_offset + used_bytes + GUARD_BYTES, ALIGN))
        os.ftruncate(self.fd, self.size)
        super().poison_workspace(used_bytes)
        self._blocks = os.fstat(self.fd).st_blocks

    def guards_intact(self) -> bool:
        return os.fstat(self.fd).st_blocks == self._blocks and super().guards_intact()

    def offset(self, name: str, slot: int) -> int:
        """Where a tensor of a slot begins, in bytes."""
        return self._regions[name].offset + slot * self._strides[name]


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
