"""Opens SQLite files that several processes share: write-ahead logging and a long timeout for locks."""

import os
import sqlite3
import time
from pathlib import Path

BUSY_TIMEOUT_S, RETRY_S = 30.0, 0.01


def connect(path: Path) -> sqlite3.Connection:
    """A connection that commits each statement. sqlite3.Error where the file cannot be written or is not SQLite's."""
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    _write_ahead(db)
    db.execute("PRAGMA synchronous=NORMAL")
    return db


def connect_to_read(path: Path) -> sqlite3.Connection:
    """A connection for a file that need not be writable and may be another program's. sqlite3.Error if not readable.

    For a file that is not writable, SQLite may have no place for its write-ahead log: changes that a writer has not yet
    moved into the file itself are missing.
    """
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    return _read_only(path, BUSY_TIMEOUT_S)


def connect_to_watch(path: Path) -> sqlite3.Connection:
    """A connection for one short look, which writes nothing, also beside the file. sqlite3.Error as above."""
    if path.with_name(f"{path.name}-wal").exists():
        return _read_only(path, timeout_s=1.0)
    return _unchanging(path)  # nobody writes, and SQLite is not to make a log


def _read_only(path: Path, timeout_s: float) -> sqlite3.Connection:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", timeout=timeout_s, isolation_level=None, uri=True)
    try:
        db.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:
        db.close()
        db = _unchanging(path)
    return db


def _unchanging(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", isolation_level=None, uri=True)


def _write_ahead(db: sqlite3.Connection) -> None:
    """Turn write-ahead logging on. SQLite ignores its timeout here while another process does the same."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return
