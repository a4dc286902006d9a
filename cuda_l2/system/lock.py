"""The lock of a machine or a GPU: one verification or timing at a time, since others would disturb the clock."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cuda_l2.system import paths, scratch
from cuda_l2.system.steps import step

WAITING = "waiting for another cuda-l2 on this machine, on top of the budget"
"""The step that is shown while it waits."""


@contextmanager
def machine_lock(gpu: str = "") -> Iterator[float]:
    """Hold the machine, or one GPU of it by its PCI address; yields the seconds spent waiting for other holders.

    Work on the CPU holds the whole machine; several GPUs may be at work at once. A killed process releases the lock.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(held("machine.lock", fcntl.LOCK_SH if gpu else fcntl.LOCK_EX))
        if gpu:
            stack.enter_context(held(f"gpu-{gpu.replace(':', '-')}.lock"))
        yield time.perf_counter() - start


@contextmanager
def held(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[Path]:
    """Hold a file under the cache against other threads and processes; its path."""
    path = paths.cache_dir() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise scratch.unwritable(error) from None
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(WAITING):
                fcntl.flock(file, kind)
        yield path
