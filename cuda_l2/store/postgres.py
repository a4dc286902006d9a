"""An archive on a PostgreSQL server, in a schema `cuda_l2` of its database.

A connection that is lost is made again, and what was being run is run again: every statement that writes may be sent
twice. Only what the server has acknowledged counts as stored.
"""

import logging
import sys
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cuda_l2.store import statements
from cuda_l2.store._base import SCHEMA_VERSION, Database, Mode, Rows, Step, StoreFault, Values
from cuda_l2.store.schema import about
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.system.place import Server

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
SCHEMA = "cuda_l2"
LOCK = 0x63756461_6C32
"""Key of the advisory lock under which an archive is made."""
PATIENCE_S = 120.0
"""How long a lost server is asked for again."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
SETTINGS: dict[str, Any] = {
    "connect_timeout": 10,
    "application_name": "cuda-l2",
    # a network that drops is noticed within half a minute
    **{"keepalives": 1, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3},
    "tcp_user_timeout": 30_000,
}
TRANSIENT = ("08", "40", "53", "57P")
"""Classes of SQLSTATE after which the same may succeed: connection, rollback, resources, shutdown."""
REFUSED = {
    "password authentication failed": "user or password is wrong; put the password into PGPASSWORD or ~/.pgpass",
    "no password supplied": "it needs a password: put it into PGPASSWORD or ~/.pgpass",
    "no pg_hba.conf entry": "the server lets this user in from no such address",
}
"""What a server says at the door, and what a user is told."""


class PostgresDatabase(Database):
    """One connection to the server. `patience_s`: how long a lost server is asked for again."""

    dialect = "postgresql"

    def __init__(self, server: Server, mode: Mode, patience_s: float = PATIENCE_S) -> None:
        """UserError where the server or the database cannot be used as the mode says."""
        self.place: Server = server
        logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of each lost connection, of which we tell
        self._psycopg = imported("psycopg", f"the archive {server} needs", "postgres")
        self._patience_s, self._gave_up = patience_s, False
        self._identity, self._stored = "", 0  # the last trial that the server acknowledged to this connection
        try:
            self._connection: psycopg.Connection[Any] | None = self._connect()
        except self._psycopg.Error as error:
            raise self._refused(error) from None
        try:
            self._prepare(mode)
        except self._psycopg.Error as error:
            raise UserError(f"cannot use the archive {server}: {self._said(error)}; see docs/scale.md") from None

    def _connect(self) -> "psycopg.Connection[Any]":
        given = self.place.options()
        # a connection of a short search runs few statements: none is planned twice
        path = f"-c search_path={SCHEMA} -c plan_cache_mode=force_generic_plan"
        options = f"{given.pop('options', '')} {path}".strip()
        made: psycopg.Connection[Any] = self._psycopg.connect(
            **{**SETTINGS, **given, "options": options}, autocommit=True, prepare_threshold=0
        )
        return made

    def _refused(self, error: Exception) -> UserError:
        said = self._said(error)
        reason = next((reason for words, reason in REFUSED.items() if words in said), said)
        return UserError(f"cannot open the archive {self.place}: {reason}")

    def _said(self, error: Exception) -> str:
        """An error's text in one line, without the password."""
        return self.place.without_password(" ".join(str(error).split())) or type(error).__name__

    def _prepare(self, mode: Mode) -> None:
        assert self._connection is not None
        if self._look() is None:
            if mode != "make":
                raise UserError(f"{self.place} holds no archive; a search makes one, or choose another with --archive")
            self._connection.execute("SELECT pg_advisory_lock(%s)", (LOCK,))  # two searches may meet a new database
            with self._connection.transaction():  # begun after the lock, so that it sees what the other one made
                if self._look() is None:
                    self._make()
            self._connection.execute("SELECT pg_advisory_unlock(%s)", (LOCK,))
        found = self._look()
        assert found is not None
        version, self._identity = found
        if version != SCHEMA_VERSION:
            raise UserError(
                f"{self.place} has archive version {version}, this program reads {SCHEMA_VERSION}; "
                "use the program that wrote it, or choose another with --archive"
            )
        if mode != "read" and self._connection.execute("SHOW transaction_read_only").fetchone() == ("on",):
            raise UserError(
                f"{self.place} can only be read: it is a standby, or writing is switched off; name the primary server"
            )

    def _look(self) -> tuple[int, str] | None:
        """The archive's version and identity; None where there is no archive."""
        assert self._connection is not None
        if self._connection.execute("SELECT to_regclass('about')").fetchone() == (None,):
            return None
        found = self._connection.execute("SELECT version, identity FROM about").fetchone()
        return (int(found[0]), str(found[1])) if found else None

    def _make(self) -> None:
        assert self._connection is not None
        self._connection.execute(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}")
        query = "SELECT count(*) FROM pg_tables WHERE schemaname = %s"
        if self._connection.execute(query, (SCHEMA,)).fetchone() != (0,):
            raise UserError(
                f"{self.place} has tables of another program in the schema {SCHEMA};"
                " name another database with --archive"
            )
        for text in [*statements.tables(self.dialect), *statements.tables(self.dialect, [about])]:
            self._connection.execute(text)
        self._connection.execute("INSERT INTO about VALUES (%s, %s)", (SCHEMA_VERSION, uuid.uuid4().hex))

    def read(self, name: str, values: Values | None = None, *filters: str) -> Rows:
        text, constants = statements.statement(name, self.dialect, filters)
        given = {**constants, **(values or {})}
        return self._run(lambda connection: connection.execute(text, given).fetchall())

    def write(self, *steps: Step) -> Rows:
        compiled = [statements.statement(name, self.dialect) for name, _ in steps]
        texts = [(text, {**constants, **step[1]}) for (text, constants), step in zip(compiled, steps, strict=True)]

        def run(connection: "psycopg.Connection[Any]") -> Rows:
            if len(texts) == 1:
                done = [connection.execute(*texts[0])]
            else:
                with connection.pipeline(), connection.transaction():  # one journey for all
                    done = [connection.execute(text, values) for text, values in texts]
            added = [each.fetchall() if each.description else [] for each in done]
            for (name, _), rows in zip(steps, added, strict=True):
                if name == "append" and rows:
                    self._stored = int(rows[0][0])
            return added[-1]

        return self._run(run)

    def _run(self, work: "Callable[[psycopg.Connection[Any]], T]") -> T:
        """Run something on the connection; where it is lost, again on a new one, until the patience ends."""
        wait_s, deadline = FIRST_WAIT_S, 0.0
        while True:
            try:
                if self._connection is None:
                    self._connection = self._again()
                done = work(self._connection)
                self._gave_up = False
                return done
            except self._psycopg.Error as error:
                if not self._is_transient(error):
                    raise StoreFault(self._said(error)) from None
                if not deadline and not self._gave_up:
                    deadline = time.monotonic() + self._patience_s
                    self._tell(f"{self._said(error)}; trying again for up to {self._patience_s:g} s")
                if time.monotonic() >= deadline:
                    self._gave_up = True  # what follows is asked once
                    raise StoreFault(f"no answer for {self._patience_s:g} s: {self._said(error)}") from None
            if self._connection is not None and self._connection.closed:
                self._connection = None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _is_transient(self, error: Exception) -> bool:
        state = getattr(error, "sqlstate", None)
        if state:
            return str(state).startswith(TRANSIENT)
        return isinstance(error, self._psycopg.OperationalError | self._psycopg.InterfaceError)

    def _again(self) -> "psycopg.Connection[Any]":
        """A new connection to the same archive. UserError where another server has taken its place without it."""
        made = self._connect()
        try:
            found = made.execute("SELECT version, identity FROM about").fetchone()
            text, constants = statements.statement("trial is there", self.dialect)
            last = made.execute(text, {**constants, "number": self._stored}).fetchone()
        except BaseException:
            made.close()
            raise
        if found != (SCHEMA_VERSION, self._identity) or (self._stored and last is None):
            made.close()
            raise UserError(
                f"{self.place} is answered by another server, which lacks trials that the first had stored: two servers"
                " may be in use; stop the searches, and name the one that has them"
            )
        return made

    def _tell(self, note: str) -> None:
        print(f"cuda-l2: the archive {self.place}: {note}", file=sys.stderr, flush=True)

    def has(self, table: str) -> bool:
        return self._run(lambda c: c.execute("SELECT to_regclass(%s)", (table,)).fetchone()) != (None,)

    def damage(self) -> list[str]:
        return []  # the server's own checksums and pg_amcheck look for it

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
