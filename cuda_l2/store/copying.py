"""Copies what one archive holds into another, as between a file and a server. What is there already is not added again.

So a copy that was interrupted goes on, and several archives can be put into one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table

from cuda_l2.store import schema
from cuda_l2.store._base import Database, Step

BATCH = 200
"""Rows that are written together."""


@dataclass
class Copied:
    """Rows read, and the number of them that were added, by kind."""

    trials: int = 0
    new_trials: int = 0
    exchanges: int = 0
    new_exchanges: int = 0
    policies: int = 0


def copy(source: Database, into: Database, on_batch: Callable[[Copied], None] = lambda copied: None) -> Copied:
    """Copy candidates, trials, exchanges and the states of policies; of a state the newer stays.

    Trials get numbers of their own, in the same order. Claims are not copied.
    """
    copied = Copied()
    for rows in pages(source, "candidate page", ""):
        into.write(*[("add candidate", {"id": key, "source": text}) for key, text in rows])
    for rows in pages(source, "trial page"):
        copied.trials += len(rows)
        copied.new_trials += _add(into, "trial count", "add trial once", schema.trials, rows)
        on_batch(copied)
    if source.has("exchanges"):
        for rows in pages(source, "exchange page"):
            copied.exchanges += len(rows)
            copied.new_exchanges += _add(into, "exchange count", "add exchange once", schema.exchanges, rows)
            on_batch(copied)
    for name, machine, state, updated in source.read("policies"):
        there = into.read("policy", {"name": name, "machine": machine})
        if not there or there[0][1] < updated:
            row = {"name": name, "machine": machine, "state": bytes(state), "updated": updated}
            into.write(("save policy", row))
            copied.policies += 1
    return copied


def pages(source: Database, name: str, first: object = 0) -> Iterator[list[tuple[Any, ...]]]:
    """The rows of a statement that begins after a key, BATCH at a time. first: a key before all."""
    after = first
    while rows := source.read(name, {"after": after, "count": BATCH}):
        yield rows
        after = rows[-1][0]


def _add(into: Database, count: str, add: str, table: Table, rows: list[tuple[Any, ...]]) -> int:
    """Add rows that are not there; their number, if nobody else writes meanwhile."""
    names = [column.name for column in table.c]
    steps: list[Step] = [(add, dict(zip(names[1:], row[1:], strict=True))) for row in rows]
    before = into.read(count)[0][0]
    into.write(*steps)
    return int(into.read(count)[0][0] - before)
