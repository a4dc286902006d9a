"""Every statement on an archive, written once in SQLAlchemy's language and compiled once a process for a database.

Connections run the compiled text themselves: the work that SQLAlchemy does at each execution takes longer than the
statements do. Names of parameters are columns' names.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Executable,
    Integer,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    literal,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from cuda_l2.records import FOUND_WRONG
from cuda_l2.store import schema
from cuda_l2.store.schema import candidates, claims, exchanges, policies, trials

Insert: TypeAlias = Any
"""A dialect's own `insert`: both have on_conflict_do_nothing and on_conflict_do_update."""
Compiled: TypeAlias = tuple[str, dict[str, Any]]
"""SQL, and the values of its constants."""

NOW = {
    "sqlite": (func.julianday("now") - 2440587.5) * 86400.0,
    "postgresql": func.date_part("epoch", func.clock_timestamp()),
}
"""Seconds since the epoch by the database's clock, which all workers share."""
CONDITIONS = "task", "candidate", "machine", "protocol"
"""Columns that say under which conditions a candidate is judged."""


@functools.cache
def _dialect(name: str) -> tuple[Dialect, Insert]:
    if name == "sqlite":
        return sqlite.dialect(paramstyle="named"), sqlite.insert
    from sqlalchemy.dialects import postgresql  # noqa: PLC0415 - a search on a file does not wait for it
    from sqlalchemy.dialects.postgresql import psycopg  # noqa: PLC0415

    made: Dialect = psycopg.dialect()  # type: ignore[no-untyped-call]
    return made, postgresql.insert


@functools.cache
def statement(name: str, dialect: str, filters: tuple[str, ...] = ()) -> Compiled:
    """A statement by its name in STATEMENTS, for a dialect."""
    chosen, insert = _dialect(dialect)
    made: Any = FILTERED[name](filters) if name in FILTERED else STATEMENTS[name](insert, dialect)
    compiled = made.compile(dialect=chosen)
    constants = {name: value for name, value in compiled.params.items() if value is not None}
    return str(compiled), constants


def tables(dialect: str, wanted: list[Table] | None = None) -> list[str]:
    """The statements that make an archive's tables and indexes where they are not there."""
    found = []
    for table in wanted or schema.METADATA.sorted_tables:
        found.append(str(CreateTable(table, if_not_exists=True).compile(dialect=_dialect(dialect)[0])))
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            found.append(str(CreateIndex(index, if_not_exists=True).compile(dialect=_dialect(dialect)[0])))
    return found


def _equal(table: Table, *names: str) -> list[Any]:
    return [table.c[name] == bindparam(name, type_=table.c[name].type) for name in names]


def _values(table: Table) -> dict[str, Any]:
    """A parameter for every column but the number, which the database gives."""
    return {column.name: bindparam(column.name, type_=column.type) for column in table.c if column.name != "number"}


def _whole() -> Select[Any]:
    """Trials with their candidates' sources."""
    return select(trials.c.number, trials.c.record, candidates.c.source).join(
        candidates, candidates.c.id == trials.c.candidate
    )


def _count() -> Any:
    return bindparam("count", type_=Integer)


def _after() -> Any:
    return bindparam("after", type_=BigInteger)


def _find(*_: Any) -> Executable:
    settled = trials.c.status != "timed-out", trials.c.status != "unstable"
    return _whole().where(*_equal(trials, *CONDITIONS), *settled).order_by(trials.c.number.desc()).limit(1)


def _trials(filters: tuple[str, ...]) -> Executable:
    return _whole().where(*_equal(trials, *filters)).order_by(trials.c.number)


def _best(*_: Any) -> Executable:
    """A candidate's fastest trial, the first of equals, of those after which it was not found wrong."""
    order = trials.c.speedup.desc(), trials.c.number
    place = func.row_number().over(partition_by=trials.c.candidate, order_by=order).label("place")
    is_wrong = or_(*(trials.c.status == status for status in FOUND_WRONG))
    last = select(trials.c.candidate, func.max(trials.c.number).label("number"))  # once, not for every trial
    wrong = last.where(*_equal(trials, "task", "machine"), is_wrong).group_by(trials.c.candidate).subquery()
    stands = trials.c.number > func.coalesce(wrong.c.number, 0)
    conditions = [*_equal(trials, "task", "machine", "protocol"), trials.c.status == "measured", stands]
    known = trials.outerjoin(wrong, wrong.c.candidate == trials.c.candidate)
    ranked = select(trials.c.number, place).select_from(known).where(*conditions).subquery()
    first = select(ranked.c.number).where(ranked.c.place == 1)
    return _whole().where(trials.c.number.in_(first)).order_by(*order).limit(_count())


def _tasks(*_: Any) -> Executable:
    return select(trials.c.task).distinct().where(*_equal(trials, "machine", "protocol"))


def _page(table: Table) -> Callable[..., Executable]:
    """Rows in order of their numbers, from the one after `after`."""
    return lambda *_: select(table).where(table.c.number > _after()).order_by(table.c.number).limit(_count())


def _candidate_page(*_: Any) -> Executable:
    after = candidates.c.id > bindparam("after", type_=Text)
    return select(candidates).where(after).order_by(candidates.c.id).limit(_count())


def _orphans(*_: Any) -> Executable:
    here = exists().where(candidates.c.id == trials.c.candidate)
    return select(trials.c.number).where(~here).order_by(trials.c.number).limit(_count())


