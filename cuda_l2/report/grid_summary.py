"""A benchmark's results in short: ours against the baselines by size, and how strong the baselines are."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from cuda_l2.measure.baselines import cublas, cublaslt_autotuned, cublaslt_heuristic, max_autotune, torch_matmul
from cuda_l2.measure.baselines._base import named
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Arm, Gemm, Interval, Layout, Timing
from cuda_l2.report import brute, library
from cuda_l2.report.arms import arms_of, drift_lines, fastest, same_layout, speedup_cells
from cuda_l2.runs.grid import bucket, bucket_name
from cuda_l2.runs.results import MEASURED, Header, Measurement
from cuda_l2.system.files import markdown_table
from cuda_l2.system.text import counted

AUTOTUNED, HEURISTIC = cublaslt_autotuned.KIND, cublaslt_heuristic.KIND
STRENGTHS = (HEURISTIC, cublas.KIND, torch_matmul.KIND, max_autotune.KIND)
"""Kinds of baselines whose times are compared with the autotuned one's."""
TFLOPS = "TFLOP/s autotuned, better layout"
MAX = "max"
SPEEDUPS = ("shapes", "mean speedup - 1", "geometric mean")
REASONS_SHOWN = 3

Case = dict[Layout, tuple[Gemm, Timing]]
"""One shape's timings by layout."""
Ratios = list[tuple[int, Interval]]
"""Bucket and t_baseline / t_ours of every shape."""


def summary(header: Header, measurements: Sequence[Measurement]) -> str:
    """Markdown tables, protocol by protocol."""
    lines: list[str] = []
    for protocol in dict.fromkeys(m.protocol for m in measurements):
        lines += _protocol_lines(protocol, [m for m in measurements if m.protocol == protocol])
    machine = ", ".join(f"{name} {value}" for name, value in header.environment.items() if name != "flags")
    return "\n".join([*lines, f"Machine: {machine}.", ""])


def ratios(cases: Iterable[Case], kind: str = "") -> dict[str, Ratios]:
    """By comparison: ours against the strongest baseline, or one kind of them.

    NN and TN: ours and the baseline read B alike. max, where both layouts were run: our faster one against the
    baseline's faster one.
    """
    found: dict[str, Ratios] = defaultdict(list)
    for case in cases:
        for layout, (gemm, timing) in case.items():
            names = _named(same_layout(dict(timing.speedups), gemm), kind)
            if names:
                arm = timing.reference if timing.reference in names else fastest(arms_of(timing), names)
                found[layout.upper()].append((bucket(gemm), dict(timing.speedups)[arm]))
        if len(case) == len(Layout):
            ratio = _better_layouts(case, kind)
            if ratio:
                found[MAX].append(ratio)
    return {name: found[name] for name in ("NN", "TN", MAX) if name in found}


def cases(measurements: Iterable[Measurement]) -> list[Case]:
    """Timings of one protocol, layouts of a shape together."""
    found: dict[Gemm, Case] = defaultdict(dict)
    for m in measurements:
        if m.timing and m.timing.candidate and m.status == MEASURED:
            found[m.gemm.any_layout][m.gemm.layout] = (m.gemm, m.timing)
    return list(found.values())


def _protocol_lines(protocol: str, measurements: Sequence[Measurement]) -> list[str]:
    of_library = library.lines(protocol, measurements)
    if of_library:
        return [*of_library, *brute.lines(protocol, measurements), *_failures(protocol, measurements)]
    found = cases(measurements)
    timings = [pair for case in found for pair in case.values()]
    lines = []
    against_ours = [
        {layout: pair for layout, pair in case.items() if pair[1].candidate and pair[1].candidate.name == CANDIDATE}
        for case in found
    ]
    for comparison, pairs in ratios(against_ours).items():
        layouts = "our faster layout against the baselines'" if comparison == MAX else "B read alike"
        lines += [f"## {protocol}, {comparison}: ours against the strongest baseline, {layouts}", ""]
        lines += _by_bucket(pairs)
    lines += _by_class(protocol, against_ours)
    lines += _strengths(protocol, timings)
    lines += brute.lines(protocol, measurements)
    strongest: Counter[str] = Counter()
    for gemm, timing in timings:
        arms = arms_of(timing)
        strongest[fastest(arms, same_layout(arms, gemm) or arms)] += 1
    if strongest:
        ranked = ", ".join(f"{name} {count}" for name, count in strongest.most_common())
        lines += [f"{protocol}: the strongest baseline that reads B alike, and how often: {ranked}.", ""]
    lines += drift_lines(protocol, (timing for _, timing in timings))
    return lines + _failures(protocol, measurements)


def _by_bucket(pairs: Ratios) -> list[str]:
    rows = [
        (bucket_name(first), *speedup_cells([ratio for at, ratio in pairs if at == first]))
        for first in sorted({first for first, _ in pairs})
    ]
    rows.append(("all", *speedup_cells([ratio for _, ratio in pairs])))
    return [*markdown_table(("log2(MNK)", *SPEEDUPS, "wins (interval above 1)", "losses (below 1)"), rows), ""]


