"""A bm25 index over pieces of code, kept in the cache: built file by file, refreshed where files changed.

Pieces lie in a SQLite file, so that an interrupted build goes on where it was; the index proper is made from them
at the end and published by one rename.
"""

import contextlib
import fcntl
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuda_l2.retrieve.chunks import chunks, words
from cuda_l2.retrieve.nearest import bm25s, ranked
from cuda_l2.retrieve.sources import File, Source, files
from cuda_l2.system import paths, scratch
from cuda_l2.system.database import connect
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text

VERSION = "1"
"""Version of how pieces and words are cut."""
FILES_A_COMMIT = 50
SAME = 0.7
"""Two pieces that share this much of their words (of both together) count as one."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, source TEXT NOT NULL, name TEXT NOT NULL, stamp TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pieces (
    number INTEGER PRIMARY KEY, path TEXT NOT NULL, line INTEGER NOT NULL, text TEXT NOT NULL, words TEXT NOT NULL,
    hash TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS pieces_by_path ON pieces (path);
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of code that a search found."""

    source: str
    name: str
    line: int
    text: str
    score: float


@dataclass
class Progress:
    """The counts of an index's refresh so far."""

    files: int = 0
    done: int = 0
    read: int = 0  # of those done: new or changed
    removed: int = 0
    pieces: int = 0


def index_folder() -> Path:
    return paths.cache_dir() / "retrieve"


def refresh(
    sources: Sequence[Source], on_progress: Callable[[Progress], None] = lambda progress: None, *, anew: bool = False
) -> Progress:
    """Bring the index to what the sources hold now; files that did not change are not read again.

    Waits for another refresh to end: each removes what the other has not published yet.
    """
    folder = index_folder()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if anew:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            return _refresh(folder, sources, on_progress)
    except sqlite3.Error as error:
        raise UserError(f"cannot keep the index in {folder}: {error}; free some space, or set CUDA_L2_CACHE") from None
    except OSError as error:
        raise scratch.unwritable(error) from None


def _refresh(folder: Path, sources: Sequence[Source], on_progress: Callable[[Progress], None]) -> Progress:
    package, progress = bm25s(), Progress()
    with contextlib.closing(_open(folder)) as db:
        found = [file for source in sources for file in files(source)]
        progress.files = len(found)
        stamps = dict(db.execute("SELECT path, stamp FROM files"))
        _remove(db, set(stamps) - {str(file.path) for file in found}, progress)
        for start in range(0, len(found), FILES_A_COMMIT):
            db.execute("BEGIN IMMEDIATE")
            for file in found[start : start + FILES_A_COMMIT]:
                if stamps.get(str(file.path)) != file.stamp:
                    _read(db, file)
                    progress.read += 1
                progress.done += 1
            db.execute("COMMIT")
            on_progress(progress)
        fingerprint = _fingerprint(db)
        (progress.pieces,) = db.execute("SELECT count(DISTINCT hash) FROM pieces").fetchone()
        if not progress.pieces:
            raise UserError(
                "there is nothing to index: no known headers are installed: pip install 'cuda-l2[cuda]', or --folder"
            )
        if not (folder / fingerprint / "numbers.npy").exists():
            # the words beside min() are those of the piece with the least number, as SQLite promises
            first = db.execute("SELECT min(number), words FROM pieces GROUP BY hash ORDER BY 1").fetchall()
            index = package.BM25()
            index.index([text.split() for _, text in first], show_progress=False)
            work = scratch.make_folder()
            index.save(work, show_progress=False)
            np.save(work / "numbers.npy", np.array([number for number, _ in first]))
            shutil.rmtree(folder / fingerprint, ignore_errors=True)
            work.rename(folder / fingerprint)
        _publish(folder, fingerprint)
    return progress


class Index:
    """The index as last built. UserError where there is none."""

    def __init__(self) -> None:
        package = bm25s()
        folder = index_folder()
        try:
            current = json.loads((folder / "current.json").read_text())
            if current["version"] != VERSION:
                raise ValueError("of another version")
            self._numbers = np.load(folder / current["index"] / "numbers.npy")
            self._index = package.BM25.load(folder / current["index"], verbosity=0)
            self._db = _open(folder)
        except (OSError, ValueError, KeyError, sqlite3.Error):
            raise UserError("there is no index of headers yet: build it with `cuda-l2 index`") from None
        by_number = dict(
            self._db.execute("SELECT number, source FROM pieces JOIN files ON files.path = pieces.path").fetchall()
        )
        self._sources = np.array([by_number.get(number, "") for number in self._numbers.tolist()])

    def search(self, query: str, count: int = 5, sources: Sequence[str] = ()) -> list[Piece]:
        """The pieces nearest to the query, best first, no two nearly alike. sources: only of these, all where empty."""
        mask = np.isin(self._sources, list(sources)) if sources else self._sources != ""
        most = min(4 * count, len(self._numbers))
        found: list[Piece] = []
        seen: list[set[str]] = []
        for place, score in ranked(self._index, query, most, mask.astype(np.float32)):
            if len(found) >= count:
                break
            row = self._db.execute(
                "SELECT source, name, line, text, words FROM pieces JOIN files ON files.path = pieces.path"
                " WHERE number = ?",
                (int(self._numbers[place]),),
            ).fetchone()
            if row is None:  # refreshed meanwhile
                continue
            source, name, line, body, own_words = row
            own = set(own_words.split())
            if any(len(own & other) > SAME * len(own | other) for other in seen):
                continue
            seen.append(own)
            found.append(Piece(source, name, line, body, float(score)))
        return found

    def close(self) -> None:
        self._db.close()


def _open(folder: Path) -> sqlite3.Connection:
    db = connect(folder / f"pieces-{VERSION}.db")
    db.executescript(_SCHEMA)
    return db


def _read(db: sqlite3.Connection, file: File) -> None:
    try:
        text = file.path.read_text(errors="replace")
    except OSError:
        return
    path = str(file.path)
    db.execute("DELETE FROM pieces WHERE path = ?", (path,))
    rows = []
    for chunk in chunks(text):
        found = " ".join(words(chunk.text))
        digest = hashlib.sha256(" ".join(chunk.text.split()).encode(errors="replace")).hexdigest()[:16]
        if found:
            rows.append((path, chunk.line, chunk.text, found, digest))
    db.executemany("INSERT INTO pieces (path, line, text, words, hash) VALUES (?, ?, ?, ?, ?)", rows)
    db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", (path, file.source, file.name, file.stamp))


def _remove(db: sqlite3.Connection, gone: set[str], progress: Progress) -> None:
    db.execute("BEGIN IMMEDIATE")
    for path in gone:
        db.execute("DELETE FROM pieces WHERE path = ?", (path,))
        db.execute("DELETE FROM files WHERE path = ?", (path,))
    db.execute("COMMIT")
    progress.removed = len(gone)


def _fingerprint(db: sqlite3.Connection) -> str:
    """A hash of the pieces and their numbers, which the index holds."""
    digest = hashlib.sha256(VERSION.encode())
    for row in db.execute("SELECT number, hash FROM pieces ORDER BY number"):
        digest.update(f"{row[0]} {row[1]}\n".encode())
    return digest.hexdigest()[:16]


def _publish(folder: Path, fingerprint: str) -> None:
    """Name the index that readers open; older ones go."""
    write_text(folder / "current.json", json.dumps({"version": VERSION, "index": fingerprint}), "set CUDA_L2_CACHE")
    for other in folder.iterdir():
        if other.is_dir() and other.name != fingerprint:
            shutil.rmtree(other, ignore_errors=True)
