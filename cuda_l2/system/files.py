"""Files that are read or written whole, tables as Markdown and CSV, and packages that may be missing."""

import contextlib
import csv
import importlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cuda_l2.system.errors import UserError

OUT = "choose another place with --out"
OWN_BYTES = 4096
"""Beginning of a file by which it is known as ours."""
MOST_BYTES = 256 << 20
"""Size of a text file that is read."""


def read_text(path: Path) -> str:
    """A text file of the user's. UserError where it cannot be read, or has more than `MOST_BYTES`."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"cannot read {path}: it has more than {MOST_BYTES >> 20} MiB")
        return io.TextIOWrapper(io.BytesIO(content), "utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is no text in UTF-8, by its byte {error.start}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def imported(package: str, what: str, extra: str) -> Any:
    """An optional package. UserError where it is missing. what: what needs it. extra: the part of ours that has it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(f"{what} the package {error.name}: pip install 'cuda-l2[{extra}]'") from None


def require_own(path: Path, mark: str, what: str, advice: str = OUT) -> None:
    """UserError where something is there that is not ours to replace; an empty file may be replaced.

    mark: pattern that the beginning of a file of ours matches. what: the noun for ours.
    """
    try:
        if not path.exists():
            return
        begins = b"?"  # a folder, or a pipe, which would wait for a writer
        if path.is_file():
            with path.open("rb") as file:
                begins = file.read(OWN_BYTES)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    if begins and not re.match(mark.encode(), begins, re.DOTALL):
        raise UserError(f"{path} is there, and is no {what}: {advice}")


@contextlib.contextmanager
def whole(path: Path, advice: str = OUT, *, new: bool = False) -> Iterator[Path]:
    """A path to write to that becomes the file only when all is written. UserError where it cannot be.

    Through a symbolic link its target is written. new: UserError too where the file is there by then, as another
    process may have been quicker.
    """
    target = path if new else Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError("it is a device, a pipe or a socket, which no file may replace")
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if new:
            os.link(partial, target)  # fails where the file is there
        else:
            partial.replace(target)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str, advice: str = OUT, *, new: bool = False) -> None:
    """Write a text file whole. UserError where it cannot be, with `new` where it is there."""
    write_bytes(path, text.encode(), advice, new=new)


def write_bytes(path: Path, content: bytes, advice: str = OUT, *, new: bool = False) -> None:
    """Write a file of bytes whole, as `write_text` does."""
    with whole(path, advice, new=new) as partial:
        partial.write_bytes(content)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    lines = [" | ".join(map(str, row)) for row in rows]
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {line} |" for line in lines)]


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV with its columns' names in the first line."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
