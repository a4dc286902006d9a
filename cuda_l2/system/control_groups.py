"""Limits that control groups set on this process: CPU quota, throttling, memory.

The groups are found along the process's own path (/proc/self/cgroup) under the mounts that /proc/self/mountinfo lists,
for cgroup v1 and v2. A parent's limit holds for its children, so that every group up to the mount counts.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

PROCESS = Path("/proc/self")
UNLIMITED_BYTES = 1 << 62
"""cgroup v1 writes a number near 2**63 where memory has no limit."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Throttling:
    """Counters of the process's groups since each was made; a difference of two readings belongs to an interval."""

    periods: int  # nr_throttled: scheduler periods in which a quota was used up
    us: int  # throttled_usec: time that threads waited for the next period, summed over CPUs


def cpu_quota(process: Path = PROCESS) -> float | None:
    """Cores that the tightest CPU quota allows, as in 1.5; None where there is no quota."""
    found = [quota for group in _groups(process, "cpu") if (quota := _read(_quota, group))]
    return min(found, default=None)


def throttling(process: Path = PROCESS) -> Throttling | None:
    """Throttling by all quotas over this process; None where no group counts it."""
    counted = [counters for group in _groups(process, "cpu") if (counters := _read(_throttling, group))]
    if not counted:
        return None
    return Throttling(sum(one.periods for one in counted), sum(one.us for one in counted))


def free_memory_bytes(process: Path = PROCESS) -> int | None:
    """Memory that the tightest limit leaves; None where there is no limit."""
    found = [free for group in _groups(process, "memory") if (free := _read(_free_memory, group)) is not None]
    return min(found, default=None)


def _groups(process: Path, controller: str) -> Iterator[Path]:
    """Folders of the process's group and of its parents up to the mount, of v1's controller and of v2."""
    try:
        memberships = (process / "cgroup").read_text().splitlines()
        mounts = (process / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version = "cgroup2"
        elif controller in controllers.split(","):
            version = "cgroup"
        else:
            continue
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            kind, _, options = after.split(" ", 2)
            if kind != version or (version == "cgroup" and controller not in options.split(",")):
                continue
            root, point = (_unescaped(field) for field in before.split(" ")[3:5])
            yield from _up(Path(point), root, path)
            break


def _up(point: Path, root: str, path: str) -> Iterator[Path]:
    """The mount shows the groups below `root`; a path elsewhere belongs to another namespace's view of the mount."""
    below = Path(path).relative_to(root) if Path(path).is_relative_to(root) and ".." not in path else Path()
    group = point / below
    while not group.exists() and group != point:
        group = group.parent
    yield group
    while group != point:
        group = group.parent
        yield group


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def _read(reader: Callable[[Path], T | None], group: Path) -> T | None:
    """None also where a group's files are missing, as in the root, or hold something else."""
    try:
        return reader(group)
    except (OSError, ValueError):
        return None


def _quota(group: Path) -> float | None:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    else:
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _throttling(group: Path) -> Throttling | None:
    fields = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
    if "nr_throttled" not in fields:
        return None
    us = int(fields["throttled_usec"]) if "throttled_usec" in fields else int(fields["throttled_time"]) // 1000
    return Throttling(int(fields["nr_throttled"]), us)


def _free_memory(group: Path) -> int | None:
    limit, used = "memory.max", "memory.current"
    if not (group / limit).exists():
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    bound = (group / limit).read_text().strip()
    if bound == "max" or int(bound) >= UNLIMITED_BYTES:
        return None
    return max(0, int(bound) - int((group / used).read_text()))
