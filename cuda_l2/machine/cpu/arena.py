"""The memory that a candidate's process shares with ours: operands, outputs and workspace between guard bands.

It holds several slots, each with an A, a B and a C: every launch of a timed round has operands and an output of
its own, so that nothing computed for one launch is of use to another.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cuda_l2.machine.cpu.host_arena import LINE, HostArena, Region, up
from cuda_l2.machine.fills import POISON
from cuda_l2.records import Gemm

MAX_SLOTS = 1024
CALL_WORDS = 7
"""m, n, k and the byte offsets of A, B, C and the workspace, as the runner's struct call has them."""

Words = npt.NDArray[np.uint16]


class Arena(HostArena):
    """Shared memory for one Gemm. A context manager; views die with it.

    slots: launches that can have operands and outputs at once; workspace_bytes: the most a candidate may ask for.
    """

    arguments: tuple[int, ...] = ()

    def __init__(self, gemm: Gemm, *, slots: int, workspace_bytes: int) -> None:
        super().__init__(workspace_bytes)
        self.gemm, self.slots = gemm, slots
        strides = (up(2 * gemm.m * gemm.k, LINE), up(2 * gemm.k * gemm.n, LINE), up(2 * gemm.m * gemm.n + LINE, LINE))
        size, self._regions = self._lay_out(MAX_SLOTS * CALL_WORDS * 8, [slots * stride for stride in strides])
        self._strides = strides
        self._map("cuda-l2-arena", size)
        a, b, self._outputs = map(self._rows, self._regions)
        self.operands = {"a": a, "b": b}
        """Raw words of A and B, slots x words; a slot's matrix comes first in its row, padding behind."""
        self.poison_workspace(0)

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

    def offsets(self, slot: int) -> list[int]:
        """Byte offsets of A, B and C of one slot."""
        return [region.offset + slot * stride for region, stride in zip(self._regions, self._strides, strict=True)]

    def write_calls(self, slots: Sequence[int]) -> int:
        """Put launches on these slots into the table that the runner reads; returns the table's offset."""
        sizes = (self.gemm.m, self.gemm.n, self.gemm.k)
        return self.write_table([(*sizes, *self.offsets(slot), self.workspace_offset) for slot in slots])


def operand_bytes(gemm: Gemm) -> int:
    """Bytes of one slot's A and B."""
    return up(2 * gemm.m * gemm.k, LINE) + up(2 * gemm.k * gemm.n, LINE)
