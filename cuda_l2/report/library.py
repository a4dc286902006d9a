"""Results of a library's kernels over many shapes: plain and dependent launches against autotuned cuBLASLt.

Every shape's kernels, in both layouts, ran beside all baselines in one run. Which of them stands for a comparison was
fixed by the times of the run that selected them, the baseline is the fastest of the run reported: both favour it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from cuda_l2.measure.baselines._base import Baseline, named
from cuda_l2.measure.baselines.cublaslt_autotuned import KIND as AUTOTUNED
from cuda_l2.records import Interval, Layout
from cuda_l2.report.arms import Row, arms_of, drift_lines, fastest, interval_cells, speedup_cells
from cuda_l2.runs.grid import log2_mnk
from cuda_l2.runs.results import MEASURED, KernelFigures, Measurement
from cuda_l2.system.files import markdown_table
from cuda_l2.system.text import counted

BUCKETS = ((0, 23), (24, 27), (28, 30), (31, 33), (34, 63))
"""First and last log2(MNK)."""
WORST_SHOWN = 10
HEAD = ("shapes", "mean speedup - 1", "geometric mean", "wins (interval above 1)", "losses (below 1)", "lowest")

Ratios = list[tuple[Measurement, Interval]]
"""t_baseline / t_ours of every shape."""

Of = Callable[[Baseline], bool]
"""Which baselines a kernel is compared with."""


def tuned(baseline: Baseline) -> bool:
    return baseline.autotuned


def any_of_them(baseline: Baseline) -> bool:
    return True


def kernel_name(kernel: KernelFigures) -> str:
    return f"{kernel.layout} {'dependent' if kernel.dependent else 'plain'}"


def sum_bits(kernel: KernelFigures) -> int:
    """Bits of the sums in the tensor cores."""
    choices = dict(kernel.schedule)
    return choices.get("ACC") or (16 if choices.get("ACC16") else 32)


def relative_error(measurement: Measurement, kernel: KernelFigures) -> float:
    """The largest error of a timed output against fp32, over sqrt(K), the elements' RMS of standard normal operands."""
    return kernel.max_difference / math.sqrt(measurement.gemm.k)


def chosen(measurement: Measurement, layout: Layout | None = None, *, dependent: bool) -> KernelFigures | None:
    """The kernel that was selected for a shape: of one layout or the faster one, dependent launches allowed or not."""
    kernels = [
        kernel
        for kernel in measurement.kernels
        if layout in (None, kernel.layout) and (dependent or not kernel.dependent)
    ]
    return min(kernels, key=lambda kernel: kernel.selected_us, default=None)


def ratio(
    measurement: Measurement, kernel: KernelFigures | None, of: Of = tuned, layout: Layout | None = None
) -> Interval | None:
    """t_baseline / t_kernel for the fastest of these baselines, of one layout or both; None where there is none."""
    if not kernel or not measurement.timing:
        return None
    arms, ratios = arms_of(measurement.timing), dict(kernel.speedups)
    names = [name for name in _chosen(ratios, of) if layout is None or named(name).reads([layout])]
    return ratios[fastest(arms, names)] if names else None


def cells(measurement: Measurement) -> Row:
    """What a row of the table holds of every kernel; a dot separates its name from what is told of it."""
    row: Row = {}
    for kernel in measurement.kernels:
        name = kernel_name(kernel).replace(" ", "_")
        row |= interval_cells(f"{name}.us", kernel.latency_us)
        row |= interval_cells(f"{name}.speedup", ratio(measurement, kernel))
        row |= interval_cells(f"{name}.speedup_same_layout", ratio(measurement, kernel, layout=kernel.layout))
        row |= {
            f"{name}.selected_us": kernel.selected_us,
            f"{name}.sum_bits": sum_bits(kernel),
            f"{name}.relative_error": relative_error(measurement, kernel),
            f"{name}.kernel": kernel.kernel,
            f"{name}.family": kernel.family,
            f"{name}.schedule": " ".join(f"{key}={value}" for key, value in kernel.schedule),
        }
    for name, dependent in (("plain", False), ("any_launch", True)):
        best = chosen(measurement, dependent=dependent)
        if best:
            row |= {f"{name}.kernel": kernel_name(best), **interval_cells(f"{name}.us", best.latency_us)}
            row |= interval_cells(f"{name}.speedup", ratio(measurement, best))
    return row


