"""What other processes, and other guests of a host, take of this process's cores while it measures."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuda_l2.system import process_tree

STAT = Path("/proc/stat")
NOTICED_CORES = 0.25
"""More, and a report says so."""


class OtherWork:
    """Watches from here on."""

    def __init__(self) -> None:
        self._before = _taken()
        self._began = time.monotonic()

    def conditions(self) -> dict[str, Any]:
        """For a timing: how many of our cores others kept busy on average, those that a host gave to other guests too.

        Nothing where the system does not say. Kernels count in hundredths of a second a core.
        """
        seconds, now = time.monotonic() - self._began, _taken()
        if self._before is None or now is None or seconds <= 0:
            return {}
        cores = max(0.0, now - self._before) / seconds
        return {"other_work": {"cores": round(cores, 2), "of": len(os.sched_getaffinity(0))}}


def noticed(conditions: Mapping[str, Any]) -> str:
    """A line for a report, or nothing where others took too little to tell."""
    found = conditions.get("other_work", {"cores": 0.0, "of": 0})
    if found["cores"] < NOTICED_CORES:
        return ""
    return f"other work kept {found['cores']:.1f} of {found['of']} cores busy meanwhile: these times are less sure"


def _taken() -> float | None:
    """Seconds that our cores were busy, less those of this process and all under it."""
    try:
        lines = STAT.read_text().splitlines()
        mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        fields = [line.split()[1:] for line in lines if line.split(" ", 1)[0] in mine]
        # user, nice, system, interrupts of two kinds, stolen; idle and waiting are between
        ticks = sum(int(core[index]) for core in fields for index in (0, 1, 2, 5, 6, 7))
    except (OSError, ValueError, IndexError):
        return None
    if not fields or not ticks:  # a sandbox's kernel that counts nothing
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - process_tree.cpu_seconds(os.getpid())
