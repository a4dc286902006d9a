"""Waiting for another process. However long it takes: pytest's own limit ends a test that hangs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

PAUSE_S = 0.02
CLI = (sys.executable, str(Path(__file__).with_name("scripted_cli.py")))
"""The command line, as from a shell, with scripted times."""


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[Any] | None" = None) -> None:
    """Return when the condition holds; AssertionError where the process that should bring it about has ended before."""
    while not condition():
        if process and process.poll() is not None:
            assert condition(), f"{process.args} ended with status {process.returncode}: {process.communicate()}"
            return
        time.sleep(PAUSE_S)


def _group_states(group: int) -> list[str]:
    """States of the processes of a group, from /proc."""
    states = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            states.append(fields[0])
    return states


def require_gone(group: int | str) -> None:
    """Return when no process of a group runs. A zombie waits for init, and runs no more."""
    wait_until(lambda: all(state.startswith("Z") for state in _group_states(int(group))))


def kill_when(condition: Callable[[], object], command: Sequence[object]) -> None:
    """Start a command and kill it, as kill -9 does, once the condition holds."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(condition, process)
    process.kill()
    process.wait()


def interrupt_when(condition: Callable[[], object], command: Sequence[object]) -> tuple[str, str]:
    """Start a command and interrupt it, as Ctrl-C does, once the condition holds. What it printed; it ends with 130."""
    words = [str(word) for word in command]
    process = subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True)
    wait_until(condition, process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    return output, errors
