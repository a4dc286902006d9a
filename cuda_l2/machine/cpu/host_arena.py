"""Memory that a candidate's process on the CPU shares with ours: regions between guard bands, the workspace last."""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from cuda_l2.machine.fills import GUARD_BYTE, SCRATCH_BYTE
from cuda_l2.system.errors import UserError

ALIGN = 4096
LINE = 64
GUARD_BYTES = 4096

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Region:
    offset: int  # bytes
    size: int  # bytes


class HostArena:
    """A context manager; views die with it. A subclass lays its regions out, then maps the memory.

    workspace_bytes: the most a candidate may ask for.
    """

    def __init__(self, workspace_bytes: int) -> None:
        self.workspace_bytes = workspace_bytes
        self.fd = -1
        self.size = 0

    def _lay_out(self, table_bytes: int, sizes: Sequence[int]) -> tuple[int, list[Region]]:
        """Regions of so many bytes behind the table, the workspace behind them; what all takes, and the regions."""
        self._end, self._guards = 0, list[Region]()
        self._table = self._region(table_bytes)
        regions = [self._region(size) for size in sizes]
        self._workspace = self._region(self.workspace_bytes)
        self._guards.append(Region(self._end, GUARD_BYTES))
        return up(self._end + GUARD_BYTES, ALIGN), regions

    def _region(self, size: int) -> Region:
        offset = up(self._end + GUARD_BYTES, ALIGN)
        self._guards.append(Region(self._end, offset - self._end))
        self._end = offset + size
        return Region(offset, size)

    def _map(self, name: str, size: int) -> None:
        """name: as the system's lists of open files show it."""
        self.size, self.fd = size, os.memfd_create(name)
        try:
            os.ftruncate(self.fd, size)
            self._bytes: Bytes = np.frombuffer(mmap.mmap(self.fd, size), dtype=np.uint8)
        except OSError as error:
            os.close(self.fd)
            raise UserError(
                f"no {size / 2**20:.0f} MiB of memory can be had ({error.strerror}): choose smaller sizes, or raise the"
                " limits (ulimit -f, -v)"
            ) from None

    def poison_workspace(self, used_bytes: int) -> None:
        """Fill a candidate's workspace with garbage and set the guards, the workspace's own end among them."""
        start = self._workspace.offset
        self._bytes[start : start + used_bytes] = SCRATCH_BYTE
        behind = min(GUARD_BYTES, self._end - start - used_bytes)
        self._workspace_guard = Region(start + used_bytes, behind)
        for guard in [*self._guards, self._workspace_guard]:
            self._bytes[guard.offset : guard.offset + guard.size] = GUARD_BYTE

    def guards_intact(self) -> bool:
        return all(
            bool((self._bytes[guard.offset : guard.offset + guard.size] == GUARD_BYTE).all())
            for guard in [*self._guards, self._workspace_guard]
        )

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def up(value: int, multiple: int) -> int:
    """The next multiple from here."""
    return -(-value // multiple) * multiple
