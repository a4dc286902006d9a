"""The distinct kernels of a table, and the two shapes at which each is to be proved.

One shape lies inside what a kernel is made for: whole tiles, many blocks. The other is at an edge: tiles are cut, K
ends in the middle of a step, the ring of stages does not come round or stops anywhere. A kernel that is compiled for
whole tiles only gets few tiles and an odd K there. Sizes are looked for around those of the table, and count where the
family takes the schedule and writes the very same kernel. Choices of the launch may differ: they are the table's where
these fit.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cuda_l2 import contract
from cuda_l2.families._base import Family, Schedule
from cuda_l2.library.table import PLAIN, PROGRAMMATIC, Named, Row, family_of, schedule_text
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Candidate, Gemm, Layout

INTERIOR, EDGE = "interior", "edge"
CHEAP_FLOPS = 1 << 37
"""A proof at more takes seconds; then a smaller shape than the table's is looked for."""
LARGE_FLOPS = 1 << 34
"""Up to here the sanitizer takes the shape itself; a ring that comes round is worth as much."""
MANY_BLOCKS = 64
"""Least blocks of an interior shape, where the table has such a shape."""
MAX_TRIES = 60
"""Shapes that are looked at, beside single sizes."""
ENDLESS = 1 << 20
"""Multiprocessors: so many that no launch is written for fewer blocks than it has tiles."""
FEW = 8
"""Multiprocessors: so few that blocks which may take several tiles do."""
GRAINS = (1, 2, 4, 8, 16, 32, 64)
"""By which sizes may have to be aligned."""
PIECES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Tiles along a side of a shape that is made up."""


@dataclass(frozen=True)
class TableKernel:
    """One compiled kernel and all that a table uses it for."""

    id: str
    rows: tuple[Row, ...]
    accumulate: Accumulate
    """The class it is proved in: fp32 where any row or the kernel itself promises it, for that demands more."""

    @property
    def family(self) -> Family:
        return family_of(self.rows[0].family)

    @property
    def layout(self) -> Layout:
        return self.rows[0].gemm.layout

    @property
    def compiled(self) -> dict[str, int]:
        """The choices that are compiled in, the same in every row."""
        named = dict(self.rows[0].schedule)
        return {name: named[name] for name in self.family.compiled}

    @property
    def schedule(self) -> str:
        return schedule_text(self.compiled.items())

    @property
    def edges(self) -> tuple[str, ...]:
        """How the table launches it, programmatic first."""
        used = {launched(row.schedule) for row in self.rows}
        return tuple(edge for edge in (PROGRAMMATIC, PLAIN) if edge in used)

    @property
    def shapes(self) -> list[Gemm]:
        """The table's, in the class of the proof, least first."""
        found = {replace(row.gemm, accumulate=self.accumulate) for row in self.rows}
        return sorted(found, key=lambda gemm: (gemm.flops, gemm))

    @property
    def tile(self) -> tuple[int, int, int]:
        """Rows and columns of C that a block or cluster computes, and the K it takes in one step."""
        c = self.compiled
        rows, columns = c["BM"] * c.get("CM", 1), c["BN"] * c.get("CN", 1)
        m, n = (columns, rows) if c.get("SWAP") else (rows, columns)
        return m, n, c["BK"] if "BK" in c else 64 * c.get("KB", 1)

    @property
    def parts(self) -> int:
        """Into which K is split among blocks."""
        c = self.compiled
        return c.get("CK", 1) * c.get("SL", 1) * c.get("SPLIT_K", 1)


@dataclass(frozen=True)
class ProofTask:
    """One kernel to be proved at one shape, launched one way."""

    kernel: TableKernel
    role: str  # interior or edge
    gemm: Gemm
    edge: str
    candidate: Candidate
    dynamic_bytes: int  # of shared memory, a block's


def launched(schedule: Named) -> str:
    """How a schedule is launched, as a dependent or not."""
    return PROGRAMMATIC if dict(schedule).get("EDGE") else PLAIN


