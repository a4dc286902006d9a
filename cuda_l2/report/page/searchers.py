"""Searchers compared on recorded worlds: regret against the number of measurements."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cuda_l2.records import Interval
from cuda_l2.report.comparison import LEAST_SHOWN, ninetieth
from cuda_l2.report.page import plots
from cuda_l2.report.page.parts import Cell, Figure, Part, Row, Section, Text, table
from cuda_l2.report.page.records import Contest, Origin
from cuda_l2.runs.comparison import NEAR, Curve, by_searcher, counts, over_tasks
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted

COLUMNS = frozenset(("searcher", "task", "seed", "measurements", "regret"))
"""Columns of comparison.csv of `cuda-l2 compare`."""


def contest(origin: Origin, date: str, rows: Sequence[Mapping[str, str]]) -> Contest:
    """A comparison from its rows. UserError where one is damaged, or a search has none for its first measurement."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for at, row in enumerate(rows, 1):
        try:
            place = row["searcher"], row["task"], int(row["seed"])
            count, regret = int(row["measurements"]), float(row["regret"])
            if count < 1 or not 0 <= regret < math.inf:
                raise ValueError(f"a regret of {regret} after {count} measurements")
            found.setdefault(place, {})[count] = regret
        except (TypeError, ValueError) as error:
            raise UserError(f"{origin.file}, row {at}: {error}") from None
    curves = []
    for (searcher, task, seed), regrets in found.items():
        if 1 not in regrets:
            raise UserError(f"{origin.file}: the search of {searcher} on {task} has no row for its first measurement")
        filled = [regrets.get(count, -1.0) for count in range(1, max(regrets) + 1)]
        curves.append(Curve(searcher, task, seed, tuple(itertools.accumulate(filled, lambda a, b: a if b < 0 else b))))
    return Contest(origin, date, tuple(curves), tuple(sorted({count for each in found.values() for count in each})))


def section(found: Sequence[Contest]) -> Section:
    """All comparisons, each as a figure and a table."""
    parts: list[Part] = []
    for at, each in enumerate(found):
        parts += _parts(each, f"c{at}")
    if not parts:
        parts.append(Text("No comparison of searchers (comparison.csv of `cuda-l2 compare`) is among the results."))
    return Section("searchers", "Searchers compared", parts)


def _parts(of: Contest, key: str) -> list[Part]:
    groups = by_searcher(of.curves)
    tasks, seeds = {curve.task for curve in of.curves}, {curve.seed for curve in of.curves}
    shown = [count for count in counts(of.curves) if count in of.counts]
    whole = of.counts == tuple(range(1, of.counts[-1] + 1))  # else nobody knows when a search was near the best
    lines, rows = [], list[Row]()
    for name, curves in groups.items():
        medians = {count: _median(curves, partial(Curve.after, count=count)) for count in of.counts}
        lines.append((name, [max(LEAST_SHOWN, median.estimate) for median in medians.values()]))
        far = over_tasks(curves, partial(Curve.after, count=1), ninetieth)
        near = _median(curves, lambda curve: curve.arrived).estimate
        arrived = Cell("not reached") if near == math.inf else Cell(f"{near:.3g}", near)
        later = [_share(medians[count]) for count in shown[1:]]
        rows.append((name, len(curves), _share(medians[1]), _share(far), *later, *([arrived] if whole else [])))
    title = f"Median regret by number of measurements: {of.origin.file}"
    caption = (
        "Regret: the time of the best schedule so far over the best recorded one, less 1; median over"
        f" {counted(len(tasks), 'task')}, mean over {counted(len(seeds), 'seed')}. Protocol search, replayed from a"
        f" recorded world; {of.origin.device}; {of.date}; {of.origin.command}; rows of {of.origin.file}."
    )
    head = (
        *("searcher", "searches", "first guess", "first guess, 90th percentile"),
        *(f"after {count}" for count in shown[1:]),
        *([f"measurements to within {NEAR:.0%}"] if whole else []),
    )
    svg = plots.regrets(f"{key}regret", title, of.counts, lines)
    return [
        Figure(title, f"{caption} Regret below {LEAST_SHOWN:.1%} is drawn at it.", svg),
        table(f"{key}-searchers", title, f"95 % intervals over seeds. {caption}", head, rows),
    ]


def _median(curves: Sequence[Curve], value: Callable[[Curve], float]) -> Interval:
    return over_tasks(curves, value, statistics.median)


def _share(regret: Interval) -> Cell:
    bounds = "" if regret.low == regret.high else f" [{regret.low:.1%}, {regret.high:.1%}]"
    return Cell(f"{regret.estimate:.1%}{bounds}", regret.estimate)
