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
def machine_lock(gpu: str = "", *, several: bool = False) -> Iterator[float]:
    """Hold the machine, or one GPU of it by its PCI address; yields the seconds spent waiting for other holders.

    Work on the CPU holds the whole machine; several GPUs may be at work at once. A killed process releases the lock.
    several: hold the GPU together with others that ask so, which take `turns` on it.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(held("machine.lock", fcntl.LOCK_SH if gpu else fcntl.LOCK_EX))
        if gpu:
            name = f"gpu-{gpu.replace(':', '-')}"
            with held(f"{name}.gate"):  # who waits has it: those that hold the GPU together never all let go else
                stack.enter_context(held(f"{name}.lock", fcntl.LOCK_SH if several else fcntl.LOCK_EX))
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
