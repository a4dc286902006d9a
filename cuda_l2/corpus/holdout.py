"""What no training text may hold: tasks, kernels, schedules, and code that is nearly theirs.

A text file, one entry a line, `#` begins a remark:

    64x48x80                     the shape in every layout and accumulator; 64x48x80:tn that task alone
    softmax                      the task at all sizes, in all types; softmax:rows=64,columns=500 there alone
    kernelbench/level1/19_ReLU   the file at all sizes, by its number too; kernelbench/level3 all of a level
    1f0e9d8c7b6a5948             a kernel by its id
    cpu_gemm: MR=12 NV=2         every schedule of the family with these choices
    like: path/to/kernel.cu      code that shares most of its runs of tokens with the file
"""

import functools
import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from cuda_l2.corpus.duplicates import Shingles, contained, digest, shingles
from cuda_l2.families._base import all_families
from cuda_l2.records import Candidate, Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text
from cuda_l2.tasks import parse
from cuda_l2.tasks.optional import is_foreign

LIKE = 0.5
"""A text with more of its shingles from a held-out file than this is held out."""
_FOREIGN = re.compile(r"kernelbench(/[\w.+-]+){0,2}", re.ASCII)
_SHAPES = (
    re.compile(r"\b(?=(\d{1,9})\s*[x*,]\s*(\d{1,9})\s*[x*,]\s*(\d{1,9})\b)"),
    re.compile(r"\b(?=M\W{1,4}(\d{1,9})\b.{0,40}?\bN\W{1,4}(\d{1,9})\b.{0,40}?\bK\W{1,4}(\d{1,9})\b)", re.I | re.S),
)
"""As 64x48x80, (64, 48, 80), and M = 64, N = 48, K = 80, or three macros of these names."""
_TASK = re.compile(r"\b(?=([\w/.+-]{0,200}\w):)")
_PLAIN = re.compile(r"\b\d+x\d+x\d+(?![\w:])")
"""The text of a matrix product in the default layout and class of sums."""
_SIZE = re.compile(r":\w+=\d")
_GOES_ON = re.compile(r"[\w:]")
_ID = re.compile(r"[0-9a-f]{16}")
_CHOICE = re.compile(r"(\w+)\s*=\s*(-?\d+)")
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(-?\d+)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True)
class HoldOut:
    """The entries of a file; empty holds nothing out."""

    ids: frozenset[str] = frozenset()
    shapes: frozenset[tuple[int, int, int]] = frozenset()
    tasks: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()  # of tasks other than matrix products
    schedules: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    digests: frozenset[str] = frozenset()
    like: tuple[Shingles, ...] = field(default=(), compare=False)

    @classmethod
    def read(cls, path: Path | None) -> "HoldOut":
        """The file's entries, none without a file; UserError with the line that cannot be read."""
        if path is None:
            return cls()
        ids, digests, tasks, names = set[str](), set[str](), set[str](), set[str]()
        shapes, schedules, like = set[tuple[int, int, int]](), [], []
        for number, line in enumerate(read_text(path).split("\n"), 1):
            entry = line.partition("#")[0].strip()
            head, colon, rest = entry.partition(": ")
            if not entry:
                continue
            if _ID.fullmatch(entry):
                ids.add(entry)
            elif colon and head == "like":
                text = read_text(path.parent / rest.strip())
                digests.add(digest(text))
                like.append(shingles(text))
                ids.add(Candidate(text).id)
            elif is_foreign(entry):
                if not _FOREIGN.fullmatch(entry):
                    raise UserError(f"{path}, line {number}: write kernelbench/level1, or kernelbench/level1/19_ReLU")
                names.add(entry)
            elif colon:
                schedules.append((head, _choices(head, rest, f"{path}, line {number}")))
            else:
                task = _task(entry, f"{path}, line {number}")
                if ":" in entry:
                    tasks.add(str(task))
                elif task.product:
                    shapes.add((task.m, task.n, task.k))
                else:
                    names.add(task.name)
        return cls(
            *(frozenset(ids), frozenset(shapes), frozenset(tasks), frozenset(names)),
            *(tuple(schedules), frozenset(digests), tuple(like)),
        )

    @property
    def fingerprint(self) -> str:
        """16 hex digits of what is held out, whatever the file's order and remarks; of code like a file, its tokens."""
        kept = (self.ids, self.shapes, self.tasks, self.names, self.digests, self.schedules)
        return hashlib.sha256(repr([sorted(entries) for entries in kept]).encode()).hexdigest()[:16]

    def task(self, task: Task) -> bool:
        """Whether the task is held out."""
        if task.product:
            return str(task) in self.tasks or (task.m, task.n, task.k) in self.shapes
        return str(task) in self.tasks or bool(self.names.intersection(_names(task.name)))

    def candidate(self, candidate: Candidate) -> bool:
        """Whether the kernel is held out, whoever wrote it."""
        chosen = dict(candidate.schedule)
        for family, choices in self.schedules:
            if candidate.family == family and all(chosen.get(name) == value for name, value in choices):
                return True
        if candidate.schedule:  # its macros say no more than the schedule, and launches share them
            return candidate.id in self.ids or digest(candidate.source) in self.digests
        return candidate.id in self.ids or self.text(candidate.source)

    def text(self, text: str) -> bool:
        """Whether a text is, holds or nearly is what is held out, or names a held-out shape or other task."""
        if Candidate(text).id in self.ids or digest(text) in self.digests:
            return True
        if self._names_shape(text) or self._names_task(text):
            return True
        if self.schedules and self._scheduled({name: int(value) for name, value in _DEFINED.findall(text)}):
            return True
        if not self.like:
            return False
        own = shingles(text)
        return any(contained(own, other) > LIKE for other in self.like)

    def _names_shape(self, text: str) -> bool:
        if not self.shapes:
            return False
        found = (match.groups() for pattern in _SHAPES for match in pattern.finditer(text))
        return any((int(m), int(n), int(k)) in self.shapes for m, n, k in found)

    def _names_task(self, text: str) -> bool:
        """Whether a text has the text of a held-out task, or a held-out name with sizes, or of a file alone."""
        for match in _TASK.finditer(text) if self.tasks or self.names else ():
            head, rest = match.group(1), match.end(1)
            if head in self.names and _SIZE.match(text, rest):
                return True
            for tail in self._tails.get(head, ()):
                if text.startswith(tail, rest) and not _GOES_ON.match(text, rest + len(tail)):
                    return True
        if any(match.group() in self.tasks for match in _PLAIN.finditer(text) if self.tasks):
            return True
        foreign = [name for name in self.names if is_foreign(name)] if "kernelbench" in text else []
        return any(re.search(rf"\b{re.escape(name)}(?!\w)", text) for name in foreign)

    @functools.cached_property
    def _tails(self) -> dict[str, list[str]]:
        """Held-out tasks' texts from the first colon on, by what stands before it."""
        tails: dict[str, list[str]] = {}
        for task in self.tasks:
            head, colon, rest = task.partition(":")
            tails.setdefault(head, []).append(colon + rest)
        return tails

    def _scheduled(self, defined: dict[str, int]) -> bool:
        """Whether a text's macros are those of a held-out schedule; choices of the launch are no macros."""
        for family, choices in self.schedules:
            macros = {name for member in all_families() if member.name == family for name in member.compiled}
            compiled = [(name, value) for name, value in choices if name in macros]
            if compiled and all(defined.get(name) == value for name, value in compiled):
                return True
        return False


def _names(name: str) -> list[str]:
    """What a task may be held out by: its name, of a file in a checkout also its number and folders."""
    folder, _, stem = name.rpartition("/")
    return [name, folder, folder.partition("/")[0], f"{folder}/{stem.partition('_')[0]}"] if folder else [name]


def _choices(family: str, text: str, where: str) -> tuple[tuple[str, int], ...]:
    member = next((member for member in all_families() if member.name == family), None)
    if member is None:
        known = ", ".join(member.name for member in all_families())
        raise UserError(
            f"{where}: there is no family {family!r}; choose from {known}, or write a shape or a kernel's id"
        )
    choices = tuple((name, int(value)) for name, value in _CHOICE.findall(text))
    names = {choice.name for choice in member.choices}
    if not choices or _CHOICE.sub("", text).strip(" ,") or not {name for name, _ in choices} <= names:
        raise UserError(f"{where}: write choices of {family} as in NAME=8; it has {', '.join(sorted(names))}")
    return choices


def _task(text: str, where: str) -> Task:
    try:
        return parse(text)
    except UserError as error:
        raise UserError(
            f"{where}: {error}; or a kernel's id of 16 hex digits, `FAMILY: NAME=8`, `like: FILE`"
        ) from None
