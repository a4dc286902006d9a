"""Figures over many tasks as CUDA-L1 reports them, by level and by baseline; fast_p as KernelBench defines it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from cuda_l2.records import Arm, Interval
from cuda_l2.runs.task_bench import TaskResult
from cuda_l2.system.files import csv_text, markdown_table

FASTER = 1.01
"""CUDA-L1 counts a kernel as faster from here on."""
FAST_P = (0.5, 0.8, 1.0, 1.5, 2.0)
EVERY_LEVEL = "all"
HEAD = (
    *("level", "tasks", "work", "faster than 1.01x", "mean", "geometric mean", "median", "75 %", "max"),
    *(f"fast_{p:g}" for p in FAST_P),
)


@dataclass(frozen=True)
class Figures:
    """Figures of a level's tasks against one baseline. Shares are of all tasks that the baseline was timed on."""

    level: str
    tasks: int
    working: int  # a kernel was correct and timed
    faster: int  # by more than 1 %
    speedups: tuple[float, ...]  # of those that work

    def fast(self, p: float) -> float:
        """KernelBench's fast_p: the share of tasks with a correct kernel more than p times as fast."""
        return sum(speedup > p for speedup in self.speedups) / self.tasks if self.tasks else 0.0


def figures(results: Sequence[TaskResult], level: str, baseline: str) -> Figures:
    """Figures of one level, or of all. Tasks without a kernel count; those without the baseline do not."""
    chosen = [result for result in results if level in (EVERY_LEVEL, result.level)]
    speedups, tasks = [], 0
    for result in chosen:
        timing = result.trial.timing if result.trial else None
        ratio = dict(timing.speedups).get(baseline) if timing else None
        tasks += timing is None or ratio is not None
        if ratio is not None:
            speedups.append(ratio.estimate)
    faster = sum(speedup > FASTER for speedup in speedups)
    return Figures(level, tasks, len(speedups), faster, tuple(speedups))


def baselines(results: Sequence[TaskResult]) -> list[str]:
    """Baselines of any of the results, in the order in which they come."""
    timings = [result.trial.timing for result in results if result.trial and result.trial.timing]
    return list(dict.fromkeys(name for timing in timings for name, _ in timing.speedups))


def markdown(results: Sequence[TaskResult]) -> str:
    """Figures by baseline and level, then every task, then those without a kernel with their reasons."""
    levels = [*dict.fromkeys(result.level for result in results), EVERY_LEVEL]
    lines = ["# Tasks", ""]
    for baseline in baselines(results):
        rows = [_row(figures(results, level, baseline)) for level in levels]
        lines += [f"## Against {baseline}", "", *markdown_table(HEAD, rows), ""]
    lines += _each(results)
    missing = [result for result in results if result.trial is None]
    if missing:
        lines += ["", f"## Without a kernel: {len(missing)}", ""]
        lines += [f"- {result.task}: {result.reason}" for result in missing]
    environment = next((result.trial.environment for result in results if result.trial), {})
    lines += ["", "Machine: " + ", ".join(f"{name} {value}" for name, value in environment.items()) + "."]
    return "\n".join(lines) + "\n"


def _row(of: Figures) -> list[str]:
    cells = [of.level, str(of.tasks), _share(of.working, of.tasks), _share(of.faster, of.tasks)]
    if of.speedups:
        speedups = of.speedups
        quarter = float(np.percentile(speedups, 75))
        numbers = (statistics.fmean(speedups), geometric_mean(speedups), statistics.median(speedups), quarter)
        cells += [f"{number:.2f}x" for number in (*numbers, max(speedups))]
    else:
        cells += ["-"] * 5
    return cells + [f"{of.fast(p):.0%}" for p in FAST_P]


def _each(results: Sequence[TaskResult]) -> list[str]:
    names = baselines(results)
    head = ["task", "level", "ours", *(column for name in names for column in (name, "speedup [95 %]"))]
    rows = []
    for result in results:
        timing = result.trial.timing if result.trial else None
        if timing and timing.candidate:
            arms, ratios = {arm.name: arm for arm in timing.baselines}, dict(timing.speedups)
            cells = [text for name in names for text in (_time(arms.get(name)), _ratio(ratios.get(name)))]
            rows.append((result.task, result.level, _time(timing.candidate), *cells))
    return ["## Every task", "", *markdown_table(head, rows)]


def table(results: Sequence[TaskResult]) -> str:
    """One line a task as CSV: times in microseconds, speedups with their intervals."""
    names, rows = baselines(results), []
    ratios = [f"{name} {what}" for name in names for what in ("us", "speedup", "low", "high")]
    columns = ["task", "level", "kernel", "family", "proposer", "ours us", *ratios, "reason"]
    for result in results:
        trial, timing = result.trial, result.trial.timing if result.trial else None
        cells: list[object] = ["" for _ in range(4 + len(ratios))]
        if trial and timing and timing.candidate:
            arms, speedups = {arm.name: arm for arm in timing.baselines}, dict(timing.speedups)
            own = trial.candidate
            cells = [own.id, own.family, own.proposer, timing.candidate.latency_us.estimate]
            for name in names:
                ratio = speedups.get(name)
                cells.append(arms[name].latency_us.estimate if name in arms else "")
                cells += [ratio.estimate, ratio.low, ratio.high] if ratio else [""] * 3
        rows.append([str(result.task), result.level, *cells, result.reason])
    return csv_text(columns, rows)


def _share(part: int, of: int) -> str:
    return f"{part} ({part / of:.0%})" if of else "-"


def _time(arm: Arm | None) -> str:
    return f"{arm.latency_us.estimate:.1f} us" if arm else "-"


def _ratio(ratio: Interval | None) -> str:
    return ratio.text(".2f", "x") if ratio else "-"
