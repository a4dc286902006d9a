"""The family of sm80_gemm.cu: mma.sync kernels for every NVIDIA GPU from compute capability 8.0 on.

Its contract, its macros, its default schedule, and a model of the time of a launch, which sorts its schedules and sets
them beside other families'. The choices are in _sm80_space.py.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

from cuda_l2.contract.cuda import ARCHITECTURES
from cuda_l2.families import _sm80_space as space
from cuda_l2.families._base import Family, Schedule, cdiv, element
from cuda_l2.families._sm80_space import CHOICES, DIRECT, PIPELINED, PLAIN, WIDE, shared_bytes, threads
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Gemm, Layout

CLOCKS = 1755  # of a multiprocessor in a microsecond
LAUNCH_US, SECOND_US, WARPS_K_US = 1.25, 1.4, 0.3
"""A launch, the launch that adds up a split, the sum over warps along K where loads are not direct."""
REGISTERS_TRIP_US, RING_TRIP_US = 0.71, 0.135
"""A trip of a block alone: operands through registers to shared memory, by cp.async."""
PIECE_CLOCKS, MULTIPLY_CLOCKS = 7.5, 0.84
"""A warp's load of one vector a thread to shared memory, and an m16n8k16 of a multiprocessor."""
READ_BYTES_PER_US, PARTIAL_BYTES_PER_US, STORE_BYTES_PER_US = 8.8e6, 2.3e6, 2.5e6
DIRECT_TRIP_US, DIRECT_CLOCKS, DIRECT_WAIT_CLOCKS, DIRECT_MULTIPLY_CLOCKS = 0.162, 2.35, 5.98, 4.42
"""Operands straight to registers: a trip; a load of one vector a thread, of a multiprocessor and by a warp alone; an
m16n8k16; below bytes of operands and of C, and sums of other warps along K that are added."""
DIRECT_READ_BYTES_PER_US, DIRECT_STORE_BYTES_PER_US, SUMS_PER_US = 7.06e6, 7.09e6, 2e4


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


GOOD_WARPS = {
    (256, 128): (4, 2, 1, 64),
    (128, 256): (2, 4, 1, 64),
    (128, 128): (2, 2, 1, 32),
    (64, 128): (2, 2, 1, 128),
    (128, 64): (2, 2, 1, 128),
    (64, 64): (2, 1, 2, 128),
    (32, 64): (1, 2, 2, 128),
    (64, 32): (2, 1, 2, 128),
    (32, 32): (1, 1, 4, 128),
    (16, 64): (1, 2, 2, 128),
}
"""Tiles that search found good on an H200, with their warps along M, N and K, and BK: defaults are among them."""
MAX_DEFAULT_DIRECT_MNK, MAX_DEFAULT_DIRECT_K = 1 << 25, 1024
SECOND_LAUNCH_COST, PARTIAL_SUM_COST = 1e6, 9  # of a split, in multiplications of a block; fitted to the same search


