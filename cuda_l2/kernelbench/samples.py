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

from cuda_l2.kernelbench.tracing import (
    COUNTER_OFFSET,
    DETACH,
    ENDED,
    INTERRUPT,
    WALL,
    executable,
    let_go_on,
    ptrace,
    registers,
    seize,
    state,
    threads,
    word,
)
from cuda_l2.system import process_tree

PAUSE_S = 0.0005
STOP_S = 1.0
"""What a thread may take to stop; one in the kernel may take as long as it likes."""

Samples = collections.Counter[tuple[str, int]]
"""How many, by the path of the mapped file, or what /proc calls the mapping, empty for code made in memory; and by the
place in that file."""


class Sampler:
    """Traces every thread of a tree of processes, those that begin meanwhile too. A context manager.

    untraced: processes with threads that could not be.
    """

    def __init__(self, root: int) -> None:
        self.root, self.counts = root, Samples()
        self.untraced: set[int] = set()
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

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        """Sample until something is done, at random times: even ones would meet what repeats at the same places.

        No longer than so many seconds.
        """
        end = time.perf_counter() + seconds
        while not done() and time.perf_counter() < end:
            time.sleep(random.expovariate(1 / PAUSE_S))
            self.sample()

    def __enter__(self) -> "Sampler":
        for pid in process_tree.processes(self.root):
            for tid in threads(pid):
                self._trace(pid, tid)
        return self

    def __exit__(self, *_: object) -> None:
        for tid in self._traced:
            ptrace(INTERRUPT, tid)
        end = time.perf_counter() + STOP_S
        for tid in self._traced:
            if status := self._stopped(tid, end):
                ptrace(DETACH, tid, 0 if status >> 8 else status)

    def _trace(self, pid: int, tid: int) -> bool:
        if tid not in self._traced and COUNTER_OFFSET is not None:
            if seize(tid):
                self._traced.add(tid)
            elif state(tid) not in ENDED:
                self.untraced.add(pid)
        return tid in self._traced

    def _running(self, pid: int) -> Iterator[int]:
        for tid in threads(pid):
            now = state(tid)
            if now == "R" and self._trace(pid, tid):
                yield tid
            elif now in ("t", "Z") and tid in self._traced and (status := self._see(tid)):
                let_go_on(tid, status)  # a signal came, which waits for us

    def _counter(self, tid: int) -> int:
        """Where a thread is; 0 where it is gone."""
        ptrace(INTERRUPT, tid)
        status = self._stopped(tid, time.perf_counter() + STOP_S)
        if not status:
            return 0
        found = registers(tid)
        let_go_on(tid, status)
        return word(found, COUNTER_OFFSET or 0)

    def _see(self, tid: int) -> int:
        """Why a thread is stopped; 0 where it is not. Its end is noticed, so that others that wait for it see it."""
        ended = 0 if tid == self.root else os.WEXITED  # our own child's is for others to notice
        with contextlib.suppress(ChildProcessError):
            said = os.waitid(os.P_PID, tid, os.WSTOPPED | ended | os.WNOHANG | WALL)
            if said and said.si_code in (os.CLD_TRAPPED, os.CLD_STOPPED):
                return said.si_status
        return 0

    def _stopped(self, tid: int, end: float) -> int:
        """Wait for a thread that was interrupted, which may not stop while the kernel has it; 0 where it does not."""
        while not (status := self._see(tid)) and state(tid) not in ENDED and time.perf_counter() < end:
            os.sched_yield()
        return status or self._see(tid)
