"""cuBLASLt searched beyond its heuristic's list: how much faster a search among all configurations makes it."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuda_l2.measure.baselines import cublaslt_autotuned, cublaslt_brute
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Gemm, Interval, Layout
from cuda_l2.report import library
from cuda_l2.report.arms import arms_of
from cuda_l2.runs.results import Measurement
from cuda_l2.system.files import markdown_table
from cuda_l2.system.text import counted

ATTRIBUTES = {
    "id": "id",
    "tile": "tile",
    "stages": "stages",
    "split_k": "splits",
    "cluster": "cluster",
    "custom_option": "option",
    "swizzle": "swizzle",
    "inner_shape": "inner",
}
"""What the summary says of an algorithm, by the library's own numbers, and how."""
HEAD = (
    *("shape", "B", "autotuned, us", "brute, us", "autotuned / brute [95 %]", "ours, us", "brute / ours [95 %]"),
    *("found", "tried / valid / wrong"),
)


@dataclass(frozen=True, slots=True)
class Searched:
    """One shape and layout of B."""

    gemm: Gemm
    layout: Layout
    autotuned_us: float
    brute_us: float
    ratio: Interval  # t_autotuned / t_brute
    found: Mapping[str, Any]  # what was searched and found
    ours_us: float | None = None  # of the plain launch that was selected in this layout
    over_ours: Interval | None = None  # t_brute / t_ours


def searched(measurements: Sequence[Measurement]) -> Iterator[Searched]:
    """Every layout in which a shape's timing has both the autotuned and the searched algorithm."""
    for measurement in measurements:
        timing = measurement.timing
        if not timing or not timing.candidate:
            continue
        arms = arms_of(timing)
        for layout in Layout:
            brute, autotuned = (f"{kind} {layout.name}" for kind in (cublaslt_brute.KIND, cublaslt_autotuned.KIND))
            ratio = next((ratio for *names, ratio in timing.among if names == [autotuned, brute]), None)
            if ratio:
                yield Searched(
                    measurement.gemm,
                    layout,
                    arms[autotuned].latency_us.estimate,
                    arms[brute].latency_us.estimate,
                    ratio,
                    measurement.arms.get(brute, {}),
                    *_ours(measurement, layout, brute),
                )


def lines(protocol: str, measurements: Sequence[Measurement]) -> list[str]:
    """Markdown: a row a shape and layout, then geometric means; empty where nothing was searched."""
    found = sorted(searched(measurements), key=lambda each: (each.gemm.flops, each.gemm, each.layout))
    if not found:
        return []
    rows = [
        (
            *(str(each.gemm.any_layout), each.layout.upper(), f"{each.autotuned_us:.2f}", f"{each.brute_us:.2f}"),
            each.ratio.text(".3f"),
            f"{each.ours_us:.2f}" if each.ours_us else "",
            each.over_ours.text(".3f") if each.over_ours else "",
            _algorithm(each.found),
            " / ".join(str(each.found.get(name, "")) for name in ("tried", "valid", "wrong")),
        )
        for each in found
    ]
    title = f"## {protocol}: cuBLASLt searched beyond its heuristic's list, against autotuned"
    ratios = [each.ratio for each in found]
    listed = sum(bool(each.found.get("returned")) for each in found)
    said = (
        f"Autotuned over brute, {counted(len(found), 'product')}: geometric mean"
        f" {statistics.geometric_mean(ratio.estimate for ratio in ratios):.4f};"
        f" interval above 1 in {sum(ratio.low > 1 for ratio in ratios)}, below 1 in"
        f" {sum(ratio.high < 1 for ratio in ratios)}; the heuristic's list has the one found in {listed}."
    )
    pairs = [(each.over_ours.estimate, each.ratio.estimate) for each in found if each.over_ours]
    if pairs:
        over_brute, over_tuned = (
            statistics.geometric_mean(values)
            for values in ([ours for ours, _ in pairs], [ours * ratio for ours, ratio in pairs])
        )
        said += (
            f" Ours, plain, in {counted(len(pairs), 'product')}: {over_brute:.4f} times as fast as brute,"
            f" {over_tuned:.4f} times as fast as autotuned."
        )
    return [title, "", *markdown_table(HEAD, rows), "", said, ""]


def _ours(measurement: Measurement, layout: Layout, brute: str) -> tuple[float | None, Interval | None]:
    """Time of our plain launch that was selected and reads B so, and brute's time over it."""
    best = library.chosen(measurement, layout, dependent=False)
    if best:
        return best.latency_us.estimate, dict(best.speedups).get(brute)
    timing = measurement.timing
    if measurement.kernels or measurement.gemm.layout is not layout or not timing or not timing.candidate:
        return None, None
    if timing.candidate.name != CANDIDATE:
        return None, None
    return timing.candidate.latency_us.estimate, dict(timing.speedups).get(brute)


def _algorithm(found: Mapping[str, Any]) -> str:
    """Its kernel, without what clears memory and sums the parts of a split K, and what is set of it."""
    kernels = [name.split()[0] for name in found.get("kernels", ()) if name.startswith("nvjet")]
    return " ".join([*kernels[:1], *(f"{word} {found[name]}" for name, word in ATTRIBUTES.items() if found.get(name))])
