"""The process tree of a sandbox: found, stopped and measured as a whole, across process groups."""

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

PR_SET_PDEATHSIG = 1
WATCH_INTERVAL_S = 0.02
WEIGHING_S = 0.1
STOPPED = ("T", "t", "Z", "X")
LOOK_AGAIN_S = 0.00005
BLOCK_BYTES = 1 << 16
OUT_OF_MEMORY = "its processes together took more memory than they may"
MOST_PROCESSES = 256 + 4 * (os.cpu_count() or 1)
"""Limit of processes in a watched tree: compilers for every core run at once, each with programs of its own."""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the thread that started this process ends, also while it is stopped or computes.

    One that has ended before is not noticed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def processes(root: int) -> list[int]:
    """A process and all that descend from it, itself first. Orphans of a namespace descend from its first process."""
    return list(_walked(root))


def stop(root: int) -> list[int]:
    """Stop every process of a tree, those that are started meanwhile too: none runs on when this returns them.

    Each is stopped when it is found, since reading the whole tree takes longer than a small task's work.
    """
    stopped: dict[int, None] = {}
    while True:
        before = len(stopped)
        for pid in _walked(root):
            if pid not in stopped:
                _send(pid, signal.SIGSTOP)
                stopped[pid] = None
        if len(stopped) == before:
            return list(stopped)


def resume(stopped: Iterable[int]) -> None:
    """Continue the processes that `stop` returned, the tree's first process last."""
    for pid in reversed(list(stopped)):
        _send(pid, signal.SIGCONT)


_ended_ticks = 0
"""Processor time of what `kill` ended below the processes that this one started, which nobody waits for."""


def kill(root: int) -> None:
    """End a process and all that descend from it, also those in groups of their own."""
    global _ended_ticks  # noqa: PLW0603 - as the system counts for a process what it waited for
    stopped = stop(root)
    _ended_ticks += sum(_ticks(pid) for pid in stopped if pid != root)
    for pid in stopped:
        _send(pid, signal.SIGKILL)


def _walked(root: int) -> Iterator[int]:
    """A tree's processes, each before its children are looked for."""
    unread = [root]
    while unread:
        pid = unread.pop()
        yield pid
        with contextlib.suppress(OSError):  # gone meanwhile
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib takes three times as long
                unread += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())


def all_stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped or gone; a signal is taken when the thread has a core. OSError where
    there is no such process.
    """
    threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - pathlib takes three times as long
    return all((_fields(f"{pid}/task/{thread}") or ["X"])[0] in STOPPED for thread in threads)


def wait_stopped(pid: int, timeout_s: float) -> bool:
    """Wait for threads to take the signal that stops them; whether they did. OSError as `all_stopped`."""
    deadline = time.monotonic() + timeout_s
    while not all_stopped(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


def wait_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Wait for processes that were killed: a namespace's end a little after its first one."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while _state(pid) not in ("", "Z", "X") and time.monotonic() < deadline:
            time.sleep(0.001)


def cpu_seconds(root: int) -> float:
    """Processor time that a tree's processes have taken, those that ended and were waited for too."""
    return sum(map(_ticks, processes(root))) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """The same of this process and all under it, those that `kill` ended too."""
    seconds = cpu_seconds(os.getpid()) + _ended_ticks / os.sysconf("SC_CLK_TCK")
    return round(seconds, 6)  # whole ticks: what has ended and what has not add up to the same, whichever comes first


def _ticks(pid: int) -> int:
    return sum(int(field) for field in _fields(pid)[11:15])  # utime, stime, cutime, cstime


def seconds_of_others() -> dict[int, float]:
    """Processor time that each process has taken which does not descend from this one, by its number."""
    ours = set(processes(os.getpid()))
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208
    fields = {pid: _fields(pid) for pid in pids if pid not in ours}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return {pid: (int(found[11]) + int(found[12])) * tick_s for pid, found in fields.items() if found}


def name_of(pid: int) -> str:
    """A process's name, printable; empty where there is none."""
    name = _read(f"/proc/{pid}/comm").decode(errors="replace").strip()
    return "".join(letter for letter in name if letter.isprintable())


