"""The schedule space of sm90_persistent.cu: tile, warpgroups, cluster, staging of C, order, dependent launch."""

import functools
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import NamedTuple

from cuda_l2.families import _sm90
from cuda_l2.families._base import Choice, Schedule, cdiv, element
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm

WIDTHS = (64, 80, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 256)
STAGES = Choice("STAGES", tuple(range(3, 11)), "stages of the ring")
CHOICES = (
    Choice("ACC", (32, 16), "bits of the sums in the tensor cores"),
    Choice("SWAP", (0, 1), "1 computes C^T = B^T A^T: the columns of C lie on the 64-row axis"),
    Choice("PINGPONG", (0, 1), "warpgroups share a tile (0), or take turns with a tile each (1)"),
    Choice("BM", (64, 128, 192, 256), "rows of a tile, on the 64-row axis"),
    Choice("BN", WIDTHS, "columns of a tile"),
    Choice("CM", (1, 2), "blocks of a cluster along BM, sharing Y by multicast"),
    Choice("CN", (1, 2), "blocks of a cluster along BN, sharing X by multicast"),
    Choice("WGSTORE", (0, 1), "C is stored by warps in 16-row boxes (0) or by warpgroups in 64-row ones (1)"),
    Choice("HINT", (0, 1), "1 asks L2 to evict C first"),
    Choice("OUT", (1, 2, 3), "staging buffers of C"),
    STAGES,
    Choice("COLUMNS", (0, 1), "tiles are walked in bands of rows (0) or of columns (1)", compiled=False),
    Choice("BAND", (1, 2, 4, 8, 16), "cluster tiles across a band", compiled=False),
    Choice("GPC", (0, 1), "1 starts pairs of one GPC on neighbouring tiles", compiled=False),
    Choice("PDL", (0, 1, 2), "instructions of dependent launch: none, trigger at the top, after the main loop"),
    Choice("EDGE", (0, 1), "launched plainly (0) or as a programmatic dependent (1)", compiled=False),
)
WARPGROUPS = {64: 2, 128: 2, 192: 3, 256: 2}
"""Consumer warpgroups by rows of a tile."""
WIDEST = {(32, 0): {128: 256, 192: 192, 256: 192}, (32, 1): {64: 256, 128: 192}}
WIDEST |= {(16, 0): {128: 256, 192: 256, 256: 256}, (16, 1): {64: 256, 128: 256}}
"""Most columns whose sums fit the registers, by bits of the sums and PINGPONG, and by rows."""
COMMON = ((128, 96), (128, 128), (128, 160), (128, 192), (64, 128), (64, 192))
"""Rows and columns of the ping-pong tiles that are best most often."""
MAX_WASTE = 1.35
"""Most area that tiles may cover, over that of C."""
INVERSE = 1 << 40
"""The kernel divides by b as it multiplies by INVERSE / b + 1."""


class Tile(NamedTuple):
    """The choices of a tile."""

    ACC: int
    SWAP: int
    PINGPONG: int
    BM: int
    BN: int


