"""One look at the files, at most once a second, for the page's server or a terminal, and the sections it shows."""

import contextlib
import difflib
import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.gpu_state import GpuSample, GpuState
from cuda_l2.report.live import duration
from cuda_l2.report.page import plots
from cuda_l2.report.page.parts import Code, Figure, Part, Row, Section, Text, number, percent, table
from cuda_l2.report.watch.followed import LAST, Archived, Followed, Searched, Tabled, Trained, Watched
from cuda_l2.runs.results import MEASURED
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.running import Running, running
from cuda_l2.system.text import counted

SHOWN = 8
"""Searches in the table, the newest first."""
CURVE = 1000
"""Newest candidates, groups or steps in a figure."""
DIFF_LINES = 400
WHY_CHARACTERS = 160
"""A compiler's message has pages."""
SMOOTHED = 8

Draw = Callable[[str, object, Callable[[], str]], str]
"""An SVG under a key; made anew at most as often as it may be, where the second argument changed. Empty: no figures."""


def sections(
    path: Path, files: Sequence[Followed], runs: Sequence[Running], gpus: Sequence[GpuSample], now: float, draw: Draw
) -> list[Section]:
    """All sections. now: seconds since the epoch."""
    found = [Section("now", "Now", [*_now(path, files, runs, now), *_gpus(gpus)])]
    for each in files:
        if isinstance(each, Archived):
            found += _searches(each, now, draw)
        elif isinstance(each, Tabled):
            found.append(_table(each, draw))
        elif isinstance(each, Trained):
            found.append(_training(each, draw))
    return found


def _now(path: Path, files: Sequence[Followed], runs: Sequence[Running], now: float) -> list[Part]:
    said = []
    for run in runs:
        left_s = 0.0 if run.left_s is None else run.left_s - (now - run.at)
        left = f" At most {duration(left_s)} left." if left_s > 0 else ""
        ago = duration(max(0.0, now - run.at))
        said.append(
            f"{run.said} (process {run.pid}).{left}"
            if run.alive
            else f"Killed, or its machine stopped: process {run.pid} said {ago} ago: {run.said}. The files hold what it"
            " stored before; the same command goes on from there."
        )
    if not files:
        said.append(f"Waiting for {path}: no search, table or training has written it yet.")
    elif not runs:
        said.append("No run says that it is writing these files: it has ended, or was called from Python.")
    said += [each.note for each in files if each.note]
    return [Text(each) for each in said]


def _gpus(samples: Sequence[GpuSample]) -> list[Part]:
    rows: list[Row] = [
        (str(at), each.sm_mhz, each.memory_mhz, number(each.power_w, 0), each.temperature_c,
         ", ".join(each.limited_by) or "nothing")
        for at, each in enumerate(samples)
    ]  # fmt: skip
    head = ("GPU", "SM, MHz", "memory, MHz", "power, W", "temperature, C", "clock limited by")
    return [table("gpus", "GPUs", "As the driver says now.", head, rows)] if rows else []


def _searches(archive: Archived, now: float, draw: Draw) -> list[Section]:
    newest = list(reversed(archive.searches.values()))
    rows: list[Row] = [
        (each.task, number(each.best or None), len(each.rewards), len(each.rewards) - each.rejected.total(),
         each.rejected.total(), number(each.a_second(now), 2),
         ", ".join(f"{name} {value:.3f}" for name, value in each.reports.items()) or "-", _device(each.machine))
        for each in newest[:SHOWN]
    ]  # fmt: skip
    head = ("task", "best speedup", "tried", "correct", "rejected", "tried a second", "reported", "machine")
    more = f" {len(newest) - SHOWN} earlier tasks are not shown." if len(newest) > SHOWN else ""
    caption = (
        f"Trials of {archive.path.name}, all searches of a task together; tried a second: in the last minute.{more}"
    )
    if not newest:
        nothing: list[Part] = [Text(f"{archive.path.name} holds no trials yet.")]
        return [] if archive.note else [Section("searches", "Searches", nothing)]
    current = newest[0]
    return [
        Section("searches", "Searches, the newest first", [table("searches-table", "Tasks", caption, head, rows)]),
        Section("current", f"Now searched, or last: {current.task}", _current(current, draw)),
        *([Section("winner", "Its best kernel", _winner(current, archive.sources))] if archive.sources else []),
    ]


