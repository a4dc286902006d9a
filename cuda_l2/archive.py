"""Every trial ever run, append-only, in a SQLite file or on a PostgreSQL server that several searches may share.

A killed search loses at most the candidates in flight, readers never wait. Sources are stored once each. The state of a
policy is kept beside the trials it learnt from. A search claims a candidate before it judges it, so that no two do the
same work. A claim ends with its lease, or when another search sees that its holder's process is dead, so that the work
of a killed search is given out again.
"""

import contextlib
import datetime
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cuda_l2.records import FOUND_WRONG, Candidate, Task, Trial, Trust, from_json, to_json
from cuda_l2.store import holder
from cuda_l2.store._base import FOREIGN, SCHEMA_VERSION, Rows, Step, StoreFault, unreadable
from cuda_l2.store.opening import open_database
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, place_of

__all__ = ["LEASE_S", "SCHEMA_VERSION", "Archive"]

LEASE_S = 300.0
"""How long a claim holds unless it is renewed: longer than a judgement usually takes."""


class Archive(Closing):
    """Trials by task, machine and protocol. A context manager."""

    def __init__(self, path: Place | str | os.PathLike[str], *, reading: bool = False) -> None:
        """path: a file's, or the URL of a PostgreSQL database. reading: of one that is there, which need not be
        writable; then nothing can be stored.
        """
        self.path = place_of(path)
        self.holder = holder.new()
        """Name under which this object claims; another that goes on with a dead one's work takes its name."""
        self._held = set[str]()
        """Claims of this object that have not ended."""
        self._db = open_database(self.path, "read" if reading else "make")

    def append(self, trial: Trial) -> None:
        """Store one trial and end the claims on it; it is there after a kill once this returns.

        ValueError for one of trust level B.
        """
        if trial.trust is not Trust.A:
            raise ValueError(
                "only trials of trust level A are kept: what the archive holds becomes exemplars and kernels"
            )
        source = trial.candidate.source if _is_plain(trial.candidate.source) else ""
        kept_here = replace(trial.candidate, source="") if source else trial.candidate
        where = _where(trial.task, trial.candidate, trial.machine, trial.protocol)
        row = {
            **where,
            "status": str(trial.status),
            "speedup": trial.speedup,
            "reward": trial.reward,
            "created": trial.created,
            "record": to_json(replace(trial, candidate=kept_here)),
        }
        text = {"id": trial.candidate.id, "source": source}
        if self._db.dialect == "postgresql":
            self._write(("append", {**text, **row}))
        else:
            self._write(("add candidate", text), ("settle", where), ("add trial", row))
        self._held.discard(str(where))

    def find(self, task: Task, candidate: Candidate, machine: str, protocol: str) -> Trial | None:
        """The latest trial of this candidate under the same conditions; a bad moment of the machine does not count."""
        found = _numbered(self._read("find", _where(task, candidate, machine, protocol)), self.path)
        return found[0][1] if found else None

    def claim(self, task: Task, candidate: Candidate, machine: str, protocol: str, *, lease_s: float = LEASE_S) -> bool:
        """Whether this object may judge a candidate now: False while another's claim holds. A second call renews it.

        lease_s: seconds after which the claim ends by itself. `append`, `release` and `close` end it before.
        """
        where = _where(task, candidate, machine, protocol)
        step: Step = "claim", {**where, "holder": self.holder, "lease_s": lease_s}
        claimed = bool(self._write(step))
        if not claimed:
            dead = [name for (name,) in self._read("holder", where) if holder.is_dead(name)]
            for name in dead:
                self.release_all(name)
            claimed = bool(dead and self._write(step))
        if claimed:
            self._held.add(str(where))
        return claimed

    def renew(self, *, lease_s: float = LEASE_S) -> None:
        """Let all of this object's claims hold this long from now."""
        if self._held:
            self._write(("renew", {"holder": self.holder, "lease_s": lease_s}))

    def release(self, task: Task, candidate: Candidate, machine: str, protocol: str) -> None:
        """End this object's claim on a candidate that it did not judge."""
        where = _where(task, candidate, machine, protocol)
        self._write(("release", {**where, "holder": self.holder}))
        self._held.discard(str(where))

    def release_all(self, name: str) -> None:
        """End all claims under a holder's name, whose process works no more."""
        with contextlib.suppress(UserError):  # a server that is gone: the leases end
            self._write(("release all", {"holder": name}))

    def trials(self, task: Task | None = None, machine: str = "", protocol: str = "") -> list[Trial]:
        """Trials in the order they were run; empty arguments match all."""
        return [trial for _, trial in self.numbered(task, machine, protocol)]

    def standing(self, task: Task, machine: str, protocol: str = "") -> list[Trial]:
        """The same of one task, without those after which a kernel was found wrong."""
        found = self.trials(task, machine, protocol)
        wrong = {t.candidate.id: number for number, t in enumerate(found) if t.status in FOUND_WRONG}
        return [trial for number, trial in enumerate(found) if number >= wrong.get(trial.candidate.id, 0)]

    def numbered(self, task: Task | None = None, machine: str = "", protocol: str = "") -> list[tuple[int, Trial]]:
        """All of them, each with its number in the archive."""
        wanted = {"task": str(task) if task else "", "machine": machine, "protocol": protocol}
        given = {column: value for column, value in wanted.items() if value}
        return _numbered(self._read("trials", given, *given), self.path)

    def best(self, task: Task, machine: str, protocol: str, count: int = 1) -> list[Trial]:
        """The fastest measured candidates that were not found wrong afterwards, each once."""
        values = {"task": str(task), "machine": machine, "protocol": protocol, "count": int(count)}
        return [trial for _, trial in _numbered(self._read("best", values), self.path)]

    def tasks(self, machine: str, protocol: str) -> list[str]:
        """The tasks of which there are trials, as texts."""
        return [task for (task,) in self._read("tasks", {"machine": machine, "protocol": protocol})]

    def load_policy(self, name: str, machine: str) -> bytes | None:
        rows = self._read("policy", {"name": name, "machine": machine})
        return bytes(rows[0][0]) if rows else None

    def save_policy(self, name: str, machine: str, state: bytes) -> None:
        updated = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._write(("save policy", {"name": name, "machine": machine, "state": state, "updated": updated}))

    def close(self) -> None:
        """End this object's claims, and the connection."""
        with contextlib.closing(self._db):
            if self._held:
                self.release_all(self.holder)

    def _read(self, name: str, values: Mapping[str, object], *filters: str) -> Rows:
        try:
            return self._db.read(name, values, *filters)
        except StoreFault as fault:
            advice = "move it away, or choose another with --archive"
            if not isinstance(self.path, Path):
                advice = "what was stored before is kept: start again when the server answers"
            raise UserError(f"{self.path} cannot be read: {fault}; {advice}") from None

    def _write(self, *steps: Step) -> Rows:
        try:
            return self._db.write(*steps)
        except StoreFault as fault:
            raise UserError(f"cannot write the archive {self.path}: {fault}; what was stored before is kept") from None


def _where(task: Task, candidate: Candidate, machine: str, protocol: str) -> dict[str, object]:
    return {"task": str(task), "candidate": candidate.id, "machine": machine, "protocol": protocol}


def _is_plain(source: str) -> bool:
    """Whether a database keeps this text as it is; what it does not is kept in the record, where JSON escapes it."""
    return re.search(r"[\0\ud800-\udfff]", source) is None


def _numbered(rows: Rows, place: Place) -> list[tuple[int, Trial]]:
    """Trials from rows of number, record and source; UserError where a record is damaged."""
    found = []
    for number, record, source in rows:
        try:
            trial = from_json(Trial, record)
        except FOREIGN as error:
            advice = "`cuda-l2 archive check` says what else is damaged; move it away, or choose another with --archive"
            raise UserError(f"{place}: {unreadable(number, error)}; {advice}") from None
        whole = replace(trial, candidate=replace(trial.candidate, source=source)) if source else trial
        found.append((int(number), whole))
    return found
