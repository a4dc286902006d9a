"""An archive in a SQLite file: write-ahead logging, so that a kill loses nothing and readers never wait."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda_l2.store import statements
from cuda_l2.store._base import SCHEMA_VERSION, Database, Mode, Rows, Step, StoreFault, Values
from cuda_l2.system.database import connect, connect_to_read
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import require_folder

ADDED = "exchanges", "claims"
"""Tables that older archives lack."""


class SqliteDatabase(Database):
    """The file's database. `connection` commits each statement."""

    dialect = "sqlite"

    def __init__(self, path: Path, mode: Mode) -> None:
        """UserError where the file cannot be used as the mode says."""
        self.place: Path = path
        try:
            if path.is_dir():
                raise UserError(
                    f"{path} is a folder; give an archive's file with --archive, as in {path / 'archive.db'}"
                )
            if mode == "read":
                self.connection = connect_to_read(path)
                self._require_version()
                return
            if mode == "make":
                require_folder(path)
                path.parent.mkdir(parents=True, exist_ok=True)
            elif not path.is_file() or not path.stat().st_size:
                raise UserError(f"there is no archive {path}; choose another with --archive")
            self.connection = connect(path)
            self._prepare()
        except (OSError, sqlite3.OperationalError) as error:
            to = "read" if mode == "read" else "write"
            raise UserError(f"cannot {to} the archive {path}: {error}; choose another with --archive") from None
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"{path} is not a usable archive: {error}; move it away, or choose another with --archive"
            ) from None

    def _prepare(self) -> None:
        if self._version() == SCHEMA_VERSION and all(map(self.has, ADDED)):
            return
        with self._transaction():  # two searches may meet a new file at the same time
            version = self._version()
            if version == 0 and self.connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                raise UserError(f"{self.place} is another program's database; choose another with --archive")
            if version == 0:
                self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._require_version()
            for text in statements.tables(self.dialect):
                self.connection.execute(text)

    def _version(self) -> int:
        return int(self.connection.execute("PRAGMA user_version").fetchone()[0])

    def _require_version(self) -> None:
        version = self._version()
        if version == 0:
            raise UserError(f"{self.place} is no archive; choose another with --archive")
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{self.place} has archive version {version}, this program reads {SCHEMA_VERSION}; "
                "use the program that wrote it, or choose another with --archive"
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield
            self.connection.execute("COMMIT")
        except BaseException:  # an interrupt too must not leave the transaction open
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    def read(self, name: str, values: Values | None = None, *filters: str) -> Rows:
        try:
            return self._run(name, values or {}, filters)
        except sqlite3.Error as error:
            raise StoreFault(str(error)) from None

    def write(self, *steps: Step) -> Rows:
        rows: Rows = []
        try:
            with self._transaction():
                for name, values in steps:
                    rows = self._run(name, values)
        except sqlite3.Error as error:
            raise StoreFault(str(error)) from None
        return rows

    def _run(self, name: str, values: Values, filters: tuple[str, ...] = ()) -> Rows:
        text, constants = statements.statement(name, self.dialect, filters)
        given: dict[str, Any] = {**constants, **values}
        return self.connection.execute(text, given).fetchall()

    def has(self, table: str) -> bool:
        query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        return self.connection.execute(query, (table,)).fetchone() is not None

    def damage(self) -> list[str]:
        try:
            found = self.connection.execute("PRAGMA integrity_check(20)").fetchall()
        except sqlite3.Error as error:
            return [str(error)]
        return [str(line) for (line,) in found if line != "ok"]

    def close(self) -> None:
        self.connection.close()
