"""Where a process spends its time, seen from outside: program counters of its running threads, by the file they are in.

Nothing is asked of the process and nothing is put into it, so code in it cannot leave anything out; that it is traced
it could find out. Needs ptrace, which some containers refuse, and knows two processors.
"""

import collections
import contextlib
import ctypes
import os
import platform
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cuda_l2 import process_tree

SEIZE, INTERRUPT, CONTINUE, DETACH, GETREGSET = 0x4206, 0x4207, 7, 17, 0x4204
NT_PRSTATUS = 1
COUNTER_OFFSET = {"x86_64": 128, "aarch64": 256}
"""Of the program counter among a thread's registers, bytes."""
REGISTER_BYTES = 512
PAUSE_S = 0.0005
WALL = 0x40000000  # waitpid for threads of others

Samples = collections.Counter[tuple[str, int]]
"""How many, by the path of the mapped file, or what /proc calls the mapping, empty for code made in memory; and by the
place in that file."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Registers(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class Sampler:
    """Traces every thread of a tree of processes, those that begin meanwhile too. A context manager."""

    def __init__(self, root: int) -> None:
        self.root, self.counts = root, Samples()
        self._traced: set[int] = set()
        self._offset = COUNTER_OFFSET.get(platform.machine())

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
            for tid in _threads(pid):
                self._trace(tid)
        return self

    def __exit__(self, *_: object) -> None:
        for tid in self._traced:
            if _ptrace(INTERRUPT, tid):
                if _stopped(tid):
                    _ptrace(DETACH, tid)
            else:  # it ended, and stays until its tracer has noticed
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(tid, WALL | os.WNOHANG)

    def _trace(self, tid: int) -> bool:
        if tid not in self._traced and self._offset is not None and _ptrace(SEIZE, tid):
            self._traced.add(tid)
        return tid in self._traced

    def _running(self, pid: int) -> Iterator[int]:
        for tid in _threads(pid):
            try:
                state = Path(f"/proc/{pid}/task/{tid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if state == "R" and self._trace(tid):
                yield tid

    def _counter(self, tid: int) -> int:
        """Where a thread is; 0 where it is gone."""
        if not (_ptrace(INTERRUPT, tid) and _stopped(tid)):
            return 0
        buffer = ctypes.create_string_buffer(REGISTER_BYTES)
        registers = _Registers(ctypes.addressof(buffer), REGISTER_BYTES)
        read = _libc.ptrace(GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(registers)) == 0
        _ptrace(CONTINUE, tid)
        offset = self._offset or 0
        return int.from_bytes(buffer.raw[offset : offset + 8], "little") if read else 0


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


def executable(pid: int) -> Iterator[tuple[int, int, int, str]]:
    """Of mappings with code: their first address, the one past the last, where the file's start would be, its path."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if "x" in fields[1]:
            low, _, high = fields[0].partition("-")
            start = int(low, 16) - int(fields[2], 16)
            yield int(low, 16), int(high, 16), start, fields[5] if len(fields) > 5 else ""


def _ptrace(request: int, tid: int) -> bool:
    return bool(_libc.ptrace(request, tid, None, None) == 0)


def _stopped(tid: int) -> bool:
    """Wait for a thread that was interrupted; False where it ended instead."""
    try:
        return os.WIFSTOPPED(os.waitpid(tid, WALL)[1])
    except ChildProcessError:
        return False
