"""Names under which searches claim candidates. A name says which process has it, so that others see when it is dead."""

import functools
import hashlib
import os
import uuid
from pathlib import Path

from cuda_l2.system import process_tree


def new() -> str:
    """A name that no other search has: this host, this process, when it began, and a random part."""
    pid = os.getpid()
    return f"{_host()}/{pid}/{process_tree.began(pid)}/{uuid.uuid4().hex}"


def is_dead(name: str) -> bool:
    """Whether the process of a name has ended. False where that cannot be seen from here, as on another host."""
    host, _, rest = name.partition("/")
    pid, _, rest = rest.partition("/")
    if host != _host() or not pid.isdecimal():
        return False
    return process_tree.is_gone(int(pid), rest.partition("/")[0])


@functools.cache
def _host() -> str:
    """What processes have in common that see one another by their numbers: a host, the kernel's boot, a namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no path, but a name
        ours = os.readlink("/proc/self") == str(os.getpid())  # noqa: PTH115 - else /proc shows another namespace
    except OSError:
        ours = False
    if not ours:
        return uuid.uuid4().hex  # nobody sees these processes
    return hashlib.sha256(f"{os.uname().nodename} {boot} {space}".encode()).hexdigest()[:16]
