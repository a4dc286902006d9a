"""Progress on standard error: of a search, a long judgement, or a run over many shapes or kernels."""

import math
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.text import Text

from cuda_l2.records import Gemm, Task, TimingStatus
from cuda_l2.system.closing import Closing
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.search import Progress


class Line(Closing):
    """A text that changes: live on a terminal, lines elsewhere, one every `EVERY_S` seconds. A context manager."""

    EVERY_S = 5.0

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._started, self._last_line = quiet, time.monotonic(), -math.inf
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        return self

    def show(self, text: str, always: bool = False) -> None:
        """always: also where the last line is younger than `EVERY_S`; the next line does not wait for this one."""
        if self._live.is_started:
            self._live.update(Text(text))
        elif not self._quiet and (always or time.monotonic() - self._last_line >= self.EVERY_S):
            self._last_line = self._last_line if always else time.monotonic()
            self._console.print(text.replace("\n  ", "; "), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def bar(words: str) -> Bar:
    """A bar on standard error, gone at its end, with words and the numbers of items done and in all."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(words))
    return Bar(*columns, transient=True, console=Console(stderr=True))


class Stages(Line):
    """Shows which stage runs."""

    def __init__(self, task: Task | str, quiet: bool = False) -> None:
        super().__init__(quiet)
        self._task = task

    def stage(self, stage: str) -> None:
        self.show(f"{self._task}: {time.monotonic() - self._started:.0f} s, {stage} ...", always=True)


class LiveProgress(Stages):
    """Shows a search's progress too."""

    def __init__(self, task: Task, budget_s: float, quiet: bool = False) -> None:
        super().__init__(task, quiet)
        self._budget_s = budget_s

    def progress(self, progress: "Progress") -> None:
        self.show(describe(self._task, progress, self._budget_s))


class GridProgress(Line):
    """Shows items done and time left."""

    EVERY_S = 10.0

    def __init__(self, total: int, done: int, noun: str = "shape") -> None:
        super().__init__()
        self._total, self._before, self._done, self._noun = total, done, done, noun

    def stage(self, item: Gemm | str, stage: str) -> None:
        self._tell(f"{item}: {stage}")

    def done(self, item: Gemm | str) -> None:
        self._done += 1
        self._tell(f"{item}: done")

    def _tell(self, what: str) -> None:
        """An estimate comes from this run's items; their order is random."""
        measured, left = self._done - self._before, ""
        ended = self._done == self._total
        if measured and not ended:
            each_s = (time.monotonic() - self._started) / measured
            left = f", {each_s:.1f} s each, {duration(each_s * (self._total - self._done))} left"
        self.show(f"{self._done} of {counted(self._total, self._noun)}{left}; {what}", always=ended)


def duration(seconds: float) -> str:
    """As in 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe(task: Task | str, progress: "Progress", budget_s: float) -> str:
    """A search's state in a few lines."""
    rejected = ", ".join(f"{count} {status}" for status, count in sorted(progress.rejected.items())) or "none"
    lines = [
        f"{task}: {progress.seconds:.0f} s, of {budget_s:.0f} s to search",
        f"{progress.proposed} proposed, {progress.built} built, {progress.correct} correct,"
        f" {progress.known} known before, {progress.repeated} repeated",
        f"rejected: {rejected}",
    ]
    if progress.best:
        lines.append(f"best {progress.best.speedup:.3f}x, reward {progress.best.reward:.3f}")
    if progress.summary:
        lines.append(f"policy: {progress.summary}")
    last = progress.last
    if last and last.reason:
        what = "correct, not timed" if last.status == TimingStatus.BUSY else "last rejected"
        lines.append(f"{what}: {last.reason[:100]}")
    return "\n  ".join(lines)
