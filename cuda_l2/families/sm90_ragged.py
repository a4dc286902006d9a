"""The family of sm90_ragged.cu: TMA and wgmma for rows that are no multiples of 16 bytes, by way of copies that are."""

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from cuda_l2.families import _sm90
from cuda_l2.families._base import Choice, Schedule, cdiv, element
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm, Layout

WIDTHS = Choice("BN", (16, 32, 64, 96, 128, 192, 256), "columns of a tile")
STAGES = Choice("STAGES", tuple(range(2, 13)), "stages of the ring")
CHOICES = (
    Choice("BM", (64, 128, 256), "rows of a tile"),
    WIDTHS,
    Choice("KB", (1, 2), "64s of K in a stage of the ring"),
    Choice("CK", (1, 2, 4, 8), "parts of K summed within a cluster"),
    Choice("MINB", (1, 2), "blocks a multiprocessor"),
    STAGES,
    Choice("BAND", (1, 4, 16), "tile rows of a band that is walked across", compiled=False),
    Choice("EDGE", (0, 1), "launched plainly (0) or as a programmatic dependent (1)", compiled=False),
)
WARPGROUPS = {64: 1, 128: 2, 256: 2}
"""Consumer warpgroups by rows of a tile."""
WIDEST = {64: 256, 128: 256, 256: 128}
"""Most columns whose sums fit the registers, by rows."""
PAD_THREADS, PER_THREAD = 256, 2
"""Threads of a block that copies, and chunks of 8 elements that a thread copies."""
MAX_SPLIT_SUMS = 64
"""A thread's sums where K is split: they move through registers as a whole."""


class Tile(NamedTuple):
    """The choices of a tile."""

    BM: int
    BN: int


