"""Which kernels of a pool to try on a shape, in which orders of tiles: by known times, else by the models; or all."""

import itertools
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cuda_l2 import contract
from cuda_l2.families._base import Family, Schedule, families_for
from cuda_l2.library.table import PROGRAMMATIC, Named, PoolRow, Row, family_of
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Candidate, Gemm, Layout

COUNTS = ((27, 40), (31, 30), (34, 24), (37, 16), (99, 12))
"""Below so many bits of M N K, so many schedules a layout: long kernels are few times slower than one another.

Of a table's kernels all are tried, whatever the sums.
"""
NARROW_COUNT = 10
"""Schedules with fp16 sums a layout, beside what was best with fp32 sums."""
KNOWN_SHARE, KNOWN_WITHIN = 0.7, 1.3
"""Largest share of a list by known times, and how much slower than the best known they may be."""
REORDERED, ORDERS = 3, 3
"""So many kernels are tried in further orders of tiles, so many each."""
NARROW = {"ACC": 16, "ACC16": 1}
"""Choices that sum in fp16, and WIDE their opposites."""
WIDE = {"ACC": 32, "ACC16": 0}
EDGE = "EDGE"


@dataclass(frozen=True, slots=True)
class Option:
    """A pool row on one shape, with its choices of the launch but EDGE; `kernel` is the identity it compiles to."""

    row: int
    layout: Layout
    launch: Named
    kernel: str
    plan: bytes  # of the plain launch, pickled: tens of thousands wait in memory for their turn
    dependent: bool

    @property
    def key(self) -> tuple[int, Layout, Named]:
        return self.row, self.layout, self.launch


Times = dict[int, list[tuple[float, Named]]]
"""Times of one shape and layout, by pool row: microseconds and choices of the launch, fastest first."""


class Shortlist:
    """A pool on one machine, with what is known of its times."""

    def __init__(
        self, rows: Sequence[PoolRow], target: CudaTarget, known: Iterable[Row] = (), *, whole: bool = False
    ) -> None:
        """whole: every kernel of the pool that serves a shape is tried, not those alone that look best."""
        self.rows, self.target, self._whole = rows, target, whole
        self._families = {row.family: family_of(row.family) for row in rows}
        self._named = [dict(row.schedule) for row in rows]
        self._index = {(row.family, row.schedule, row.layout): i for i, row in enumerate(rows)}
        self._twins = []
        for kernel in rows:
            wide = ((name, WIDE[name] if NARROW.get(name) == value else value) for name, value in kernel.schedule)
            self._twins.append(self._find(kernel.family, tuple(wide), kernel.layout))
        self.known: dict[Gemm, Times] = {}
        """By the product with fp32 sums, whose times tell of the others too."""
        for row in known:
            self._learn(row)

    def options(self, gemm: Gemm) -> list[Option]:
        """What to try on a shape in its layout. In the fp16 class only what sums in fp16: see `repeat` for the rest."""
        times = self.known.get(replace(gemm, accumulate=Accumulate.FP32), {})
        narrow = gemm.accumulate is Accumulate.FP16
        bits = (gemm.m * gemm.n * gemm.k).bit_length() - 1
        count = NARROW_COUNT if narrow else next(count for limit, count in COUNTS if bits < limit)
        usable = [i for i in range(len(self.rows)) if self._usable(i, gemm, narrow)]
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
        for i in itertools.chain(by_time, by_model):
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

    def _learn(self, row: Row) -> None:
        if row.edge == PROGRAMMATIC:
            return
        compiled = {choice.name for choice in family_of(row.family).choices if choice.compiled}
        schedule = tuple((name, value) for name, value in row.schedule if name in compiled)
        launch = tuple((name, value) for name, value in row.schedule if name not in compiled and name != EDGE)
        index = self._find(row.family, schedule, row.gemm.layout)
        if index is not None:
            times = self.known.setdefault(replace(row.gemm, accumulate=Accumulate.FP32), {})
            times[index] = sorted([*times.get(index, []), (row.us, launch)])

    def _find(self, family: str, schedule: Named, layout: Layout | None) -> int | None:
        own = self._index.get((family, schedule, layout))
        return self._index.get((family, schedule, None)) if own is None else own

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
