"""Files in KernelBench's format, found in a checkout or given one by one.

A collection lies in folders level1, level_2, ..., which KernelBench has in KernelBench/ and others in tasks/ or
elsewhere, or flat in one folder, or a folder a task. Files are read here and run only in a sandbox.
"""

import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.kernelbench.examined import Readiness, Refused
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import KERNELBENCH

MAX_SOURCE_BYTES = 1 << 20
MAX_FOLDERS = 2000
DEPTH = 3
"""Folders between a checkout and its levels, at most."""
_LEVEL = re.compile(r"level[_-]?(\d{1,3})", re.I)
_FORMAT = (b"get_inputs", b"get_init_inputs", b"Model")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. name: as a task's; level: 0 where the file is in no level; revision: of the file's text."""

    name: str
    level: int
    revision: str
    path: Path


def entries(checkout: Path, levels: Sequence[int] = ()) -> list[Entry]:
    """The files of these levels, of all without, in their own order; UserError where there are none."""
    folders = _level_folders(checkout)
    if folders:
        wanted = sorted(set(levels) & folders.keys()) if levels else sorted(folders)
        found = [_entry(p, f"level{n}/", n) for n in wanted for p in sorted(folders[n].glob("*.py"), key=_number)]
        if not found and levels:
            missing, known = (", ".join(map(str, sorted(each))) for each in (levels, folders))
            raise UserError(f"no files of level {missing} in {checkout}, which has level {known}")
        return found
    flat = [path for path in sorted(checkout.glob("*.py"), key=_number) if _in_format(path)]
    nested = [path for path in sorted(checkout.glob("*/*.py")) if _in_format(path)] if not flat else []
    found = [_entry(path) for path in flat] + [_entry(path, f"{_word(path.parent.name)}/") for path in nested]
    if not found or levels:
        raise UserError(
            f"no tasks in {checkout}: looked for folders named level1 or level_1 in it and up to {DEPTH} folders below,"
            " and without them for Python files with Model, get_inputs and get_init_inputs in it and in its folders"
            + ("; a level is asked for, and there is no such folder" if levels else "")
        )
    return found


def entry_of(path: Path) -> Entry:
    """One file by its path, whatever folder it is in; UserError where there is none."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    return _entry(path.resolve())


def find_entry(checkout: Path, name: str) -> Entry:
    """The file of a checkout that `kernelbench/level1/NAME` names, in full or by its number; UserError without one."""
    known = entries(checkout)
    found = [entry for entry in known if _matches(entry.name, name)]
    if len(found) != 1:
        near = [entry.name for entry in known][:6]
        raise UserError(f"there is no file {name!r} in {checkout}; its files are named {', '.join(near)}, ...")
    return found[0]


def read_source(path: Path) -> bytes:
    """A regular file's bytes; Refused for links, pipes, a text that is too long or cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Refused(Readiness.MALFORMED, "not a regular file")
            text = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        reason = "not a regular file" if path.is_symlink() else f"cannot be read: {error.strerror}"
        raise Refused(Readiness.MALFORMED, reason) from None
    if len(text) > MAX_SOURCE_BYTES:
        raise Refused(Readiness.MALFORMED, f"the file is longer than {MAX_SOURCE_BYTES} bytes")
    return text


def revision_of(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:12]


def _level_folders(checkout: Path) -> dict[int, Path]:
    """Folders by their level: those beside one another that are nearest to the checkout, or the checkout itself."""
    if match := _LEVEL.fullmatch(checkout.resolve().name):
        return {int(match[1]): checkout}
    for folder in itertools.islice(_folders(checkout), MAX_FOLDERS):
        matches = ((_LEVEL.fullmatch(path.name), path) for path in _subfolders(folder))
        found = {int(match[1]): path for match, path in matches if match and any(path.glob("*.py"))}
        if found:
            return found
    return {}


def _folders(checkout: Path) -> Iterator[Path]:
    """A folder and those below, the nearest first, KernelBench's and METR's before others beside them."""
    layer = [checkout]
    for _ in range(DEPTH):
        yield from layer
        layer = [below for folder in layer for below in _subfolders(folder)]
        layer.sort(key=lambda path: (path.name not in ("KernelBench", "tasks"), path))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink() and not p.name.startswith("."))
    except OSError:
        return []


def _in_format(path: Path) -> bool:
    try:
        text = read_source(path)
    except Refused:
        return False
    return all(word in text for word in _FORMAT)


def _entry(path: Path, folder: str = "", level: int = 0) -> Entry:
    try:
        revision = revision_of(read_source(path))
    except Refused:
        revision = ""  # running it says why
    return Entry(f"{KERNELBENCH}/{folder}{_word(path.stem)}", level, revision, path)


def _word(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name)


def _number(path: Path) -> tuple[int, str]:
    match = re.match(r"\d{1,9}", path.stem)
    return (int(match.group()) if match else 1 << 30, path.stem)


def _matches(known: str, name: str) -> bool:
    folder, _, stem = known.rpartition("/")
    return name in (known, f"{folder}/{stem.partition('_')[0]}")