class Ragged(_sm90.HopperFamily):
    """TMA and wgmma where K or N is no multiple of 8."""

    name = "sm90_ragged"
    choices = CHOICES
    warpgroups = WARPGROUPS

    def serves(self, gemm: Gemm, target: Target) -> bool:
        return _sm90.hopper(target) is not None and (gemm.k % 8 != 0 or gemm.n % 8 != 0)

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
        if name in Tile._fields:
            return _tiles(gemm).one_begins_with({**chosen, name: value})
        c, chosen = SimpleNamespace(**chosen), {**chosen, name: value}
        tiles = cdiv(gemm.m, c.BM) * cdiv(gemm.n, c.BN)
        match name:
            case "KB":
                return value == 1 or (gemm.k > 64 and c.BM * c.BN <= 16384)
            case "CK":
                enough = cdiv(gemm.k, 64 * c.KB) >= value and tiles * value <= target.sms
                return value == 1 or (enough and _splits(chosen) and _stages(chosen, target) > 0)
            case "MINB":
                return value == 1 or (
                    c.CK == 1 and c.BM == 64 and c.BN <= 128 and tiles > target.sms and _stages(chosen, target) > 0
                )
            case "STAGES":
                most = _stages(chosen, target)
                return value in {max(2, cdiv(part * most, 4)) for part in (2, 3, 4)}
            case "BAND":
                return value == 1 or value // 4 < cdiv(gemm.m, c.BM)
        return True

    def estimate_us(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> float:
        """A rough model of a launch, as sm90_wave's, and of the copies before it, which all schedules need."""
        bm, bn, parts, kb = (chosen[name] for name in ("BM", "BN", "CK", "KB"))
        tiles = cdiv(gemm.m, bm) * cdiv(gemm.n, bn)
        rounds = cdiv(tiles * parts, target.sms)
        blocks_of_k = cdiv(cdiv(gemm.k, 64 * kb), parts) * kb
        multiply = blocks_of_k * max(bn / 2, 16 + bn / 4) * bm / 16 / 1400
        load = blocks_of_k * (bm + bn) * 128 / 100e3
        within = 0.13 + 4 * bm * bn * (parts - 1) / parts / 27e3 if parts > 1 else 0
        store = bm * bn / parts / 20000
        copied = 2 * (gemm.m * gemm.k * (gemm.k % 8 != 0) + gemm.k * gemm.n * (_b_row(gemm) % 8 != 0))
        copy = 1.5 + copied / 1.2e6 if copied else 0
        return 2.0 + copy + rounds * (max(multiply, load) + store) + within

    def launches(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> list[dict[str, int]]:
        return [{"BAND": band} for band in (4, 16, 1)]

    def ranked(self, gemm: Gemm, target: CudaTarget, count: int) -> list[tuple[int, ...]]:
        found = []
        for tile in _tiles(gemm):
            for ck in (1, 2, 4, 8):
                kb = 1 if tile.BM * tile.BN >= 8192 or gemm.k <= 64 else 2
                chosen = {**tile._asdict(), "KB": kb}
                if self.fits("CK", ck, chosen, gemm, target):
                    found.append(chosen | {"CK": ck})
        found.sort(key=lambda chosen: self.estimate_us(gemm, target, chosen))
        usual = {"MINB": 1, "STAGES": STAGES.values[-1], "BAND": 4, "EDGE": 1}
        return [self.nearest({**chosen, **usual}, gemm, target) for chosen in found[:count]]

    def macros(self, schedule: Schedule) -> dict[str, int]:
        gemm = schedule.task
        return {
            "BF16": int(gemm.dtype == "bfloat16"),
            "LAYOUT_TN": int(gemm.layout is Layout.TN),
            "NWG": WARPGROUPS[schedule.named["BM"]],
        }

    def generated(self, schedule: Schedule) -> str:
        """`wgmma` for the width of the tile."""
        gemm = schedule.task
        return _sm90.wgmma(schedule.named["BN"], 32, gemm.dtype, False, gemm.layout is Layout.NN)

    def contract(self, schedule: Schedule) -> str:
        gemm, c, tn = schedule.task, SimpleNamespace(**schedule.named), schedule.task.layout is Layout.TN
        a = _Operand("a", "m", "k", gemm.k % 8 != 0)
        b = _Operand("b", *(("n", "k") if tn else ("k", "n")), _b_row(gemm) % 8 != 0)
        copied = [operand for operand in (a, b) if operand.copied]
        zeros = ["gm * gn / 16777216", f"max(0, {c.CK} - cdiv(k, {64 * c.KB}))"]
        zeros += [f"{operand.length} % 8" for operand in (a, b) if not operand.copied]
        blocks = f"gm * gn * {c.CK}" if c.CK > 1 else f"min(gm * gn, sms * {c.MINB})"
        edge = "programmatic" if c.EDGE else "plain"
        return "\n".join(
            [
                "\n".join(['target = "cuda"', 'arch = "sm_90a"', f'layouts = ["{gemm.layout}"]', *element(gemm), ""]),
                f'[names]\ngm = "cdiv(m, {c.BM})"\ngn = "cdiv(n, {c.BN})"\naccepted = "{_sm90.zero(*zeros)}"\n',
                *(operand.workspace for operand in copied),
                a.map("map_x", [64, c.BM, 1]),
                b.map("map_y", [64, c.BN, 1] if tn else [64, 64 * c.KB, 1]),
                *([_pad(a, b, edge)] if copied else []),
                f'[[launch]]\nkernel = "gemm"\ngrid = ["{blocks}"]\nblock = [{block_threads(c.BM, c.BN)}]\n'
                f"cluster = [{c.CK}]\nshared_bytes = {shared_bytes(schedule.named, c.STAGES)}\n"
                f'args = ["map_x", "map_y", "c", "m", "n", "k", {{int32 = {c.BAND}}}, {{int32 = {c.EDGE}}}]\n'
                f'edge = "{"programmatic" if copied else edge}"',
            ]
        )


@dataclass(frozen=True, slots=True)
class _Operand:
    """A or B as it lies in memory: names of its rows' number and length. copied: into a workspace first."""

    tensor: str
    rows: str
    length: str
    copied: bool

    @property
    def chunks(self) -> str:
        """Chunks of 8 elements that are copied."""
        return f"{self.rows} * cdiv({self.length}, 8)" if self.copied else "0"

    @property
    def workspace(self) -> str:
        """The copy, in TOML."""
        return f'[[workspace]]\nname = "padded_{self.tensor}"\nbytes = "{self.rows} * cdiv({self.length}, 8) * 16"\n'

    def map(self, name: str, box: list[int]) -> str:
        """The tensor map of the operand, or of its copy."""
        stride = f"cdiv({self.length}, 8) * 16" if self.copied else f"2 * {self.length}"
        tensor = f"padded_{self.tensor}" if self.copied else self.tensor
        return _sm90.tensor_map(name, tensor, [self.length, self.rows, 1], [stride, stride], box, "128B")


def _pad(a: _Operand, b: _Operand, edge: str) -> str:
    """The launch that copies operands, in TOML. What is not copied has no chunks, and any workspace for its copy."""
    place = "padded_a" if a.copied else "padded_b"
    arguments = [
        f'"{o.tensor}", "{f"padded_{o.tensor}" if o.copied else place}", "{o.rows}", "{o.length}"' for o in (a, b)
    ]
    total = f"{a.chunks} + {b.chunks}"
    arguments += [f'{{uint32 = "{a.chunks}"}}', f'{{uint32 = "{total}"}}']
    return (
        f'[[launch]]\nkernel = "pad"\ngrid = ["cdiv({total}, {PAD_THREADS * PER_THREAD})"]\n'
        f"block = [{PAD_THREADS}]\n"
        f'args = [{", ".join(arguments)}]\nedge = "{edge}"\n'
    )


def _b_row(gemm: Gemm) -> int:
    """Elements of a row of B as it lies in memory."""
    return gemm.k if gemm.layout is Layout.TN else gemm.n


def _splits(chosen: dict[str, int]) -> bool:
    """Whether a thread's sums divide into CK parts: whole slabs of 64 rows, or columns of one in eights."""
    bm, bn, parts = chosen["BM"], chosen["BN"], chosen["CK"]
    sums, slab = bm * bn // (128 * WARPGROUPS[bm]), bn // 2
    kept = sums // parts
    return sums <= MAX_SPLIT_SUMS and sums % (4 * parts) == 0 and (kept % slab == 0 or slab % kept == 0)


def block_threads(rows: int, columns: int) -> int:
    """Threads of a block: consumers, and a producer that is a warpgroup where registers are split."""
    consumers = 128 * WARPGROUPS[rows]
    return consumers + (128 if rows * columns // consumers >= 128 and consumers > 128 else 32)


def shared_bytes(chosen: dict[str, int], stages: int) -> int:
    """Dynamic shared memory of a block: the ring, what other parts of K send, rows of C."""
    bm, bn, parts = chosen["BM"], chosen["BN"], chosen.get("CK", 1)
    ring = stages * chosen["KB"] * (bm + bn) * 128
    inbox = (parts - 1) * bm * bn * 4 // parts
    return ring + inbox + WARPGROUPS[bm] * 4 * 16 * (bn * 2 + 16) + _sm90.ALIGNMENT_BYTES


def _stages(chosen: dict[str, int], target: CudaTarget) -> int:
    """The most stages that fit; 0 where fewer than 2 do."""
    return _sm90.most_stages(functools.partial(shared_bytes, chosen), STAGES, target, chosen.get("MINB", 1))


@functools.cache
def _tiles(gemm: Gemm) -> _sm90.Tiles[Tile]:
    """Every tile that no smaller one replaces."""
    found, wide = [], [bn for bn in WIDTHS.values if bn >= 64]  # for row-major B the least is 64 wide
    for bm, widest in WIDEST.items():
        for bn in WIDTHS.values:
            aligned = gemm.layout is Layout.TN or bn % 64 == 0
            needed = _sm90.needed(bm, gemm.m, WIDEST) and _sm90.needed(bn, gemm.n, wide)
            if aligned and bn <= widest and needed:
                found.append(Tile(bm, bn))
    return _sm90.Tiles(found)


FAMILY = Ragged()