def kernels_of(rows: Iterable[Row], target: CudaTarget) -> list[TableKernel]:
    """The distinct kernels of a table in the order in which it names them; UserError where a row cannot be."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(contract.kernel_id(row.candidate(target).source), []).append(row)
    kernels = []
    for name, own in found.items():
        kernel = TableKernel(name, tuple(own), Accumulate.FP32)
        promised = any(row.gemm.accumulate is Accumulate.FP32 for row in own)
        if not promised and not any(map(_Fit(kernel, target).serves, kernel.shapes)):
            kernel = replace(kernel, accumulate=Accumulate.FP16)
        kernels.append(kernel)
    return kernels


def tasks_for(kernel: TableKernel, target: CudaTarget) -> list[ProofTask]:
    """A kernel at an interior shape and, where there is another one, at an edge shape.

    Each way in which the table launches it comes up at one of them. A kernel whose blocks take several tiles has more
    tiles than there are blocks at one of them, where that can be.
    """
    fit, edges = _Fit(kernel, target), kernel.edges
    inside = _interior(kernel, fit)
    beyond = _edge(kernel, fit, inside)
    first = fit.candidate(inside, edges[0])
    assert first is not None  # a table's shape, or one that was tried
    tasks = [_task(kernel, INTERIOR, inside, edges[0], first, target)]
    other = fit.candidate(beyond or inside, edges[-1], fit.other_launch(inside, edges[0]))
    if other and (beyond or len(edges) > 1):
        tasks.append(_task(kernel, EDGE, beyond or inside, edges[-1], other, target))
    return tasks


def _task(kernel: TableKernel, role: str, gemm: Gemm, edge: str, candidate: Candidate, target: CudaTarget) -> ProofTask:
    """ContractError where the contract refuses the shape."""
    assert contract.kernel_id(candidate.source) == kernel.id
    plan = contract.parse_cuda(candidate.source).plan(gemm, target.sms)
    return ProofTask(kernel, role, gemm, edge, candidate, max(launch.shared_bytes for launch in plan.launches))


class _Fit:
    """Whether and how a kernel serves shapes of the same layout and class that the table may not have."""

    def __init__(self, kernel: TableKernel, target: CudaTarget) -> None:
        self._kernel, self._target = kernel, target
        self._family, self._compiled = kernel.family, kernel.compiled
        names = self._family.launched
        self._launches: dict[tuple[Gemm, str], dict[str, int]] = {}
        """The other choices of the launch, by shape and edge."""
        for row in kernel.rows:
            place = replace(row.gemm, accumulate=kernel.accumulate), launched(row.schedule)
            self._launches[place] = {name: value for name, value in row.schedule if name in names}
        counted = Counter(tuple(launch.items()) for launch in self._launches.values())
        self._usual = [dict(launch) for launch, _ in counted.most_common()]
        self._contract, self._planned = functools.cache(self._read), functools.cache(self._plan)
        first = kernel.rows[0]
        self._own = Schedule(self._family, first.gemm, target, self._family.values(dict(first.schedule)))

    def other_launch(self, gemm: Gemm, edge: str) -> dict[str, int]:
        """Choices of the launch that the table uses, if possible other ones than at this shape."""
        own = self._launch(gemm, edge)
        return next((launch for launch in self._usual if launch != own), self._usual[0])

    def candidate(self, gemm: Gemm, edge: str, launch: dict[str, int] | None = None) -> Candidate | None:
        """The kernel with its contract for this shape; None where it does not serve it.

        launch: choices of the launch to be used where they are valid; the table's if not given.
        """
        schedule = self._schedule(gemm, edge, launch or self._launch(gemm, edge))
        return self._family.render(schedule, "table") if schedule else None

    def serves(self, gemm: Gemm) -> bool:
        """Whether it is the very same kernel that the family writes for a shape."""
        return self._schedule(gemm, PLAIN, self._launch(gemm, PLAIN)) is not None

    def blocks(self, gemm: Gemm, sms: int = 0) -> int:
        """Blocks of the first launch; 0 where the kernel does not serve the shape."""
        return self._planned(gemm, sms or self._target.sms)

    def wraps(self, gemm: Gemm) -> bool:
        """Whether blocks take several tiles each there."""
        return self.blocks(gemm) < self.blocks(gemm, ENDLESS)

    def persistent(self, gemm: Gemm) -> bool:
        """Whether they may, where there are more tiles than multiprocessors."""
        return self.blocks(gemm, FEW) < self.blocks(gemm, ENDLESS)

    @property
    def sms(self) -> int:
        return self._target.sms

    def _read(self, gemm: Gemm) -> contract.CudaContract | None:
        candidate = self.candidate(gemm, PLAIN)
        return contract.parse_cuda(candidate.source) if candidate else None

    def _plan(self, gemm: Gemm, sms: int) -> int:
        terms = self._contract(gemm)
        try:
            plan = terms.plan(gemm, sms) if terms else None
        except contract.ContractError:
            return 0
        return math.prod(plan.launches[0].grid) if plan else 0

    def _launch(self, gemm: Gemm, edge: str) -> dict[str, int]:
        """The table's choices of the launch: this shape's, else the usual ones."""
        both = (self._launches.get((gemm, way)) for way in (edge, PROGRAMMATIC, PLAIN))
        return next((launch for launch in both if launch), self._usual[0])

    def _schedule(self, gemm: Gemm, edge: str, launch: dict[str, int]) -> Schedule | None:
        wanted = {**launch, "EDGE": int(edge == PROGRAMMATIC)}
        if not self._family.serves(gemm, self._target):
            return None
        values: list[int] = []
        for choice in self._family.choices:
            valid = self._family.valid_values(gemm, self._target, values)
            if choice.name in self._compiled:
                values.append(self._compiled[choice.name])
            else:
                values.append(wanted[choice.name] if wanted[choice.name] in valid else valid[0])
            if values[-1] not in valid:
                return None
        schedule = Schedule(self._family, gemm, self._target, tuple(values))
        # all of a kernel's text that may depend on the shape
        same = (
            self._family.macros(schedule) == self._family.macros(self._own)
            and gemm.layout is self._own.task.layout
            and self._family.generated(schedule) == self._family.generated(self._own)
        )
        return schedule if same else None


def _interior(kernel: TableKernel, fit: _Fit) -> Gemm:
    """A cheap shape of the table with whole tiles and many blocks, or one like it where all of those are costly."""
    shapes = [gemm for gemm in kernel.shapes if fit.serves(gemm)]
    cheap = [gemm for gemm in shapes if gemm.flops <= CHEAP_FLOPS]
    if not cheap:
        return _smaller(kernel, fit, shapes[0])
    persistent, stages = fit.persistent(shapes[-1]), kernel.compiled.get("STAGES", 1)

    def lacks(gemm: Gemm) -> tuple[bool, int, int, bool]:
        too_few = max(0, MANY_BLOCKS - fit.blocks(gemm))
        comes_round = gemm.flops <= LARGE_FLOPS and _ring(gemm, kernel) > stages
        return persistent and not fit.wraps(gemm), _cuts(gemm, kernel.tile), too_few, not comes_round

    best = cheap[0]
    for gemm in cheap:  # least first
        if lacks(gemm) < lacks(best):
            best = gemm
        if not any(lacks(best)):
            break
    return best


def _smaller(kernel: TableKernel, fit: _Fit, real: Gemm) -> Gemm:
    """The cheapest shape found that is laid out like a costly one: whole where it is whole, tiles for every block."""
    tile_m, tile_n, step = kernel.tile
    m = [tile_m * pieces for pieces in PIECES if tile_m * pieces < real.m]
    n = [tile_n * pieces for pieces in PIECES if tile_n * pieces < real.n]
    k = [step * kernel.parts * steps for steps in (16, 32) if step * kernel.parts * steps < real.k]
    wraps = fit.wraps(real)
    most = fit.sms if wraps else min(MANY_BLOCKS, fit.blocks(real)) - 1
    shapes = [replace(real, m=x, n=y, k=z) for x, y, z in itertools.product(m, n, k)]
    shapes = [gemm for gemm in shapes if _tiles(gemm, kernel.tile) > most]
    for gemm in itertools.islice(sorted(shapes, key=lambda gemm: gemm.flops), MAX_TRIES):
        if fit.wraps(gemm) if wraps else fit.blocks(gemm) > most:
            return gemm
    return real


def _edge(kernel: TableKernel, fit: _Fit, inside: Gemm) -> Gemm | None:
    """The most ragged shape found that the kernel serves, the cheapest of those; None where it serves no other."""
    stages, parts = kernel.compiled.get("STAGES", 1), kernel.parts
    steps = {parts * count + odd for count in (1, stages - 1, stages, stages + 1, 2 * stages + 1) for odd in (0, 1)}
    sizes = []
    for place, side in enumerate(kernel.tile):
        own = (inside.m, inside.n, inside.k)[place]
        counts = sorted(steps - {0}) if place == 2 else [1, 2, 3, own // side - 1]
        rest = next((r for r in _rests(side) if any(_serves(fit, inside, place, n) for n in _near(own, side, r))), 0)
        tried = dict.fromkeys([*(side * count + rest for count in counts), *(side * count for count in counts)])
        sizes.append([own, *(size for size in tried if size != own and _serves(fit, inside, place, size))])
    shapes = [replace(inside, m=m, n=n, k=k) for m, n, k in itertools.product(*sizes)]
    must_wrap = fit.persistent(inside) and not fit.wraps(inside)

    def order(gemm: Gemm) -> tuple[bool, float, int]:
        few = must_wrap and _tiles(gemm, kernel.tile) <= fit.sms
        ragged = _cuts(gemm, kernel.tile) + _unlike(_ring(gemm, kernel), _ring(inside, kernel), stages)
        return few, -ragged, gemm.flops

    found = (gemm for gemm in sorted(shapes, key=order) if gemm != inside)
    return next((gemm for gemm in itertools.islice(found, MAX_TRIES) if fit.blocks(gemm)), None)


def _serves(fit: _Fit, inside: Gemm, place: int, size: int) -> bool:
    """Whether the kernel serves the shape with one other size: M, N or K."""
    if size < 1:
        return False
    m, n, k = (size if place == i else own for i, own in enumerate((inside.m, inside.n, inside.k)))
    return fit.serves(replace(inside, m=m, n=n, k=k))


def _near(own: int, side: int, rest: int) -> list[int]:
    return [side * count + rest for count in dict.fromkeys((own // side - 1, own // side, 1, 0))]


def _rests(side: int) -> Iterator[int]:
    """What is left of a tile that is cut somewhere behind its middle, the oddest first."""
    for grain in GRAINS:
        half = side // 2 // grain * grain
        if half and half + grain <= side:
            yield half + grain if half + grain < side else half


def _cuts(gemm: Gemm, tile: tuple[int, int, int]) -> int:
    """Sizes that are no whole number of tiles or steps."""
    return sum(size % side != 0 for size, side in zip((gemm.m, gemm.n, gemm.k), tile, strict=True))


def _tiles(gemm: Gemm, tile: tuple[int, int, int]) -> int:
    return -(-gemm.m // tile[0]) * -(-gemm.n // tile[1])


def _ring(gemm: Gemm, kernel: TableKernel) -> int:
    """Steps of K that the ring of a block takes for a tile."""
    return -(-gemm.k // (kernel.tile[2] * kernel.parts))


def _unlike(steps: int, inside: int, stages: int) -> float:
    """1 where one of two rings comes round and the other does not, else a half where it ends in its middle."""
    return 1.0 if (steps <= stages) != (inside <= stages) else 0.5 * (steps % stages != 0)
