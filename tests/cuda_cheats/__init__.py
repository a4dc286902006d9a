"""The corpora of CUDA cheats and faults: one candidate a file, its second comment says what becomes of it.

Those for tasks other than matrix products lie in tests/cuda_task_cheats.

/* What it does.
 * shape: 250x256x256            the shape it is judged on, 256x256x256 if not given; `task:` for another task
 * verify: full                  also the checks that are too slow for every candidate of a search
 * because: clock|timer          a pattern that the reason must hold
 * expect: refused incorrect */  every status that is a right answer; `measured` for the honest controls
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda_l2 import tasks
from cuda_l2.records import BuildStatus, TimingStatus, VerdictStatus

STATUSES = frozenset(map(str, (*BuildStatus, *VerdictStatus, *TimingStatus)))
ACCEPTED = str(TimingStatus.MEASURED)
TASKS_FOLDER = Path(__file__).parents[1] / "cuda_task_cheats"
_FIELDS = re.compile(r"^ \* (\w+): (.+?)(?: \*/)?$", re.M)


@dataclass(frozen=True)
class Cheat:
    """One file of the corpus."""

    name: str
    source: str
    what: str
    shape: str
    full: bool
    because: str
    expect: frozenset[str]

    @property
    def honest(self) -> bool:
        return self.expect == {ACCEPTED}

    def accepts(self, status: str, reason: str) -> bool:
        """Whether this is an outcome that the file allows, for a reason that it allows."""
        return status in self.expect and bool(re.search(self.because, reason))


def read(path: Path) -> Cheat:
    """One file; ValueError where it does not say what to expect."""
    source = path.read_text()
    comment = re.match(r"/\* cuda-l2\b.*?\*/\n(/\*.*?\*/)\n", source, re.S)
    if not comment:
        raise ValueError(f"{path.name}: a second comment must say what the candidate does and what to expect")
    fields = dict(_FIELDS.findall(comment.group(1)))
    expect = frozenset(fields.pop("expect", "").split())
    cheat = Cheat(
        name=path.stem,
        source=source,
        what=re.split(r"\n \* \w+:", comment.group(1))[0].removeprefix("/* ").replace("\n *", ""),
        shape=fields.pop("task", "") or fields.pop("shape", "256x256x256"),
        full=fields.pop("verify", "") == "full",
        because=fields.pop("because", ""),
        expect=expect,
    )
    if fields or not expect or not expect <= STATUSES or (ACCEPTED in expect) != (expect == {ACCEPTED}):
        raise ValueError(f"{path.name}: unknown fields or statuses: {fields} {sorted(expect)}")
    tasks.parse(cheat.shape)
    return cheat


@cache
def all_cheats(folder: Path = Path(__file__).parent) -> tuple[Cheat, ...]:
    """Every file of a folder, by name; the matrix products' if not given."""
    return tuple(read(path) for path in sorted(folder.glob("*.cu")))
