"""One verification or timing at a time on a machine or a GPU, whoever runs it: others would disturb the clock."""

import contextlib
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from cuda_l2 import paths, scratch


@contextmanager
def machine_lock(gpu: str = "") -> Iterator[None]:
    """Hold the machine, or one GPU of it by its PCI address; waits for another search to finish its candidate.

    What runs on the CPU holds the whole machine; several GPUs may be at work at once. A killed holder releases it.
    """
    with contextlib.ExitStack() as held:
        _hold(held, "machine.lock", fcntl.LOCK_SH if gpu else fcntl.LOCK_EX)
        if gpu:
            _hold(held, f"gpu-{gpu.replace(':', '-')}.lock", fcntl.LOCK_EX)
        yield


def _hold(held: contextlib.ExitStack, name: str, kind: int) -> None:
    path = paths.cache_dir() / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(path.open("w"))
    except OSError as error:
        raise scratch.unwritable(error) from None
    fcntl.flock(file, kind)
