"""The tables of an archive, alike on SQLite and PostgreSQL.

Trials, candidates and exchanges are only ever added to. A row of `claims` goes when its candidate has been judged.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

METADATA = MetaData()
NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers the rows of an INTEGER alone


def _text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


candidates = Table(
    *("candidates", METADATA, Column("id", Text, primary_key=True), _text("source")), sqlite_with_rowid=False
)
trials = Table(
    *("trials", METADATA, Column("number", NUMBER, Identity(), primary_key=True), _text("task")),
    Column("candidate", Text, ForeignKey("candidates.id"), nullable=False),
    *(_text("machine"), _text("protocol"), _text("status"), Column("speedup", Double, nullable=False)),
    *(Column("reward", Double), _text("created"), _text("record")),
    Index("trials_by_task", "task", "machine", "protocol", "candidate"),
)
policies = Table(
    *("policies", METADATA, _text("name"), _text("machine"), Column("state", LargeBinary, nullable=False)),
    *(_text("updated"), PrimaryKeyConstraint("name", "machine")),
)
exchanges = Table(
    *("exchanges", METADATA, Column("number", NUMBER, Identity(), primary_key=True), _text("key")),
    *(_text("purpose"), _text("task"), _text("machine"), _text("model"), _text("address"), _text("parent")),
    *(Column("turn", Integer, nullable=False), _text("settings"), _text("messages"), _text("outcome")),
    *(_text("reply"), Column("cost", Double), _text("created")),
    *(Index("exchanges_by_key", "key"), Index("exchanges_by_task", "task", "machine", "model")),
)
claims = Table(
    *("claims", METADATA, _text("task"), _text("candidate"), _text("machine"), _text("protocol")),
    *(_text("holder"), Column("expires", Double, nullable=False)),  # seconds since the epoch, by the database's clock
    PrimaryKeyConstraint("task", "candidate", "machine", "protocol"),
)
about = Table("about", MetaData(), Column("version", Integer, nullable=False), _text("identity"))
"""On PostgreSQL alone; a SQLite file keeps its version in `user_version`. identity: tells one archive from another."""
