"""One process of torch's baselines for all rigs of this process and of those forked from it: a start loads torch.

torch.compile, which takes seconds a task, is no baseline of theirs unless a test asks for it.
"""

import atexit
from collections.abc import Callable
from functools import cache
from typing import Any

from cuda_l2.rigs import cpu

compiling = {"now": False}


class Kept(cpu.TorchBaselines):
    """Baselines that a rig does not close."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()

    def await_start(self) -> None:
        """Return when torch is loaded: processes forked from here on need not know."""
        self._await(b"R")
        self._started = True

    def _all(self) -> list[Any]:
        return [each for each in super()._all() if compiling["now"] or not each.compiled]


@cache
def kept() -> Kept:
    """With one thread: several spin while they wait, and take the cores from other tests."""
    made = Kept(1)
    atexit.register(made.end)
    return made


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Let rigs use it. replace: sets an attribute, as `setattr` does."""
    replace(cpu, "TorchBaselines", lambda *_: kept())


def await_start() -> None:
    kept().await_start()


def leave() -> None:
    """In a forked process: the baselines' process is another's to end."""
    atexit.unregister(kept().end)
