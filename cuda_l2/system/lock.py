"""The lock of a machine or a GPU: one verification or timing at a time, since others would disturb the clock."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cuda_l2.system import paths, scratch


@contextmanager
def machine_lock(gpu: str = "") -> Iterator[float]:
    """Hold the machine, or one GPU of it by its PCI address; yields the seconds spent waiting for other holders.

    Work on the CPU holds the whole machine; several GPUs may be at work at once. A killed process releases the lock.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as held:
        _hold(held, "machine.lock", fcntl.LOCK_SH if gpu else fcntl.LOCK_EX)
        if gpu:
            _hold(held, f"gpu-{gpu.replace(':', '-')}.lock", fcntl.LOCK_EX)
        yield time.perf_counter() - start


def _hold(held: contextlib.ExitStack, name: str, kind: int) -> None:
    path = paths.cache_dir() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(path.open("w"))
    except OSError as error:
        raise scratch.unwritable(error) from None
    fcntl.flock(file, kind)