def queued_s(root: int) -> float:
    """Seconds that the threads of a tree's processes have waited for a core; 0 where the system does not say."""
    return sum(queues_s(root).values())


def queues_s(root: int) -> dict[int, float]:
    """The same for each of the threads."""
    found = {}
    for pid in processes(root):
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that ended, a kernel without schedstat
            for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - pathlib takes three times as long
                with open(f"/proc/{pid}/task/{thread}/schedstat") as file:  # noqa: PTH123
                    found[int(thread)] = int(file.read().split()[1]) / 1e9
    return found


def give_way(root: int) -> None:
    """Let the first threads of a tree's processes wait, where they are woken, until what runs on their core sleeps.

    Else one may take the core of the thread that woke it and was about to sleep, which then waits for a core.
    """
    for pid in processes(root):
        with contextlib.suppress(OSError):  # gone, or not ours to change
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def own_queued_s() -> float:
    """Seconds that the calling thread has waited for a core; 0 where the system does not say."""
    fields = _read("/proc/thread-self/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0


class Watch:
    """Ends a tree of processes that holds more memory than it may, or grows without end. Watches it until closed.

    exceeded: what it had too much of, in a line, or nothing.
    """

    def __init__(self, root: int, most_bytes: int, end: Callable[[], None]) -> None:
        self.exceeded = ""
        self._root, self._most, self._end = root, most_bytes, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        with contextlib.suppress(OSError):  # where processes multiply, others wait for seconds
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        while not self._closed.wait(WATCH_INTERVAL_S):
            found = self._found()
            if len(found) > MOST_PROCESSES:
                self.exceeded = f"started more than {MOST_PROCESSES} processes"
            elif self._weighs_too_much(found):
                self.exceeded = OUT_OF_MEMORY
            if self.exceeded:
                self._end()
                return

    def _weighs_too_much(self, found: Sequence[int]) -> bool:
        """Not to be said where the tree grows while that is found out: it takes long, and their number comes first."""
        if _resident_bytes(found) <= self._most:
            return False
        look_again = time.monotonic() + WEIGHING_S
        total = 0
        for pid in found:
            total += _proportional_bytes(pid)
            if time.monotonic() > look_again:
                if len(self._found()) > len(found):
                    return False
                look_again = time.monotonic() + WEIGHING_S
        return total > self._most

    def _found(self) -> list[int]:
        """All, or one more than there may be."""
        return list(itertools.islice(_walked(self._root), MOST_PROCESSES + 1))

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def _resident_bytes(found: Iterable[int]) -> int:
    """Pages that several share count each time."""
    statements = [_read(f"/proc/{pid}/statm").split() for pid in found]
    return sum(int(fields[1]) for fields in statements if fields) * os.sysconf("SC_PAGE_SIZE")


def _proportional_bytes(pid: int) -> int:
    """A process's memory with shared pages divided among those that share them, where the kernel says."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return _resident_bytes([pid])  # nothing of one that is gone


def began(pid: int) -> str:
    """When a process began, in the kernel's ticks since its boot; empty where there is no such process."""
    return (_fields(pid) or [""] * 20)[19]


def is_gone(pid: int, began_at: str) -> bool:
    """Whether a process that began then has ended; its number may be another one's by now.

    False where /proc does not show when the process of that number began: it may be hidden, or not be readable now.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's
        pass
    now = began(pid)
    return bool(now and began_at and now != began_at) or _state(pid) in ("Z", "X")


def _state(pid: int) -> str:
    """One letter, as the kernel gives it; empty where there is no such process."""
    return (_fields(pid) or [""])[0]


def _fields(pid: int | str) -> list[str]:
    """Fields of a process's or a thread's `stat`, from the state on."""
    return _read(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")[2].split()


def _read(path: str) -> bytes:
    """Text of a file of /proc by few system calls: processes that multiply race with this. Empty where it is gone."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(file, BLOCK_BYTES), b""))
    except OSError:
        return b""
    finally:
        os.close(file)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
