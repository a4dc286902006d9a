"""From a survey's times to a dispatch table: few kernels for all modes, and the best of them for each shape."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from cuda_l2 import contract
from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, Named, PoolRow, Row, family_of, joined
from cuda_l2.machine._base import Target
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.runs.shortlist import EDGE
from cuda_l2.runs.survey import Arm, Record
from cuda_l2.system.files import markdown_table
from cuda_l2.system.text import counted

MODES = tuple((accumulate, edge) for accumulate in Accumulate for edge in (PLAIN, PROGRAMMATIC))
"""Classes of shapes, each launched plainly or, where that is faster, as dependents."""
COLD_MODES = tuple((accumulate, COLD) for accumulate in Accumulate)
WEIGHTS = (1.0, 0.6, 0.5, 0.3)
"""Weights of the modes; cold ones count alike."""
MARGIN = 0.005
"""By this a kernel must beat the one that a table names for a shape: less is within what these times tell."""
LAYOUT_SHARE = 0.4
"""Share of a mode's weight for callers who cannot choose B's layout; the rest is for the better of both."""


@dataclass(frozen=True)
class Case:
    """What is to be served: a product in one mode, in one layout or, None, in whichever is faster."""

    gemm: Gemm
    """With row-major B, whatever the layout."""
    edge: str
    layout: Layout | None


@dataclass(frozen=True)
class Use:
    """A kernel as a case would use it."""

    us: float
    arm: Arm
    edge: int
    margin: float = 0.0

    @property
    def counted_us(self) -> float:
        """What it is compared by."""
        return self.us * (1 + self.margin)


Current = Mapping[tuple[Gemm, str], tuple[str, frozenset[tuple[str, int]]]]
"""What a table names: by product and edge the kernel's identity and its choices of the launch, EDGE among them."""


def current(rows: Iterable[Row], target: Target) -> Current:
    """What a table names."""
    found = {}
    for row in rows:
        launched = {*family_of(row.family).launched, EDGE}
        launch = frozenset((name, value) for name, value in row.schedule if name in launched)
        found[row.gemm, row.edge] = contract.kernel_id(row.candidate(target).source), launch
    return found


@dataclass(frozen=True)
class Selection:
    """The kernels kept, and for each case the best use of any kernel and of those kept."""

    kernels: tuple[str, ...]
    offered: int  # kernels timed
    best: Mapping[Case, Use]
    kept: Mapping[Case, Use]

    def ratio(self, case: Case) -> float:
        """What of the best speed is left, 0 where no kernel serves the case."""
        return self.best[case].counted_us / self.kept[case].counted_us if case in self.kept else 0.0


def select(
    records: Iterable[Record],
    most: int,
    weights: Sequence[float] = WEIGHTS,
    *,
    cold: bool = False,
    table: Current = MappingProxyType({}),
) -> Selection:
    """Keep at most `most` kernels, over all modes that the records hold. cold: they are times of cold launches.

    table: what it names for a shape stays unless another is faster by MARGIN. Kernels that it names for what the
    records do not hold are kept and count among the `most`, however many they are.
    """
    uses = _uses(list(records), cold, table)
    kernels = sorted({kernel for found in uses.values() for kernel in found})
    column = {kernel: i for i, kernel in enumerate(kernels)}
    cases = list(uses)
    best = {case: min(found.values(), key=lambda use: use.counted_us) for case, found in uses.items()}
    worth_SK = np.zeros((len(cases), len(kernels)), np.float32)
    for i, case in enumerate(cases):
        for kernel, use in uses[case].items():
            worth_SK[i, column[kernel]] = best[case].counted_us / use.counted_us
    others = {
        kernel
        for (gemm, edge), (kernel, _) in table.items()
        if Case(replace(gemm, layout=Layout.NN), edge, gemm.layout) not in uses
    }
    given = [column[kernel] for kernel in kernels if kernel in others]
    most -= len(others) - len(given)
    chosen = [kernels[i] for i in choose(worth_SK, _weights(cases, weights), most, given)] if cases else []
    kept = {}
    for case, found in uses.items():
        served = [found[kernel] for kernel in chosen if kernel in found]
        if served:
            kept[case] = min(served, key=lambda use: use.counted_us)
    return Selection(tuple(chosen), len(kernels), best, kept)


