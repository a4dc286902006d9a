"""A model of the time of a launch of sm80_gemm.cu, which sorts its schedules and sets them beside other families'."""

import functools
import math
from types import SimpleNamespace

from cuda_l2.families._base import cdiv
from cuda_l2.families._sm80_space import DIRECT, PLAIN, shared_bytes, threads
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm, Layout

CLOCKS = 1755  # of a multiprocessor in a microsecond
LAUNCH_US, SECOND_US, WARPS_K_US = 1.25, 1.4, 0.3
"""A launch, the launch that adds up a split, the sum over warps along K."""
DIRECT_TRIP_US, REGISTERS_TRIP_US, RING_TRIP_US = 0.21, 0.71, 0.135
"""A trip of a block alone: operands straight to registers, through registers to shared memory, by cp.async."""
DIRECT_CLOCKS, PIECE_CLOCKS, MULTIPLY_CLOCKS = 4.6, 7.5, 0.84
"""A warp's load of one vector a thread, the same to shared memory, and an m16n8k16 of a multiprocessor."""
READ_BYTES_PER_US, PARTIAL_BYTES_PER_US, STORE_BYTES_PER_US = 8.8e6, 2.3e6, 2.5e6


def estimate_us(gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> float:
    """Microseconds of a launch, fitted to 1,200 timings on one H100.

    A block's trips one after the other, and beside them what its multiprocessor does for all of its blocks: loads, of
    which a ragged row needs more; reads of shared memory with their bank conflicts; products of whole tiles.
    """
    c, tn = SimpleNamespace(**chosen), gemm.layout is Layout.TN
    blocks = cdiv(gemm.m, c.BM) * cdiv(gemm.n, c.BN) * c.SPLIT_K
    fitting = target.shared_bytes // max(1, shared_bytes(chosen))
    at_once = max(1, min(16, 1024 // threads(chosen), fitting))
    beside, rounds = min(at_once, cdiv(blocks, target.sms)), cdiv(blocks, target.sms * at_once)
    trips = cdiv(cdiv(gemm.k, c.BK), c.SPLIT_K)
    k = trips * c.BK
    row_a, row_b = math.gcd(gemm.k, 8), math.gcd(gemm.k if tn else gemm.n, 8)  # elements that one load may take
    clocks = MULTIPLY_CLOCKS * c.BM * c.BN * k / 2048
    if c.LOAD == DIRECT:
        row_b = row_b if tn else min(row_b, c.BN // c.WARPS_N // 8)
        clocks += DIRECT_CLOCKS * (c.BM * c.WARPS_N / row_a + c.BN * c.WARPS_M / row_b) * k / 32
        trip_us = DIRECT_TRIP_US
    else:
        for rows, row in ((c.BM, row_a), (c.BN, row_b)):
            if c.LOAD == PLAIN or row < 8:  # 16 bytes by cp.async cost next to nothing
                clocks += PIECE_CLOCKS * rows / row * k / 32
        trip_us = REGISTERS_TRIP_US if c.LOAD == PLAIN or min(row_a, row_b) == 1 else RING_TRIP_US
        swizzle = c.SWIZZLE_BITS, c.SWIZZLE_BASE, c.SWIZZLE_SHIFT
        along_k = conflicts(panel_width(c.BK, c.BK // c.WARPS_K), *swizzle)
        of_b = along_k if tn else conflicts(panel_width(c.BN, c.BN // c.WARPS_N), *swizzle)
        clocks += (c.BM * c.WARPS_N * along_k + c.BN * c.WARPS_M * of_b) * k / 64
    read_us = blocks * (c.BM + c.BN) * 2 * k / READ_BYTES_PER_US
    us: float = LAUNCH_US + max(rounds * (trips * trip_us + beside * clocks / CLOCKS), read_us)
    us += 2 * gemm.m * gemm.n / STORE_BYTES_PER_US + WARPS_K_US * (c.WARPS_K > 1)
    if c.SPLIT_K > 1:
        us += SECOND_US + 4 * c.SPLIT_K * gemm.m * gemm.n / PARTIAL_BYTES_PER_US
    return us


@functools.cache
def conflicts(width: int, bits: int, base: int, shift: int) -> int:
    """Clocks in which ldmatrix reads 8 rows of 16 bytes: the most rows in the same banks. width: halves of a row.

    Swizzle<bits, base, shift> moves them, as sm80_tile.cuh does.
    """
    offsets = [row * width for row in range(8)]
    places = [(offset ^ ((offset >> (base + shift) & ((1 << bits) - 1)) << base)) // 8 % 8 for offset in offsets]
    return max(map(places.count, places))


def panel_width(columns: int, part: int) -> int:
    """Columns of a panel of a tile, as in sm80_tile.cuh. part: columns that one warp reads."""
    width = 64
    while columns % width or (part % width and width % part):
        width //= 2
    return width
