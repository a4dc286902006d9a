"""One verification or timing at a time on a machine, whoever runs it: others would disturb the clock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from cuda_l2 import paths, scratch


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the machine; waits for another search to finish its candidate. A killed holder releases it."""
    path = paths.cache_dir() / "machine.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise scratch.unwritable(error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
