"""Which kernels of a pool to try on a shape, in which orders of tiles: by known times, else by the models; or all.

What a table names for a shape is tried there in every order of tiles, with all other kernels of the table, or with
those of the pool that differ from one of them in one choice. Or it is tried as it is, with what the table names for
shapes like it.
"""

import itertools
import math
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cuda_l2 import contract
from cuda_l2.families._base import Family, Schedule, families_for
from cuda_l2.library.table import COLD, PROGRAMMATIC, Named, PoolRow, Row, family_of, pool_of
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Candidate, Gemm, Layout

COUNTS = ((27, 40), (31, 30), (34, 24), (37, 16), (99, 12))
"""Upper limits of log2(M N K), each with the number of schedules tried a layout: the larger a shape, the less kernels
differ there. Of a table's kernels all are tried, whatever the sums.
"""
NARROW_COUNT = 10
"""Schedules with fp16 sums a layout, beside what was best with fp32 sums."""
KNOWN_SHARE, KNOWN_WITHIN = 0.7, 1.3
"""Largest share of a list by known times, and how much slower than the best known they may be."""
REORDERED, ORDERS = 3, 3
"""Kernels that are tried in further orders of tiles, and the orders each."""
ALL_ORDERS = 1 << 10
"""A limit above the number of orders that a kernel has: all are tried."""
NARROW = {"ACC": 16, "ACC16": 1}
"""Choices that sum in fp16, and WIDE their opposites."""
WIDE = {"ACC": 32, "ACC16": 0}
EDGE, STAGES = "EDGE", "STAGES"


@dataclass(frozen=True, slots=True)
class Option:
    """A pool row on one shape, with its choices of the launch but EDGE; `kernel` is the identity it compiles to."""

    row: int
    layout: Layout
    launch: Named
    kernel: str
    plan: bytes  # of the plain launch, pickled: tens of thousands wait in memory for their turn
    dependent: bool
    own: bool = False  # the table launches it so for this shape

    @property
    def key(self) -> tuple[int, Layout, Named]:
        return self.row, self.layout, self.launch


Times = dict[int, list[tuple[float, Named]]]
"""Times of one shape and layout, by pool row: microseconds and choices of the launch, fastest first."""


