"""The family of sm90_wave.cu: its contract, the order of tiles, and a model that ranks schedules."""

from collections.abc import Iterator
from math import log2
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

from cuda_l2.families import _sm90
from cuda_l2.families import _sm90_wave_space as space
from cuda_l2.families._base import Schedule, cdiv, element, toml_list
from cuda_l2.families._sm90_wave_space import CHOICES, GPC, MAX_TILES, ORDERS, WARPGROUPS, Shape
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Gemm

COLUMN = 1 << 30
"""More rows than there are: a box that is a whole column of tiles."""
LEAST_ROWS = min(WARPGROUPS)
"""Rows of the least box of the operand on the 64-row axis."""


class Wave(_sm90.HopperFamily):
    """TMA and wgmma, one tile or one K part of a tile a block."""

    name = "sm90_wave"
    choices = CHOICES
    warpgroups = WARPGROUPS
    fitted: ClassVar[bool] = False
    """Whether tiles have all widths of wgmma, and K may be split within a cluster where operands are swapped."""

    def serves(self, gemm: Gemm, target: Target) -> bool:
        hopper = _sm90.hopper(target)
        return hopper is not None and _sm90.addressable(gemm) and bool(space.tiles(gemm, hopper, self.fitted))

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: CudaTarget) -> bool:
        return space.fits(name, value, chosen, gemm, target, self.fitted)

    def _completed(self, wanted: dict[str, int], gemm: Gemm, target: CudaTarget) -> tuple[int, ...]:
        """Choices up to COUNT with the usual values of the rest."""
        values: list[int] = []
        for choice in self.choices:
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

    def estimate_us(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> float:
        """A rough model of a launch, fitted to 6,007 timings on an H100 and an H200.

        chosen: what comes after SL may be left out, which gives a plain launch with the deepest ring.
        """
        shape = Shape(chosen)
        x, y = _sm90.sides(gemm, shape.swap)
        blocks = cdiv(x.rows, shape.rows) * cdiv(y.rows, shape.columns) * shape.ck * shape.sl
        resident = space.resident(target, shape.cluster)
        rounds, busy = cdiv(blocks, resident), min(blocks, target.sms)
        steps = cdiv(cdiv(gemm.k, 64 * shape.blocks_of_k), shape.ck * shape.sl)
        blocks_of_k, stages = steps * shape.blocks_of_k, chosen.get("STAGES") or shape.stages(target)
        # a wgmma takes half a clock a column, no less than to read its operands; 1400 useful clocks a microsecond
        multiply = blocks_of_k * max(shape.columns / 2, 16 + shape.columns / 4) * shape.rows / 16 / 1400
        rows, columns = min(x.rows, shape.rows), min(y.rows, shape.columns)
        # of all multiprocessors; the limit of one alone never showed
        load = (rows + columns) * 128 * blocks_of_k * min(blocks, resident) / 20e6
        # where an operand has fewer rows than a box the rest is filled with zeros, which takes longer than to load them
        fill = (shape.rows - rows + shape.columns - columns) * 128 * blocks_of_k / 113e3
        stall = 1 + 1 / max(1, stages - 1) ** 2 if steps > stages else 1  # a shallow ring runs dry
        sums = 4 * shape.rows * shape.columns / shape.ck  # bytes
        within = 0.16 + sums * (shape.ck - 1) / 31e3 if shape.ck > 1 else 0
        across = 0.52 + sums * (1 - 1 / shape.sl) * 2 * busy / 5.7e6 if shape.sl > 1 else 0
        operands = 2 * gemm.k * (gemm.m + gemm.n)
        stream = operands / (13.6e6 if operands < target.l2_bytes * 2 / 3 else 7e6)
        begin = 1.4 + 0.078 * log2(busy) - (0.31 if chosen.get("EDGE") else 0)
        store = 2 * gemm.m * gemm.n / 4.2e6
        beside = 1 + 0.07 * log2(shape.cluster // shape.ck)  # blocks that share loads wait for one another
        return beside * (begin + stream + rounds * (max(multiply, load) * stall + fill) + within + across + store)

    def launches(self, gemm: Gemm, target: CudaTarget, chosen: dict[str, int]) -> list[dict[str, int]]:
        orders = sorted(ORDERS.values, key=lambda order: _footprint(order, chosen, gemm))
        return [{"ORDER": order} for order in orders]

    def ranked(self, gemm: Gemm, target: CudaTarget, count: int) -> list[tuple[int, ...]]:
        guesses = sorted(_guesses(gemm, target, self.fitted), key=lambda chosen: self.estimate_us(gemm, target, chosen))
        return [self._completed(chosen, gemm, target) for chosen in guesses[:count]]

    def macros(self, schedule: Schedule) -> dict[str, int]:
        gemm, c = schedule.task, SimpleNamespace(**schedule.named)
        x, y = _sm90.sides(gemm, c.SWAP)
        whole = x.rows % (c.BM * c.CM) == 0 and y.rows % (c.BN * c.CN) == 0 and gemm.n % 8 == 0
        return {**super().macros(schedule), "EDGES": 0 if whole else 1 if gemm.n % 8 == 0 else 2}

    def contract(self, schedule: Schedule) -> str:
        gemm, c = schedule.task, SimpleNamespace(**schedule.named)
        x, y = _sm90.sides(gemm, c.SWAP)
        shape = Shape(schedule.named)
        parts, cluster = c.CK * c.SL, shape.cluster
        rows, columns = c.BM * c.CM, c.BN * c.CN
        zeros = [*_sm90.inner_remainders(gemm, c.SWAP), f"gm * gn / {MAX_TILES + 1}", "gm / 257", "gn / 257"]
        zeros.append(f"max(0, {parts} - cdiv(k, {64 * c.KB}))")
        edges = self.macros(schedule)["EDGES"]
        if edges == 0:
            zeros += [f"{x.size} % {rows}", f"{y.size} % {columns}"]
        if edges < 2:
            zeros.append("n % 8")
        order = _order(c.ORDER, cluster, c.SL)
        pieces = c.CM * c.CN > 1
        text = [
            "\n".join(['target = "cuda"', 'arch = "sm_90a"', *element(gemm), ""]),
            f'[names]\ngm = "cdiv({x.size}, {rows})"\ngn = "cdiv({y.size}, {columns})"',
            f'accepted = "{_sm90.zero(*zeros, *order.fits)}"\n',
            _sm90.operand_map("map_x", x, gemm, c.BM // c.CN, c.KB, whole=not pieces, passes=False),
            _sm90.operand_map("map_y", y, gemm, c.BN // c.CM, c.KB, whole=not pieces, passes=c.BM == 64),
        ]
        arguments: list[str | dict[str, int]] = ["map_x", "map_y"]
        if cluster * c.SL > 1:  # whatever the order: one kernel serves all, and reads it only if told
            text.append(f'[[table]]\nname = "order"\nlength = "gm * gn"\nvalue = "{order.table}"\n')
            arguments.append("order")
        arguments.append("c")  # from here on all lie side by side
        if c.SL > 1:
            arguments.append("parts")
            floats = c.CM * c.CN * (c.SL - 1) * c.BM * c.BN
            kind = "" if c.COUNT else 'kind = "persistent"\nfill = 0xffffffff\n'
            text.append(f'[[workspace]]\nname = "parts"\nbytes = "gm * gn * {4 * floats}"\n{kind}')
            if c.COUNT:
                arguments.append("counters")
                words = c.CM * c.CN * parts
                text.append(f'[[workspace]]\nname = "counters"\nbytes = "gm * gn * {4 * words}"\nkind = "persistent"\n')
        arguments += ["m", "n", "k", *order.arguments]
        if c.PDL:
            arguments.append({"int32": c.EDGE})
        text.append(
            f'[[launch]]\nkernel = "gemm"\ngrid = {toml_list(order.grid)}\nblock = [{shape.threads}]\n'
            f"cluster = [{cluster}]\nshared_bytes = {shape.dynamic_bytes(c.STAGES)}\n"
            f"args = {toml_list(arguments)}\n"
            f"coresident = {'true' if c.SL > 1 else 'false'}\n"
            f'edge = "{"programmatic" if c.EDGE else "plain"}"'
        )
        return "\n".join(text)


class _Order(NamedTuple):
    """How clusters come by their tiles: by the grid or by a table, as find_work of sm90_wave_work.cuh takes it."""

    grid: tuple[str | int, ...]
    box_rows: int = 1  # a power of two; 0: x and y are column and row of the tile
    box_columns: int = 1  # 0: the table says
    table: str = "0"  # the tile of cluster i as row | column << 8, in cluster tiles
    fits: tuple[str, ...] = ()  # what must be 0

    @property
    def arguments(self) -> list[dict[str, int]]:
        numbers = self.box_rows, max(0, self.box_rows.bit_length() - 1), self.box_columns
        return [{"int32": number} for number in numbers]


def _order(order: int, cluster: int, parts: int) -> _Order:
    """parts: of K beyond a cluster, along z."""
    if order == 0:
        across = f"gn * {cluster}"
        return _Order((across, 1, "gm")) if parts == 1 else _Order((across, "gm", parts), box_rows=0)
    if order < 0:
        return _Order((f"gm * {cluster}", "gn", parts), COLUMN)
    size = max(2, GPC // cluster)
    width = size // order
    fits, across = (f"gm % {order}", f"gn % {width}"), f"gn / {width}"
    if cluster * parts == 1:
        return _Order((size, across, f"gm / {order}"), order, width, fits=fits)
    # the place of cluster i when clusters are sorted by GPC
    place = "i" if cluster == 1 else "(i % 8 * (gm * gn / 8) + min(i % 8, gm * gn % 8) + i / 8)"
    box, inside = f"{place} / {size}", f"{place} % {size}"
    row, column = f"({box} / ({across}))", f"({box} % ({across}))"
    snake = f"({column} + {row} % 2 * ({across} - 1 - 2 * {column}))"
    table = f"{row} * {order} + {inside} % {order} + 256 * ({snake} * {width} + {inside} / {order})"
    return _Order((f"gm * gn * {cluster}", 1, parts), 1, 0, table, fits)


def _guesses(gemm: Gemm, target: CudaTarget, fitted: bool) -> Iterator[dict[str, int]]:
    """Choices up to COUNT of which one is usually good: no clusters along M or N.

    Where A has fewer rows than the least box, tiles with swapped operands come too. fitted: these alone.
    """
    tiles = space.tiles(gemm, target, fitted)
    swaps = {1} if fitted else {tiles[0].SWAP}
    if gemm.m < LEAST_ROWS:
        swaps.add(1)
    for tile in tiles:
        if tile.ACC != tiles[0].ACC or tile.SWAP not in swaps:
            continue
        # short steps suit large tiles; small ones are bound by the costs of a step beside its products
        area = tile.BM * tile.BN
        kb = 1 if area >= 8192 or gemm.k <= 64 else 2
        for ck, sl in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (1, 16)):
            alone = {"KB": kb, "CM": 1, "CN": 1, "LOCAL": 0}
            chosen = {**tile._asdict(), **alone, "CK": ck, "SL": sl, "COUNT": int(area > 8192 and sl > 1)}
            before: dict[str, int] = {}
            for name, value in chosen.items():
                if not space.fits(name, value, before, gemm, target, fitted):
                    break
                before[name] = value
            else:
                yield chosen


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
