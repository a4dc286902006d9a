"""Reads all of an archive and says what is wrong with it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cuda_l2.records import Candidate, Trial, from_json
from cuda_l2.store._base import FOREIGN, Database, unreadable
from cuda_l2.store.copying import pages

MOST_TOLD = 20
"""Faults after which the reading ends."""


@dataclass
class Checked:
    """What an archive holds, and its faults, a line each."""

    candidates: int = 0
    trials: int = 0
    exchanges: int = 0
    claims: int = 0
    expired: int = 0  # of the claims
    faults: list[str] = field(default_factory=list)


def check(db: Database) -> Checked:
    """Read every row: sources have their ids, records can be read and say what their columns say, none is missing."""
    found = Checked(faults=db.damage()[:MOST_TOLD])
    if found.faults:
        return found
    for fault in _faults(db, found):
        found.faults.append(fault)
        if len(found.faults) == MOST_TOLD:
            break
    if db.has("claims"):
        found.claims, found.expired = db.read("held")[0]
    return found


def _faults(db: Database, found: Checked) -> Iterator[str]:
    for rows in pages(db, "candidate page", ""):
        found.candidates += len(rows)
        for key, source in rows:
            if source and Candidate(source).id != key:  # an empty one is kept in the record
                yield f"candidate {key}: its source is another one's"
    for (number,) in db.read("orphans", {"count": MOST_TOLD}):
        yield f"trial {number}: its candidate is missing"
    for rows in pages(db, "trial page"):
        found.trials += len(rows)
        for row in rows:
            yield from _trial_faults(*row)
    if db.has("exchanges"):
        for rows in pages(db, "exchange page"):
            found.exchanges += len(rows)
            for row in rows:
                yield from _exchange_faults(row)


def _trial_faults(number: int, task: str, candidate: str, machine: str, protocol: str, *rest: Any) -> Iterator[str]:
    status, *_, record = rest
    try:
        trial = from_json(Trial, record)
    except FOREIGN as error:
        yield unreadable(number, error)
        return
    said = str(trial.task), trial.machine, trial.protocol, str(trial.status)
    if said != (task, machine, protocol, status):
        yield f"trial {number}: its record is of {', '.join(said)}, its row of {task}, {machine}, {protocol}, {status}"
    if trial.candidate.source and trial.candidate.id != candidate:
        yield f"trial {number}: its record has another candidate's source"


def _exchange_faults(row: tuple[Any, ...]) -> Iterator[str]:
    number, texts = row[0], [text for text in row if isinstance(text, str) and text[:1] in ("{", "[")]
    try:
        for text in texts:
            json.loads(text)
    except ValueError as error:
        yield f"exchange {number}: it cannot be read: {error}"
