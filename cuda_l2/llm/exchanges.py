"""Every exchange with a language model, append-only, in a table of its own in the archive's file.

An exchange is on disk once `append` returns, and answers the same question later, so that a search that was killed
does not pay twice. Keys of endpoints are never part of an exchange.
"""

import datetime
import json
import shutil
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_l2.llm._base import Message, Messages, Outcome, Reply
from cuda_l2.records import from_json, to_json
from cuda_l2.system.closing import Closing
from cuda_l2.system.database import BUSY_TIMEOUT_S
from cuda_l2.system.errors import UserError

SPARE_BYTES = 8 << 20
"""Free disk space needed for each answer before it is paid for: the longest stored one, twice, and its prompt."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS exchanges (
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, purpose TEXT NOT NULL, task TEXT NOT NULL, machine TEXT NOT NULL,
    model TEXT NOT NULL, address TEXT NOT NULL, parent TEXT NOT NULL, turn INTEGER NOT NULL, settings TEXT NOT NULL,
    messages TEXT NOT NULL, outcome TEXT NOT NULL, reply TEXT NOT NULL, cost REAL, created TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS exchanges_by_key ON exchanges (key);
CREATE INDEX IF NOT EXISTS exchanges_by_task ON exchanges (task, machine, model);
"""
_COLUMNS = "key, purpose, task, machine, model, address, parent, turn, settings, messages, reply, cost, created"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question with its reply."""

    key: str  # hash of the question and of how often it was asked before; equal keys may share an answer
    purpose: str  # "propose", "instruct", "segment", "check", "collect" with the round
    task: str
    machine: str
    model: str
    address: str
    messages: Messages
    reply: Reply
    parent: str = ""  # key of the exchange that this one goes on from
    turn: int = 0  # how many repairs came before
    settings: dict[str, Any] = field(default_factory=dict)
    cost: float | None = None  # in the unit of the user's prices
    created: str = ""  # UTC, ISO 8601


class ExchangeLog(Closing):
    """The table of exchanges in an archive that is there already. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            address = f"{path.resolve().as_uri()}?mode=rw"  # the archive makes the file, never this
            self._db = sqlite3.connect(address, timeout=BUSY_TIMEOUT_S, isolation_level=None, uri=True)
            if self._db.execute("PRAGMA user_version").fetchone() == (0,):
                raise sqlite3.DatabaseError("it is no archive yet")
            self._db.executescript(_SCHEMA)
            self._db.row_factory = sqlite3.Row
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def require_space(self, count: int) -> None:
        """UserError where this number of answers might not fit on the disk."""
        free = shutil.disk_usage(self.path.resolve().parent).free
        if free < count * SPARE_BYTES:
            raise UserError(
                f"{free >> 20} MiB are free where the archive {self.path} lies, and an answer that is paid for might"
                f" not fit: free {count * SPARE_BYTES >> 20} MiB, or choose another with --archive"
            )

    def append(self, exchange: Exchange) -> None:
        """Store one exchange; it is there after a kill once this returns."""
        created = exchange.created or datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        row = {
            **asdict(exchange),
            "settings": json.dumps(exchange.settings),
            "messages": json.dumps([[message.role, message.text] for message in exchange.messages]),
            "outcome": str(exchange.reply.outcome),
            "reply": to_json(exchange.reply),
            "created": created,
        }
        names = [*_COLUMNS.split(", "), "outcome"]
        query = f"INSERT INTO exchanges ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        self._run(query, [row[name] for name in names])

    def answered(self, key: str) -> Exchange | None:
        """The stored answer to the same question."""
        found = self._select("key = ? AND outcome = ?", (key, str(Outcome.ANSWERED)), "number LIMIT 1")
        return found[0] if found else None

    def exchanges(self, *, purpose: str = "", task: str = "", machine: str = "", model: str = "") -> list[Exchange]:
        """Exchanges in the order in which they ended; empty arguments match all."""
        wanted = {"purpose": purpose, "task": task, "machine": machine, "model": model}
        given = {name: value for name, value in wanted.items() if value}
        return self._select(" AND ".join(["1", *(f"{name} = ?" for name in given)]), given.values(), "number")

    def close(self) -> None:
        self._db.close()

    def _select(self, where: str, values: Iterable[object], order: str) -> list[Exchange]:
        rows = self._run(f"SELECT {_COLUMNS} FROM exchanges WHERE {where} ORDER BY {order}", values)
        return [_exchange(dict(row)) for row in rows]

    def _run(self, query: str, values: Iterable[object]) -> list[sqlite3.Row]:
        try:
            return self._db.execute(query, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise self._unusable(error) from None

    def _unusable(self, error: sqlite3.Error) -> UserError:
        return UserError(f"cannot keep exchanges in the archive {self.path}: {error}; choose another with --archive")


def _exchange(row: dict[str, Any]) -> Exchange:
    settings, reply = json.loads(row["settings"]), from_json(Reply, row["reply"])
    messages = tuple(Message(role, text) for role, text in json.loads(row["messages"]))
    return Exchange(**{**row, "settings": settings, "messages": messages, "reply": reply})
