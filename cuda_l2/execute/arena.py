"""The memory that a candidate's process shares with ours: operands, outputs and workspace between guard bands.

Operands have slack behind them, so that launches can read windows at different offsets: every launch
of a timed round has its own operands and its own output slot.
"""

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuda_l2.records import Gemm

ALIGN = 4096
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
POISON = 0x7DAD
"""An fp16 NaN no kernel has reason to write: what an output holds before a launch."""
MAX_CALLS = 1024
WINDOW_ELEMENTS = 32
"""Distance between operand windows: 64 bytes, so that alignment is the same at every offset."""

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: the operand windows it reads, in units of WINDOW_ELEMENTS, and its output slot."""

    a_window: int = 0
    b_window: int = 0
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    offset: int  # bytes
    size: int  # bytes


class Arena:
    """Shared memory for one Gemm. A context manager; views die with it.

    windows: how many operand windows fit in the slack; slots: outputs that can be live at once;
    workspace_bytes: the most a candidate may ask for.
    """

    def __init__(self, gemm: Gemm, *, windows: int, slots: int, workspace_bytes: int) -> None:
        self.gemm, self.windows, self.slots, self.workspace_bytes = gemm, windows, slots, workspace_bytes
        slack = windows * WINDOW_ELEMENTS
        self.slot_bytes = _up(2 * gemm.m * gemm.n + 64, 64)
        self._end = 0
        self._guards: list[Region] = []
        self._table = self._region(MAX_CALLS * 56)
        self._a = self._region(2 * (gemm.m * gemm.k + slack))
        self._b = self._region(2 * (gemm.k * gemm.n + slack))
        self._c = self._region(slots * self.slot_bytes)
        self._workspace = self._region(workspace_bytes)
        self._guards.append(Region(self._end, GUARD_BYTES))
        self.size = _up(self._end + GUARD_BYTES, ALIGN)
        self.fd = os.memfd_create("cuda-l2-arena")
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.a = self._words(self._a)
        self.b = self._words(self._b)
        self._all_slots = self._words(self._c)
        self.poison_workspace(0)

    def _region(self, size: int) -> Region:
        offset = _up(self._end + GUARD_BYTES, ALIGN)
        self._guards.append(Region(self._end, offset - self._end))
        self._end = offset + size
        return Region(offset, size)

    def _words(self, region: Region) -> Words:
        return self._bytes[region.offset : region.offset + region.size].view(np.uint16)

    def output(self, slot: int = 0) -> Words:
        """C of one slot, M x N, as raw fp16 words."""
        start, count = slot * self.slot_bytes // 2, self.gemm.m * self.gemm.n
        return self._all_slots[start : start + count].reshape(self.gemm.m, self.gemm.n)

    def outputs(self, slots: int) -> Words:
        """C of the first slots, slots x M x N, as raw fp16 words."""
        gemm = self.gemm
        rows = self._all_slots[: slots * self.slot_bytes // 2].reshape(slots, -1)
        return rows[:, : gemm.m * gemm.n].reshape(slots, gemm.m, gemm.n)

    def poison_outputs(self, slots: int = 1) -> None:
        """Fill the first slots, and the gaps between them, with a NaN pattern."""
        self._all_slots[: slots * self.slot_bytes // 2] = POISON

    def gaps_intact(self, slots: int = 1) -> bool:
        """Whether the gap behind each of the first slots still holds its poison."""
        rows = self._all_slots[: slots * self.slot_bytes // 2].reshape(slots, -1)
        return bool((rows[:, self.gemm.m * self.gemm.n :] == POISON).all())

    def poison_workspace(self, used_bytes: int) -> None:
        """Fill a candidate's workspace with garbage and set the guards, the workspace's own end among them."""
        start = self._workspace.offset
        self._bytes[start : start + used_bytes] = 0xFB
        self._workspace_guard = Region(start + used_bytes, GUARD_BYTES)
        for guard in [*self._guards, self._workspace_guard]:
            self._bytes[guard.offset : guard.offset + guard.size] = GUARD_BYTE

    def guards_intact(self) -> bool:
        return all(
            bool((self._bytes[guard.offset : guard.offset + guard.size] == GUARD_BYTE).all())
            for guard in [*self._guards, self._workspace_guard]
        )

    def offsets(self, call: Call) -> tuple[int, int, int]:
        """Byte offsets of A, B and C of one launch."""
        return (
            self._a.offset + 2 * WINDOW_ELEMENTS * call.a_window,
            self._b.offset + 2 * WINDOW_ELEMENTS * call.b_window,
            self._c.offset + call.slot * self.slot_bytes,
        )

    def write_calls(self, calls: list[Call]) -> int:
        """Put launches into the table that the worker reads; returns the table's offset."""
        gemm = self.gemm
        rows = [(gemm.m, gemm.n, gemm.k, *self.offsets(call), self._workspace.offset) for call in calls]
        table = self._bytes[self._table.offset : self._table.offset + 56 * len(calls)].view(np.int64)
        table[:] = np.asarray(rows, dtype=np.int64).ravel()
        return self._table.offset

    def close(self) -> None:
        """Give the memory back once no view is left."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> "Arena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
