"""Progress of a search or a long judgement."""

import time
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cuda_l2.records import Task, TimingStatus
from cuda_l2.search import Progress

LINE_EVERY_S = 5.0
"""Seconds between lines without a terminal."""


class Stages:
    """Shows which stage runs: live on a terminal, as lines elsewhere, on standard error. A context manager."""

    def __init__(self, task: Task | str, quiet: bool = False) -> None:
        self._task, self._quiet = task, quiet
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True)
        self._on_terminal = self._console.is_terminal and not quiet
        self._started = time.monotonic()

    def stage(self, stage: str) -> None:
        text = f"{self._task}: {time.monotonic() - self._started:.0f} s, {stage} ..."
        if self._on_terminal:
            self._live.update(Text(text))
        elif not self._quiet:
            self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.stop()


class LiveProgress(Stages):
    """Shows a search's progress too."""

    def __init__(self, task: Task, budget_s: float, quiet: bool = False) -> None:
        super().__init__(task, quiet)
        self._budget_s = budget_s
        self._last_line = 0.0

    def progress(self, progress: Progress) -> None:
        text = describe(self._task, progress, self._budget_s)
        if self._on_terminal:
            self._live.update(Text(text))
        elif not self._quiet and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self._console.print(text.replace("\n  ", "; "), soft_wrap=True)


def describe(task: Task | str, progress: Progress, budget_s: float) -> str:
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
