"""What this machine's cores and memory reach at most: measured while nothing else runs, and kept in the cache folder.

Of several measurements the largest counts, for other work can only lower what is measured. One that other work
interrupted is kept too and tried again by the next process; one that nothing interrupted stays.
"""

import contextlib
import hashlib
import json
import resource
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.native import compiled
from cuda_l2.system.steps import step

PROGRAM = Path(__file__).with_name("peak.c")
TRIES = 3
INTERRUPTIONS = 3
"""Times that a thread may lose its core to another: so few are the system's own."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """GFLOP/s of multiply-adds with fp32 sums and GB/s of memory reads, on all cores.

    quiet: nothing interrupted the measuring.
    """

    gflops: float
    gbytes_per_s: float
    quiet: bool

    def or_more(self, other: "Ceilings | None") -> "Ceilings":
        if other is None:
            return self
        gflops, gbytes_per_s = max(self.gflops, other.gflops), max(self.gbytes_per_s, other.gbytes_per_s)
        return Ceilings(gflops, gbytes_per_s, self.quiet or other.quiet)


def kept(threads: int, machine: str, flag: str) -> Ceilings:
    """The ceilings of a machine, measured where they are not kept from a quiet moment. flag: for its instructions.

    Those of other instructions are another machine's.
    """
    path = place(threads, machine)
    found = _read(path)
    for _ in range(TRIES):
        if found and found.quiet:
            return found
        with step("measuring what this machine reaches at most"):
            found = measure(threads, flag).or_more(found)
        _write(path, found)
    assert found
    return found


def place(threads: int, machine: str) -> Path:
    """Where a machine's ceilings are kept."""
    return paths.cache_dir() / "ceilings" / f"{hashlib.sha256(f'{threads} {machine}'.encode()).hexdigest()[:16]}.json"


def undisturbed(threads: int, machine: str) -> bool:
    """Whether what is kept comes from a quiet moment, or nothing is kept."""
    found = _read(place(threads, machine))
    return found is None or found.quiet


def again(threads: int, machine: str) -> None:
    """Have a machine's ceilings measured again; what is kept still counts where it is larger."""
    path = place(threads, machine)
    if found := _read(path):
        _write(path, replace(found, quiet=False))


def measure(threads: int, flag: str) -> Ceilings:
    """Run the program that measures, once."""
    program = compiled(PROGRAM, "-O3", *flag.split(), "-pthread")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_nivcsw
    done = subprocess.run([program, str(threads)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{program} fails with status {done.returncode}; remove it and try again")
    interrupted = resource.getrusage(resource.RUSAGE_CHILDREN).ru_nivcsw - before
    gflops, gbytes_per_s = map(float, done.stdout.split())
    return Ceilings(gflops, gbytes_per_s, interrupted <= INTERRUPTIONS * threads)


def _read(path: Path) -> Ceilings | None:
    """What is kept; None where it is missing or damaged."""
    try:
        found = Ceilings(**json.loads(path.read_text()))
        return found if min(found.gflops, found.gbytes_per_s) > 0 and isinstance(found.quiet, bool) else None
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, found: Ceilings) -> None:
    with contextlib.suppress(UserError):  # a cache that cannot be written costs the next process a second
        write_text(path, json.dumps(asdict(found)))
