"""Arms in tables: baselines by name and layout, intervals as cells."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence

from cuda_l2.measure.baselines._base import named
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Arm, Gemm, Interval, Timing
from cuda_l2.system.text import counted

Cell = str | int | float | None
Row = dict[str, Cell]


def arms_of(timing: Timing) -> dict[str, Arm]:
    """Every baseline of a timing by name, also the one that stood in a candidate's place."""
    assert timing.candidate
    subject = () if timing.candidate.name == CANDIDATE else (timing.candidate,)
    return {arm.name: arm for arm in (*subject, *timing.baselines)}


def same_layout(arms: Iterable[str], gemm: Gemm) -> list[str]:
    """The baselines that read B as the task lays it out."""
    return [arm for arm in arms if named(arm).reads([gemm.layout])]


def fastest(arms: dict[str, Arm], names: Iterable[str]) -> str:
    """The one of these names with the lowest median."""
    return min(names, key=lambda name: arms[name].latency_us.estimate)


def speedup_cells(found: Sequence[Interval], digits: int = 1) -> list[str]:
    """Number of ratios, mean - 1, geometric mean, wins (above 1), losses (below 1). digits: of the mean in %."""
    values, count = [ratio.estimate for ratio in found], len(found)
    shares = (sum(ratio.low > 1 for ratio in found) / count, sum(ratio.high < 1 for ratio in found) / count)
    mean = f"{statistics.fmean(values) - 1:+.{digits}%}"
    return [
        str(count),
        mean,
        f"{statistics.geometric_mean(values):.3f}",
        *(f"{share:.{digits - 1}%}" for share in shares),
    ]


def drift_lines(protocol: str, timings: Iterable[Timing]) -> list[str]:
    """Markdown on how many runs' clocks drifted; empty where none did."""
    drifted = sum(bool(timing.conditions.drifted) for timing in timings)
    said = f"{protocol}: in {counted(drifted, 'run')} the clocks drifted between arms, after repetitions too."
    return [said, ""] if drifted else []


def interval_cells(name: str, interval: Interval | None) -> Row:
    """Estimate and 95 % interval, empty where there were too few samples to say."""
    low, high = (interval.low, interval.high) if interval else (None, None)
    estimate = interval.estimate if interval else None
    return {name: cell(estimate), f"{name}_low": cell(low), f"{name}_high": cell(high)}


def cell(value: object) -> Cell:
    """A value that CSV and Parquet hold alike: not-a-number is empty, a structure is JSON."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str | int | float) else json.dumps(value)