def table(selection: Selection, rows: Sequence[PoolRow]) -> list[Row]:
    """One row a size, layout, class and edge."""
    found = []
    for case, use in selection.kept.items():
        if case.layout is not None:
            gemm = replace(case.gemm, layout=case.layout)
            row = rows[use.arm.row]
            named = {**dict(row.schedule), **dict(use.arm.launch), EDGE: use.edge}
            schedule = tuple((choice.name, named[choice.name]) for choice in family_of(row.family).choices)
            found.append(Row(gemm, case.edge, row.family, schedule, use.us))
    return joined((), found)


def summary(selection: Selection, rows: Sequence[PoolRow]) -> str:
    """What is kept, and what the limit costs, as Markdown."""
    families = {kernel: rows[use.arm.row].family for use in selection.kept.values() for kernel in (use.arm.kernel,)}
    counts = ", ".join(f"{count} {family}" for family, count in sorted(Counter(families.values()).items()))
    lines = [
        f"{counted(len(selection.kernels), 'distinct kernel')} kept of {selection.offered} timed: {counts}.",
        "",
        "What is left of the speed of the best kernel known: mean over shapes, 5th percentile, least; shapes that no"
        " kept kernel serves.",
        "",
    ]
    shown: list[tuple[object, ...]] = []
    for accumulate, edge in (*MODES, *COLD_MODES):
        for layout in (None, *Layout):
            mode = (accumulate, edge, layout)
            cases = [case for case in selection.best if (case.gemm.accumulate, case.edge, case.layout) == mode]
            if cases:
                ratios = np.array([selection.ratio(case) for case in cases])
                served = ratios[ratios > 0]
                least = served.min(initial=1)
                figures = (f"{share:.4f}" for share in (ratios.mean(), np.quantile(ratios, 0.05), least))
                lost = len(ratios) - len(served)
                shown.append((accumulate, edge, layout or "better of both", len(cases), *figures, lost))
    head = ("class", "edge", "layout", "shapes", "mean", "5 %", "least", "not served")
    return "\n".join([*lines, *markdown_table(head, shown)]) + "\n"


def _uses(records: list[Record], cold: bool, table: Current) -> dict[Case, dict[str, Use]]:
    """For every case, by kernel, its fastest use."""
    uses: defaultdict[Case, dict[str, Use]] = defaultdict(dict)
    by_gemm = {record.gemm: record for record in records}
    for record in records:
        times = _times(record)
        wide = by_gemm.get(replace(record.gemm, accumulate=Accumulate.FP32))
        if record.gemm.accumulate is Accumulate.FP16 and wide:  # kernels that sum in fp32 serve the fp16 class too
            times = _joined(times, _times(wide))
        for (arm, edge), us in times.items():
            edges = (PLAIN, PROGRAMMATIC) if edge == 0 else (PROGRAMMATIC,)  # dependents where that is faster
            launched = arm.kernel, frozenset([*arm.launch, (EDGE, edge)])
            for name in (COLD,) if cold else edges:
                own = table.get((replace(record.gemm, layout=arm.layout), name))
                use = Use(us, arm, edge, MARGIN if own and own != launched else 0.0)
                for layout in (None, arm.layout):
                    found = uses[Case(record.gemm, name, layout)]
                    if arm.kernel not in found or use.counted_us < found[arm.kernel].counted_us:
                        found[arm.kernel] = use
    return dict(uses)


