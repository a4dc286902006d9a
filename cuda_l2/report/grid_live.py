"""Progress of a run over many shapes or kernels: items done and time left."""

import math
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cuda_l2.records import Gemm
from cuda_l2.system.text import counted

LINE_EVERY_S = 10.0
"""Seconds between lines without a terminal; the first comes at once."""


class GridProgress:
    """One line on standard error: live on a terminal, every few seconds elsewhere. A context manager."""

    def __init__(self, total: int, done: int, noun: str = "shape") -> None:
        self._total, self._before, self._done, self._noun = total, done, done, noun
        self._start, self._last_line = time.monotonic(), -math.inf
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True)

    def stage(self, item: Gemm | str, stage: str) -> None:
        self._show(f"{item}: {stage}", False)

    def done(self, item: Gemm | str) -> None:
        self._done += 1
        self._show(f"{item}: done", self._done == self._total)

    def __enter__(self) -> "GridProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _show(self, what: str, always: bool) -> None:
        now = time.monotonic()
        text = f"{self._done} of {counted(self._total, self._noun)}{self._left(now - self._start)}; {what}"
        if self._console.is_terminal:
            self._live.update(Text(text))
        elif always or now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            self._console.print(text, soft_wrap=True)

    def _left(self, elapsed_s: float) -> str:
        """An estimate from this run's items; their order is random."""
        measured = self._done - self._before
        if not measured or measured + self._before == self._total:
            return ""
        each_s = elapsed_s / measured
        return f", {each_s:.1f} s each, {duration(each_s * (self._total - self._done))} left"


def duration(seconds: float) -> str:
    """As in 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