def _device(machine: str) -> str:
    """The kind and the name of a machine's identity."""
    return ":".join(machine.split(":")[:2])


def _current(search: Searched, draw: Draw) -> list[Part]:
    tried = search.rewards[-CURVE:]
    first = len(search.rewards) - len(tried) + 1
    title = f"Best speedup so far: {search.task}"
    svg = tried and draw(
        *("curve", (search.task, len(search.rewards))), lambda: plots.search("curve", title, tried, first)
    )
    parts: list[Part] = [Figure(title, "Over the strongest baseline, as the search timed it.", svg)] if svg else []
    rows: list[Row] = [
        (str(at), number(speedup or None), f"{what}: {_brief(why)}" if why else what, number(reward, 4))
        for at, speedup, reward, what, why in reversed(search.newest)
    ]
    head = ("trial", "speedup", "what became of it", "reward")
    if search.rejected:
        reasons: list[Row] = [(why, count) for why, count in search.rejected.most_common()]
        caption = "All searches of the task together."
        parts.append(table("rejected", "Rejected candidates by reason", caption, ("reason", "candidates"), reasons))
    return [*parts, table("newest", "Newest candidates", "Trials by their number in the archive.", head, rows)]


def _brief(text: str) -> str:
    """A reason in one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= WHY_CHARACTERS else f"{line[:WHY_CHARACTERS]}..."


def _winner(search: Searched, sources: Sequence[str]) -> list[Part]:
    """Its source, and how it differs from the best one before it."""
    parts: list[Part] = [Code(f"Source of {search.winner}", sources[-1])]
    if len(sources) > 1:
        text = _difference(*sources, search.beaten, f"{search.winner}, {search.best:.3f}x")
        parts.insert(0, Code(f"{search.winner} against the best before it, {search.beaten}", text, diff=True))
    return parts


@functools.lru_cache(maxsize=1)
def _difference(before: str, after: str, first: str, second: str) -> str:
    """A unified difference, cut where it is long; kept, for it is asked for every second."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), first, second, lineterm=""))
    cut = [f"... {counted(len(lines) - DIFF_LINES, 'line')} more"] if len(lines) > DIFF_LINES else []
    return "\n".join([*lines[:DIFF_LINES], *cut])


def _table(results: Tabled, draw: Draw) -> Section:
    rows, parts = list(results.rows.values()), list[Part]()
    shapes = len({row.task for row in rows})
    damaged = f" {counted(results.damaged, 'damaged line')} left out." if results.damaged else ""
    of = f" of {results.total}" if results.total else ""
    parts.append(Text(f"{shapes}{of} shapes have results in {results.path.name}.{damaged}"))
    by_protocol: list[Row] = []
    for protocol in dict.fromkeys(row.protocol for row in rows):
        of_it = [row for row in rows if row.protocol == protocol]
        ratios = [row.speedup for row in of_it if row.speedup]
        mean = statistics.fmean(ratios) - 1 if ratios else float("nan")
        wins = sum(ratio > 1 for ratio in ratios) / len(ratios) if ratios else float("nan")
        others = [f"{row.task}: {row.status}" for row in of_it if row.status != MEASURED]
        by_protocol.append(
            (protocol, len(of_it), percent(mean, sign=True), percent(wins), number(min(ratios, default=None)),
             ", ".join(others[-3:]) + (f" and {len(others) - 3} more" if len(others) > 3 else "") or "none")
        )  # fmt: skip
    head = ("protocol", "shapes", "mean speedup - 1", "estimates above 1", "lowest", "without figures")
    parts.append(table("protocols", "So far", "Over the strongest baseline of each row.", head, by_protocol))
    speedups = [row.speedup or 0.0 for row in rows][-CURVE:]
    title, lines = "Speedups in the order measured", [("speedup, 0 without figures", speedups)]
    first = len(rows) - len(speedups) + 1
    svg = speedups and draw(
        "table", len(rows), lambda: plots.curves("table", title, "row", "speedup", lines, first, joined=False)
    )
    parts += [Figure(title, f"Rows of {results.path.name}.", svg)] if svg else []
    newest: list[Row] = [
        (row.task, row.protocol, row.status, number(row.us), number(row.speedup), row.reference or "-")
        for row in reversed(rows[-LAST:])
    ]
    columns = ("shape", "protocol", "status", "us", "speedup", "over")
    parts.append(table("rows-newest", "Newest rows", f"Lines of {results.path.name}.", columns, newest))
    return Section("table", "Table", parts)


