"""The memory that a candidate's process on the CPU shares with ours: tensors by name and a workspace, between guards.

There are several slots, each with every tensor of the task: each launch of a timed round has inputs and outputs of its
own, so that nothing computed for one launch is of use to another. The same memory is laid out anew for other sizes.
"""

import mmap
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cuda_l2.contract import CpuContract
from cuda_l2.contract.buffers import PRODUCTS
from cuda_l2.machine.fills import GUARD_BYTE, POISONS, SCRATCH_BYTE
from cuda_l2.machine.tensors import Tensors, rounded_up, stored, view
from cuda_l2.records import Task, Tensor
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError

ALIGN = 4096
LINE = 64
GUARD_BYTES = 4096
GAP_BYTES = LINE
"""At least this much lies behind every tensor, guarded."""

Bytes = npt.NDArray[np.uint8]


class Arena(Closing):
    """Shared memory for one task, at its own sizes and at others. A context manager; views die with it.

    tasks: the task, and the same at the other sizes. slots: launches that can have tensors at once at the first task's
    sizes; the others have one. workspace_bytes: the most a candidate may ask for.
    """

    def __init__(self, tasks: Sequence[Task], *, slots: int, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self._most_slots = {str(task): slots if task == tasks[0] else 1 for task in reversed(tasks)}
        self.size = max(self._plan(task) for task in tasks)
        self.fd = os.memfd_create("cuda-l2-arena")  # the name shows in the system's lists of open files
        try:
            os.ftruncate(self.fd, self.size)
            self._bytes: Bytes = np.frombuffer(mmap.mmap(self.fd, self.size), dtype=np.uint8)
        except OSError as error:
            os.close(self.fd)
            raise UserError(
                f"no {self.size / 2**20:.0f} MiB of memory can be had ({error.strerror}): choose smaller sizes, or"
                " raise the limits (ulimit -f, -v)"
            ) from None
        self.select(tasks[0])

    def select(self, task: Task) -> None:
        """Lay the memory out for this task, one of those given; what it held before is of no meaning.

        Every page up to the workspace is touched, so that a page more shows a stray write.
        """
        self._plan(task)
        self._bytes[: self.workspace_offset : ALIGN] |= 0
        for tensor in task.tensors:
            self.rows(tensor)[:, tensor.bytes :] = GUARD_BYTE
        self.poison_workspace(0)

    def _plan(self, task: Task) -> int:
        """Lay out the table of launches, every tensor and the workspace, guards between them; the size of it all."""
        self.task, self.slots = task, self._most_slots[str(task)]
        # the most words a launch can have: sizes that a contract can name, pointers, the workspace
        words = len(task.sizes) + sum(len(tensor.shape) for tensor in task.tensors) + len(task.tensors) + 1
        self._end, self._guards = 0, list[slice]()
        self._table = self._region(8 * words * self.slots)
        self._strides = {tensor.name: rounded_up(tensor.bytes + GAP_BYTES, LINE) for tensor in task.tensors}
        self._regions = {name: self._region(self.slots * stride) for name, stride in self._strides.items()}
        self._workspace = self._region(self.workspace_bytes)
        self._guards.append(slice(self._end, self._end + GUARD_BYTES))
        return rounded_up(self._end + GUARD_BYTES, ALIGN)

    def _region(self, size: int) -> slice:
        offset = rounded_up(self._end + GUARD_BYTES, ALIGN)
        self._guards.append(slice(self._end, offset))
        self._end = offset + size
        return slice(offset, self._end)

    @property
    def workspace_offset(self) -> int:
        """Bytes from the start to the workspace: every launch may use them."""
        return int(self._workspace.start)

    def offset(self, name: str, slot: int) -> int:
        """Where a tensor of a slot begins, in bytes."""
        return int(self._regions[name].start) + slot * self._strides[name]

    def offsets(self, slot: int) -> list[int]:
        """Where each tensor of a slot begins, in the task's order."""
        return [self.offset(name, slot) for name in self._regions]

    def rows(self, tensor: Tensor) -> Bytes:
        """Bytes of a tensor, slots x its stride: first the tensor, then its gap."""
        return self._bytes[self._regions[tensor.name]].reshape(self.slots, -1)

    def tensor(self, slot: int, tensor: Tensor) -> torch.Tensor:
        """A view of one tensor; as uint8 where it should be bool and holds something else."""
        return view(torch.from_numpy(self.rows(tensor)[slot, : tensor.bytes]), tensor)

    def given(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of a slot's inputs and weights, by name."""
        return {tensor.name: self.tensor(slot, tensor) for tensor in self.task.given}

    def outputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of a slot's outputs, by name."""
        return {tensor.name: self.tensor(slot, tensor) for tensor in self.task.outputs}

    def write(self, slot: int, tensors: Tensors) -> None:
        """Put inputs and weights into a slot."""
        for tensor in self.task.given:
            self.rows(tensor)[slot, : tensor.bytes] = stored(tensors[tensor.name], tensor).numpy()

    def untouched(self, slot: int, tensors: Tensors) -> bool:
        """Whether a slot's inputs and weights still hold these values."""
        return all(
            np.array_equal(self.rows(tensor)[slot, : tensor.bytes], stored(tensors[tensor.name], tensor).numpy())
            for tensor in self.task.given
        )

    def clear(self) -> None:
        """Leave nothing that a launch could have kept: inputs and weights zero, outputs poisoned, no table."""
        for tensor in self.task.given:
            self.rows(tensor)[:, : tensor.bytes] = 0
        self.poison_outputs(range(self.slots))
        self._bytes[self._table] = 0

    def poison_outputs(self, slots: Sequence[int], prefill: Tensors | None = None) -> None:
        """Fill these slots' outputs with what nothing computes, or with given values."""
        for tensor in self.task.outputs:
            poison = np.frombuffer(POISONS[tensor.dtype], dtype=f"u{len(POISONS[tensor.dtype])}")
            values = poison if prefill is None else stored(prefill[tensor.name], tensor).numpy().view(poison.dtype)
            for slot in slots:
                self.rows(tensor)[slot, : tensor.bytes].view(poison.dtype)[:] = values

    def poison_workspace(self, used_bytes: int) -> None:
        """Fill a candidate's workspace with garbage and set the guards, the workspace's own end among them.

        What lies behind is given back to the system: a page of it that is there afterwards was written to.
        """
        start = self.workspace_offset
        os.ftruncate(self.fd, rounded_up(start + used_bytes + GUARD_BYTES, ALIGN))
        os.ftruncate(self.fd, self.size)
        self._bytes[start : start + used_bytes] = SCRATCH_BYTE
        self._workspace_guard = slice(start + used_bytes, min(start + used_bytes + GUARD_BYTES, self._end))
        for guard in [*self._guards, self._workspace_guard]:
            self._bytes[guard] = GUARD_BYTE
        self._blocks = os.fstat(self.fd).st_blocks

    def guards_intact(self) -> bool:
        """Whether nothing was written between the regions, nor behind the workspace that a candidate asked for."""
        return os.fstat(self.fd).st_blocks == self._blocks and all(
            bool((self._bytes[guard] == GUARD_BYTE).all()) for guard in [*self._guards, self._workspace_guard]
        )

    def gaps_intact(self) -> bool:
        """Whether the gap behind every tensor of every slot still holds its guards."""
        return all(bool((self.rows(tensor)[:, tensor.bytes :] == GUARD_BYTE).all()) for tensor in self.task.tensors)

    def write_table(self, rows: Sequence[Sequence[int]]) -> int:
        """Put launches into the table that the runner reads; returns the table's offset."""
        words = np.asarray(rows, dtype=np.int64).ravel()
        self._bytes[self._table].view(np.int64)[: len(words)] = words
        return int(self._table.start)

    def close(self) -> None:
        """Give the memory back once no view is left."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CandidateMemory:
    """The arena as one candidate's worker needs it: launches in the words of its contract, at the sizes selected.

    ContractError where the contract's tensors are not those of the task that is selected.
    """

    def __init__(self, arena: Arena, contract: CpuContract) -> None:
        self.arena, self.interface = arena, contract.interface
        sizes = len(self.interface.bind(arena.task))
        product = self.interface in PRODUCTS.values()  # whose function has a signature of its own
        self.arguments = () if product else (sizes, len(self.interface.buffers), arena.workspace_offset)
        """The runner's last parameters: numbers of sizes and buffers, where the workspace is; none for a product."""

    def write_calls(self, slots: Sequence[int]) -> int:
        """Put launches on these slots into the table; returns its offset."""
        arena, names = self.arena, self.interface.names
        sizes = self.interface.bind(arena.task).values()
        places = [[arena.offset(name, slot) for name in names] for slot in slots]
        return arena.write_table([[*sizes, *offsets, arena.workspace_offset] for offsets in places])
