"""Files that are written whole or not at all, and tables as Markdown and CSV."""

import contextlib
import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cuda_l2.system.errors import UserError


@contextlib.contextmanager
def whole(path: Path, advice: str = "choose another place with --out") -> Iterator[Path]:
    """A path to write to that becomes the file only when all is written. UserError where it cannot be."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str, advice: str = "choose another place with --out") -> None:
    """Write a text file whole. UserError where it cannot be."""
    with whole(path, advice) as partial:
        partial.write_text(text)


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
