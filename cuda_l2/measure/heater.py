"""Keeps the chip at work while results are looked at, so that heavy launches are timed as sustained work runs.

Where power holds the clock it is power averaged over many milliseconds that does: with pauses of a tenth of the time
between samples, launches of milliseconds were timed 10 % faster than without (one H200; docs/log.md).
"""

import math

import torch

from cuda_l2.execute.cuda_driver import Graph

SIDE = 2048
"""Of the square product that heats: draws what the chip may, and lets others' kernels in between."""
LAUNCHES = 16
LONGEST_S = 0.1


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
        self._once_s = self._graph.time()[0]

    def run(self, seconds: float) -> None:
        """Enqueue about so much work, and return at once; `torch.cuda.synchronize` waits for it."""
        for _ in range(math.ceil(min(seconds, LONGEST_S) / self._once_s)):
            self._graph.replay()
