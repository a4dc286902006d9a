"""The memory that a candidate's process on the CPU shares with ours: tensors by name and a workspace.

There are several slots, each with every tensor of the task: each launch of a timed round has inputs and outputs of its
own, so that nothing computed for one launch is of use to another. The same memory is laid out anew for other sizes.

A candidate's process maps the pages of the tensors and of the workspace that its contract asks for, those of inputs and
weights to be read only, and nothing before, between or behind them: what reaches a page further ends it. What is left
of the pages is guarded, and holds NaN before some launches and other numbers before others, so that a result shows what
it took from there. Tensors begin at other places of a page in every slot; those of the first slot end in the last line
of a page. All tensors of some slots lie right behind one another, in any order, as where an allocator gave them so.
All tensors of all slots lie in one random order: which of two has the lower address, and how far apart they are,
differs from slot to slot. Some of them lie FAR behind the others, in addresses alone: their offsets need over 32 bits.
"""

import itertools
import math
import mmap
import os
from collections.abc import Iterator, Sequence

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

ALIGN = max(4096, mmap.PAGESIZE)
LINE = 64
WORDS_A_SEGMENT = 3
FAR = 1 << 35
"""Addresses that nothing has, in bytes: more than 32 bits count, of elements of 4 bytes too."""
PLACES = ALIGN // LINE
"""Slots in which a tensor begins at every place of a page."""
USUAL = 1
"""The slot whose tensors begin a line into their page, as large ones of the usual allocator do."""
NAN_BYTE = 0xFF
"""Words of it are NaN in every type of real numbers, and -1 in others."""
Bytes = npt.NDArray[np.uint8]


