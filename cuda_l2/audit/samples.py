"""Where a process spends its time, seen from outside: program counters of its running threads, by the file they are in.

Nothing is asked of the process and nothing is put into it, so code in it cannot leave anything out; that it is traced
it could find out. Needs ptrace, which some containers refuse, and knows two processors.
"""

import collections
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator

from cuda_l2 import process_tree
from cuda_l2.audit.tracing import (
    CONTINUE,
    COUNTER_OFFSET,
    DETACH,
    INTERRUPT,
    SEIZE,
    WALL,
    executable,
    ptrace,
    registers,
    state,
    threads,
    word,
)

PAUSE_S = 0.0005

Samples = collections.Counter[tuple[str, int]]
"""How many, by the path of the mapped file, or what /proc calls the mapping, empty for code made in memory; and by the
place in that file."""


class Sampler:
    """Traces every thread of a tree of processes, those that begin meanwhile too. A context manager."""

    def __init__(self, root: int) -> None:
        self.root, self.counts = root, Samples()
        self._traced: set[int] = set()

    @property
    def able(self) -> bool:
        """Whether threads can be traced here."""
        return bool(self._traced)

    def sample(self) -> None:
        """Look once at every thread that is running."""
        for pid in process_tree.processes(self.root):
            counters = [counter for tid in self._running(pid) if (counter := self._counter(tid))]
            if counters:
                maps = list(executable(pid))
                for counter in counters:
                    found = ((name, counter - start) for low, high, start, name in maps if low <= counter < high)
                    self.counts[next(found, ("", 0))] += 1

    def until(self, done: Callable[[], bool]) -> None:
        """Sample until something is done, at random times: even ones would meet what repeats at the same places."""
        while not done():
            time.sleep(random.expovariate(1 / PAUSE_S))
            self.sample()

    def __enter__(self) -> "Sampler":
        for pid in process_tree.processes(self.root):
            for tid in threads(pid):
                self._trace(tid)
        return self

    def __exit__(self, *_: object) -> None:
        for tid in self._traced:
            if ptrace(INTERRUPT, tid):
                if _stopped(tid):
                    ptrace(DETACH, tid)
            else:  # it ended, and stays until its tracer has noticed
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(tid, WALL | os.WNOHANG)

    def _trace(self, tid: int) -> bool:
        if tid not in self._traced and COUNTER_OFFSET is not None and ptrace(SEIZE, tid):
            self._traced.add(tid)
        return tid in self._traced

    def _running(self, pid: int) -> Iterator[int]:
        for tid in threads(pid):
            if state(tid) == "R" and self._trace(tid):
                yield tid

    def _counter(self, tid: int) -> int:
        """Where a thread is; 0 where it is gone."""
        if not (ptrace(INTERRUPT, tid) and _stopped(tid)):
            return 0
        found = registers(tid)
        ptrace(CONTINUE, tid)
        return word(found, COUNTER_OFFSET or 0)


def _stopped(tid: int) -> bool:
    """Wait for a thread that was interrupted; False where it ended instead."""
    try:
        return os.WIFSTOPPED(os.waitpid(tid, WALL)[1])
    except ChildProcessError:
        return False
