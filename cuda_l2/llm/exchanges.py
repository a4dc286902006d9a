"""Every exchange with a language model, append-only, in a table of its own in the archive.

An exchange is on disk once `append` returns, and answers the same question later, so that a search that was killed
does not pay twice. Keys of endpoints are never part of an exchange.
"""

import datetime
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cuda_l2.llm._base import Message, Messages, Outcome, Reply
from cuda_l2.records import from_json, to_json
from cuda_l2.store._base import Rows, StoreFault
from cuda_l2.store.opening import open_database
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, place_of

SPARE_BYTES = 8 << 20
"""Free disk space needed for each answer before it is paid for: the longest stored one, twice, and its prompt."""
_COLUMNS = (
    *("key", "purpose", "task", "machine", "model", "address", "parent", "turn", "settings", "messages", "reply"),
    *("cost", "created"),
)
"""Columns of a row, in the order of the table."""


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

    def __init__(self, path: Place | str | os.PathLike[str]) -> None:
        self.path = place_of(path)
        self._db = open_database(self.path, "add")  # the archive makes its tables, never this
        self._appends = "add exchange once" if self._db.dialect == "postgresql" else "add exchange"

    def require_space(self, count: int) -> None:
        """UserError where this number of answers might not fit on the disk. A server's disk is not asked for."""
        if not isinstance(self.path, Path):
            return
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
        try:
            self._db.write((self._appends, row))
        except StoreFault as fault:
            raise self._unusable(fault) from None

    def answered(self, key: str) -> Exchange | None:
        """The stored answer to the same question."""
        rows = self._read("answered", {"key": key, "outcome": str(Outcome.ANSWERED)})
        return _exchange(rows[0]) if rows else None

    def exchanges(self, *, purpose: str = "", task: str = "", machine: str = "", model: str = "") -> list[Exchange]:
        """Exchanges in the order in which they ended; empty arguments match all."""
        wanted = {"purpose": purpose, "task": task, "machine": machine, "model": model}
        given = {name: value for name, value in wanted.items() if value}
        return [_exchange(row) for row in self._read("exchanges", given, *given)]

    def close(self) -> None:
        self._db.close()

    def _read(self, name: str, values: dict[str, str], *filters: str) -> Rows:
        try:
            return self._db.read(name, values, *filters)
        except StoreFault as fault:
            raise self._unusable(fault) from None

    def _unusable(self, fault: StoreFault) -> UserError:
        return UserError(f"cannot keep exchanges in the archive {self.path}: {fault}; choose another with --archive")


def _exchange(row: tuple[Any, ...]) -> Exchange:
    fields: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    messages = tuple(Message(role, text) for role, text in json.loads(fields["messages"]))
    settings, reply = json.loads(fields["settings"]), from_json(Reply, fields["reply"])
    return Exchange(**{**fields, "settings": settings, "messages": messages, "reply": reply})
