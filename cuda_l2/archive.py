"""Every trial ever run, append-only, in one SQLite file that several searches may share.

Write-ahead logging: a killed search loses at most the candidates in flight, readers never wait. Sources are
stored once each. The state of a policy is kept beside the trials it learnt from.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cuda_l2.records import Candidate, Task, Trial, Trust, from_json, to_json
from cuda_l2.system.closing import Closing
from cuda_l2.system.database import connect, connect_to_read
from cuda_l2.system.errors import UserError

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE candidates (id TEXT PRIMARY KEY, source TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE trials (
    number INTEGER PRIMARY KEY, task TEXT NOT NULL, candidate TEXT NOT NULL REFERENCES candidates(id),
    machine TEXT NOT NULL, protocol TEXT NOT NULL, status TEXT NOT NULL, speedup REAL NOT NULL,
    reward REAL, created TEXT NOT NULL, record TEXT NOT NULL
);
CREATE INDEX trials_by_task ON trials (task, machine, protocol, candidate);
CREATE TABLE policies (
    name TEXT NOT NULL, machine TEXT NOT NULL, state BLOB NOT NULL, updated TEXT NOT NULL,
    PRIMARY KEY (name, machine)
);
"""


class Archive(Closing):
    """Trials by task, machine and protocol. A context manager."""

    def __init__(self, path: Path, *, reading: bool = False) -> None:
        """reading: of one that is there, which need not be writable; then nothing can be stored."""
        self.path = path
        try:
            if reading:
                self._db = connect_to_read(path)
                self._require_version()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = connect(path)
                self._prepare()
        except (OSError, sqlite3.OperationalError) as error:
            to = "read" if reading else "write"
            raise UserError(f"cannot {to} the archive {path}: {error}; choose another with --archive") from None
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{path} is not a usable archive: {error}; move it away, or choose another with --archive"
            ) from None

    def _prepare(self) -> None:
        with self._transaction():  # two searches may meet a new file at the same time
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version == 0 and self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise UserError(f"{self.path} is another program's database; choose another with --archive")
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._require_version()

    def _require_version(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            raise UserError(f"{self.path} is no archive; choose another with --archive")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{self.path} has archive version {version}, this program reads {SCHEMA_VERSION}; "
                "use the program that wrote it, or choose another with --archive"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException:  # an interrupt too must not leave the transaction open
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def append(self, trial: Trial) -> None:
        """Store one trial; it is there after a kill once this returns. ValueError for one of trust level B."""
        if trial.trust is not Trust.A:
            raise ValueError(
                "only trials of trust level A are kept: what the archive holds becomes exemplars and kernels"
            )
        record = json.loads(to_json(trial))
        record["candidate"]["source"] = ""
        row = (
            *(str(trial.task), trial.candidate.id, trial.machine, trial.protocol, trial.status, trial.speedup),
            *(trial.reward, trial.created, json.dumps(record, separators=(",", ":"))),
        )
        source = (trial.candidate.id, trial.candidate.source)
        query = (
            "INSERT INTO trials (task, candidate, machine, protocol, status, speedup, reward, created, record)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        with self._writing(), self._transaction():
            self._db.execute("INSERT OR IGNORE INTO candidates VALUES (?, ?)", source)
            self._db.execute(query, row)

    def find(self, task: Task, candidate: Candidate, machine: str, protocol: str) -> Trial | None:
        """The latest trial of this candidate under the same conditions; a bad moment of the machine does not count."""
        found = self._select(
            "task = ? AND candidate = ? AND machine = ? AND protocol = ?  AND status NOT IN ('timed-out', 'unstable')",
            (str(task), candidate.id, machine, protocol),
            "number DESC LIMIT 1",
        )
        return found[0][1] if found else None

    def trials(self, task: Task | None = None, machine: str = "", protocol: str = "") -> list[Trial]:
        """Trials in the order they were run; empty arguments match all."""
        return [trial for _, trial in self.numbered(task, machine, protocol)]

    def numbered(self, task: Task | None = None, machine: str = "", protocol: str = "") -> list[tuple[int, Trial]]:
        """The same, each with its number in the archive."""
        conditions, values = ["1"], []
        for column, value in (("task", str(task) if task else ""), ("machine", machine), ("protocol", protocol)):
            if value:
                conditions.append(f"{column} = ?")
                values.append(value)
        return self._select(" AND ".join(conditions), values, "number")

    def best(self, task: Task, machine: str, protocol: str, count: int = 1) -> list[Trial]:
        """The fastest measured candidates, each once."""
        found = self._select(
            "number IN (SELECT number FROM trials"
            " WHERE task = ? AND machine = ? AND protocol = ? AND status = 'measured'"
            " GROUP BY candidate HAVING speedup = max(speedup))",
            (str(task), machine, protocol),
            f"speedup DESC LIMIT {int(count)}",
        )
        return [trial for _, trial in found]

    def tasks(self, machine: str, protocol: str) -> list[str]:
        """The tasks of which there are trials, as texts."""
        query = "SELECT DISTINCT task FROM trials WHERE machine = ? AND protocol = ?"
        return [task for (task,) in self._read(query, (machine, protocol))]

    def load_policy(self, name: str, machine: str) -> bytes | None:
        rows = self._read("SELECT state FROM policies WHERE name = ? AND machine = ?", (name, machine))
        return rows[0][0] if rows else None

    def save_policy(self, name: str, machine: str, state: bytes) -> None:
        query = "INSERT OR REPLACE INTO policies VALUES (?, ?, ?, strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))"
        with self._writing():
            self._db.execute(query, (name, machine, state))

    def close(self) -> None:
        self._db.close()

    def _select(self, where: str, values: Iterable[object], order: str) -> list[tuple[int, Trial]]:
        query = (
            "SELECT number, record, source FROM trials JOIN candidates ON candidates.id = trials.candidate"
            f" WHERE {where} ORDER BY {order}"
        )
        trials = []
        for number, record, source in self._read(query, values):
            fields = json.loads(record)
            fields["candidate"]["source"] = source
            trials.append((number, from_json(Trial, json.dumps(fields))))
        return trials

    def _read(self, query: str, values: Iterable[object]) -> list[Any]:
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.DatabaseError as error:
            advice = "move it away, or choose another with --archive"
            raise UserError(f"{self.path} cannot be read: {error}; {advice}") from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UserError(f"cannot write the archive {self.path}: {error}; what was stored before is kept") from None
