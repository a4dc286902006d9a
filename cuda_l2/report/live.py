"""Progress on standard error: of a search, a long judgement, or a run over many shapes or kernels."""

import math
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.records import Gemm, Task, TimingStatus
from cuda_l2.system import steps
from cuda_l2.system.closing import Closing
from cuda_l2.system.running import RunningFile
from cuda_l2.system.text import counted, plain

if TYPE_CHECKING:
    from cuda_l2.search import Progress

TICK_S = 1.0
MOST_REASON = 200
"""Characters shown of why the last candidate was rejected."""


class Line(Closing):
    """A text that changes, and the step that runs: on a terminal anew every second, elsewhere a line every `EVERY_S`.

    There no line is printed twice in a row. A context manager. beside: the file that the run writes, for `cuda-l2
    watch`.
    """

    EVERY_S = 5.0

    def __init__(self, quiet: bool = False, clock: Clock = CLOCK, beside: Path | None = None) -> None:
        self._quiet, self._now, self._text = quiet, clock.now, ""
        self._item = ""
        """The shape or task that it is at."""
        self._running = RunningFile(beside) if beside else None
        self._started, self._last_line, self._printed = self._now(), -math.inf, ""
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._writing, self._ended = threading.RLock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            if self._console.is_terminal:
                self._live.start()
            self._ticker.start()
        return self

    def show(self, text: str, always: bool = False) -> None:
        """always: also where the last line is younger than `EVERY_S`."""
        with self._writing:
            self._text = text
            self._write(always=always)

    def text(self) -> str:
        """What is shown now, without the step that runs."""
        return self._text

    def left_s(self) -> float | None:
        """Time left, where that is known."""
        return None

    def tick(self) -> None:
        """Show the time that went by; called every second."""
        with self._writing:
            if self.text():
                self._write(brief=True)

    def close(self) -> None:
        self._ended.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._live.stop()
        if self._running:
            self._running.close()

    def _write(self, *, always: bool = False, brief: bool = False) -> None:
        """brief: where lines follow one another, only the first, which says what runs."""
        now, running = self._now(), steps.current()
        head, *rest = self.text().split("\n")
        head = f"{head}: {running.at(now, self.left_s())}" if running else head
        if self._running:
            self._running.write(head, self._item, self.left_s())
        if self._live.is_started:
            self._live.update(Text("\n".join([head, *rest])), refresh=True)
        elif not self._quiet and (always or now - self._last_line >= self.EVERY_S):
            line = "; ".join([head, *(() if brief else map(str.strip, rest))])
            if line != self._printed:
                self._console.print(line, soft_wrap=True)
            self._last_line, self._printed = now, line

    def _tick_on(self) -> None:
        while not self._ended.wait(TICK_S):
            self.tick()


def bar(words: str) -> Bar:
    """A bar on standard error, gone at its end, with words and the numbers of items done and in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(words))
    return Bar(*columns, transient=True, console=Console(stderr=True))


class Stages(Line):
    """Shows which stage runs. most_s: how long all may take, where that is known; spent_s of it are gone already."""

    def __init__(
        self,
        task: Task | str,
        quiet: bool = False,
        most_s: float = math.inf,
        spent_s: float = 0.0,
        clock: Clock = CLOCK,
        beside: Path | None = None,
    ) -> None:
        super().__init__(quiet, clock, beside)
        self._item, self._most_s, self._stage = str(task), most_s, ""
        self._last_line, self._started = self._started, self._started - spent_s

    def stage(self, stage: str, always: bool = True) -> None:
        """always: also where it may end before a line is due."""
        with self._writing:
            self._stage = stage
            self._write(always=always, brief=True)

    def left_s(self) -> float | None:
        return self._most_s - (self._now() - self._started) if math.isfinite(self._most_s) else None

    def text(self) -> str:
        took_s, most = self._now() - self._started, ""
        if math.isfinite(self._most_s):
            most = ", longer than the planned" if round(took_s) > round(self._most_s) else " of at most"
            most += f" {self._most_s:.0f} s"
        return f"{self._item}: {took_s:.0f} s{most}, {self._stage}"


class LiveProgress(Stages):
    """Shows a search's progress too."""

    _found = ""

    def progress(self, progress: "Progress") -> None:
        self._found = describe(progress)
        self.show("")

    def text(self) -> str:
        return super().text() + self._found


class GridProgress(Line):
    """Shows items done and time left."""

    EVERY_S = 10.0

    def __init__(self, total: int, done: int, noun: str = "shape", beside: Path | None = None) -> None:
        super().__init__(beside=beside)
        self._total, self._before, self._done, self._noun = total, done, done, noun

    def stage(self, item: Gemm | str, stage: str) -> None:
        self._tell(item, stage)

    def done(self, item: Gemm | str) -> None:
        self._done += 1
        self._tell(item, "done")

    def left_s(self) -> float | None:
        """An estimate from this run's items; their order is random."""
        each_s = self._each_s()
        return each_s * (self._total - self._done) if each_s else None

    def _tell(self, item: Gemm | str, what: str) -> None:
        self._item, each_s, left_s = str(item), self._each_s(), self.left_s()
        left = f", {each_s:.1f} s each, {duration(left_s)} left" if left_s else ""
        said = f"{self._done} of {counted(self._total, self._noun)}{left}; {item}: {what}"
        self.show(said, always=self._done == self._total)

    def _each_s(self) -> float:
        measured = self._done - self._before
        return (self._now() - self._started) / measured if measured else 0.0


def duration(seconds: float) -> str:
    """As in 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe(progress: "Progress") -> str:
    """What a search found so far, in lines that follow the first."""
    lines = [
        "",
        f"{counted(progress.proposed, 'kernel')} tried, {correct(progress)}"
        + (f", {progress.known} of them known from an earlier search" if progress.known else "")
        + (f", {progress.repeated} proposed again" if progress.repeated else ""),
    ]
    if progress.rejected:
        lines.append(f"rejected: {rejected(progress)}")
    if progress.best:
        lines.append(f"best so far {progress.best.speedup:.2f}x as fast as the strongest library")
    if progress.summary:
        lines.append(f"policy: {progress.summary}")
    last = progress.last
    if last and last.reason:
        what = "correct, not timed" if last.status == TimingStatus.BUSY else "last rejected"
        lines.append(f"{what}: {textwrap.shorten(plain(last.reason), MOST_REASON, placeholder=' ...')}")
    return "\n  ".join(lines)


def correct(progress: "Progress") -> str:
    """How many kernels were correct, and how many of them timed."""
    if progress.timed == progress.correct:
        return f"{progress.correct} correct and timed"
    return f"{progress.correct} correct, {progress.timed or 'none'} of them timed"


REJECTED = {
    "refused": "against the rules of the launch contract",
    "failed": "that did not compile",
    "timed-out": "over a time limit",
    "incorrect": "with wrong results",
    "imprecise": "that sum in too little precision",
    "unhygienic": "that wrote where they must not or kept state",
    "forbidden": "that tried a forbidden system call",
    "wrong-output": "with a wrong result while timed",
    "unstable": "whose speedup did not repeat",
    "suspect": "that the checker calls a cheat",
}
"""A rejected kernel's status in words."""


def rejected(progress: "Progress") -> str:
    """How many kernels were rejected, by what was wrong; none where none was."""
    counts = sorted(progress.rejected.items())
    return ", ".join(f"{count} {REJECTED.get(status, status)}" for status, count in counts) or "none"
