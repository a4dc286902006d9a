"""Whether a rule over text takes linear time, in this thread's processor time, which other work does not lengthen."""

import time
from collections.abc import Callable

SHARE, MOST = 8, 24.0
"""A text is compared with its eighth: 8 times as long where the rule is linear, 64 times where it is quadratic."""
GRAIN_S = 0.05


def require_linear(rule: Callable[[str], object], text: str) -> None:
    def seconds(part: str) -> float:
        start = time.thread_time()
        rule(part)
        return time.thread_time() - start

    part, whole = (min(seconds(text[:length]) for _ in range(3)) for length in (len(text) // SHARE, len(text)))
    assert whole < MOST * part + GRAIN_S, (part, whole)