class Sm80Gemm(Family):
    """Tiled mma.sync matmul, from direct loads to deep cp.async pipelines."""

    name = "sm80_gemm"
    choices = CHOICES

    def serves(self, gemm: Gemm, target: Target) -> bool:
        return isinstance(target, CudaTarget) and target.capability >= (8, 0)

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        return space.fits(name, value, chosen, gemm, target)

    def default(self, gemm: Gemm, target: CudaTarget) -> tuple[int, ...]:
        return self.nearest(_wanted(gemm, target), gemm, target)

    def ranked(self, gemm: Gemm, target: CudaTarget, count: int) -> list[tuple[int, ...]]:
        default = self.default(gemm, target)
        likely = {self.nearest(chosen, gemm, target) for chosen in _guesses(gemm, target)} - {default}
        modelled = sorted((self.estimate_us(gemm, target, self.named(values)), values) for values in likely)
        return [default, *(values for _, values in modelled)][:count]

    def estimate_us(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> float:
        """Microseconds of a launch, fitted to 1,200 timings on one H100; where operands go straight to registers, to
        1,719 on H100s and H200s.

        A block's trips one after the other, and beside them what its multiprocessor does for all of its blocks: loads,
        of which a ragged row needs more; reads of shared memory with their bank conflicts; products of whole tiles.
        """
        c, tn = SimpleNamespace(**chosen), gemm.layout is Layout.TN
        blocks = _tiles(gemm, c.BM, c.BN) * c.SPLIT_K
        fitting = target.shared_bytes // max(1, shared_bytes(chosen))
        at_once = max(1, min(16, 1024 // threads(chosen), fitting))
        beside, rounds = min(at_once, cdiv(blocks, target.sms)), cdiv(blocks, target.sms * at_once)
        trips = cdiv(cdiv(gemm.k, c.BK), c.SPLIT_K)
        k = trips * c.BK
        row_a, row_b = math.gcd(gemm.k, 8), math.gcd(gemm.k if tn else gemm.n, 8)  # elements that one load may take
        read, stored = blocks * (c.BM + c.BN) * 2 * k, 2 * gemm.m * gemm.n
        products = c.BM * c.BN * k / 2048
        us: float = LAUNCH_US
        if c.SPLIT_K > 1:
            us += SECOND_US + 4 * c.SPLIT_K * gemm.m * gemm.n / PARTIAL_BYTES_PER_US
        if c.LOAD == DIRECT:
            row_b = row_b if tn else min(row_b, c.BN // c.WARPS_N // 8)
            loads = (c.BM * c.WARPS_N / row_a + c.BN * c.WARPS_M / row_b) * k / 32
            own = (c.BM / c.WARPS_M / row_a + c.BN / c.WARPS_N / row_b) * k / c.WARPS_K / 32  # of one warp
            clocks = beside * (DIRECT_MULTIPLY_CLOCKS * products + DIRECT_CLOCKS * loads) + DIRECT_WAIT_CLOCKS * own
            us += max(rounds * (trips * DIRECT_TRIP_US + clocks / CLOCKS), read / DIRECT_READ_BYTES_PER_US)
            us += stored / DIRECT_STORE_BYTES_PER_US + c.BM * c.BN * (c.WARPS_K - 1) / SUMS_PER_US
            return us
        clocks = MULTIPLY_CLOCKS * products
        for rows, row in ((c.BM, row_a), (c.BN, row_b)):
            if c.LOAD == PLAIN or row < 8:  # 16 bytes by cp.async cost next to nothing
                clocks += PIECE_CLOCKS * rows / row * k / 32
        trip_us = REGISTERS_TRIP_US if c.LOAD == PLAIN or min(row_a, row_b) == 1 else RING_TRIP_US
        swizzle = c.SWIZZLE_BITS, c.SWIZZLE_BASE, c.SWIZZLE_SHIFT
        along_k = conflicts(panel_width(c.BK, c.BK // c.WARPS_K), *swizzle)
        of_b = along_k if tn else conflicts(panel_width(c.BN, c.BN // c.WARPS_N), *swizzle)
        clocks += (c.BM * c.WARPS_N * along_k + c.BN * c.WARPS_M * of_b) * k / 64
        us += max(rounds * (trips * trip_us + beside * clocks / CLOCKS), read / READ_BYTES_PER_US)
        us += stored / STORE_BYTES_PER_US + WARPS_K_US * (c.WARPS_K > 1)
        return us

    def general(self, gemm: Gemm, chosen: dict[str, int]) -> Gemm:
        """Sizes that are odd: rows of any alignment, no tile whole. K stays on its side of one trip."""
        k = gemm.k - 1 + gemm.k % 2 if gemm.k <= chosen["BK"] else gemm.k + 1 - gemm.k % 2
        return replace(gemm, m=gemm.m | 1, n=gemm.n | 1, k=k)

    def macros(self, schedule: Schedule) -> dict[str, int]:
        gemm, choice = schedule.task, schedule.named
        return {
            "BF16": int(gemm.dtype == "bfloat16"),
            "LAYOUT_TN": int(gemm.layout is Layout.TN),
            "K_VECTOR": math.gcd(gemm.k, 8),
            "N_VECTOR": math.gcd(gemm.n, 8),
            "WHOLE_M": int(gemm.m % choice["BM"] == 0),
            "WHOLE_N": int(gemm.n % choice["BN"] == 0),
            "WHOLE_K": int(gemm.k % choice["BK"] == 0),
            "ONE_TRIP": int(gemm.k <= choice["BK"]),
        }

    def contract(self, schedule: Schedule) -> str:
        gemm, choice, macros = schedule.task, schedule.named, self.macros(schedule)
        bm, bn, split = choice["BM"], choice["BN"], choice["SPLIT_K"]
        along, across = ("m", "n") if choice["RASTER"] else ("n", "m")
        sides = {"m": f"cdiv(m, {bm})", "n": f"cdiv(n, {bn})"}
        width = choice["BLOCK_SWIZZLE"] // {"m": bm, "n": bn}[along]  # tiles a strip
        strips = f"cdiv({sides[along]}, {width})" if width else "1"
        grid = [f"{width}" if width else sides[along], sides[across], f"{strips} * {split}"]
        pdl = choice["PDL"] > 0
        arch = schedule.target.arch if pdl and isinstance(schedule.target, CudaTarget) else "sm_80"
        dependent = f", {{int32 = {choice['EDGE']}}}" if pdl else ""
        lines = [
            'target = "cuda"',
            f'arch = "{arch if arch in ARCHITECTURES else "sm_80"}"',
            *element(gemm),
            *_only_shapes_like(macros, choice),
        ]
        if split > 1:
            lines += ["[[workspace]]", 'name = "partial"', f'bytes = "{4 * split} * m * n"']
        lines += [
            "[[launch]]",
            'kernel = "gemm"',
            f'grid = ["{grid[0]}", "{grid[1]}", "{grid[2]}"]',
            f"block = [{space.threads(choice)}]",
            f"shared_bytes = {space.shared_bytes(choice)}",
            f'args = ["a", "b", "{"partial" if split > 1 else "c"}", "m", "n", "k"{dependent}]',
            f'edge = "{"programmatic" if choice["EDGE"] else "plain"}"',
        ]
        if split > 1:
            lines += [
                "[[launch]]",
                'kernel = "reduce"',
                f'grid = ["cdiv(m * n, {256 * min(macros["N_VECTOR"], 4)})"]',
                "block = [256]",
                f'args = ["partial", "c", {{int64 = "m * n"}}{dependent}]',
                f'edge = "{"programmatic" if choice["EDGE"] else "plain"}"',
            ]
        return "\n".join(lines)


def _only_shapes_like(macros: dict[str, int], choice: dict[str, int]) -> list[str]:
    """Names whose expressions are negative, and so refuse the shape, where the macros do not hold."""
    rules = {
        "rows_of_k": f"0 - k % {macros['K_VECTOR']}",
        "rows_of_n": f"0 - n % {macros['N_VECTOR']}",
        "whole_m": f"0 - m % {choice['BM']}" if macros["WHOLE_M"] else "",
        "whole_n": f"0 - n % {choice['BN']}" if macros["WHOLE_N"] else "",
        "whole_k": f"0 - k % {choice['BK']}" if macros["WHOLE_K"] else "",
        "one_trip": f"{choice['BK']} - k" if macros["ONE_TRIP"] else "",
    }
    return ["[names]", *(f'{name} = "{rule}"' for name, rule in rules.items() if rule)]


def _wanted(gemm: Gemm, target: CudaTarget) -> dict[str, int]:
    """What an engineer would try first; the nearest valid values are taken."""
    small = gemm.m * gemm.n * gemm.k <= MAX_DEFAULT_DIRECT_MNK and gemm.k <= MAX_DEFAULT_DIRECT_K
    return _usual(gemm) | (_wanted_direct(gemm) if small else _wanted_pipelined(gemm, target))


def _guesses(gemm: Gemm, target: CudaTarget) -> Iterator[dict[str, int]]:
    """What may win; the nearest valid values are taken."""
    for direct in space.direct_guesses(gemm, target):
        yield _usual(gemm) | direct
    for (bm, bn), split in itertools.product(GOOD_WARPS, space.VALUES["SPLIT_K"]):
        chosen = _usual(gemm) | _pipelined(gemm, target, bm, bn, split)
        if space.fits("SPLIT_K", split, chosen, gemm, target):
            yield chosen


def _usual(gemm: Gemm) -> dict[str, int]:
    return {
        "ACC16": int(gemm.accumulate is Accumulate.FP16),
        "SPLIT_K": 1,
        "SWIZZLE_BITS": 3,
        "SWIZZLE_BASE": 3,
        "SWIZZLE_SHIFT": 3,
        "RASTER": 0,
        "BLOCK_SWIZZLE": 1024 if gemm.m * gemm.n > 1 << 24 else 0,
        "STAGGER": 0,
        "EPILOGUE": WIDE,
        "MIN_BLOCKS": 1,
        "PDL": 0,
        "EDGE": 0,
    }


def _wanted_direct(gemm: Gemm) -> dict[str, int]:
    """All of K in flight at once, shared among warps, in many small blocks."""
    steps = -(-gemm.k // 32)
    wk = 1 if steps <= 2 else 4 if steps < 8 else 8
    tile = {"BM": 16, "BN": 32 if wk == 8 else 16, "WARPS_M": 1, "WARPS_N": 2 if wk == 1 else 1, "WARPS_K": wk}
    bk = 32 * wk * min(2, max(1, steps // wk))
    return {**tile, "LOAD": DIRECT, "BK": bk, "STAGES": 1, "DOUBLE_BUFFER": 0, "PREFETCH": 0}


def _wanted_pipelined(gemm: Gemm, target: CudaTarget) -> dict[str, int]:
    """The tile and split that keep all multiprocessors busy with the least work and traffic."""

    def cost(bm: int, bn: int, split: int) -> float:
        """Rounds of blocks, times a block's multiplications and, weighed, its fetches; and the second launch."""
        rounds = cdiv(_tiles(gemm, bm, bn) * split, target.sms)
        second = SECOND_LAUNCH_COST + PARTIAL_SUM_COST * split * gemm.m * gemm.n if split > 1 else 0
        return rounds * (bm * bn + 64 * (bm + bn)) * gemm.k / split + second

    bm, bn, split = min(((*tile, split) for tile in GOOD_WARPS for split in (1, 2, 4, 8)), key=lambda c: cost(*c))
    return _pipelined(gemm, target, bm, bn, split)


def _tiles(gemm: Gemm, bm: int, bn: int) -> int:
    return cdiv(gemm.m, bm) * cdiv(gemm.n, bn)


def _pipelined(gemm: Gemm, target: CudaTarget, bm: int, bn: int, split: int) -> dict[str, int]:
    """A tile of GOOD_WARPS with as many stages as leave room for the blocks of a multiprocessor."""
    warps_m, warps_n, warps_k, bk = GOOD_WARPS[bm, bn]
    if gemm.k % 2:  # rows are copied element by element: more threads
        warps_n, warps_k, bk = 2 * warps_n, 2, 64
    while bk > 32 and 3 * (bm + bn) * bk * 2 > space.shared_limit(target):
        bk //= 2
    two_at_once = _tiles(gemm, bm, bn) * split > target.sms and bm * bn <= 128 * 128
    stages = space.shared_limit(target) // (2 if two_at_once else 1) // ((bm + bn) * bk * 2)
    return {
        **{"LOAD": PIPELINED, "BM": bm, "BN": bn, "WARPS_M": warps_m, "WARPS_N": warps_n, "WARPS_K": warps_k, "BK": bk},
        **{"STAGES": max(2, min(6, stages)), "SPLIT_K": split, "DOUBLE_BUFFER": 1, "PREFETCH": 1},
    }


FAMILY = Sm80Gemm()