class Persistent(_sm90.HopperFamily):
    """TMA and wgmma, several tiles a block."""

    name = "sm90_persistent"
    choices = CHOICES
    warpgroups = WARPGROUPS

    def serves(self, gemm: Gemm, target: Target) -> bool:
        hopper = _sm90.hopper(target)
        return hopper is not None and _sm90.addressable(gemm) and gemm.n % 8 == 0 and bool(_tiles(gemm, hopper))

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
        if name in Tile._fields:
            return _tiles(gemm, target).one_begins_with({**chosen, name: value})
        x, y = _sm90.sides(gemm, chosen["SWAP"])
        c = SimpleNamespace(**chosen)
        chosen = {**chosen, name: value}
        gm, gn = cdiv(x.rows, c.BM * chosen.get("CM", 1)), cdiv(y.rows, c.BN * chosen.get("CN", 1))
        little = _waste(gemm, chosen) <= MAX_WASTE
        match name:
            case "CM":
                return value == 1 or (little and cdiv(x.rows, c.BM) > 1 and c.BN // 2 % (64 if y.mn_major else 8) == 0)
            case "CN":
                many = cdiv(y.rows, c.BN) > 1 and c.CM == 1
                return value == 1 or (little and many and c.BM // 2 % (64 if x.mn_major else 8) == 0)
            case "WGSTORE":
                return value == 0 or (c.BN % 64 == 0 and not c.SWAP and _stages(chosen, target) > 0)
            case "OUT":
                return value == 1 or _stages(chosen, target) > 0
            case "STAGES":
                most = _stages(c.__dict__, target)
                return value in (most, most - 1)
            case "COLUMNS":
                return value == 0 or (gm > 1 and gn > 1)
            case "BAND":
                return value == 1 or value // 2 < (gn if c.COLUMNS else gm)
            case "GPC":
                return value == 0 or c.CM * c.CN == 2
            case "EDGE":
                return value == 0 or c.PDL > 0
        return True

    def estimate_us(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> float:
        """A rough model of a launch without clusters, tuned on 50,000 timings on one H200."""
        _, swap, pingpong, bm, bn = (chosen[name] for name in Tile._fields)
        x, y = _sm90.sides(gemm, swap)
        rounds = cdiv(cdiv(x.rows, bm) * cdiv(y.rows, bn), target.sms)
        multiply = max(bn / 2, 16 + bn / 4) * bm / 16 / 1600  # microseconds for 64 of K, at 1600 clocks each
        load = (bm + bn) * 128 / 100e3
        store = (0.6 if pingpong else 1.2) * bm * bn / 32768
        return 2 + rounds * (gemm.k / 64 * max(multiply, load) + store + 0.2)

    def launches(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> list[dict[str, int]]:
        walks = ((0, 4), (1, 4), (0, 1), (0, 8), (1, 8), (0, 16), (0, 2), (1, 16), (1, 1), (1, 2))
        pair = chosen["CM"] * chosen["CN"] == 2
        by_gpc = (1, 0) if pair else (0,)
        return [{"COLUMNS": columns, "BAND": band, "GPC": gpc} for columns, band in walks for gpc in by_gpc]

    def ranked(self, gemm: Gemm, target: CudaTarget, count: int) -> list[tuple[int, ...]]:
        tiles = _tiles(gemm, target)
        usual = [tile for tile in tiles if (tile.ACC, tile.SWAP, tile.PINGPONG) == (tiles[0].ACC, 0, 1)] or tiles
        common = [tile for tile in usual if (tile.BM, tile.BN) in COMMON] or usual

        def modelled(some: Iterable[Tile]) -> list[Tile]:
            return sorted(some, key=lambda tile: self.estimate_us(gemm, target, tile._asdict()))

        first, rest = modelled(common), modelled(set(tiles) - set(common))
        return [self._completed(tile, gemm, target) for tile in [*first, *rest][:count]]

    def _completed(self, tile: Tile, gemm: Gemm, target: CudaTarget) -> tuple[int, ...]:
        """A tile with the usual values of the other choices."""
        x, y = _sm90.sides(gemm, tile.SWAP)
        rounds = cdiv(x.rows, tile.BM) * cdiv(y.rows, tile.BN) / target.sms
        storing = gemm.k <= 512 and rounds > 2  # bound by the store of C: large boxes, and C leaves L2 to the operands
        wanted = {
            **tile._asdict(),
            "CM": 2 if gemm.k >= 2048 and rounds > 4 else 1,
            "CN": 1,
            "WGSTORE": storing,
            "HINT": storing,
            "OUT": 2 if gemm.k <= 1024 and not storing else 1,
            "STAGES": STAGES.values[-1],
            "COLUMNS": 0,
            "BAND": 4,
            "GPC": 0,
            "PDL": 2,
            "EDGE": 1,
        }
        return self.nearest(wanted, gemm, target)

    def contract(self, schedule: Schedule) -> str:
        gemm, c = schedule.task, SimpleNamespace(**schedule.named)
        x, y = _sm90.sides(gemm, c.SWAP)
        length, total = ("gm", "gn") if c.COLUMNS else ("gn", "gm")
        cluster, threads = c.CM * c.CN, 128 * WARPGROUPS[c.BM] + 128
        zeros = [*_sm90.inner_remainders(gemm, c.SWAP), "n % 8", "gm * gn / 16777216", f"gm * gn * band / {INVERSE}"]
        chunk = _chunk(c.BN)
        dependent = f", {{int32 = {c.EDGE}}}" if c.PDL else ""
        box = [64, c.BN] if c.SWAP else [64, 64] if c.WGSTORE else [chunk, 16]
        swizzle = "128B" if c.SWAP or chunk == 64 else "none"
        return "\n".join(
            [
                "\n".join(['target = "cuda"', 'arch = "sm_90a"', *element(gemm), ""]),
                f'[names]\ngm = "cdiv({x.size}, {c.BM * c.CM})"\ngn = "cdiv({y.size}, {c.BN * c.CN})"',
                f'band = "{c.BAND} * {length}"\naccepted = "{_sm90.zero(*zeros)}"\n',
                _sm90.operand_map("map_x", x, gemm, c.BM // c.CN, 1, whole=True, passes=False),
                _sm90.operand_map("map_y", y, gemm, c.BN // c.CM, 1, whole=True, passes=c.BM == 64),
                _sm90.tensor_map("map_c", "c", ["n", "m"], ["2 * n"], box, swizzle),
                f'[[launch]]\nkernel = "gemm"\ngrid = ["min(gm * gn, sms / {cluster}) * {cluster}"]\n'
                f"block = [{threads}]\ncluster = [{cluster}]\nshared_bytes = {_dynamic_bytes(schedule.named)}\n"
                'args = ["map_x", "map_y", "map_c", "m", "n", "k",'
                f" {{int32 = {c.COLUMNS}}}, {{int32 = {c.BAND}}}, {{int32 = {c.GPC}}},"
                f' {{uint64 = "{INVERSE} / band + 1"}}, {{uint64 = {INVERSE // c.BAND + 1}}},'
                f' {{uint64 = "{INVERSE} / max(1, {total} % {c.BAND}) + 1"}}{dependent}]\n'
                f'edge = "{"programmatic" if c.EDGE else "plain"}"',
            ]
        )


def _chunk(columns: int) -> int:
    """Columns of C that a warp stores at once."""
    return next((width for width in (64, 80) if columns % width == 0), columns)


def _dynamic_bytes(chosen: dict[str, int], stages: int = 0) -> int:
    """Dynamic shared memory of a block."""
    bm, bn = chosen["BM"], chosen["BN"]
    whole = chosen["SWAP"] or chosen.get("WGSTORE", 0)
    staging = chosen.get("OUT", 1) * (bn * 128 if whole else 4 * 16 * _chunk(bn) * 2)
    return (stages or chosen["STAGES"]) * (bm + bn) * 128 + WARPGROUPS[bm] * staging


def _shared_bytes(chosen: dict[str, int], stages: int) -> int:
    """Shared memory of a block, with the barriers in front of the ring."""
    return _dynamic_bytes(chosen, stages) + _sm90.ALIGNMENT_BYTES


def _stages(chosen: dict[str, int], target: CudaTarget) -> int:
    """The most stages that fit; 0 where fewer than 3 do."""
    return _sm90.most_stages(functools.partial(_shared_bytes, chosen), STAGES, target)


def _waste(gemm: Gemm, chosen: dict[str, int]) -> float:
    """Area that cluster tiles cover, over C's."""
    x, y = _sm90.sides(gemm, chosen["SWAP"])
    bm, bn = chosen["BM"] * chosen.get("CM", 1), chosen["BN"] * chosen.get("CN", 1)
    return cdiv(x.rows, bm) * bm * cdiv(y.rows, bn) * bn / (x.rows * y.rows)


@functools.cache
def _tiles(gemm: Gemm, target: CudaTarget) -> _sm90.Tiles[Tile]:
    """Every tile that gives half the multiprocessors work and wastes little."""
    found = []
    for acc, swap, pingpong in itertools.product(_sm90.accumulators(gemm), (0, 1), (0, 1)):
        x, y = _sm90.sides(gemm, swap)
        for (bm, widest), bn in itertools.product(WIDEST[acc, pingpong].items(), WIDTHS):
            chosen = {"SWAP": swap, "BM": bm, "BN": bn}
            aligned = bn % (64 if y.mn_major else 16 if swap else 8) == 0
            many = cdiv(x.rows, bm) * cdiv(y.rows, bn) >= target.sms // 2
            little = bn <= widest and _waste(gemm, chosen) <= MAX_WASTE
            if aligned and many and little and _stages(chosen, target):
                found.append(Tile(acc, swap, pingpong, bm, bn))
    return _sm90.Tiles(found)


FAMILY = Persistent()