class Arena(Closing):
    """Shared memory for one task, at its own sizes and at others. A context manager; views die with it.

    tasks: the task, and the same at the other sizes. slots: launches that can have tensors at once at the first task's
    sizes; the others have one. workspace_bytes: the most a candidate may ask for.
    """

    def __init__(self, tasks: Sequence[Task], *, slots: int, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.at: dict[str, str] = {}
        """For launches from now on: names of tensors that are to be found where another lies."""
        self._rng = np.random.default_rng()
        self._most_slots = {str(task): slots if task == tasks[0] else 1 for task in reversed(tasks)}
        for self._far in (FAR, 0):  # without it where limits leave no room for addresses that nothing fills
            self.size = max(self._plan(task) + ALIGN * len(task.tensors) for task in tasks)
            self.fd = os.memfd_create("cuda-l2-arena")  # the name shows in the system's lists of open files
            try:
                os.ftruncate(self.fd, self.size)
                self._bytes: Bytes = np.frombuffer(mmap.mmap(self.fd, self.size), dtype=np.uint8)
                break
            except OSError as error:
                os.close(self.fd)
                why = error.strerror
        else:
            raise UserError(
                f"no {self.size / 2**20:.0f} MiB of memory can be had ({why}): choose smaller sizes, or raise the"
                " limits (ulimit -f, -v)"
            )
        self.select(tasks[0])

    def select(self, task: Task) -> None:
        """Lay the memory out for this task, one of those given; what it held before is of no meaning."""
        self._plan(task)
        self._guards = [GUARD_BYTE] * self.slots
        for slot in range(self.slots):
            self.guard(slot)
        self.poison_workspace(0)

    def guard(self, slot: int, *, other: bool = False) -> None:
        """Fill what is mapped beside a slot's tensors anew: half of the times with NaN, else with other numbers.

        other: with another byte than is there now.
        """
        drawn = NAN_BYTE if self._rng.integers(2) else int(self._rng.integers(NAN_BYTE))
        self._guards[slot] = drawn ^ int(other and drawn == self._guards[slot])
        for gap in self._gaps(slot):
            gap[:] = self._guards[slot]

    def _plan(self, task: Task) -> int:
        """Lay out the table of launches, every tensor and the workspace; the size of it all."""
        self.task, self.slots = task, self._most_slots[str(task)]
        self._beside: dict[int, list[Bytes]] = {}
        # the most words a launch can have: sizes that a contract can name, pointers, the workspace
        words = len(task.sizes) + sum(len(tensor.shape) for tensor in task.tensors) + len(task.tensors) + 1
        segments = WORDS_A_SEGMENT * (len(task.tensors) * self.slots + 2)
        self._table = slice(ALIGN, ALIGN + 8 * max(words * self.slots, segments))
        self._offsets = {tensor.name: [0] * self.slots for tensor in task.tensors}
        self._orders = {
            slot: [task.tensors[number] for number in self._rng.permutation(len(task.tensors))]
            for slot in range(min(PLACES, math.ceil(0.75 * self.slots)), self.slots)
            if self.slots != PLACES
        }
        end = self._table.stop
        blocks = [(slot, block) for slot in range(self.slots) for block in self._blocks(task, slot)]
        for number, chosen in enumerate(self._rng.permutation(len(blocks))):
            slot, block = blocks[chosen]
            end += self._far if number == len(blocks) // 2 else 0
            end = rounded_up(end, ALIGN) + ALIGN + _place(task, slot, block[0])  # behind a page that nobody maps
            for tensor in block:
                self._offsets[tensor.name][slot] = start = rounded_up(end, LINE)
                end = start + tensor.bytes
        start = rounded_up(end, ALIGN) + ALIGN
        self._workspace = slice(start, start + rounded_up(self.workspace_bytes, ALIGN))
        return self._workspace.stop + ALIGN

    def _blocks(self, task: Task, slot: int) -> list[Sequence[Tensor]]:
        """What lies together in a slot: each tensor by itself, or all right behind one another.

        These do in the slots behind those that have every place of a page; where slots are fewer in a quarter of them,
        and in none where slots are just as many.
        """
        return [self._orders[slot]] if slot in self._orders else [(tensor,) for tensor in task.tensors]

    @property
    def workspace_offset(self) -> int:
        """Bytes from the start to the workspace: every launch may use them."""
        return int(self._workspace.start)

    def offset(self, name: str, slot: int) -> int:
        """Where a tensor of a slot begins, in bytes."""
        return self._offsets[name][slot]

    def offsets(self, slot: int) -> list[int]:
        """Where each tensor of a slot begins, in the task's order."""
        return [self.offset(tensor.name, slot) for tensor in self.task.tensors]

    def row(self, slot: int, tensor: Tensor) -> Bytes:
        """A view of one tensor's bytes."""
        start = self.offset(tensor.name, slot)
        return self._bytes[start : start + tensor.bytes]

    def read(self, slots: int) -> None:
        """Read a byte of every cache line of the tensors in the first slots."""
        for tensor, slot in itertools.product(self.task.tensors, range(slots)):
            self.row(slot, tensor)[::LINE].max(initial=0)

    def _gaps(self, slot: int) -> list[Bytes]:
        """The rest of each tensor's first and last page: all that is mapped beside it."""
        if slot not in self._beside:
            self._beside[slot] = list(self._found_gaps(slot))
        return self._beside[slot]

    def _found_gaps(self, slot: int) -> Iterator[Bytes]:
        for block in self._blocks(self.task, slot):
            end = self.offset(block[0].name, slot) // ALIGN * ALIGN
            for tensor in block:
                start = self.offset(tensor.name, slot)
                yield self._bytes[end:start]
                end = start + tensor.bytes
            yield self._bytes[end : rounded_up(end, ALIGN)]

    def tensor(self, slot: int, tensor: Tensor) -> torch.Tensor:
        """A view of one tensor; as uint8 where it should be bool and holds something else."""
        return view(torch.from_numpy(self.row(slot, tensor)), tensor)

    def given(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of a slot's inputs and weights, by name."""
        return {tensor.name: self.tensor(slot, tensor) for tensor in self.task.given}

    def outputs(self, slot: int) -> dict[str, torch.Tensor]:
        """Views of a slot's outputs, by name."""
        return {tensor.name: self.tensor(slot, tensor) for tensor in self.task.outputs}

    def write(self, slot: int, tensors: Tensors) -> None:
        """Put inputs and weights into a slot."""
        for tensor in self.task.given:
            self.row(slot, tensor)[:] = stored(tensors[tensor.name], tensor).numpy()

    def untouched(self, slot: int, tensors: Tensors) -> bool:
        """Whether a slot's inputs and weights still hold these values."""
        return all(
            np.array_equal(self.row(slot, tensor), stored(tensors[tensor.name], tensor).numpy())
            for tensor in self.task.given
        )

    def clear(self) -> None:
        """Leave nothing that a launch could have kept: inputs and weights zero, outputs poisoned, no table."""
        for tensor, slot in itertools.product(self.task.given, range(self.slots)):
            self.row(slot, tensor)[:] = 0
        self.poison_outputs(range(self.slots))
        self._bytes[self._table] = 0

    def poison_outputs(self, slots: Sequence[int], prefill: Tensors | None = None) -> None:
        """Fill these slots' outputs with what nothing computes, or with given values."""
        for tensor in self.task.outputs:
            poison = np.frombuffer(POISONS[tensor.dtype], dtype=f"u{len(POISONS[tensor.dtype])}")
            values = poison if prefill is None else stored(prefill[tensor.name], tensor).numpy().view(poison.dtype)
            for slot in slots:
                self.row(slot, tensor).view(poison.dtype)[:] = values

    def unwritten(self, slot: int) -> bool:
        """Whether a slot's first output holds nothing but poison."""
        tensor = self.task.outputs[0]
        poison = np.frombuffer(POISONS[tensor.dtype], dtype=f"u{len(POISONS[tensor.dtype])}")
        return bool((self.row(slot, tensor).view(poison.dtype) == poison).all())

    def poison_workspace(self, used_bytes: int) -> None:
        """Fill a candidate's workspace with garbage or zeros, and guard the rest of its last page."""
        start = self.workspace_offset
        self._workspace_guard = slice(start + used_bytes, start + rounded_up(used_bytes, ALIGN))
        self._bytes[start : start + used_bytes] = SCRATCH_BYTE * int(self._rng.integers(2))
        self._bytes[self._workspace_guard] = GUARD_BYTE

    def workspace(self, used_bytes: int) -> Bytes:
        """What a candidate's workspace holds; a view."""
        return self._bytes[self.workspace_offset : self.workspace_offset + used_bytes]

    def gaps_intact(self, slot: int | None = None) -> bool:
        """Whether nothing was written beside tensors, of one slot or of all, nor behind the workspace asked for."""
        slots = range(self.slots) if slot is None else [slot]
        beside = ((gap, self._guards[slot]) for slot in slots for gap in self._gaps(slot))
        return all((gap == guard).all() for gap, guard in [(self._bytes[self._workspace_guard], GUARD_BYTE), *beside])

    def write_segments(self, workspace_bytes: int) -> tuple[int, int]:
        """Put what a candidate's process maps into the table: where, how much, whether it may write there.

        Returns the table's offset and the number of segments. The table itself comes first.
        """
        found = [(self._table.start, self._table.stop, 0)]
        outputs = {tensor.name for tensor in self.task.outputs}
        for tensor in self.task.tensors:
            starts = [self.offset(tensor.name, slot) for slot in range(self.slots if tensor.bytes else 0)]
            found += [(start, start + tensor.bytes, int(tensor.name in outputs)) for start in starts]
        if workspace_bytes:
            found.append((self.workspace_offset, self.workspace_offset + workspace_bytes, 1))
        pages = [(start // ALIGN * ALIGN, rounded_up(stop, ALIGN), writes) for start, stop, writes in found]
        return self.write_table(pages), len(pages)

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


def _place(task: Task, slot: int, tensor: Tensor) -> int:
    """How far into its page a slot's tensor begins, unless it lies behind another, in bytes."""
    # odd numbers of lines beyond the first slot's: every place of a page comes up, in another order for each tensor
    lines, behind = 2 * task.tensors.index(tensor) + 1, rounded_up(tensor.bytes, LINE)
    own, usual = ((number * lines * LINE - behind) % ALIGN for number in (slot, USUAL))
    if slot == USUAL:
        return LINE
    return usual if own == LINE else own


class CandidateMemory:
    """The arena as one candidate's worker needs it: launches in the words of its contract, at the sizes selected.

    ContractError where the contract's tensors are not those of the task that is selected.
    """

    def __init__(self, arena: Arena, contract: CpuContract) -> None:
        self.arena, self._contract, self.interface = arena, contract, contract.interface
        sizes = len(self.interface.bind(arena.task))
        product = self.interface in PRODUCTS.values()  # whose function has a signature of its own
        self.arguments = () if product else (sizes, len(self.interface.buffers))
        """The runner's last parameters: numbers of sizes and buffers; none for a product."""

    def write_segments(self) -> tuple[int, int]:
        """Put what the candidate's process maps into the table; returns its offset and their number."""
        return self.arena.write_segments(self._contract.workspace_bytes(self.arena.task))

    def write_calls(self, slots: Sequence[int]) -> int:
        """Put launches on these slots into the table; returns its offset."""
        arena, names = self.arena, self.interface.names
        sizes = self.interface.bind(arena.task).values()
        places = [[arena.offset(arena.at.get(name, name), slot) for name in names] for slot in slots]
        return arena.write_table([[*sizes, *offsets, arena.workspace_offset] for offsets in places])
