"""One verification or timing at a time on a machine, whoever runs it: others would disturb the clock."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from cuda_l2 import paths
from cuda_l2.errors import UserError


@contextmanager
def machine_lock() -> Iterator[None]:
    """Hold the machine; waits for another search to finish its candidate. A killed holder releases it."""
    path = paths.cache_dir() / "machine.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(f"cannot write the cache {path.parent}: {error.strerror}; set CUDA_L2_CACHE") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
