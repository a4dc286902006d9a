"""Turns that several processes of one run take on a GPU on which they judge: they verify at once, and time alone.

A process asks for its next turn between two messages to its candidate, so that one that is to be alone waits for as
long as a message and what is done with its answer takes. Waiting for such a turn is no waiting for another run.
"""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from cuda_l2.system.closing import Closing
from cuda_l2.system.lock import take

WAITING = "waiting for a turn on the GPU"
"""The step that is shown while another process is alone on it."""


class Turns(Closing):
    """The turns of one process, taken by one thread. A context manager; a killed process gives its turn back.

    file: what all processes lock, and a second one beside it; without one a process is always alone.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._now = fcntl.LOCK_UN
        self._files = [path.open("w") for path in (file.with_name(f"{file.name} gate"), file)] if file else []

    @property
    def several(self) -> bool:
        """Whether others may be at work on the same GPU."""
        return bool(self._files)

    @contextlib.contextmanager
    def taken(self, *, alone: bool = False) -> Iterator[None]:
        """A turn beside others, or alone. Within another it takes that one's place, and others may come between."""
        before = self._now
        self._take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            yield
        finally:
            if before != self._now:
                self._take(before)

    def _take(self, kind: int) -> None:
        if not self._files:
            return
        gate, file = self._files
        fcntl.flock(file, fcntl.LOCK_UN)
        self._now = fcntl.LOCK_UN
        if kind != fcntl.LOCK_UN:
            take(gate, fcntl.LOCK_EX, WAITING)  # who waits to be alone has it, so that no others come before
            try:
                take(file, kind, WAITING)
            finally:
                fcntl.flock(gate, fcntl.LOCK_UN)
            self._now = kind

    def close(self) -> None:
        for file in self._files:
            file.close()


ALONE = Turns()
"""The turns of a process that shares its GPU with no other one of its run."""
