"""What a running command does, in a hidden file beside what it writes: watchers read it without asking the process.

The process holds the file locked. So a reader knows a run that was killed: its file is there, and nobody holds it.
"""

import contextlib
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cuda_l2.system.closing import Closing


@dataclass(frozen=True)
class Running:
    """What a run last said of itself."""

    pid: int
    said: str  # its line of progress
    task: str = ""
    left_s: float | None = None  # at `at`; None where the run does not know
    at: float = 0.0  # seconds since the epoch
    alive: bool = False


class RunningFile(Closing):
    """This process's file beside an archive or results. It never fails a run: where it cannot be written it is not."""

    def __init__(self, beside: Path) -> None:
        self._path = beside.with_name(f".{beside.name}.running-{os.getpid()}")
        self._file = -1
        with contextlib.suppress(OSError):
            for path in _files(beside):  # of runs that were killed
                if not _read(path).alive:
                    path.unlink()
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def write(self, said: str, task: str, left_s: float | None) -> None:
        if self._file >= 0:
            line = json.dumps(asdict(Running(os.getpid(), said, task, left_s, time.time()))).encode() + b"\n"
            with contextlib.suppress(OSError):
                os.pwrite(self._file, line, 0)
                os.ftruncate(self._file, len(line))

    def close(self) -> None:
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = -1


def running(beside: Path) -> list[Running]:
    """What the runs that write this file say; those that were killed have `alive` false."""
    found = []
    for path in _files(beside):
        with contextlib.suppress(OSError):
            found.append(_read(path))
    return [run for run in found if run.said]


def _files(beside: Path) -> list[Path]:
    return [path for path in beside.parent.iterdir() if path.name.startswith(f".{beside.name}.running-")]


def _read(path: Path) -> Running:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            alive = False
        except OSError:
            alive = True
        try:
            fields = json.loads(file.readline())
            said, task, left_s = str(fields["said"]), str(fields["task"]), fields["left_s"]
            at = float(fields["at"])
            return Running(int(fields["pid"]), said, task, None if left_s is None else float(left_s), at, alive)
        except (ValueError, TypeError, KeyError, AttributeError):  # being written, or another version's
            return Running(0, "", alive=alive)
