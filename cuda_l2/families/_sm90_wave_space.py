"""The choices of sm90_wave.cu, what each may be on a machine, and the sizes that follow from them."""

import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

from cuda_l2.families import _sm90
from cuda_l2.families._base import Choice, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm

WIDTHS = Choice("BN", (16, 32, 48, 64, 96, 128, 192, 256), "columns of a tile")
STAGES = Choice("STAGES", tuple(range(2, 17)), "stages of the ring")
ORDERS = Choice(
    "ORDER",
    (0, -1, 1, 2, 4, 8, 16),
    "tiles along N first (0), along M first (-1), or in boxes of this many tile rows",
    compiled=False,
)
CHOICES: tuple[Choice, ...] = (
    Choice("ACC", (32, 16), "bits of the sums in the tensor cores"),
    Choice("SWAP", (0, 1), "1 computes C^T = B^T A^T: the columns of C lie on the 64-row axis"),
    Choice("BM", (64, 128, 192, 256), "rows of a tile, on the 64-row axis"),
    WIDTHS,
    Choice("KB", (1, 2, 4), "64s of K in a stage of the ring"),
    Choice("CM", (1, 2), "blocks of a cluster along BM, sharing Y by multicast"),
    Choice("CN", (1, 2), "blocks of a cluster along BN, sharing X by multicast"),
    Choice("LOCAL", (0, 1), "first stages loaded without multicast, before the cluster has met"),
    Choice("CK", (1, 2, 4, 8), "parts of K summed within a cluster"),
    Choice("SL", (1, 2, 4, 8, 16), "further parts of K, summed through L2"),
    Choice("COUNT", (0, 1), "sums through L2 are announced by counters (1) or polled word by word (0)"),
    Choice("MINB", (1, 2), "blocks a multiprocessor"),
    STAGES,
    ORDERS,
    Choice("PDL", (0, 1, 2), "instructions of dependent launch: none, trigger at the top, after the main loop"),
    Choice("EDGE", (0, 1), "launched plainly (0) or as a programmatic dependent (1)", compiled=False),
)
EIGHTS = Choice("BN", tuple(range(8, 257, 8)), "columns of a tile")
FITTED = tuple(EIGHTS if choice is WIDTHS else choice for choice in CHOICES)
"""The choices of a family whose tiles have any width that wgmma has."""
WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Consumer warpgroups by rows of a tile."""
WIDEST = {32: {64: 256, 128: 256, 192: 200, 256: 128}, 16: {64: 256, 128: 256, 192: 256, 256: 256}}
"""Most columns whose sums fit the registers, by bits of the sums and by rows."""
MAX_TILES = 264  # entries of the kernel's table
GPC = 16  # multiprocessors that share a way to L2; blocks fill one after another, clusters go round robin over 8


class Shape:
    """Sizes that follow from a tile, its ring and its splits."""

    def __init__(self, chosen: dict[str, int]) -> None:
        self.acc, self.swap = chosen["ACC"], chosen["SWAP"]
        self.rows, self.columns = chosen["BM"], chosen["BN"]
        self.blocks_of_k = chosen.get("KB", 1)
        self.ck, self.sl = chosen.get("CK", 1), chosen.get("SL", 1)
        self.cluster = chosen.get("CM", 1) * chosen.get("CN", 1) * self.ck
        self.consumers = 128 * WARPGROUPS[self.rows]
        self.sums = self.rows * self.columns // self.consumers  # a thread
        registers = self.sums // (2 if self.acc == 16 else 1)
        self.threads = self.consumers + (128 if registers >= 128 and self.consumers > 128 else 32)

    @property
    def staging_bytes(self) -> int:
        """What C takes with operands swapped. With K split in a cluster it must fit the ring: the inbox is above."""
        return self.consumers // 32 * self.columns * 48

    def ring_bytes(self, stages: int) -> int:
        return stages * self.blocks_of_k * (self.rows + self.columns) * 128

    def dynamic_bytes(self, stages: int) -> int:
        """Dynamic shared memory of a block."""
        ring = self.ring_bytes(stages)
        staging = self.staging_bytes if self.swap else self.consumers // 32 * 16 * (self.columns * 2 + 16)
        inbox = (self.ck - 1) * (self.sums // self.ck) * self.consumers * 4
        return max(ring, staging) + inbox

    def shared_bytes(self, stages: int) -> int:
        """Shared memory of a block, with the barriers in front of the ring."""
        return self.dynamic_bytes(stages) + _sm90.ALIGNMENT_BYTES

    def stages(self, target: CudaTarget, blocks: int = 1) -> int:
        """The most stages that fit, `blocks` blocks a multiprocessor."""
        return _sm90.most_stages(self.shared_bytes, STAGES, target, blocks)

    def splits(self, pairs: bool = False) -> bool:
        """Whether the sums divide into the parts in whole vectors, and whole slabs or parts of one.

        pairs: also where a share is no multiple of 4 sums, which then move in pairs.
        """
        slab, sums = self.columns // 2, self.sums
        if sums > (96 if self.consumers == 384 else 128):  # as fp32 they would not fit the registers
            return False
        for parts in (self.ck, self.sl):
            if sums % (parts * (2 if pairs or self.swap or sums // parts < 4 else 4)):
                return False
            sums //= parts
        return slab % sums == 0 if sums <= slab else sums % slab == 0


class Tile(NamedTuple):
    """The choices of a tile."""

    ACC: int
    SWAP: int
    BM: int
    BN: int


@functools.cache
def tiles(gemm: Gemm, target: CudaTarget, fitted: bool = False) -> _sm90.Tiles[Tile]:
    """Every tile of which the task takes few enough. fitted: in all widths."""
    found = []
    for acc, swap in itertools.product(_sm90.accumulators(gemm), (0, 1)):
        x, y = _sm90.sides(gemm, swap)
        widths = [bn for bn in (EIGHTS if fitted else WIDTHS).values if not (y.mn_major and bn % 64)]
        for (bm, widest), bn in itertools.product(WIDEST[acc].items(), widths):
            gm, gn = cdiv(x.rows, bm), cdiv(y.rows, bn)
            few = gm * gn <= MAX_TILES and max(gm, gn) <= 256
            registers = bm * bn * acc // 32 // (128 * WARPGROUPS[bm])
            if gemm.n % 8 and registers >= 96:
                continue  # storing C element by element takes the registers left
            steps = [step for step in (8, 16, 32) if bn % step == 0] if fitted else [1]  # 16s and 32s can be split
            wanted = any(_sm90.needed(bn, y.rows, [each for each in widths if each % step == 0]) for step in steps)
            if few and bn <= widest and wanted and _sm90.needed(bm, x.rows, WARPGROUPS):
                found.append(Tile(acc, swap, bm, bn))
    return _sm90.Tiles(found)


def resident(target: CudaTarget, cluster: int) -> int:
    """Blocks that run at once, one a multiprocessor: clusters of 4 and more leave some of a GPC idle."""
    return target.sms if cluster <= 2 else target.sms * 10 // 11 // cluster * cluster


def fits(name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget, fitted: bool = False) -> bool:
    """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
    if name in Tile._fields:
        return tiles(gemm, target, fitted).one_begins_with({**chosen, name: value})
    x, y = _sm90.sides(gemm, chosen["SWAP"])
    c = SimpleNamespace(**chosen)
    shape = Shape({**chosen, name: value})
    steps = cdiv(gemm.k, 64 * (value if name == "KB" else c.KB))
    gm, gn = cdiv(x.rows, c.BM * chosen.get("CM", 1)), cdiv(y.rows, c.BN * chosen.get("CN", 1))
    match name:
        case "KB":
            return value == 1 or (
                64 * value < 2 * gemm.k and c.BM * c.BN * value <= 32768 and shape.stages(target) >= 2
            )
        case "CM":
            return value == 1 or (gm > 1 and c.BN // 2 % (64 if y.mn_major else 8) == 0)
        case "CN":
            return value == 1 or (gn > 1 and c.CM == 1 and c.BM // 2 % (64 if x.mn_major else 8) == 0)
        case "LOCAL":
            return value == 0 or c.CM * c.CN > 1
        case "CK" | "SL" if value > 1:
            blocks = gm * gn * shape.cluster * shape.sl
            # blocks that wait for none beyond their cluster need not all run at once
            room = target.sms if fitted and shape.sl == 1 else resident(target, shape.cluster)
            busy = steps >= shape.ck * shape.sl and blocks <= room
            both = shape.ck > 1 and shape.sl > 1 and gemm.m * gemm.n > 1 << 16  # two exchanges pay for small C alone
            alike = not c.SWAP or (fitted and name == "CK")
            fits = shape.cluster <= 8 and alike and shape.splits(fitted) and shape.stages(target) >= 2
            return busy and fits and not both
        case "COUNT":
            area = c.BM * c.BN  # resetting polled words costs more than a fence where there are many
            return bool(area <= 16384 or c.SL == 1 if value == 0 else c.SL > 1 and area >= 8192)
        case "MINB":
            alone = shape.cluster == 1 and c.SL == 1 and shape.threads < 2 * 160 and shape.sums <= 64
            return value == 1 or (alone and gm * gn > target.sms and shape.stages(target, 2) >= 2)
        case "STAGES" if c.SWAP and c.CK > 1 and shape.ring_bytes(value) < shape.staging_bytes:
            return False
        case "STAGES":
            full = shape.stages(target, c.MINB)  # also where K takes fewer: then one kernel serves every K
            most = min(full, max(2, cdiv(steps, c.CK * c.SL)))
            return value >= 2 and value in [cdiv(part * n, 4) for n in (full, most) for part in (4, 3, 2)]
        case "ORDER" if value:
            if value < 0 or gm == 1 or gn == 1:
                return gm > 1 and gn > 1
            size = max(2, GPC // shape.cluster)
            return value <= size and gm % value == 0 and gn % (size // value) == 0
        case "EDGE":
            return value == 0 or c.PDL > 0
    return True