def _training(run: Trained, draw: Draw) -> Section:
    of, left = f" of {run.steps}" if run.steps else "", run.left_s
    said = [f"Stage {run.head.get('stage', 'unknown')}: step {run.step}{of} ended."]
    said += (
        [f"About {duration(left)} left, by the steps that ended while this was watched."] if left is not None else []
    )
    said += [f"The newest tasks: {', '.join(dict.fromkeys(run.tasks))}."] if run.tasks else []
    parts: list[Part] = [Text(" ".join(said))]
    for key, name, x, values in (
        ("rewards", "mean speedup, failures as 0", "group", run.rewards),
        ("loss", "loss", "step", run.losses),
    ):
        shown = values[-CURVE:]
        if not shown:
            continue
        last = statistics.fmean(shown[-SMOOTHED:])
        lines, first = [(name, shown)], len(values) - len(shown) + 1
        svg = draw(key, len(values), lambda a=(key, name, x, name, lines, first): plots.curves(*a))  # type: ignore[misc]
        parts.append(Text(f"{name}: {last:.4g}, the mean of the last {min(SMOOTHED, len(shown))} {x}s."))
        parts += [Figure(f"{name} by {x}", f"Lines of {run.path.name}.", svg)] if svg else []
    if run.statuses:
        rows: list[Row] = [(status, count) for status, count in run.statuses.most_common()]
        parts.append(table("answers", "Answers by what became of them", "Of all groups.", ("status", "answers"), rows))
    return Section("training", "Training", parts)


EVERY_S = 1.0
DRAWN_SHARE, DRAWN_EVERY_S = 0.005, 30.0
"""A figure takes at most this share of a core, or is drawn again after this time."""


class Watcher(Closing):
    """Files of one path and the GPUs here. A context manager; threads may share it."""

    def __init__(
        self, path: Path, *, figures: bool, clock: Clock = CLOCK, today: Callable[[], float] = time.time
    ) -> None:
        """figures: whether they are drawn. today: seconds since the epoch. UserError for a file of another kind."""
        self.path, self._clock, self._today = path, clock, today
        self._watched, self._figures = Watched(path, clock.now), figures
        self._gpus, self._lost = _opened_gpus()
        self._lock, self._looked = threading.Lock(), -EVERY_S
        self._sections: list[Section] = []
        self._drawn: dict[str, tuple[object, str, float]] = {}
        """By a figure's key: what it is of, its SVG, and when it may be drawn again."""

    def look(self) -> list[Section]:
        """What there is to show; a look younger than `EVERY_S` serves."""
        with self._lock:
            if self._clock.now() - self._looked >= EVERY_S:
                self._sections = self._look()
                self._looked = self._clock.now()
            return self._sections

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.close()

    def _look(self) -> list[Section]:
        files = self._watched.poll()
        runs = []
        for path in dict.fromkeys([self.path, *(each.path for each in files)]):
            with contextlib.suppress(OSError):
                runs += running(path)
        return sections(self.path, files, runs, self._sampled(), self._today(), self._draw)

    def _sampled(self) -> list[GpuSample]:
        try:
            return [gpu.sample() for gpu in self._gpus]
        except self._lost:  # a GPU has gone
            return []

    def _draw(self, key: str, of: object, make: Callable[[], str]) -> str:
        if not self._figures:
            return ""
        before, svg, again = self._drawn.get(key, (None, "", 0.0))
        began = self._clock.now()
        if svg and (before == of or began < again):
            return svg
        svg = make()
        took = self._clock.now() - began
        self._drawn[key] = of, svg, began + min(DRAWN_EVERY_S, took / DRAWN_SHARE)
        return svg


def _opened_gpus() -> tuple[list[GpuState], type[Exception]]:
    """Every GPU that the driver names, none where there is no driver, and what NVML raises."""
    try:
        import pynvml  # noqa: PLC0415
    except ImportError:
        return [], UserError
    lost: type[Exception] = pynvml.NVMLError
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [GpuState(pynvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles], lost
    except (lost, UserError):
        return [], lost
