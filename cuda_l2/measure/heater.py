"""Keeps the chip at work while results are looked at, so that heavy launches are timed as sustained work runs.

Where power holds the clock it is power averaged over many milliseconds that does: with pauses of a tenth of the time
between samples, launches of milliseconds were timed 10 % faster than without (one H200; docs/log.md).
"""

import math

import torch

from cuda_l2.machine.cuda.driver import Graph

SIDE = 2048
"""Side of the square product that heats: draws what the chip may, and lets others' kernels in between."""
LAUNCHES = 4
LONGEST_S = 0.1
SHRINK, GROW, LEAST_SHARE = 0.8, 1.1, 0.2
"""In balance work is left at three pauses in ten."""


class Heater:
    """Products of its own on a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        a, b, c = (torch.randn(SIDE, SIDE, dtype=torch.float16, device="cuda") for _ in range(3))
        torch.cuda.synchronize()

        def enqueue(stream: int) -> None:
            del stream  # torch's current one
            for _ in range(LAUNCHES):
                torch.mm(a, b, out=c)

        with torch.cuda.stream(self._stream):
            torch.mm(a, b, out=c)  # what the library sets up on first use is not captured
            self._stream.synchronize()
            self._graph = Graph(self._stream.cuda_stream, enqueue)
        self._operands = a, b, c
        self._once_s = self._graph.time()
        self._share = 1.0
        """Share of a pause that work is enqueued for: kernels that look at results take their part of it."""

    def run(self, pause_s: float) -> None:
        """Enqueue work for a pause like this one, and return at once; `torch.cuda.synchronize` waits for it."""
        for _ in range(math.ceil(self._share * min(pause_s, LONGEST_S) / self._once_s)):
            self._graph.replay()

    def pause_ended(self) -> None:
        """The host would go on: if work is left, it waits for it, and the next pause gets less."""
        if self._stream.query():
            self._share = min(1.0, self._share * GROW)
        else:
            self._share = max(LEAST_SHARE, self._share * SHRINK)
