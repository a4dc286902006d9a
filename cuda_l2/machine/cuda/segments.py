"""Many pieces of device memory filled, or looked at, by one kernel: a launch's surroundings, which are a dozen arrays.

Each fill or comparison by a kernel of torch's costs more of the host's time than a small candidate takes to run.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cuda_l2.machine.cuda.helpers import Helpers

if TYPE_CHECKING:
    import torch

MAX_SEGMENTS = 64
"""As in cuda_helpers.cu."""


class Segment(NamedTuple):
    """Bytes of device memory: what they are to hold, or must hold, is other memory or a repeated 32-bit word."""

    address: int
    bytes: int
    word: int = 0
    source: int = 0  # address of other memory; the word where 0


def filled(memory: "torch.Tensor", word: int) -> Segment:
    """What memory is to hold, or must: a word over and over."""
    return Segment(memory.data_ptr(), memory.nbytes, word)


@dataclass(frozen=True)
class Copied:
    """Bytes to copy away while one looks whether a 16-bit word is among them."""

    address: int
    bytes: int
    word: int
    target: int


NOTHING = Copied(0, 0, 0, 0)


class _Table(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64 * MAX_SEGMENTS),
        ("source", ctypes.c_uint64 * MAX_SEGMENTS),
        ("bytes", ctypes.c_uint64 * MAX_SEGMENTS),
        ("word", ctypes.c_uint32 * MAX_SEGMENTS),
    )


class Segments:
    """Fills and looks, on the stream that is torch's current one now."""

    def __init__(self, helpers: Helpers) -> None:
        import torch  # noqa: PLC0415 - the worker's process fills too, and does without it

        self._helpers, self._stream = helpers, torch.cuda.current_stream()
        self._found = torch.zeros(MAX_SEGMENTS + 1, dtype=torch.int32, pin_memory=True)
        """What the kernel found: a word a segment, and one for the copied bytes."""

    def fill(self, segments: Sequence[Segment]) -> None:
        """Make every segment hold what it is to hold. Waits for the device."""
        enqueue_fill(self._helpers, self._stream.cuda_stream, segments)
        self._stream.synchronize()

    def hold(self, segments: Sequence[Segment]) -> list[bool]:
        """Whether each segment holds what it must. Waits for the device."""
        return [kept for some in _tables(segments) for kept in self._look(some, NOTHING)[0]]

    def look(self, segments: Sequence[Segment], copied: Copied) -> tuple[list[bool], bool]:
        """Whether each segment holds what it must, and whether the word is in what was copied. Waits for the device."""
        kept, there = self._look(segments[:MAX_SEGMENTS], copied)
        return kept + self.hold(segments[MAX_SEGMENTS:]), there

    def _look(self, segments: Sequence[Segment], copied: Copied) -> tuple[list[bool], bool]:
        """The same of at most MAX_SEGMENTS."""
        table, most = _table(segments)
        self._found.zero_()
        values = [copied.address, copied.bytes, copied.word, copied.target, self._found.data_ptr()]
        stream = self._stream.cuda_stream
        self._helpers.look_at_segments(stream, table, len(segments), max(most, copied.bytes), values)
        self._stream.synchronize()
        found = self._found.tolist()
        return [not differs for differs in found[: len(segments)]], bool(found[MAX_SEGMENTS])


def enqueue_fill(helpers: Helpers, stream: int, segments: Sequence[Segment]) -> None:
    """Make every segment hold what it is to hold, on a stream and without waiting."""
    for some in _tables(segments):
        table, most = _table(some)
        helpers.fill_segments(stream, table, len(some), most)


def _tables(segments: Sequence[Segment]) -> list[Sequence[Segment]]:
    """As many as one kernel takes at a time."""
    return [segments[start : start + MAX_SEGMENTS] for start in range(0, len(segments), MAX_SEGMENTS)]


def _table(segments: Sequence[Segment]) -> tuple[_Table, int]:
    """As the kernels read it, and the longest segment's bytes."""
    table = _Table()
    if not segments:
        return table, 0
    addresses, sizes, words, sources = zip(*segments, strict=True)
    count = len(segments)
    table.address[:count], table.bytes[:count] = addresses, sizes
    table.word[:count], table.source[:count] = words, sources
    return table, max(sizes)
