"""Files that a search, a table or a training writes: what is new in them is read, and nothing else.

Nothing is written, locked or kept open, so that the run does not notice. A file that is not there yet, is cut, or is
replaced by another is read from its beginning.
"""

import contextlib
import datetime
import json
import sqlite3
import statistics
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cuda_l2.archive import SCHEMA_VERSION
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import Gemm, from_json
from cuda_l2.runs.results import Header
from cuda_l2.system.database import connect_to_watch
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import parsed

SQLITE = b"SQLite format 3\0"
TRAINING = "cuda-l2 train"
MOST_TRIALS, MOST_BYTES = 20_000, 8 << 20
"""Read at one poll; the next goes on."""
HEAD_BYTES = 256
"""Length of a file's beginning by which another file in its place is known."""
LAST = 12
"""Newest results that are kept."""
RATE_S = 60.0


class Followed(ABC):
    """One file. `poll` reads what is new; `note` says why it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.note, self._seen = path, "", object()
        self.forget()

    @abstractmethod
    def forget(self) -> None:
        """Begin anew."""

    def poll(self) -> None:
        """Read what is new. Where nothing changed this costs two calls of stat."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            if self._read():
                self._seen = stamp
            self.note = ""
        except (OSError, sqlite3.Error, ValueError, TypeError, KeyError, AttributeError) as error:
            self.note = f"{self.path} cannot be read: {getattr(error, 'strerror', None) or error}"

    @abstractmethod
    def _read(self) -> bool:
        """Whether all that is there was read."""

    def _stamp(self) -> object:
        found = []
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        return found


@dataclass
class Searched:
    """The searches for one task on one machine."""

    task: str
    machine: str
    rewards: list[float] = field(default_factory=list)  # speedups in the order tried, 0 where rejected
    rejected: Counter[str] = field(default_factory=Counter)  # by status and check
    best: float = 0.0
    winner: str = ""  # id of the best candidate
    beaten: str = ""  # id of the best one before it
    newest: deque[tuple[int, float, float | None, str, str]] = field(default_factory=lambda: deque(maxlen=LAST))
    """Number, speedup, reward, what became of it, and why it was rejected."""
    at: deque[float] = field(default_factory=lambda: deque(maxlen=1000))  # seconds since the epoch
    reports: dict[str, float] = field(default_factory=dict)  # speedups by protocol

    def a_second(self, now: float) -> float | None:
        """Candidates judged a second in the last minute; None where they are too few to say."""
        recent = [at for at in self.at if now - at < RATE_S]
        return len(recent) / max(1.0, min(RATE_S, now - recent[0])) if len(recent) > 1 else None


class _Row(NamedTuple):
    """One trial of an archive. record: of one that was rejected; SQLite cannot read JSON with NaN in it."""

    number: int
    task: str
    machine: str
    protocol: str
    status: str
    speedup: float
    reward: float | None
    created: str
    candidate: str
    record: str