def lines(protocol: str, measurements: Sequence[Measurement]) -> list[str]:
    """Markdown: the speedups by size, by layout and by baseline, and the worst shapes."""
    measured = [m for m in measurements if m.status == MEASURED and m.kernels]
    if not measured:
        return []
    kernels = {kernel.kernel for m in measured for kernel in m.kernels}
    distinct = counted(len(kernels), "distinct kernel")
    text = [f"## {protocol}: {counted(len(measured), 'shape')}, {distinct}", ""]
    plain = _ratios(measured, lambda m: ratio(m, chosen(m, dependent=False)))
    launched = _ratios(measured, lambda m: ratio(m, chosen(m, dependent=True)))
    for title, ratios in (("plain launches", plain), ("dependent launch where it was selected", launched)):
        text += _by_size(f"{protocol}, {title}, faster layout against {AUTOTUNED}'s faster layout", ratios)
    strongest = _ratios(measured, lambda m: ratio(m, chosen(m, dependent=False), any_of_them))
    text += _by_size(f"{protocol}, plain launches against the fastest of all baselines of the run", strongest)
    text += _totals(protocol, measured)
    text += _by_layout(protocol, measured)
    text += _by_baseline(protocol, measured)
    text += _true_fp16(protocol, plain)
    worst = sorted(plain or strongest, key=lambda pair: pair[1].estimate)[:WORST_SHOWN]
    shown = ", ".join(f"{m.gemm} {value.estimate:.3f}" for m, value in worst)
    text += [f"{protocol}: the lowest of the plain launches: {shown}.", ""]
    families = Counter(kernel.family for m in measured if (kernel := chosen(m, dependent=False)))
    text += [f"{protocol}: families: " + ", ".join(f"{name} {n}" for name, n in families.most_common()) + ".", ""]
    return text + drift_lines(protocol, (m.timing for m in measured if m.timing))


def _ratios(measurements: Iterable[Measurement], of: Callable[[Measurement], Interval | None]) -> Ratios:
    return [(m, value) for m in measurements if (value := of(m))]


def _by_size(title: str, ratios: Ratios) -> list[str]:
    if not ratios:
        return []
    rows = []
    for first, last in BUCKETS:
        name = f"<= {last}" if not first else f">= {first}" if last > 60 else f"{first}-{last}"
        rows.append((name, [value for m, value in ratios if first <= log2_mnk(m.gemm) <= last]))
    rows.append(("all", [value for _, value in ratios]))
    return _section(title, "log2(MNK)", rows)


def _true_fp16(protocol: str, plain: Ratios) -> list[str]:
    """The shapes that sums in fp16 win, with their error."""
    served = [(m, value, kernel) for m, value in plain if (kernel := chosen(m, dependent=False))]
    served = [each for each in served if sum_bits(each[2]) == 16]
    if not served:
        return []
    won = sorted((each for each in served if each[1].low > 1), key=lambda each: -each[1].estimate)
    shown = []
    for m, value, kernel in won:
        error = relative_error(m, kernel)  # not kept by earlier versions
        shown.append(f"{m.gemm} {value.estimate:.3f}" + ("" if math.isnan(error) else f" {error:.2%}"))
    return [
        f"{protocol}: sums in fp16 serve {len(served)} of {counted(len(plain), 'shape')} as plain launches, and win"
        f" {len(won)}"
        " (interval above 1). Speedup, and the largest error of an output over its RMS:",
        "",
        ", ".join(shown) + ".",
        "",
    ]


def _chosen(names: Iterable[str], of: Of) -> list[str]:
    return [name for name in names if of(named(name))]


def _totals(protocol: str, measured: Sequence[Measurement]) -> list[str]:
    """Time of one launch of every shape, over ours: what the largest shapes decide."""
    pairs = [(m, kernel) for m in measured if m.timing and (kernel := chosen(m, dependent=False))]
    ours = sum(kernel.latency_us.estimate for _, kernel in pairs)
    told = []
    for of, title in ((tuned, AUTOTUNED), (any_of_them, "the fastest of all baselines")):
        theirs = 0.0
        for m, _ in pairs:
            assert m.timing
            arms = arms_of(m.timing)
            names = _chosen(arms, of)  # none where --arms left them out
            theirs += arms[fastest(arms, names)].latency_us.estimate if names else math.nan
        if not math.isnan(theirs):
            told.append(f"{title} {theirs / ours:.3f}")
    return [f"{protocol}: one launch of each shape, all together, over our plain ones: {', '.join(told)}.", ""]


def _by_layout(protocol: str, measured: Sequence[Measurement]) -> list[str]:
    rows = []
    for layout in Layout:
        for launch, dependent in (("plain", False), ("dependent where selected", True)):
            found = [ratio(m, chosen(m, layout, dependent=dependent), layout=layout) for m in measured]
            rows.append((f"{layout.upper()}, {launch}", [value for value in found if value]))
    return _section(f"{protocol}: B read alike", "layout and launch", rows) if any(found for _, found in rows) else []


def _is_kind(kind: str, baseline: Baseline) -> bool:
    return baseline.kind == kind


def _by_baseline(protocol: str, measured: Sequence[Measurement]) -> list[str]:
    kinds = dict.fromkeys(named(name).kind for m in measured for name, _ in m.kernels[0].speedups)
    rows = []
    for kind in kinds:
        found = [ratio(m, chosen(m, dependent=False), partial(_is_kind, kind)) for m in measured]
        rows.append((kind, [value for value in found if value]))
    return _section(f"{protocol}: plain launches against each baseline's faster layout", "baseline", rows)


def _section(title: str, of: str, rows: Sequence[tuple[str, list[Interval]]]) -> list[str]:
    """A table of speedups under its title; rows without any are left out."""
    cells = [
        (name, *speedup_cells(found, 2), f"{min(value.estimate for value in found):.3f}")
        for name, found in rows
        if found
    ]
    return [f"### {title}", "", *markdown_table((of, *HEAD), cells), ""]
