"""The processes under one of ours, a sandbox's: found, stopped and weighed as a whole, whatever groups they are in."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

WATCH_INTERVAL_S = 0.05


def processes(root: int) -> list[int]:
    """A process and all that descend from it, itself first. Orphans of a namespace descend from its first process."""
    found, unread = [], [root]
    while unread:
        pid = unread.pop()
        found.append(pid)
        for task in _listed(Path(f"/proc/{pid}/task")):
            unread += [int(child) for child in _read(task / "children").split()]
    return found


def stop(root: int) -> None:
    """Stop every process of a tree, those that are started meanwhile too: none runs on when this returns."""
    stopped: set[int] = set()
    while True:
        left = [pid for pid in processes(root) if pid not in stopped]
        if not left:
            return
        for pid in left:
            _send(pid, signal.SIGSTOP)
        stopped.update(left)


def resume(root: int) -> None:
    for pid in processes(root):
        _send(pid, signal.SIGCONT)


def wait_gone(pids: Iterable[int], timeout_s: float) -> None:
    """Wait for processes that were killed: a namespace's end a little after its first one."""
    deadline = time.monotonic() + timeout_s
    for pid in pids:
        while _state(pid) not in ("", "Z", "X") and time.monotonic() < deadline:
            time.sleep(0.001)


def cpu_seconds(root: int) -> float:
    """Processor time that a tree's processes have taken, those that ended and were waited for too."""
    ticks = 0
    for pid in processes(root):
        ticks += sum(int(field) for field in _fields(pid)[11:15])  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(root: int, most: int = 0) -> int:
    """Memory that a tree holds; pages that several processes share count once where the kernel says, else each time.

    most: below this much the cheaper sum is enough, in which shared pages count each time.
    """
    found = processes(root)
    page = os.sysconf("SC_PAGE_SIZE")
    statements = [_read(Path(f"/proc/{pid}/statm")).split() for pid in found]
    resident = sum(int(fields[1]) * page for fields in statements if fields)
    if resident <= most:
        return resident
    shares = [_proportional_bytes(pid) for pid in found]
    return resident if None in shares else sum(share for share in shares if share is not None)


class MemoryWatch:
    """Ends a tree of processes that holds more memory than it may. Looks at it until closed."""

    def __init__(self, root: int, most_bytes: int, end: Callable[[], None]) -> None:
        self.exceeded = False
        self._root, self._most, self._end = root, most_bytes, end
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._closed.wait(WATCH_INTERVAL_S):
            if memory_bytes(self._root, self._most) > self._most:
                self.exceeded = True
                self._end()
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


def _proportional_bytes(pid: int) -> int | None:
    """A process's memory with shared pages divided among those that share them; None where that is not said."""
    for line in _read(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None


def _state(pid: int) -> str:
    """One letter, as the kernel gives it; empty where there is no such process."""
    return (_fields(pid) or [""])[0]


def _fields(pid: int) -> list[str]:
    """Of its `stat`, from the state on."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []  # gone meanwhile


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
