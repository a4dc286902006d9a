"""The schedule space of sm90_wave.cu: tile, ring, cluster, split of K, order of tiles, dependent launch."""

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

from cuda_l2.families import _sm90
from cuda_l2.families._base import Choice, Schedule
from cuda_l2.families._sm90 import cdiv
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm

CHOICES = (
    Choice("ACC", (32, 16), "bits of the sums in the tensor cores"),
    Choice("SWAP", (0, 1), "1 computes C^T = B^T A^T: the columns of C lie on the 64-row axis"),
    Choice("BM", (64, 128, 192, 256), "rows of a tile, on the 64-row axis"),
    Choice("BN", (16, 32, 48, 64, 96, 128, 192, 256), "columns of a tile"),
    Choice("KB", (1, 2, 4), "64s of K in a stage of the ring"),
    Choice("CM", (1, 2), "blocks of a cluster along BM, sharing Y by multicast"),
    Choice("CN", (1, 2), "blocks of a cluster along BN, sharing X by multicast"),
    Choice("LOCAL", (0, 1), "first stages loaded without multicast, before the cluster has met"),
    Choice("CK", (1, 2, 4, 8), "parts of K summed within a cluster"),
    Choice("SL", (1, 2, 4, 8, 16), "further parts of K, summed through L2"),
    Choice("COUNT", (0, 1), "sums through L2 are announced by counters (1) or polled word by word (0)"),
    Choice("MINB", (1, 2), "blocks a multiprocessor"),
    Choice("STAGES", tuple(range(2, 17)), "stages of the ring"),
    Choice(
        "ORDER",
        (0, -1, 1, 2, 4, 8, 16),
        "tiles along N first (0), along M first (-1), in boxes so many tiles high",
        compiled=False,
    ),
    Choice("PDL", (0, 1, 2), "instructions of dependent launch: none, trigger at the top, after the main loop"),
    Choice("EDGE", (0, 1), "launched plainly (0) or as a programmatic dependent (1)", compiled=False),
)
_ORDER = next(choice for choice in CHOICES if choice.name == "ORDER")
WARPGROUPS = {64: 1, 128: 2, 192: 3, 256: 2}
"""Consumer warpgroups of a tile of so many rows."""
WIDEST = {32: {64: 256, 128: 256, 192: 192, 256: 128}, 16: {64: 256, 128: 256, 192: 256, 256: 256}}
"""By bits of the sums and rows: columns whose sums fit the registers."""
MAX_TILES = 264  # entries of the kernel's table
GPC = 16  # multiprocessors that share a way to L2; blocks fill one after another, clusters go round robin over 8