class Shortlist:
    """A pool on one machine, with what is known of its times."""

    def __init__(
        self,
        rows: Sequence[PoolRow],
        target: CudaTarget,
        known: Iterable[Row] = (),
        *,
        whole: bool = False,
        near: bool = False,
        alike: int = 0,
        cold: bool = False,
    ) -> None:
        """whole: all kernels of the pool that serve a shape are tried, not only what looks best; known is a table.

        near: those alone that are near one that the table names for the shape, where it names one. alike: what the
        table names for the shape, of cold launches or of others, and this number more that it names for shapes like it.
        """
        self.rows, self.target, self._whole, self._near_alone = rows, target, whole, near
        self._alike, self._cold = alike, cold
        self._table: list[Row] = []
        self._families = {row.family: family_of(row.family) for row in rows}
        self._named = [dict(row.schedule) for row in rows]
        self._index = {(row.family, row.schedule, row.layout): i for i, row in enumerate(rows)}
        self._twins = []
        for kernel in rows:
            wide = ((name, WIDE[name] if NARROW.get(name) == value else value) for name, value in kernel.schedule)
            self._twins.append(self._find(kernel.family, tuple(wide), kernel.layout))
        self.known: dict[Gemm, Times] = {}
        """By the product with fp32 sums, whose times tell of the others too."""
        self._own: dict[Gemm, dict[tuple[int, Named], None]] = {}
        """What the table names for a shape: pool rows with their choices of the launch but EDGE."""
        for row in known:
            self._learn(row)

    def options(self, gemm: Gemm) -> list[Option]:
        """What to try on a shape in its layout. In the fp16 class only what sums in fp16: see `repeat` for the rest."""
        if self._alike:
            return list(itertools.islice(self._of_alike(gemm), self._alike + len(self._own.get(gemm, {}))))
        times = self.known.get(replace(gemm, accumulate=Accumulate.FP32), {})
        narrow = gemm.accumulate is Accumulate.FP16
        bits = (gemm.m * gemm.n * gemm.k).bit_length() - 1
        count = NARROW_COUNT if narrow else next(count for limit, count in COUNTS if bits < limit)
        own = self._own.get(gemm, {})
        bases = dict.fromkeys(i for i, _ in own)
        usable = [i for i in range(len(self.rows)) if self._usable(i, gemm, narrow)]
        if self._near_alone and bases:
            usable = [i for i in usable if any(self._near(i, base) for base in bases)]
        if self._whole:
            count = ORDERS * len(usable)
        estimates = {i: self._family(i).estimate_us(gemm, self.target, self._named[i]) for i in usable}
        if narrow:  # as fast as with fp32 sums, where that is known
            times = {i: times[twin] for i in usable if (twin := self._twins[i]) in times}
        by_time = sorted((i for i in usable if i in times), key=lambda i: times[i][0][0])
        by_time = [i for i in by_time if times[i][0][0] <= KNOWN_WITHIN * times[by_time[0]][0][0]]
        by_time = by_time[: round(KNOWN_SHARE * count)]
        by_model = sorted(set(usable) - set(by_time), key=lambda i: (estimates[i], i))
        found: list[Option] = []
        for i in bases:
            if i in usable:
                found += self._orders(i, gemm, [launch for row, launch in own if row == i], ALL_ORDERS)
        found = [replace(option, own=(option.row, option.launch) in own) for option in found]
        count += len(found)
        for i in itertools.chain(by_time, by_model):
            if i in bases:
                continue
            known = [launch for _, launch in times.get(i, [])]
            orders = ORDERS if len(found) < REORDERED * ORDERS else 1
            found += self._orders(i, gemm, known, min(orders, count - len(found)))
            if len(found) >= count:
                break
        return found

    def repeat(self, gemm: Gemm, keys: Iterable[tuple[int, Layout, Named]]) -> list[Option]:
        """Options of a shape by their keys, as of the same shape with other sums."""
        options = (self._option(row, replace(gemm, layout=layout), launch) for row, layout, launch in keys)
        return [option for option in options if option]

    def candidate(self, option: Option, gemm: Gemm) -> Candidate:
        """The kernel with its contract."""
        schedule = self.schedule(option, gemm, 0)
        assert schedule
        return schedule.family.render(schedule, "pool")

    def schedule(self, option: Option, gemm: Gemm, edge: int) -> Schedule | None:
        return self._schedule(option.row, replace(gemm, layout=option.layout), option.launch, edge)

    def _of_alike(self, gemm: Gemm) -> Iterator[Option]:
        """What the table names for a shape, then for others of its layout and class, the most alike first."""
        mine, others = list(self._own.get(gemm, {})), (row for row in self._table if row.gemm.layout is gemm.layout)
        others = (row for row in others if (row.gemm.accumulate, row.gemm.dtype) == (gemm.accumulate, gemm.dtype))
        ranked = sorted(others, key=lambda row: (distance(row.gemm, gemm), -row.gemm.flops / row.us))
        for index, launch in dict.fromkeys([*mine, *map(self._split, ranked)]):
            option = None if index is None else self._option(index, gemm, launch)
            if option:
                yield replace(option, own=(index, launch) in self._own.get(gemm, {}))

    def _split(self, row: Row) -> tuple[int | None, Named]:
        """A table's row as a row of the pool, None where that lacks it, and its choices of the launch but EDGE."""
        compiled = {choice.name for choice in family_of(row.family).choices if choice.compiled}
        schedule = tuple((name, value) for name, value in row.schedule if name in compiled)
        launch = tuple((name, value) for name, value in row.schedule if name not in compiled and name != EDGE)
        return self._find(row.family, schedule, row.gemm.layout), launch

    def _learn(self, row: Row) -> None:
        index, launch = self._split(row)
        if self._alike and (row.edge == COLD) != self._cold:
            return
        if index is not None and self._whole:
            self._own.setdefault(row.gemm, {})[index, launch] = None
        if row.edge != PROGRAMMATIC:
            self._table.append(row)
        if index is not None and row.edge != PROGRAMMATIC:
            times = self.known.setdefault(replace(row.gemm, accumulate=Accumulate.FP32), {})
            times[index] = sorted([*times.get(index, []), (row.us, launch)])

    def _find(self, family: str, schedule: Named, layout: Layout | None) -> int | None:
        own = self._index.get((family, schedule, layout))
        return self._index.get((family, schedule, None)) if own is None else own

    def _near(self, row: int, other: int) -> bool:
        """Whether two kernels of one family and layout differ in at most one choice, the number of stages apart."""
        a, b = self.rows[row], self.rows[other]
        if (a.family, a.layout) != (b.family, b.layout):
            return False
        return sum(x != y for x, y in zip(a.schedule, b.schedule, strict=True) if x[0] != STAGES) <= 1

    def _family(self, row: int) -> Family:
        return self._families[self.rows[row].family]

    def _usable(self, row: int, gemm: Gemm, narrow: bool) -> bool:
        is_narrow = any(self._named[row].get(name) == value for name, value in NARROW.items())
        if self.rows[row].layout not in (None, gemm.layout) or is_narrow != narrow:
            return False
        return self._family(row).serves(gemm, self.target)

    def _orders(self, row: int, gemm: Gemm, known: Sequence[Named], count: int) -> list[Option]:
        """A row in several orders of tiles: those known to be good, then what the family thinks."""
        family = self._family(row)
        named = {choice.name for choice in family.choices if not choice.compiled and choice.name != EDGE}
        offered = [tuple(launch.items()) for launch in family.launches(gemm, self.target, self._named[row])]
        wanted = dict.fromkeys([launch for launch in known if {name for name, _ in launch} == named] + offered)
        options = (self._option(row, gemm, launch) for launch in wanted)
        return list(itertools.islice((option for option in options if option), count))

    def _option(self, row: int, gemm: Gemm, launch: Named) -> Option | None:
        schedule = self._schedule(row, gemm, launch, 0)
        if schedule is None:
            return None
        source = schedule.family.render(schedule, "pool").source
        terms = contract.parse_cuda(source)
        try:
            plan = pickle.dumps(terms.plan(gemm, self.target.sms))
        except contract.ContractError:
            return None
        dependent = self._schedule(row, gemm, launch, 1) is not None
        return Option(row, gemm.layout, launch, contract.kernel_id(source, terms), plan, dependent)

    def _schedule(self, row: int, gemm: Gemm, launch: Named, edge: int) -> Schedule | None:
        family = self._family(row)
        named = {**self._named[row], **dict(launch), EDGE: edge}
        try:
            return Schedule(family, gemm, self.target, tuple(named[choice.name] for choice in family.choices))
        except ValueError:
            return None


