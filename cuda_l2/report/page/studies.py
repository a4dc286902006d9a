"""The papers' comparisons from rows: speedups over each baseline and layout, and by size."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cuda_l2.measure.baselines._base import all_baselines
from cuda_l2.records import SHORT_DTYPES, Interval
from cuda_l2.report import library
from cuda_l2.report.page.published import COLUMNS
from cuda_l2.report.page.records import Case, Kernel, Rival
from cuda_l2.runs.grid import bucket, bucket_name
from cuda_l2.runs.results import MEASURED

MAX = "max"
MODES = ("offline", "server", "rotating")
"""Protocols in the order shown; others follow."""
SMALL = 0.1
"""Share of the largest file's shapes below which a file has a line of its own alone."""

Ratios = list[tuple[Case, Interval]]
"""t_baseline / t_ours of every shape."""


@dataclass
class Study:
    """Products of one type on one machine: for each protocol the file with the most shapes."""

    machine: str
    device: str
    kind: str  # of the products, as in 'fp16, fp32 sums'
    modes: dict[str, list[Case]] = field(default_factory=dict)
    others: list[list[Case]] = field(default_factory=list)  # smaller files of the same, by protocol

    @property
    def main(self) -> list[Case]:
        """The cases that figures of one mode show."""
        return next(iter(self.modes.values()))

    @property
    def gpu(self) -> bool:
        return "gpu" in self.main[0].origin.environment


@dataclass(frozen=True)
class Spread:
    """Statistics of speedups. certain: those whose 95 % interval is known."""

    shapes: int
    mean: float
    median: float
    deviation: float
    wins: float  # share above 1
    certain: int
    certain_wins: float  # share of these whose interval lies above 1
    certain_losses: float


def studies(cases: Iterable[Case]) -> list[Study]:
    """Studies with their modes, the one with the most shapes first."""
    grouped: dict[tuple[str, str, str], dict[tuple[str, str], list[Case]]] = {}
    for case in cases:
        if case.gemm and case.status == MEASURED and case.best:
            kind = f"{SHORT_DTYPES[case.gemm.dtype]}, {case.gemm.accumulate} sums"
            group = grouped.setdefault((case.origin.machine, case.origin.device, kind), {})
            group.setdefault((case.protocol, case.origin.file), []).append(case)
    found = []
    for (machine, device, kind), group in grouped.items():
        study = Study(machine, device, kind)
        ranked = sorted(group.items(), key=lambda item: (_rank(item[0][0]), item[0][0], -len(item[1])))
        for (protocol, _), members in ranked:
            few = SMALL * max(map(len, group.values()))
            if protocol in study.modes or len(members) < few:
                study.others.append(members)
            else:
                study.modes[protocol] = members
        found.append(study)
    return sorted(found, key=lambda study: -max(map(len, study.modes.values())))


def _rank(protocol: str) -> int:
    return MODES.index(protocol) if protocol in MODES else len(MODES)


