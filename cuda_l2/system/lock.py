"""The lock of a machine or a GPU: one verification or timing at a time, since others would disturb the clock."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from cuda_l2.system import paths, scratch
from cuda_l2.system.steps import step

WAITING = "waiting for another cuda-l2 on this machine, on top of the budget"
"""The step that is shown while it waits."""


@contextmanager
def machine_lock(gpu: str = "", *, several: bool = False) -> Iterator[float]:
    """Hold the machine, or one GPU of it by its PCI address; yields the seconds spent waiting for other holders.

    Work on the CPU holds the whole machine; several GPUs may be at work at once. A killed process releases the lock.
    several: hold the GPU together with others that ask so, which take `turns` on it.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        locks = {"machine": not gpu, f"gpu-{gpu.replace(':', '-')}": not several} if gpu else {"machine": True}
        for name, alone in locks.items():
            # Who waits for a lock holds its gate: others that share it would always overlap, and never leave it free.
            with held(f"{name}.gate"):
                stack.enter_context(held(f"{name}.lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield time.perf_counter() - start


@contextmanager
def held(name: str, kind: int = fcntl.LOCK_EX) -> Iterator[Path]:
    """Hold a file under the cache against other threads and processes; its path."""
    path = paths.cache_dir() / name
    with scratch.writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    with file:
        take(file, kind, WAITING)
        yield path


def take(file: IO[str], kind: int, waiting: str) -> None:
    """Lock an open file. waiting: the step that is shown where others hold it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        with step(waiting):
            fcntl.flock(file, kind)
