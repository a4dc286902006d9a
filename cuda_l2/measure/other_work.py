"""What other processes, and other guests of a host, take of this process's cores while it measures."""

import os
from pathlib import Path

from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.records import BusyCores, Conditions
from cuda_l2.system import process_tree

STAT = Path("/proc/stat")
LEAST_WATCHED_S = 0.2
"""The kernel counts processor time in hundredths of a second."""
NOTICED_CORES = 0.25
"""More, and a report says so."""


class OtherWork:
    """Watches from here on."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._now, self._before = clock.now, _taken()
        self._began = self._now()

    def found(self) -> BusyCores | None:
        """How many of our cores others kept busy on average, those that a host gave to other guests included.

        None where the system does not say. Kernels count in hundredths of a second a core.
        """
        seconds, now = self._now() - self._began, _taken()
        if self._before is None or now is None or seconds <= 0:
            return None
        most = len(os.sched_getaffinity(0))
        return BusyCores(round(min(max(0.0, now - self._before) / seconds, most), 2), most)


class Others:
    """Watches from here on which other process takes most of the cores."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._now, self._before, self._began = clock.now, process_tree.seconds_of_others(), clock.now()

    def busiest(self) -> str:
        """As in: process 1234 (cc1) took 0.9 cores. Empty where none took a noticed part, or too little time passed.

        A process that began or ended meanwhile is not seen.
        """
        taken = process_tree.seconds_of_others()
        seconds = self._now() - self._began
        if seconds < LEAST_WATCHED_S:
            return ""
        cores = {pid: (taken[pid] - self._before[pid]) / seconds for pid in taken if pid in self._before}
        pid = max(cores, key=cores.__getitem__, default=0)
        if not pid or cores[pid] < NOTICED_CORES:
            return ""
        return f"process {pid} ({process_tree.name_of(pid)}) took {cores[pid]:.1f} cores"


def noticed(conditions: Conditions) -> str:
    """A line for a report, or nothing where other work took too little to mention."""
    found = conditions.other_work
    if found is None or found.cores < NOTICED_CORES:
        return ""
    return f"other work kept {found.cores:.1f} of {found.of} cores busy meanwhile: these times are less sure"


def stolen_s() -> float:
    """Seconds that a host gave our cores to other guests, summed over the cores; 0 where the system does not say."""
    try:
        return sum(int(core[7]) for core in _own_cores()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _own_cores() -> list[list[str]]:
    """What /proc/stat counts of each of our cores."""
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = STAT.read_text().splitlines()
    return [line.split()[1:] for line in lines if line.split(" ", 1)[0] in mine]


def _taken() -> float | None:
    """Seconds that our cores were busy, less those of this process and all under it."""
    try:
        fields = _own_cores()
        # user, nice, system, interrupts of two kinds, stolen; idle and waiting are between
        ticks = sum(int(core[index]) for core in fields for index in (0, 1, 2, 5, 6, 7))
    except (OSError, ValueError, IndexError):
        return None
    if not fields or not ticks:  # a sandbox's kernel that counts nothing
        return None
    return ticks / os.sysconf("SC_CLK_TCK") - process_tree.own_seconds()