def comparisons(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Kinds and layouts of the baselines that were measured, the paper's ten first."""
    layouts: dict[str, set[str]] = {}
    for case in cases:
        for rival in case.rivals:
            layouts.setdefault(rival.kind, set()).add(rival.layout)
    found = {
        (kind, way)
        for kind, known in layouts.items()
        for way in (("",) if known == {""} else (*sorted(known - {""}), *((MAX,) if len(known - {""}) > 1 else ())))
    }
    ours = [pair for pair in COLUMNS if pair in found]
    return [*ours, *sorted(found - set(ours), key=lambda pair: (pair[0], ("", "nn", "tn", MAX).index(pair[1])))]


def label(kind: str, way: str) -> str:
    return f"{kind} {way if way == MAX else way.upper()}".strip()


def ratios(cases: Sequence[Case], kind: str, way: str) -> Ratios:
    """Speedups over one baseline.

    nn, tn: kernel and baseline read B alike. max: our faster layout against the baseline's faster one, and of a shape
    with a row for each layout the row with our faster kernel. Without a layout: our faster layout.
    """
    found: dict[str, tuple[Case, Interval]] = {}
    for case in cases:
        pair = _contest(case, kind, way)
        if not pair or not case.gemm:
            continue
        kernel, rival = pair
        shape = str(case.gemm.any_layout)
        if shape in found and _us(found[shape][0], way) <= kernel.us.estimate:
            continue
        found[shape] = case, _speedup(case, kernel, rival, way)
    return list(found.values())


def _us(case: Case, way: str) -> float:
    kernel = _kernel(case, way)
    return kernel.us.estimate if kernel else math.inf


def _kernel(case: Case, way: str) -> Kernel | None:
    if way not in ("nn", "tn"):
        return case.best
    alone = case.best if case.best and case.best.layout == way and len(case.kernels) == 1 else None
    return case.kernel(f"{way} plain") or alone


def _contest(case: Case, kind: str, way: str) -> tuple[Kernel, Rival] | None:
    kernel = _kernel(case, way)
    rivals = [r for r in case.rivals if r.kind == kind and (way in ("", MAX) or r.layout == way)]
    return (kernel, min(rivals, key=lambda rival: rival.us.estimate)) if kernel and rivals else None


def _speedup(case: Case, kernel: Kernel, rival: Rival, way: str) -> Interval:
    """From paired rounds where the row has that, else the ratio of the two medians, without an interval."""
    if rival.ratio and kernel.us.estimate == case.ours_us:
        return rival.ratio
    tuned = {rival.kind for rival in case.rivals if _is_tuned(rival.name)}
    paired = kernel.tuned_alike if way in ("nn", "tn") else kernel.tuned
    if paired and tuned == {rival.kind}:
        return paired
    return Interval(rival.us.estimate / kernel.us.estimate, -math.inf, math.inf)


def _is_tuned(name: str) -> bool:
    known = all_baselines().get(name)
    return bool(known and library.tuned(known))


def headline(cases: Sequence[Case]) -> tuple[str, Ratios]:
    """Speedups for figures by shape: our faster layout over the fastest baseline that was tuned, else over any."""
    names = {rival.name for case in cases for rival in case.rivals}
    tuned = {name for name in names if _is_tuned(name)}
    found: dict[str, tuple[Case, Interval]] = {}
    for case in cases:
        rivals = [rival for rival in case.rivals if not tuned or rival.name in tuned]
        if not case.best or not rivals or not case.gemm:
            continue
        shape = str(case.gemm.any_layout)
        if shape in found and _us(found[shape][0], MAX) <= case.best.us.estimate:
            continue
        rival = min(rivals, key=lambda rival: rival.us.estimate)
        paired = case.best.tuned if tuned else None
        found[shape] = case, paired or _speedup(case, case.best, rival, MAX)
    return "the fastest tuned cuBLASLt algorithm" if tuned else "the fastest baseline", list(found.values())


def spread(found: Sequence[Interval], floor: float = 0.0) -> Spread:
    """floor: 1 where the baseline is used wherever it is faster."""
    values = [max(floor, ratio.estimate) for ratio in found]
    certain = [ratio for ratio in found if math.isfinite(ratio.low) and math.isfinite(ratio.high)]
    share = 1 / len(certain) if certain else math.nan
    return Spread(
        len(values),
        statistics.fmean(values),
        statistics.median(values),
        statistics.stdev(values) if len(values) > 1 else math.nan,
        sum(ratio.estimate > 1 for ratio in found) / len(values),
        len(certain),
        sum(ratio.low > 1 for ratio in certain) * share,
        sum(ratio.high < 1 for ratio in certain) * share,
    )


def by_size(found: Ratios) -> list[tuple[int, str, list[Interval]]]:
    """The paper's buckets of log2(MNK): first, name, speedups."""
    groups: dict[int, list[Interval]] = {}
    for case, ratio in found:
        if case.gemm:
            groups.setdefault(bucket(case.gemm), []).append(ratio)
    return [(first, bucket_name(first), groups[first]) for first in sorted(groups)]