def _times(record: Record) -> dict[tuple[Arm, int], float]:
    """Microseconds of every arm and edge: of the second pass, else of the first as it was off for those in both."""
    pairs = [(a, b) for arm in record.arms for a, b in zip(arm.first, arm.final, strict=True)]
    both = [b / a for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    # the fastest of many samples is too fast by chance: what was not in the second pass is no faster than it was
    factor = max(1.0, median(both)) if both else 1.0
    times = {}
    for arm in record.arms:
        for edge in (0, 1):
            us = arm.final[edge] if math.isfinite(arm.final[edge]) else arm.first[edge] * factor
            if math.isfinite(us):
                times[arm, edge] = us
    return times


def _joined(times: dict[tuple[Arm, int], float], others: dict[tuple[Arm, int], float]) -> dict[tuple[Arm, int], float]:
    """Times of another hour added, scaled by what the same kernels took in both."""

    def key(arm: Arm, edge: int) -> tuple[str, Named, int]:
        return arm.kernel, arm.launch, edge

    known = {key(*each): us for each, us in times.items()}
    both = [known[key(*each)] / us for each, us in others.items() if key(*each) in known]
    factor = median(both) if both else 1.0
    return times | {each: us * factor for each, us in others.items() if key(*each) not in known}


def _weights(cases: Sequence[Case], weights: Sequence[float]) -> NDArray[np.float64]:
    """Weights of the cases; each mode has the same sum, whatever the number of its cases."""
    shares = dict(zip(MODES, weights, strict=True)) | dict.fromkeys(COLD_MODES, 1.0)
    counts = Counter((case.gemm.accumulate, case.edge, case.layout) for case in cases)
    found = []
    for case in cases:
        share = LAYOUT_SHARE / len(Layout) if case.layout else 1 - LAYOUT_SHARE
        accumulate = case.gemm.accumulate
        found.append(shares[accumulate, case.edge] * share / counts[accumulate, case.edge, case.layout])
    return np.array(found)


Matrix = NDArray[np.float32]
MOST_PASSES = 20


def choose(worth_SK: Matrix, weights_S: NDArray[np.float64], most: int, given: Sequence[int] = ()) -> list[int]:
    """At most `most` columns whose weighted sum over rows of the largest worth is large; in order of their number.

    worth_SK: of kernel K to case S, 0 where it does not serve it. given: columns that are chosen whatever they are
    worth, however many. The greedy choice is at least 63 % of the best sum; swaps of one kernel for another then go on
    until none helps, or MOST_PASSES are done. What adds nothing is left out.
    """
    weighted_SK = worth_SK * weights_S[:, None].astype(np.float32)
    chosen: list[int] = list(given)
    best_S = weighted_SK[:, chosen].max(axis=1, initial=0)
    while len(chosen) < min(most, weighted_SK.shape[1]):
        gains_K = np.maximum(weighted_SK - best_S[:, None], 0).sum(axis=0, dtype=np.float64)
        gains_K[chosen] = -1
        k = int(gains_K.argmax())
        if gains_K[k] <= 0:
            break
        chosen.append(k)
        best_S = np.maximum(best_S, weighted_SK[:, k])
    for _ in range(MOST_PASSES):
        if not _swap_each(weighted_SK, chosen, len(given)):
            break
    for k in chosen[len(given) :]:
        others = [other for other in chosen if other != k]
        if not (weighted_SK[:, k] > weighted_SK[:, others].max(axis=1, initial=0)).any():
            chosen = others
    return sorted(chosen)


def _swap_each(weighted_SK: Matrix, chosen: list[int], start: int) -> bool:
    """Give every place from `start` on, in turn, to the kernel that is worth most there; whether any place changed."""
    changed = False
    for place in range(start, len(chosen)):
        others = chosen[:place] + chosen[place + 1 :]
        rest_S = weighted_SK[:, others].max(axis=1, initial=0)
        gains_K = np.maximum(weighted_SK - rest_S[:, None], 0).sum(axis=0, dtype=np.float64)
        gains_K[others] = -1
        k = int(gains_K.argmax())
        if gains_K[k] > gains_K[chosen[place]] * (1 + 1e-6):
            chosen[place] = k
            changed = True
    return changed
