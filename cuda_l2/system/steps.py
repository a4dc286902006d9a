"""The step that runs now, with its time limit: what a line of progress shows while nothing else can be said."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter


@dataclass(eq=False, slots=True)
class Step:
    """name: may change while it runs. began: by `perf_counter`. limit_s: infinite where nothing ends it."""

    name: str
    began: float
    limit_s: float = math.inf

    def at(self, now: float, left_s: float | None = None) -> str:
        """As in: compiling torch.compile's baseline, 12 s of at most 600 s.

        left_s: time left for the run, where that is known; a limit beyond it is not shown.
        """
        shown = self.limit_s < math.inf and (left_s is None or self.began + self.limit_s <= now + left_s)
        limit = f" of at most {self.limit_s:.0f} s" if shown else ""
        return f"{self.name}, {max(0.0, now - self.began):.0f} s{limit}"


_running: list[Step] = []
"""The outermost first."""


@contextmanager
def step(name: str, limit_s: float = math.inf) -> Iterator[Step]:
    """A step runs as long as the context lasts; steps within it are shown in its place."""
    entered = Step(name, perf_counter(), limit_s)
    _running.append(entered)
    try:
        yield entered
    finally:
        _running.remove(entered)


def current() -> Step | None:
    """The innermost step that runs now."""
    running = _running[-1:]  # one read: another thread shows it
    return running[0] if running else None
