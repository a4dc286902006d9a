"""The choices of sm80_gemm.cu, and which of them a machine can run: shared memory, registers, threads, grids.

The choices are the techniques of the paper's section 5, each on its own, so that trials count how often the best
kernels use them (its figure 4). Every valid schedule fits the machine; the search finds the fast ones.
"""

import functools
from collections.abc import Iterator

from cuda_l2.families._base import Choice
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Gemm, Layout

DIRECT, PLAIN, PIPELINED = 0, 1, 2
NARROW, WIDE, SHARED = 0, 1, 2

CHOICES = (
    Choice("LOAD", (DIRECT, PLAIN, PIPELINED), "operands: global to registers, through shared memory, cp.async ring"),
    Choice("ACC16", (0, 1), "1 sums products in fp16"),
    Choice("BM", (16, 32, 48, 64, 80, 96, 128, 160, 192, 256), "rows of C a block computes"),
    Choice("BN", (8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256), "columns of C a block computes"),
    Choice("WARPS_M", (1, 2, 3, 4, 6, 8), "warps along M"),
    Choice("WARPS_N", (1, 2, 3, 4, 6, 8), "warps along N"),
    Choice("WARPS_K", (1, 2, 4, 8), "warps that share a tile along K and add up in shared memory"),
    Choice("BK", (16, 32, 64, 128, 256, 512), "K a block takes in one trip of its main loop"),
    Choice("STAGES", (1, 2, 3, 4, 5, 6, 7, 8), "buffers in shared memory"),
    Choice("SPLIT_K", (1, 2, 3, 4, 6, 8, 16), "blocks that share a tile along K; a second launch adds up"),
    Choice("SWIZZLE_BITS", (0, 1, 2, 3), "Swizzle<bits, base, shift> of shared memory; 0 for none"),
    Choice("SWIZZLE_BASE", (3, 4), "log2 of the halves that stay together"),
    Choice("SWIZZLE_SHIFT", (3, 4, 5), "how far above lie the bits that are mixed in"),
    Choice("RASTER", (0, 1), "neighbouring blocks lie along N (0) or M (1)"),
    Choice(
        "BLOCK_SWIZZLE",
        (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        "stride: columns (rows if RASTER) of the strips that blocks sweep one after the other; 0 for none",
    ),
    Choice("DOUBLE_BUFFER", (0, 1), "1 loads fragments ahead into registers of their own"),
    Choice("PREFETCH", (0, 1, 2, 3, 4), "k16 steps that fragments are loaded ahead"),
    Choice("STAGGER", (0, 1), "1 loads A's fragments before the multiplications and B's after"),
    Choice(
        "EPILOGUE", (NARROW, WIDE, SHARED), "C by narrow stores, wide ones from registers, or through shared memory"
    ),
    Choice("MIN_BLOCKS", (1, 2, 3, 4), "blocks a multiprocessor for which the compiler saves registers"),
    Choice("PDL", (0, 1, 2), "instructions of dependent launch: none, next kernel let in at the start, after the loop"),
    Choice("EDGE", (0, 1), "launched plainly (0) or as a programmatic dependent (1)", compiled=False),
)
VALUES = {choice.name: choice.values for choice in CHOICES}
MAX_WARPS = 16
MAX_THREADS_PER_SM = 1536  # 2048 on some
MAX_GRID_YZ = 65535
MAX_DIRECT_MNK = 1 << 28  # beyond, operands read once a warp cost too much
MAX_PLAIN_MNK = 1 << 30
SPARE_SHARED_BYTES = 128  # static, for builds that delay threads and count how often
MAX_STEPS = 8  # of 16 (32 if direct) along K that a warp's trip unrolls
BLOCKS_PER_SM = 16  # tiles so small that there are more are left out, up to MAX_LEAST_AREA
MAX_LEAST_AREA = 64 * 128
MAX_PIECES_M, MAX_PIECES_N = 8, 16  # of 16 rows and 8 columns, a warp
BASE_REGISTERS = 40  # addresses, counters
GUESSED_PIECES = 4  # of m16n8 that a guessed warp multiplies, at most


def threads(choice: dict[str, int]) -> int:
    return 32 * choice["WARPS_M"] * choice["WARPS_N"] * choice["WARPS_K"]


def shared_bytes(choice: dict[str, int]) -> int:
    """Dynamic shared memory of a block; the ring, the sums of warps along K and the tile of C take turns in it."""
    bm, bn = choice["BM"], choice["BN"]
    ring = choice["STAGES"] * (bm + bn) * choice["BK"] * 2 if choice["LOAD"] != DIRECT else 0
    sums = bm * bn * 4 * choice["WARPS_K"] if choice["WARPS_K"] > 1 else 0
    tile = bm * (bn + 8) * 2 if choice["EPILOGUE"] == SHARED else 0
    return max(ring, sums, tile)


def shared_limit(target: CudaTarget) -> int:
    return target.shared_bytes - SPARE_SHARED_BYTES


def _registers(choice: dict[str, int], gemm: Gemm, ahead: int = 0, blocks: int = 1) -> int:
    """Estimate for a thread: sums, fragments loaded `ahead` steps (direct: `blocks` of 32 along K), addresses."""
    mi, ni = choice["BM"] // choice["WARPS_M"] // 16, choice["BN"] // choice["WARPS_N"] // 8
    sums = mi * ni * (2 if choice["ACC16"] else 4)
    if choice["LOAD"] == DIRECT:
        odd = gemm.k % 2 or (gemm.n % 2 and gemm.layout is Layout.NN)  # every element comes in a register of its own
        return sums + blocks * (8 * mi + 4 * max(ni, 2)) * (2 if odd else 1) + BASE_REGISTERS
    by_hand = choice["LOAD"] == PLAIN or gemm.k % 2 or (gemm.n % 2 and gemm.layout is Layout.NN)
    return sums + (ahead + 1) * (4 * mi + 2 * ni) + BASE_REGISTERS + (24 if by_hand else 0)


def _register_limit(choice: dict[str, int], blocks: int = 1) -> int:
    return min(255, 65536 // (threads(choice) * blocks))


def _step(choice: dict[str, int]) -> int:
    return 32 if choice["LOAD"] == DIRECT else 16


@functools.lru_cache(maxsize=256)
def _warps(gemm: Gemm, target: CudaTarget, load: int, acc16: int) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """For every tile (BM, BN) worth trying, the arrangements of warps (along M, N, K) that fit the machine."""
    found: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    for bm in _sides("BM", gemm.m):
        for bn in _sides("BN", gemm.n):
            tile = {"LOAD": load, "ACC16": acc16, "BM": bm, "BN": bn}
            arrangements = tuple(
                (wm, wn, wk)
                for wm in VALUES["WARPS_M"]
                if bm % (16 * wm) == 0
                for wn in VALUES["WARPS_N"]
                if bn % (8 * wn) == 0
                for wk in VALUES["WARPS_K"]
                if _warps_fit({**tile, "WARPS_M": wm, "WARPS_N": wn, "WARPS_K": wk}, gemm, target)
            )
            if arrangements:
                found[bm, bn] = arrangements
    areas = [bm * bn for bm, bn in found]
    least = min(max(areas), MAX_LEAST_AREA, gemm.m * gemm.n // (BLOCKS_PER_SM * target.sms))
    return {tile: arrangements for tile, arrangements in found.items() if tile[0] * tile[1] >= least}


def _sides(name: str, size: int) -> list[int]:
    """Tile sides that are not mostly beyond the matrix."""
    return [value for value in VALUES[name] if value in (16, VALUES[name][0]) or value < 2 * size]


def _warps_fit(choice: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    wk = choice["WARPS_K"]
    mi, ni = choice["BM"] // choice["WARPS_M"] // 16, choice["BN"] // choice["WARPS_N"] // 8
    if threads(choice) > 32 * MAX_WARPS or 4 * mi * ni % (2 * wk):
        return False
    if choice["LOAD"] == DIRECT and not (max(choice["BM"], choice["BN"]) <= 64 and mi <= 2 and ni in (1, 2, 4, 8)):
        return False
    if choice["LOAD"] != DIRECT and (mi > MAX_PIECES_M or ni > MAX_PIECES_N or ni % 2):
        return False
    bk = _step(choice) * wk
    least = {**choice, "BK": bk, "STAGES": 2 if choice["LOAD"] == PIPELINED else 1, "EPILOGUE": WIDE}
    return (
        (wk == 1 or bk < 2 * gemm.k)
        and shared_bytes(least) <= shared_limit(target)
        and _registers(choice, gemm) <= _register_limit(choice)
    )


def fits(name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
    choice = {**chosen, name: value}
    load = choice["LOAD"]
    match name:
        case "LOAD":
            mnk = gemm.m * gemm.n * gemm.k
            return mnk <= {DIRECT: MAX_DIRECT_MNK, PLAIN: MAX_PLAIN_MNK}.get(load, mnk)
        case "ACC16":
            return not value or gemm.accumulate is Accumulate.FP16
        case "BM" | "BN" | "WARPS_M" | "WARPS_N" | "WARPS_K":
            tiles = _warps(gemm, target, load, choice["ACC16"])
            if name == "BM":
                return any(bm == value for bm, _ in tiles)
            if name == "BN":
                return (choice["BM"], value) in tiles
            warps = [choice[key] for key in ("WARPS_M", "WARPS_N", "WARPS_K") if key in choice]
            return any(list(found[: len(warps)]) == warps for found in tiles[choice["BM"], choice["BN"]])
        case "BK":
            return _fits_bk(choice, gemm, target)
        case "STAGES":
            if load != PIPELINED:
                return value == 1
            room = shared_bytes({**choice, "EPILOGUE": WIDE}) <= shared_limit(target)
            return value == 2 or (value > 2 and room and value <= -(-gemm.k // choice["BK"]))
        case "SPLIT_K":
            return value == 1 or _worth_splitting(choice, gemm, target)
        case "SWIZZLE_BITS":
            return value == 0 or load != DIRECT
        case "SWIZZLE_BASE" | "SWIZZLE_SHIFT":
            return value == 3 or choice["SWIZZLE_BITS"] > 0
        case "RASTER":
            across = -(-gemm.n // choice["BN"]) if value else -(-gemm.m // choice["BM"])
            return across <= MAX_GRID_YZ or (value == 0 and gemm.m <= gemm.n)
        case "BLOCK_SWIZZLE":
            size, side = (gemm.m, choice["BM"]) if choice["RASTER"] else (gemm.n, choice["BN"])
            strips = -(-size // side) * choice["SPLIT_K"]
            return value == 0 or (load != DIRECT and side <= value < size and strips <= MAX_GRID_YZ)
        case "DOUBLE_BUFFER":
            return value == 0 or _fits_prefetch(1, choice, gemm)
        case "PREFETCH":
            return value == 0 if not choice["DOUBLE_BUFFER"] else value > 0 and _fits_prefetch(value, choice, gemm)
        case "STAGGER":
            return value == 0 or choice["DOUBLE_BUFFER"] == 1
        case "EPILOGUE":
            return _fits_epilogue(choice, gemm, target)
        case "MIN_BLOCKS":
            return value == 1 or (
                threads(choice) * value <= MAX_THREADS_PER_SM
                and (shared_bytes(choice) + SPARE_SHARED_BYTES + 1024) * value <= target.shared_bytes + 1024
                and _registers(choice, gemm, choice["PREFETCH"], _blocks(choice)) <= _register_limit(choice, value)
            )
        case "PDL":
            return value == 0 or target.capability >= (9, 0)
        case "EDGE":
            return value == 0 or choice["PDL"] > 0
    raise AssertionError(name)


def _blocks(choice: dict[str, int]) -> int:
    """Blocks of 32 (16 if staged) along K that a warp multiplies in one trip."""
    return choice["BK"] // choice["WARPS_K"] // _step(choice)


def _fits_bk(choice: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    least = _step(choice) * choice["WARPS_K"]
    if choice["BK"] == least:
        return True
    small = {**choice, "STAGES": 2 if choice["LOAD"] == PIPELINED else 1, "EPILOGUE": WIDE}
    room = choice["BK"] % least == 0 and choice["BK"] < 2 * gemm.k and shared_bytes(small) <= shared_limit(target)
    if choice["LOAD"] == DIRECT:
        return room and _registers(choice, gemm, blocks=_blocks(choice)) <= _register_limit(choice)
    return room and _blocks(choice) <= MAX_STEPS


def _fits_prefetch(ahead: int, choice: dict[str, int], gemm: Gemm) -> bool:
    if choice["LOAD"] == DIRECT:
        return False
    return ahead < _blocks(choice) and _registers(choice, gemm, ahead) <= _register_limit(choice)


def _worth_splitting(choice: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    split = choice["SPLIT_K"]
    tiles = -(-gemm.m // choice["BM"]) * -(-gemm.n // choice["BN"])
    return gemm.k >= 2 * split * choice["BK"] and tiles * split <= 2 * target.sms


def _fits_epilogue(choice: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    value = choice["EPILOGUE"]
    if choice["LOAD"] == DIRECT:
        return value == WIDE  # a thread's columns are neighbours
    if choice["SPLIT_K"] > 1:
        return value == NARROW
    if value == WIDE:
        share = choice["BM"] * choice["BN"] // threads(choice)
        return share % 4 == 0 and gemm.n % 4 == 0
    return value == NARROW or shared_bytes(choice) <= shared_limit(target)


def direct_guesses(gemm: Gemm, target: CudaTarget) -> Iterator[dict[str, int]]:
    """Tiles, warps and K of a trip worth a guess where operands go straight to registers: two to eight warps a block,
    each with at most GUESSED_PIECES of m16n8, and K in as few trips as fit.
    """
    acc16 = int(gemm.accumulate is Accumulate.FP16)
    if not fits("LOAD", DIRECT, {}, gemm, target):
        return
    for (bm, bn), arrangements in _warps(gemm, target, DIRECT, acc16).items():
        for wm, wn, wk in arrangements:
            if 2 <= wm * wn * wk <= 8 and bm * bn <= 128 * GUESSED_PIECES * wm * wn:
                tile = {"LOAD": DIRECT, "ACC16": acc16, "BM": bm, "BN": bn, "WARPS_M": wm, "WARPS_N": wn, "WARPS_K": wk}
                fitting = [bk for bk in VALUES["BK"] if _fits_bk({**tile, "BK": bk}, gemm, target)]
                bk = min(fitting, key=lambda bk: (-(-gemm.k // bk), bk))
                yield {**tile, "BK": bk, "STAGES": 1, "DOUBLE_BUFFER": 0, "PREFETCH": 0}
