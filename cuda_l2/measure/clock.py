"""The host's clock, as measurements read it and wait by it. Tests give another."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since some moment, and a way to let some pass."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


CLOCK = Clock()
