"""An append-only file of JSON lines from which an interrupted run goes on; each line is written whole or not at all."""

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError


class LinesFile(Closing):
    """The file, open for one run alone. A context manager."""

    def __init__(
        self, path: Path, accept: Callable[[bytes], None] = lambda line: None, warn: Callable[[str], None] | None = None
    ) -> None:
        """Open the file or begin it; the last line of a killed run is completed or dropped.

        accept: may raise at the first line, before anything is changed.
        """
        self.path = path
        self._warn = warn or (lambda text: print(f"cuda-l2: {text}", file=sys.stderr))
        self._file = open_alone(path)
        try:
            self.lines = self._read(accept)
        except BaseException:
            self._file.close()
            raise

    def append(self, *texts: str) -> None:
        """Append lines, which are on disk when this returns; UserError where the disk is full."""
        self._append("".join(f"{text}\n" for text in texts).encode())

    def close(self) -> None:
        self._file.close()

    def _read(self, accept: Callable[[bytes], None]) -> list[bytes]:
        data = self.path.read_bytes()
        if not data:
            return []
        *lines, tail = data.split(b"\n")
        accept((lines or [tail])[0])
        if tail and parsed(tail):
            lines.append(tail)  # all but its end was written
            self._append(b"\n")
        elif tail:
            self._warn(f"the last line of {self.path} is damaged and dropped")
            os.ftruncate(self._file.fileno(), len(data) - len(tail))
        return lines

    def _append(self, data: bytes) -> None:
        try:
            start = os.lseek(self._file.fileno(), 0, os.SEEK_END)
            if os.write(self._file.fileno(), data) != len(data):
                os.ftruncate(self._file.fileno(), start)
                raise OSError(28, "no space left")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; what was stored before is kept") from None


def open_alone(path: Path) -> FileIO:
    """The file for appending, held against other runs until it is closed; UserError where one has it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a+")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place with --out") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise UserError(f"another run is writing {path}: wait for it, or choose another place with --out") from None
    return file


def set_aside(folder: Path, first: str, *others: str) -> None:
    """Rename an earlier run's files, all with the same number: results.jsonl becomes results-1.jsonl.

    first: the file that a run holds; UserError while one does.
    """
    present = [folder / name for name in (first, *others) if (folder / name).exists()]
    if not present:
        return
    if folder / first in present:
        open_alone(folder / first).close()
    taken = [int(m.group(1)) for path in folder.iterdir() if (m := re.search(r"-(\d+)\.\w+$", path.name))]
    number = max(taken, default=0) + 1
    for path in present:
        path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line's fields; None where it is damaged."""
    try:
        fields = json.loads(line)
    except ValueError:  # text that is no UTF-8 too
        return None
    return fields if isinstance(fields, dict) else None