class Archived(Followed):
    """An archive of searches."""

    QUERY = (
        "SELECT number, task, machine, protocol, status, speedup, reward, created, candidate,"
        " CASE WHEN speedup > 0 THEN '' ELSE record END"
        " FROM trials WHERE number > ? ORDER BY number LIMIT ?"
    )

    def forget(self) -> None:
        self.searches: dict[tuple[str, str], Searched] = {}
        """By task and machine, the one that went on last at the end."""
        self.sources: tuple[str, ...] = ()
        """Texts of the last search's winner and, before it, of the one that it beat."""
        self._shown: tuple[str, ...] = ()
        self._last: tuple[Any, ...] = (0, "", "")

    @property
    def current(self) -> Searched | None:
        return next(reversed(self.searches.values()), None)

    def _read(self) -> bool:
        with contextlib.closing(connect_to_watch(self.path)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if not version:
                raise ValueError("it is no archive, or not one yet")
            if version != SCHEMA_VERSION:
                raise ValueError(f"it has archive version {version}, this program reads {SCHEMA_VERSION}")
            query = "SELECT number, candidate, created FROM trials WHERE number = ?"
            if self._last[0] and db.execute(query, self._last[:1]).fetchone() != self._last:
                self.forget()
            rows = [_Row(*row) for row in db.execute(self.QUERY, (self._last[0], MOST_TRIALS))]
            for row in rows:
                self._add(row)
                self._last = row.number, row.candidate, row.created
            self._fetch(db)
        return len(rows) < MOST_TRIALS

    def _add(self, row: _Row) -> None:
        place = row.task, row.machine
        found = self.searches[place] = self.searches.pop(place, Searched(*place))
        if row.protocol != SEARCH.name:
            found.reports |= {row.protocol: row.speedup} if row.speedup else {}
            return
        found.rewards.append(row.speedup)
        with contextlib.suppress(ValueError):
            found.at.append(datetime.datetime.fromisoformat(row.created).timestamp())
        record = json.loads(row.record) if row.record else {}
        stages = [record.get(stage) or {} for stage in ("build", "verdict", "timing")]
        check = stages[1].get("check")
        what = f"{row.status} in the check '{check}'" if check else row.status
        why = next((stage["reason"] for stage in reversed(stages) if stage.get("reason")), "")
        found.newest.append((row.number, row.speedup, row.reward, what, why))
        if not row.speedup:
            found.rejected[what] += 1
        elif row.speedup > found.best:
            found.beaten = found.winner if found.winner != row.candidate else found.beaten
            found.best, found.winner = row.speedup, row.candidate

    def _fetch(self, db: sqlite3.Connection) -> None:
        """The texts of a new winner and of the kernel that it beat."""
        now = self.current
        wanted = (now.beaten, now.winner) if now and now.beaten else (now.winner,) if now and now.winner else ()
        if wanted != self._shown:
            query = "SELECT source FROM candidates WHERE id = ?"
            self.sources = tuple(str(db.execute(query, (each,)).fetchone()[0]) for each in wanted)
            self._shown = wanted


class Lines(Followed):
    """An append-only file of JSON lines. A line that is half written waits for its end."""

    def forget(self) -> None:
        self.head: dict[str, Any] = {}
        self.damaged, self._offset, self._begins = 0, 0, b""

    def _read(self) -> bool:
        with self.path.open("rb") as file:
            begins = file.read(len(self._begins) or HEAD_BYTES)
            size = file.seek(0, 2)
            if size < self._offset or not begins.startswith(self._begins):
                self.forget()
                file.seek(0)
                begins = file.read(HEAD_BYTES)
            self._begins = begins
            file.seek(self._offset)
            data = file.read(MOST_BYTES)
        *lines, tail = data.split(b"\n")
        if not lines and len(data) == MOST_BYTES:
            raise ValueError("it has a line that is too long")
        self._offset += len(data) - len(tail)
        for line in filter(None, lines):
            fields = parsed(line)
            try:
                if fields is None:
                    raise ValueError
                if self.head:
                    self._add(fields)
                else:
                    self.head = fields
            except (ValueError, TypeError, KeyError, AttributeError):
                self.damaged += 1
        return self._offset + len(tail) >= size

    @abstractmethod
    def _add(self, fields: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Measured:
    """One line of a table's results."""

    task: str
    protocol: str
    status: str
    us: float | None
    speedup: float | None
    reference: str


class Tabled(Lines):
    """results.jsonl of `cuda-l2 bench`."""

    def forget(self) -> None:
        super().forget()
        self.rows: dict[tuple[str, str], Measured] = {}
        """The last of a shape and protocol, the newest at the end."""

    @property
    def total(self) -> int | None:
        """Number of shapes, of which each has a row a protocol."""
        word = str(self.head.get("settings", {}).get("shapes", "")).split(" ")[0]
        return int(word) if word.isdecimal() else None

    def _add(self, fields: dict[str, Any]) -> None:
        task, timing = str(from_json(Gemm, json.dumps(fields["gemm"]))), fields.get("timing") or {}
        row = Measured(
            task,
            *(str(fields["protocol"]), str(fields["status"])),
            us=(timing.get("candidate") or {}).get("latency_us", {}).get("estimate"),
            speedup=(timing.get("speedup") or {}).get("estimate"),
            reference=str(timing.get("reference", "")),
        )
        self.rows.pop((task, row.protocol), None)
        self.rows[task, row.protocol] = row


class Trained(Lines):
    """run.jsonl of `cuda-l2 train`."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._now = now
        super().__init__(path)

    def forget(self) -> None:
        super().forget()
        self.rewards: list[float] = []  # of each group the mean speedup, 0 for each answer that is not correct
        self.statuses: Counter[str] = Counter()
        self.tasks: deque[str] = deque(maxlen=LAST)
        self.losses: list[float] = []
        self.step = 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=200)
        """When steps were seen."""

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 where its header does not say."""
        return int(self.head.get("tuning", {}).get("steps") or 0)

    @property
    def left_s(self) -> float | None:
        """By the steps that were seen to end; None before two of them did."""
        if not self.steps or len(self._steps) < 2:
            return None
        (began, first), (at, step) = self._steps[0], self._steps[-1]
        return (self.steps - step) * (at - began) / (step - first)

    def poll(self) -> None:
        super().poll()
        if self.step and (not self._steps or self._steps[-1][1] < self.step):
            self._steps.append((self._now(), self.step))

    def _add(self, fields: dict[str, Any]) -> None:
        if fields.get("speedups"):
            self.rewards.append(statistics.fmean(float(value or 0) for value in fields["speedups"]))
            self.statuses.update(map(str, fields.get("statuses", ())))
            self.tasks.append(str(fields.get("task", "")))
        if "step" in fields:
            self.step = int(fields["step"])
            if "loss" in fields:
                self.losses.append(float(fields["loss"]))


def kind_of(path: Path) -> type[Followed] | None:
    """What a file is, by its beginning; None where it is nothing that can be followed, or empty yet."""
    with path.open("rb") as file:
        begins = file.read(1 << 16)
    if begins.startswith(SQLITE):
        return Archived
    head = parsed(begins.partition(b"\n")[0]) or {}
    if str(head.get("format", "")).startswith(TRAINING):
        return Trained
    return Tabled if head.get("kind") == Header.kind else None


class Watched:
    """All that a path names: a file, or of a folder the newest file of each kind. It need not be there yet."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self.path, self._now, self.files = path, now, list[Followed]()
        self._kinds: dict[tuple[Path, int], type[Followed]] = {}
        """By path and number of the file there."""
        for each in self._candidates():
            if path.is_file() and each.stat().st_size and kind_of(each) is None:
                raise UserError(
                    f"{path} is nothing that can be watched: name an archive, results.jsonl of `cuda-l2 bench`,"
                    " run.jsonl of `cuda-l2 train`, or the folder of one"
                )

    def poll(self) -> Sequence[Followed]:
        """Read what is new in every file."""
        newest: dict[type[Followed], Path] = {}
        for each in self._candidates():
            with contextlib.suppress(OSError):
                place = each, each.stat().st_ino
                kind = self._kinds.get(place) or kind_of(each)
                if kind:
                    self._kinds[place], newest[kind] = kind, each
        known = {(type(each), each.path): each for each in self.files}
        self.files = [known.get(found) or self._opened(*found) for found in newest.items()]
        for file in self.files:
            file.poll()
        return self.files

    def _candidates(self) -> list[Path]:
        """The oldest first."""
        if not self.path.is_dir():
            return [self.path] if self.path.is_file() else []
        found = [each for each in self.path.iterdir() if each.suffix in (".db", ".jsonl") and each.is_file()]
        return sorted(found, key=lambda each: each.stat().st_mtime_ns)

    def _opened(self, kind: type[Followed], path: Path) -> Followed:
        return Trained(path, self._now) if kind is Trained else kind(path)