class Wave(_sm90.HopperFamily):
    """TMA and wgmma, one tile or one K part of a tile a block."""

    name = "sm90_wave"
    choices = CHOICES
    warpgroups = WARPGROUPS

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("sm90_wave.cu")

    def serves(self, gemm: Gemm, target: Target) -> bool:
        hopper = _sm90.hopper(target)
        return hopper is not None and _sm90.addressable(gemm) and bool(_tiles(gemm, hopper))

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: Target) -> bool:
        assert isinstance(target, CudaTarget)
        return _fits(name, value, chosen, gemm, target)

    def _completed(self, wanted: dict[str, int], gemm: Gemm, target: CudaTarget) -> tuple[int, ...]:
        """Choices up to COUNT with the usual values of the rest."""
        values: list[int] = []
        for choice in CHOICES:
            valid = self.valid_values(gemm, target, values)
            match choice.name:
                case "STAGES":
                    needed = cdiv(cdiv(gemm.k, 64 * wanted["KB"]), wanted["CK"] * wanted["SL"])
                    values.append(max(stages for stages in valid if stages <= max(2, needed)))
                case "ORDER":
                    values.append(min(valid, key=lambda order: _footprint(order, wanted, gemm)))
                case "PDL":
                    values.append(0 if wanted["SL"] > 1 else 2)  # blocks that poll L2 are disturbed by early dependents
                case "EDGE":
                    values.append(max(valid))
                case _:
                    values.append(wanted.get(choice.name, valid[0]))
        return tuple(values)

    def estimate_us(self, gemm: Gemm, target: Target, chosen: dict[str, int]) -> float:
        assert isinstance(target, CudaTarget)
        return _estimate_us(chosen, gemm, target)

    def launches(self, gemm: Gemm, target: Target, chosen: dict[str, int]) -> list[dict[str, int]]:
        orders = sorted(_ORDER.values, key=lambda order: _footprint(order, chosen, gemm))
        return [{"ORDER": order} for order in orders]

    def ranked(self, gemm: Gemm, target: Target, count: int) -> list[tuple[int, ...]]:
        assert isinstance(target, CudaTarget)
        guesses = sorted(_guesses(gemm, target), key=lambda chosen: _estimate_us(chosen, gemm, target))
        return [self._completed(chosen, gemm, target) for chosen in guesses[:count]]

    def macros(self, schedule: Schedule) -> dict[str, int]:
        gemm, c = schedule.gemm, SimpleNamespace(**schedule.named)
        x, y = _sm90.sides(gemm, c.SWAP)
        whole = x.rows % (c.BM * c.CM) == 0 and y.rows % (c.BN * c.CN) == 0 and gemm.n % 8 == 0
        return {**super().macros(schedule), "EDGES": 0 if whole else 1 if gemm.n % 8 == 0 else 2}

    def contract(self, schedule: Schedule) -> str:
        gemm, c = schedule.gemm, SimpleNamespace(**schedule.named)
        x, y = _sm90.sides(gemm, c.SWAP)
        shape = _Shape(schedule.named)
        parts, cluster = c.CK * c.SL, shape.cluster
        rows, columns = c.BM * c.CM, c.BN * c.CN
        zeros = [*_sm90.inner_remainders(gemm, c.SWAP), f"gm * gn / {MAX_TILES + 1}", "gm / 257", "gn / 257"]
        zeros.append(f"max(0, {parts} - cdiv(k, {64 * c.KB}))")
        edges = self.macros(schedule)["EDGES"]
        if edges == 0:
            zeros += [f"{x.size} % {rows}", f"{y.size} % {columns}"]
        if edges < 2:
            zeros.append("n % 8")
        value, fits = _order(c.ORDER, cluster)
        pieces = c.CM * c.CN > 1
        text = [
            'target = "cuda"\narch = "sm_90a"\n',
            f'[names]\ngm = "cdiv({x.size}, {rows})"\ngn = "cdiv({y.size}, {columns})"',
            f'accepted = "{_sm90.zero(*zeros, *fits)}"\n',
            _sm90.operand_map("map_x", x, gemm, c.BM // c.CN, c.KB, not pieces),
            _sm90.operand_map("map_y", y, gemm, c.BN // c.CM, c.KB, not pieces),
            f'[[table]]\nname = "order"\nlength = "gm * gn"\nvalue = "{value}"\n',
        ]
        arguments: list[str | dict[str, int]] = ["map_x", "map_y", "c"]
        if c.SL > 1:
            arguments.append("parts")
            floats = c.CM * c.CN * (c.SL - 1) * c.BM * c.BN
            kind = "" if c.COUNT else 'kind = "persistent"\nfill = 0xffffffff\n'
            text.append(f'[[workspace]]\nname = "parts"\nbytes = "gm * gn * {4 * floats}"\n{kind}')
            if c.COUNT:
                arguments.append("counters")
                words = c.CM * c.CN * parts
                text.append(f'[[workspace]]\nname = "counters"\nbytes = "gm * gn * {4 * words}"\nkind = "persistent"\n')
        arguments += ["m", "n", "k", "order"]
        if c.PDL:
            arguments.append({"int32": c.EDGE})
        text.append(
            f'[[launch]]\nkernel = "gemm"\ngrid = ["gm * gn * {cluster}", {c.SL}]\nblock = [{shape.threads}]\n'
            f"cluster = [{cluster}]\nshared_bytes = {shape.shared_bytes(c.STAGES)}\n"
            f"args = {_sm90.toml_list(arguments)}\n"
            f"coresident = {'true' if c.SL > 1 else 'false'}\n"
            f'edge = "{"programmatic" if c.EDGE else "plain"}"'
        )
        return "\n".join(text)


class _Shape:
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

    def shared_bytes(self, stages: int) -> int:
        """Dynamic shared memory of a block."""
        ring = stages * self.blocks_of_k * (self.rows + self.columns) * 128
        staging = self.consumers // 32 * (self.columns * 48 if self.swap else 16 * (self.columns * 2 + 16))
        inbox = (self.ck - 1) * (self.sums // self.ck) * self.consumers * 4
        return max(ring, staging) + inbox + _sm90.ALIGNMENT_BYTES

    def stages(self, target: CudaTarget, blocks: int = 1) -> int:
        """The most stages that fit, `blocks` blocks a multiprocessor."""
        room = (target.shared_bytes + 1024) // blocks - 1024 - _sm90.STATIC_BYTES
        most = CHOICES[12].values[-1]
        return next((stages for stages in range(most, 1, -1) if self.shared_bytes(stages) <= room), 0)

    def splits(self) -> bool:
        """Whether the sums divide into the parts in whole vectors, and whole slabs or parts of one."""
        slab, sums = self.columns // 2, self.sums
        if sums > (96 if self.consumers == 384 else 128):  # as fp32 they would not fit the registers
            return False
        for parts in (self.ck, self.sl):
            if sums % (parts * (2 if sums // parts < 4 else 4)):
                return False
            sums //= parts
        return slab % sums == 0 if sums <= slab else sums % slab == 0


@functools.cache
def _tiles(gemm: Gemm, target: CudaTarget) -> tuple[tuple[int, int, int, int], ...]:
    """ACC, SWAP, BM, BN of every tile of which the task takes few enough."""
    found = []
    for acc in _sm90.accumulators(gemm):
        for swap in (0, 1):
            x, y = _sm90.sides(gemm, swap)
            widths = [bn for bn in CHOICES[3].values if not (y.mn_major and bn % 64)]
            for bm, widest in WIDEST[acc].items():
                for bn in widths:
                    gm, gn = cdiv(x.rows, bm), cdiv(y.rows, bn)
                    few = gm * gn <= MAX_TILES and max(gm, gn) <= 256
                    registers = bm * bn * acc // 32 // (128 * WARPGROUPS[bm])
                    if gemm.n % 8 and registers >= 96:
                        continue  # storing C element by element takes the registers left
                    if few and bn <= widest and _needed(bm, x.rows, WARPGROUPS) and _needed(bn, y.rows, widths):
                        found.append((acc, swap, bm, bn))
    return tuple(found)


def _needed(size: int, rows: int, sizes: Iterable[int]) -> bool:
    """Whether no smaller tile covers all rows."""
    return not any(rows <= smaller < size for smaller in sizes)


def _resident(target: CudaTarget, cluster: int) -> int:
    """Blocks that run at once, one a multiprocessor: clusters of 4 and more leave some of a GPC idle."""
    return target.sms if cluster <= 2 else target.sms * 10 // 11 // cluster * cluster


def _fits(name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
    """Whether a value is worth compiling after the ones chosen; each choice always has one that is."""
    if name in ("ACC", "SWAP", "BM", "BN"):
        prefix = (*chosen.values(), value)
        return any(tile[: len(prefix)] == prefix for tile in _tiles(gemm, target))
    x, y = _sm90.sides(gemm, chosen["SWAP"])
    c = SimpleNamespace(**chosen)
    shape = _Shape({**chosen, name: value})
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
            busy = steps >= shape.ck * shape.sl and blocks <= _resident(target, shape.cluster)
            both = shape.ck > 1 and shape.sl > 1 and gemm.m * gemm.n > 1 << 16  # two exchanges pay for small C alone
            fits = shape.cluster <= 8 and not c.SWAP and shape.splits() and shape.stages(target) >= 2
            return busy and fits and not both
        case "COUNT":
            area = c.BM * c.BN  # resetting polled words costs more than a fence where there are many
            return bool(area <= 16384 or c.SL == 1 if value == 0 else c.SL > 1 and area >= 8192)
        case "MINB":
            alone = shape.cluster == 1 and c.SL == 1 and shape.threads < 2 * 160 and shape.sums <= 64
            return value == 1 or (alone and gm * gn > target.sms and shape.stages(target, 2) >= 2)
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


def _order(order: int, cluster: int) -> tuple[str, list[str]]:
    """The tile of cluster i as row | column << 8, in cluster tiles, and what must be 0 for the order to be one."""
    if order == 0:
        return "i / gn + 256 * (i % gn)", []
    if order < 0:
        return "i % gm + 256 * (i / gm)", []
    size = max(2, GPC // cluster)
    width = size // order
    # the place of cluster i when clusters are sorted by GPC
    place = "i" if cluster == 1 else "(i % 8 * (gm * gn / 8) + min(i % 8, gm * gn % 8) + i / 8)"
    box, inside, across = f"{place} / {size}", f"{place} % {size}", f"(gn / {width})"
    row, column = f"({box} / {across})", f"({box} % {across})"
    snake = f"({column} + {row} % 2 * ({across} - 1 - 2 * ({column})))"
    value = f"{row} * {order} + {inside} % {order} + 256 * ({snake} * {width} + {inside} / {order})"
    return value, [f"gm % {order}", f"gn % {width}"]


def _guesses(gemm: Gemm, target: CudaTarget) -> Iterator[dict[str, int]]:
    """Choices up to COUNT of which one is usually good: no clusters along M or N, operands as they are."""
    tiles = _tiles(gemm, target)
    for acc, swap, bm, bn in tiles:
        if (acc, swap) != tiles[0][:2]:
            continue
        # short steps suit large tiles; small ones are bound by what a step costs beside its products
        kb = 1 if bm * bn >= 8192 or gemm.k <= 64 else 2
        for ck, sl in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (1, 16)):
            count = int(bm * bn > 8192 and sl > 1)
            values = (acc, swap, bm, bn, kb, 1, 1, 0, ck, sl, count)
            chosen = {choice.name: value for choice, value in zip(CHOICES, values, strict=False)}
            before: dict[str, int] = {}
            for name, value in chosen.items():
                if not _fits(name, value, before, gemm, target):
                    break
                before[name] = value
            else:
                yield chosen


def _estimate_us(chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> float:
    """A rough model of a launch, fitted to 100,000 timings on one H200; clusters along M or N are not told apart."""
    shape = _Shape(chosen)
    x, y = _sm90.sides(gemm, shape.swap)
    blocks = cdiv(x.rows, shape.rows) * cdiv(y.rows, shape.columns) * shape.ck * shape.sl
    resident = _resident(target, shape.cluster)
    rounds, busy = cdiv(blocks, resident), min(blocks, target.sms)
    steps = cdiv(cdiv(gemm.k, 64 * shape.blocks_of_k), shape.ck * shape.sl)
    blocks_of_k, stages = steps * shape.blocks_of_k, shape.stages(target)
    # a wgmma takes half a clock a column, no less than it takes to read its operands; 1400 useful clocks a microsecond
    multiply = blocks_of_k * max(shape.columns / 2, 16 + shape.columns / 4) * shape.rows / 16 / 1400
    bytes_loaded = (shape.rows + shape.columns) * 128 * blocks_of_k
    load = max(bytes_loaded / 130e3, bytes_loaded * min(blocks, resident) / 17e6)
    stall = 1 + 1 / (stages - 1) ** 2 if steps > stages else 1  # a shallow ring runs dry
    sums = 4 * shape.rows * shape.columns / shape.ck  # bytes
    within = 0.13 + sums * (shape.ck - 1) / 27e3 if shape.ck > 1 else 0
    count = 0.59 if chosen["COUNT"] else 0
    across = 0.75 + count + sums * (1 - 1 / shape.sl) * 2 * busy / 4.6e6 if shape.sl > 1 else 0
    store = 2 * gemm.m * gemm.n / 3.7e6
    return 1.8 + rounds * (max(multiply, load) * stall + 0.03 * steps) + within + across + store


def _footprint(order: int, chosen: dict[str, int], gemm: Gemm) -> float:
    """Rows of operands that the blocks of one GPC read, by the order of tiles; a box must be clearly better to win."""
    x, y = _sm90.sides(gemm, chosen["SWAP"])
    gm, gn = cdiv(x.rows, chosen["BM"]), cdiv(y.rows, chosen["BN"])
    size = max(2, GPC // chosen["CK"])
    if order > 0:
        return 1.2 * (order * chosen["BM"] + size / order * chosen["BN"])
    along = min(size, gn if order == 0 else gm)
    rows, columns = (size / along, along) if order == 0 else (along, size / along)
    return rows * chosen["BM"] + columns * chosen["BN"]


FAMILY = Wave()
