"""The memory that a candidate's process shares with ours: operands, outputs and workspace between guard bands.

It holds several slots, each with an A, a B and a C: every launch of a timed round has operands and an output of
its own, so that nothing computed for one launch is of use to another.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuda_l2.execute.fills import GUARD_BYTE, POISON
from cuda_l2.records import Gemm

ALIGN = 4096
LINE = 64
GUARD_BYTES = 4096
MAX_SLOTS = 1024
CALL_WORDS = 7
"""m, n, k and the byte offsets of A, B, C and the workspace, as the runner's struct call has them."""

Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Region:
    offset: int  # bytes
    size: int  # bytes


class Arena:
    """Shared memory for one Gemm. A context manager; views die with it.

    slots: launches that can have operands and outputs at once; workspace_bytes: the most a candidate may ask for.
    """

    arguments: tuple[int, ...] = ()

    def __init__(self, gemm: Gemm, *, slots: int, workspace_bytes: int) -> None:
        self.gemm, self.slots, self.workspace_bytes = gemm, slots, workspace_bytes
        self._a_stride, self._b_stride = _up(2 * gemm.m * gemm.k, LINE), _up(2 * gemm.k * gemm.n, LINE)
        self._c_stride = _up(2 * gemm.m * gemm.n + LINE, LINE)
        self._end = 0
        self._guards: list[Region] = []
        self._table = self._region(MAX_SLOTS * CALL_WORDS * 8)
        self._a = self._region(slots * self._a_stride)
        self._b = self._region(slots * self._b_stride)
        self._c = self._region(slots * self._c_stride)
        self._workspace = self._region(workspace_bytes)
        self._guards.append(Region(self._end, GUARD_BYTES))
        self.size = _up(self._end + GUARD_BYTES, ALIGN)
        self.fd = os.memfd_create("cuda-l2-arena")
        os.ftruncate(self.fd, self.size)
        self._map = mmap.mmap(self.fd, self.size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.operands = {"a": self._rows(self._a), "b": self._rows(self._b)}
        """Raw words of A and B, slots x words; a slot's matrix comes first in its row, padding behind."""
        self._outputs = self._rows(self._c)
        self.poison_workspace(0)

    def _region(self, size: int) -> Region:
        offset = _up(self._end + GUARD_BYTES, ALIGN)
        self._guards.append(Region(self._end, offset - self._end))
        self._end = offset + size
        return Region(offset, size)

    def _rows(self, region: Region) -> Words:
        words = self._bytes[region.offset : region.offset + region.size].view(np.uint16)
        return words.reshape(self.slots, -1)

    def outputs(self, count: int) -> Words:
        """C of the first slots, count x M x N, as raw fp16 words."""
        gemm = self.gemm
        return self._outputs[:count, : gemm.m * gemm.n].reshape(count, gemm.m, gemm.n)

    def output(self, slot: int = 0) -> Words:
        """C of one slot, M x N, as raw fp16 words; writable."""
        gemm = self.gemm
        return self._outputs[slot, : gemm.m * gemm.n].reshape(gemm.m, gemm.n)

    def poison_outputs(self, count: int = 1) -> None:
        """Fill the first slots' outputs, and the gaps behind them, with a NaN pattern."""
        self._outputs[:count] = POISON

    def gaps_intact(self, count: int = 1) -> bool:
        """Whether the gap behind each of the first slots' outputs still holds its poison."""
        return bool((self._outputs[:count, self.gemm.m * self.gemm.n :] == POISON).all())

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

    def offsets(self, slot: int) -> tuple[int, int, int]:
        """Byte offsets of A, B and C of one slot."""
        return (
            self._a.offset + slot * self._a_stride,
            self._b.offset + slot * self._b_stride,
            self._c.offset + slot * self._c_stride,
        )

    def write_calls(self, slots: Sequence[int]) -> int:
        """Put launches on these slots into the table that the runner reads; returns the table's offset."""
        gemm = self.gemm
        rows = [(gemm.m, gemm.n, gemm.k, *self.offsets(slot), self._workspace.offset) for slot in slots]
        table = self._bytes[self._table.offset : self._table.offset + CALL_WORDS * 8 * len(slots)].view(np.int64)
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


def operand_bytes(gemm: Gemm) -> int:
    """Bytes of one slot's A and B."""
    return _up(2 * gemm.m * gemm.k, LINE) + _up(2 * gemm.k * gemm.n, LINE)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
