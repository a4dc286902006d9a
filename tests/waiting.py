"""Waiting for another process. However long it takes: pytest's own limit ends a test that hangs."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

PAUSE_S = 0.02


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[Any] | None" = None) -> None:
    """Return when the condition holds; AssertionError where the process that should bring it about has ended before."""
    while not condition():
        if process and process.poll() is not None:
            assert condition(), f"{process.args} ended with status {process.returncode}: {process.communicate()}"
            return
        time.sleep(PAUSE_S)