def _by_class(protocol: str, found: Sequence[Case]) -> list[str]:
    """Ours against every class of baselines, all shapes together."""
    names = [name for case in found for _, timing in case.values() for name, _ in timing.speedups]
    rows = [
        (kind, comparison, *speedup_cells([ratio for _, ratio in pairs]))
        for kind in dict.fromkeys(named(name).kind for name in names)
        for comparison, pairs in ratios(found, kind).items()
    ]
    if not rows:
        return []
    lines = markdown_table(("baseline", "layouts", *SPEEDUPS, "wins", "losses"), rows)
    note = "A baseline left out of the rounds for slowness has no interval: neither a win nor a loss."
    unbounded = any(
        math.isinf(ratio.low) for case in found for _, timing in case.values() for _, ratio in timing.speedups
    )
    return [f"## {protocol}: ours against each baseline", "", *lines, *(["", note] if unbounded else []), ""]


def _strengths(protocol: str, timings: Sequence[tuple[Gemm, Timing]]) -> list[str]:
    """Medians of the baselines' times over the autotuned one's, and what that one reaches."""
    by_bucket: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    everything: dict[str, list[float]] = defaultdict(list)
    for gemm, timing in timings:
        arms = arms_of(timing)
        own = same_layout(arms, gemm)
        tuned = _time(arms, _named(own, AUTOTUNED))
        best_tuned = _time(arms, _named(arms, AUTOTUNED))
        if not tuned or not best_tuned:
            continue
        figures = {f"{kind} / autotuned": _time(arms, _named(own, kind)) / tuned for kind in STRENGTHS}
        figures[f"{HEURISTIC} / autotuned, better layouts"] = _time(arms, _named(arms, HEURISTIC)) / best_tuned
        figures[TFLOPS] = gemm.flops / best_tuned * 1e-6
        for name, value in figures.items():
            if value:
                by_bucket[bucket(gemm)][name].append(value)
                everything[name].append(value)
    if not everything:
        return []
    order = [name for name in figures if name in everything]
    rows = [(bucket_name(first), *_strength_cells(by_bucket[first], order)) for first in sorted(by_bucket)]
    rows.append(("all", *_strength_cells(everything, order)))
    title = f"## {protocol}: strength of the baselines, medians of ratios of times; mean TFLOP/s"
    return [title, "", *markdown_table(("log2(MNK)", "timings", *order), rows), ""]


def _strength_cells(figures: dict[str, list[float]], order: Sequence[str]) -> list[str]:
    cells = [str(max(len(values) for values in figures.values()))]
    for name in order:
        values = figures.get(name, [])
        if not values:
            cells.append("")
        elif name == TFLOPS:
            cells.append(f"{statistics.fmean(values):.3g}")
        else:
            cells.append(f"{statistics.median(values):.3f}")
    return cells


def _failures(protocol: str, measurements: Sequence[Measurement]) -> list[str]:
    failed = [m for m in measurements if m.status != MEASURED]
    if not failed:
        return []
    counts = ", ".join(f"{count} {status}" for status, count in Counter(m.status for m in failed).most_common())
    shapes = counted(len(measurements), "shape")
    lines = [f"{protocol}: without figures {len(failed)} of {shapes}: {counts}.", ""]
    return lines + [f"- {m.gemm}: {m.reason}" for m in failed[:REASONS_SHOWN]] + [""]


def _better_layouts(case: Case, kind: str) -> tuple[int, Interval] | None:
    """Our faster layout against the baselines' faster one: from one interleaved run where that holds both."""
    runs = sorted(case.values(), key=lambda pair: pair[1].candidate.latency_us.estimate if pair[1].candidate else 0)
    (gemm, timing), (_, other) = runs
    arms, others = arms_of(timing), arms_of(other)
    names = _named(dict(timing.speedups), kind)
    # what reads B as the task lays it out met the other layout in the other run alone
    elsewhere = [name for name in _named(dict(other.speedups), kind) if named(name).layout is None]
    if not names or not timing.candidate:
        return None
    arm = fastest(arms, names)
    ratio = dict(timing.speedups)[arm]
    if elsewhere:
        theirs = others[fastest(others, elsewhere)].latency_us
        if theirs.estimate < arms[arm].latency_us.estimate:
            ratio = _unpaired(theirs, timing.candidate.latency_us)
    return bucket(gemm), ratio


def _unpaired(theirs: Interval, ours: Interval) -> Interval:
    """t_theirs / t_ours from two runs: wider than from pairs."""
    estimate = theirs.estimate / ours.estimate
    if math.isinf(theirs.low) or math.isinf(ours.low):
        return Interval(estimate, -math.inf, math.inf)
    return Interval(estimate, theirs.low / ours.high, theirs.high / ours.low)


def _named(arms: Iterable[str], kind: str) -> list[str]:
    """The baselines of one kind; all where it is empty."""
    return [arm for arm in arms if not kind or named(arm).kind == kind]


def _time(arms: dict[str, Arm], names: Sequence[str]) -> float:
    """The lowest median of these, 0 where there is none."""
    return min((arms[name].latency_us.estimate for name in names), default=0.0)
