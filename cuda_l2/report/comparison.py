"""A comparison of searchers as a table, as CSV and as a figure."""

import io
import math
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from cuda_l2.records import Interval
from cuda_l2.runs.comparison import NEAR, Curve, by_searcher, counts, over_tasks
from cuda_l2.system.files import csv_text, imported, markdown_table
from cuda_l2.system.text import counted

LEAST_SHOWN = 1e-3
"""Regret below this is drawn at it: the axis is logarithmic."""
WIDTH, HEIGHT = 7.0, 4.2  # inches


def ninetieth(values: Sequence[float]) -> float:
    return float(np.quantile(values, 0.9, method="higher"))


def table(curves: Sequence[Curve], about: str) -> str:
    """Markdown: for every searcher its regret over the held-out tasks, with intervals over seeds. about: the world."""
    tasks, seeds = {curve.task for curve in curves}, {curve.seed for curve in curves}
    shown = counts(curves)
    head = [
        "searcher",
        "first guess: median",
        "90th percentile",
        *(f"after {count}" for count in shown[1:]),
        f"measurements to within {NEAR:.0%}",
    ]
    rows = []
    for name, found in by_searcher(curves).items():
        first = [over_tasks(found, partial(Curve.after, count=1), of) for of in (statistics.median, ninetieth)]
        later = [over_tasks(found, partial(Curve.after, count=count), statistics.median) for count in shown[1:]]
        arrived = over_tasks(found, lambda curve: curve.arrived, statistics.median)
        rows.append([name, *(_percent(interval) for interval in (*first, *later)), _number(arrived)])
    lines = [
        f"{about}; {counted(len(tasks), 'task')} held out, {counted(len(seeds), 'seed')}.",
        "",
        "Regret: the time of the best schedule so far over the best recorded one, less 1. Median over tasks, mean over"
        " seeds (95 % bootstrap interval over seeds).",
        "",
    ]
    return "\n".join([*lines, *markdown_table(head, rows)]) + "\n"


def csv(curves: Sequence[Curve]) -> str:
    """A row for every search and number of measurements."""
    rows = [
        (curve.searcher, curve.task, curve.seed, count, f"{regret:.6g}")
        for curve in curves
        for count, regret in enumerate(curve.regrets, 1)
    ]
    return csv_text(("searcher", "task", "seed", "measurements", "regret"), rows)


def figure(curves: Sequence[Curve]) -> str:
    """Median regret of every searcher against the number of measurements, with intervals over seeds, as SVG."""
    matplotlib = imported("matplotlib", "the figure of a comparison needs", "worlds")
    colours = matplotlib.colormaps["tab10"].colors
    longest = max(len(curve.regrets) for curve in curves)
    xs = sorted({*counts(curves), *(round(longest ** (i / 24)) for i in range(25))})
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cuda-l2", "font.size": 9}):
        drawn = imported("matplotlib.figure", "the figure of a comparison needs", "worlds").Figure(
            figsize=(WIDTH, HEIGHT), layout="constrained"
        )
        axes = drawn.add_subplot(xlabel="measurements", ylabel="median regret", xscale="log", yscale="log")
        for number, (name, found) in enumerate(by_searcher(curves).items()):
            intervals = [over_tasks(found, partial(Curve.after, count=x), statistics.median) for x in xs]
            colour, style = colours[number % len(colours)], "--" if number >= len(colours) else "-"
            low, middle, high = (
                [max(LEAST_SHOWN, getattr(interval, part)) for interval in intervals]
                for part in ("low", "estimate", "high")
            )
            axes.plot(xs, middle, color=colour, linestyle=style, label=name)
            axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhline(NEAR, color="grey", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
        file = io.StringIO()
        drawn.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))
    return file.getvalue()


def _percent(interval: Interval) -> str:
    return f"{interval.estimate:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def _number(interval: Interval) -> str:
    if not math.isfinite(interval.estimate):
        return "not reached"
    high = f"{interval.high:.3g}" if math.isfinite(interval.high) else "never"
    return f"{interval.estimate:.3g} ({interval.low:.3g} to {high})"