def _add_candidate(insert: Insert, _: str) -> Any:
    return insert(candidates).values(_values(candidates)).on_conflict_do_nothing()


def _add(table: Table) -> Callable[..., Any]:
    return lambda insert, _: insert(table).values(_values(table))


def _add_once(table: Table, *same: str) -> Callable[..., Any]:
    """Adds a row unless these columns of another are alike: for what may be sent twice."""

    def make(insert: Insert, _: str) -> Any:
        numbers = {column.name for column in table.c if isinstance(column.type, Double)}  # PostgreSQL asks for a NULL's
        values = {name: cast(value, Double) if name in numbers else value for name, value in _values(table).items()}
        there = exists().where(*_equal(table, *same))
        row = select(*values.values()).where(~there)
        return insert(table).from_select(list(values), row).returning(table.c.number)

    return make


def _append(insert: Insert, dialect: str) -> Any:
    """Adds a candidate and its trial and ends the claims on it, for PostgreSQL in one statement: one journey."""
    there = _add_candidate(insert, dialect).cte("added_candidate")
    settled = _settle().cte("settled")
    return _add_once(trials, *CONDITIONS, "created", "record")(insert, dialect).add_cte(there, settled)


def _replace(table: Table, *key: str) -> Callable[..., Any]:
    def make(insert: Insert, _: str) -> Any:
        made = insert(table).values(_values(table))
        changed = {column.name: made.excluded[column.name] for column in table.c if column.name not in key}
        return made.on_conflict_do_update(index_elements=list(key), set_=changed)

    return make


def _policy(*_: Any) -> Executable:
    return select(policies.c.state, policies.c.updated).where(*_equal(policies, "name", "machine"))


def _claim(insert: Insert, dialect: str) -> Any:
    """Takes a candidate that nobody holds, whose holder's lease is over, or that is held already: then it renews."""
    now: Any = NOW[dialect]
    expires = now + bindparam("lease_s", type_=Double)
    made = insert(claims).values({**_values(claims), "expires": expires})
    free = or_(claims.c.expires <= now, claims.c.holder == made.excluded.holder)
    changed = {"holder": made.excluded.holder, "expires": made.excluded.expires}
    taken = made.on_conflict_do_update(index_elements=list(CONDITIONS), set_=changed, where=free)
    return taken.returning(claims.c.holder)


def _release(*_: Any) -> Any:
    return delete(claims).where(*_equal(claims, *CONDITIONS, "holder"))


def _release_all(*_: Any) -> Any:
    return delete(claims).where(*_equal(claims, "holder"))


def _renew(_: Insert, dialect: str) -> Any:
    """Begins the leases of all that a holder has anew."""
    now: Any = NOW[dialect]
    expires = now + bindparam("lease_s", type_=Double)
    return update(claims).where(*_equal(claims, "holder")).values(expires=expires)


def _holder(*_: Any) -> Executable:
    return select(claims.c.holder).where(*_equal(claims, *CONDITIONS))


def _settle(*_: Any) -> Any:
    """Ends everybody's claim: the candidate has been judged."""
    return delete(claims).where(*_equal(claims, *CONDITIONS))


def _held(_: Insert, dialect: str) -> Executable:
    now: Any = NOW[dialect]
    return select(func.count(), func.count().filter(claims.c.expires <= now)).select_from(claims)


def _number(table: Table) -> Callable[..., Executable]:
    return lambda *_: select(func.count()).select_from(table)


def _is_there(*_: Any) -> Executable:
    return select(literal(1)).where(exists().where(and_(*_equal(trials, "number"))))


def _exchange_columns() -> list[Column[Any]]:
    return [column for column in exchanges.c if column.name not in ("number", "outcome")]


def _answered(*_: Any) -> Executable:
    found = select(*_exchange_columns()).where(*_equal(exchanges, "key", "outcome"))
    return found.order_by(exchanges.c.number).limit(1)


def _exchanges(filters: tuple[str, ...]) -> Executable:
    return select(*_exchange_columns()).where(*_equal(exchanges, *filters)).order_by(exchanges.c.number)


FILTERED: dict[str, Callable[[tuple[str, ...]], Executable]] = {"trials": _trials, "exchanges": _exchanges}
STATEMENTS: dict[str, Callable[..., Any]] = {
    "find": _find,
    "best": _best,
    "tasks": _tasks,
    "trial page": _page(trials),
    "exchange page": _page(exchanges),
    "candidate page": _candidate_page,
    "orphans": _orphans,
    "add candidate": _add_candidate,
    "add trial": _add(trials),
    "add trial once": _add_once(trials, *CONDITIONS, "created", "record"),
    "append": _append,
    "add exchange": _add(exchanges),
    "add exchange once": _add_once(exchanges, "key", "created", "messages", "reply"),
    "answered": _answered,
    "policy": _policy,
    "policies": lambda *_: select(policies),
    "save policy": _replace(policies, "name", "machine"),
    "claim": _claim,
    "release": _release,
    "release all": _release_all,
    "renew": _renew,
    "holder": _holder,
    "settle": _settle,
    "held": _held,
    "trial count": _number(trials),
    "candidate count": _number(candidates),
    "exchange count": _number(exchanges),
    "trial is there": _is_there,
}
