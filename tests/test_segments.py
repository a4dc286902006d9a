"""machine/cuda/segments.py: pieces of device memory filled and looked at, against torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuda_l2.machine.cuda.segments import MAX_SEGMENTS, Copied, Segment, Segments

pytestmark = pytest.mark.gpu
WORD = 0xA5A5A5A5
POISON = 0x7DAD


@pytest.fixture
def segments(gpu: Any) -> Segments:
    return Segments(gpu.workers.helpers)


def memory(size: int, offset: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size + offset,), dtype=torch.uint8, device="cuda")[offset:]


SIZES = [(1, 0), (2, 2), (15, 0), (16, 0), (4096, 6), (4098, 0), (100_003, 0), (1 << 22, 4)]


def test_each_piece_gets_its_bytes_and_no_other_is_touched(segments: Any) -> None:
    whole = [memory(size + offset + 32) for size, offset in SIZES]
    before = [piece.clone() for piece in whole]
    sources = [memory(size) for size, _ in SIZES]
    pieces = []
    for i, (piece, source, (size, offset)) in enumerate(zip(whole, sources, SIZES, strict=True)):
        pieces.append(Segment(piece.data_ptr() + offset, size, WORD, source.data_ptr() if i % 2 else 0))
    segments.fill(pieces)
    for i, (piece, old, source, (size, offset)) in enumerate(zip(whole, before, sources, SIZES, strict=True)):
        old[offset : offset + size] = source if i % 2 else WORD & 0xFF
        assert torch.equal(piece, old), SIZES[i]


@pytest.mark.parametrize("at", [0, 7, -1])
@pytest.mark.parametrize("which", range(len(SIZES)))
def test_one_byte_that_differs_is_found_where_it_is(segments: Any, which: int, at: int) -> None:
    pieces = [memory(size, offset) for size, offset in SIZES]
    same = [piece.clone() for piece in pieces]
    c, copy = torch.zeros(77, dtype=torch.int16, device="cuda"), torch.ones(77, dtype=torch.int16, device="cuda")
    table = [Segment(p.data_ptr(), p.numel(), source=s.data_ptr()) for p, s in zip(pieces, same, strict=True)]
    copied = Copied(c.data_ptr(), 154, POISON, copy.data_ptr())
    assert segments.look(table, copied) == ([True] * len(SIZES), False)
    at = min(at, SIZES[which][0] - 1)
    pieces[which][at] ^= 1
    found, poisoned = segments.look(table, copied)
    assert found == [i != which for i in range(len(SIZES))]
    assert not poisoned


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 1001, 1 << 20])
def test_what_is_copied_is_searched_for_the_word(segments: Any, length: int) -> None:
    c = torch.randint(0, 0x7000, (length,), dtype=torch.int16, device="cuda")
    copy = torch.full((length + 8,), -1, dtype=torch.int16, device="cuda")

    def look() -> Callable[..., Any]:
        return segments.look([], Copied(c.data_ptr(), 2 * length, POISON, copy.data_ptr()))[1]

    assert not look()
    assert torch.equal(copy[:length], c)
    assert (copy[length:] == -1).all()
    for at in (0, length // 2, length - 1):
        kept, c[at] = c[at].clone(), POISON
        assert look()
        c[at] = kept
    assert not look()


def test_more_pieces_than_one_kernel_takes_are_all_filled_and_looked_at(segments: Any) -> None:
    count = 2 * MAX_SEGMENTS + 3
    whole = torch.zeros(count, 12, dtype=torch.int32, device="cuda")
    pieces = [Segment(row.data_ptr() + 4, 16, number + 1) for number, row in enumerate(whole)]
    segments.fill(pieces)
    assert segments.hold(pieces) == [True] * count
    assert whole[:, 1:5].eq(torch.arange(1, count + 1, device="cuda")[:, None]).all() and not whole[:, 5:].any()
    whole[MAX_SEGMENTS + 1, 4] = 0
    assert segments.hold(pieces) == [number != MAX_SEGMENTS + 1 for number in range(count)]
