"""Opens the database of an archive."""

from cuda_l2.store._base import Database, Mode
from cuda_l2.system.place import Place, Server


def open_database(place: Place, mode: Mode) -> Database:
    """The database of a file or of a server. UserError where it cannot be used as the mode says.

    SQLAlchemy (0.2 s) and psycopg load here: what opens no archive does not wait for them.
    """
    if isinstance(place, Server):
        from cuda_l2.store.postgres import PostgresDatabase  # noqa: PLC0415

        return PostgresDatabase(place, mode)
    from cuda_l2.store.sqlite import SqliteDatabase  # noqa: PLC0415

    return SqliteDatabase(place, mode)