def distance(one: Gemm, other: Gemm) -> float:
    """How unlike two shapes are: the sum of the differences of log2 of M, of N and of K."""
    pairs = (one.m, other.m), (one.n, other.n), (one.k, other.k)
    return sum(abs(math.log2(a / b)) for a, b in pairs)


def near_pool(table: Sequence[Row], target: Target, each: int, seed: int) -> list[PoolRow]:
    """Up to `each` kernels for every kernel of a table, drawn among those near it, that the table does not have.

    A near kernel has one choice changed, and where they do not fit any more, the number of stages. It is valid for the
    smallest, the middle or the largest shape that the table uses the kernel for.
    """
    used: dict[PoolRow, list[Row]] = {}
    for row in table:
        (kernel,) = pool_of([row])
        used.setdefault(kernel, []).append(row)
    rng = np.random.default_rng(seed)
    found: dict[PoolRow, None] = {}
    for kernel, rows in used.items():
        rows.sort(key=lambda row: row.gemm.flops)
        sample = (rows[0], rows[len(rows) // 2], rows[-1])
        near = [
            other
            for other in dict.fromkeys(itertools.chain.from_iterable(_variants(kernel, row, target) for row in sample))
            if other not in used
        ]
        for i in rng.permutation(len(near))[:each]:
            found[near[i]] = None
    return list(found)


def _variants(kernel: PoolRow, row: Row, target: Target) -> Iterator[PoolRow]:
    family, named = family_of(kernel.family), dict(row.schedule)
    for choice in family.choices:
        if not choice.compiled or choice.name in NARROW:
            continue
        for value in choice.values:
            values = family.nearest({**named, choice.name: value}, row.gemm, target)
            chosen = zip(family.choices, values, strict=True)
            schedule = tuple((each.name, value) for each, value in chosen if each.compiled)
            changed = {name for (name, new), (_, old) in zip(schedule, kernel.schedule, strict=True) if new != old}
            if choice.name in changed and changed <= {choice.name, STAGES}:
                yield replace(kernel, schedule=schedule)


def default_pool(gemms: Sequence[Gemm], target: Target, each: int) -> list[PoolRow]:
    """The kernels that the families' own ranking gives for these shapes."""
    rows: dict[PoolRow, None] = {}
    for gemm in gemms:
        for family in families_for(gemm, target):
            for values in family.ranked(gemm, target, each):
                chosen = zip(family.choices, values, strict=True)
                compiled = tuple((choice.name, value) for choice, value in chosen if choice.compiled)
                rows[PoolRow(family.name, compiled, gemm.layout)] = None
    return list(rows)
