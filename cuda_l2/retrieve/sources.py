"""Lists the files to index: CUDA, CCCL, CUTLASS and ATen headers of installed wheels, and the user's folders."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.system.errors import UserError

SUFFIXES = (".h", ".hpp", ".cuh", ".cu", ".c", ".cc", ".cpp", ".inl", ".inc")
MAX_FILE_BYTES = 1 << 20
"""Larger files are tables or generated."""
USER = "user"


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of code. Files are named relative to `root`."""

    name: str
    root: Path
    folders: tuple[str, ...] = (".",)
    without: tuple[str, ...] = ()  # beginnings of names to leave out


@dataclass(frozen=True, slots=True)
class File:
    source: str
    name: str  # the source's name and the path within it, as a reader of a prompt sees it
    path: Path
    stamp: str  # changes when the file does


def installed_sources() -> list[Source]:
    """The header folders of known wheels that are installed here."""
    found = []
    for root in _package_roots("nvidia"):
        for include in sorted(root.glob("cu*/include")) + sorted(root.glob("*/include")):
            if (include / "cuda_fp16.h").is_file():
                found.append(
                    Source("cuda", include, (".",), ("cccl/", "cupti", "sanitizer", "generated_", "cudaGL", "Open"))
                )
            if (include / "cccl").is_dir():
                found.append(Source("cccl", include / "cccl"))
    for root in _package_roots("cutlass_library"):
        if (root / "source" / "include").is_dir():
            found.append(Source("cutlass", root / "source", ("include", "examples/cute")))
    for root in _package_roots("torch"):
        folders = tuple(f"ATen/{part}" for part in ("cpu", "cuda", "native"))
        without = ("ATen/native/mps", "ATen/native/hip", "ATen/cpu/vec/vec256/zarch", "ATen/cpu/vec/vec256/vsx")
        found.append(Source("aten", root / "include", folders, without))
    unique = {source.root.resolve(): source for source in reversed(found)}
    return sorted(unique.values(), key=lambda source: source.name)


def user_sources(folders: Sequence[Path]) -> list[Source]:
    """The user's folders; UserError where one is not there."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder; give folders of code with --folder")
    return [Source(USER, folder.resolve()) for folder in folders]


def files(source: Source) -> Iterator[File]:
    """Every file to index, in a fixed order, without unreadable files and links out of the root."""
    for folder in source.folders:
        for parent, names, leaves in os.walk(source.root / folder):
            names[:] = sorted(name for name in names if not name.startswith("."))
            for leaf in sorted(leaves):
                path = Path(parent) / leaf
                # headers of the standard library style have no suffix
                if path.suffix not in SUFFIXES and not (source.name == "cccl" and not path.suffix):
                    continue
                name = path.relative_to(source.root).as_posix()
                if name.startswith(source.without or ("\0",)):
                    continue
                try:
                    facts = path.stat()
                    inside = path.resolve().is_relative_to(source.root.resolve())
                except OSError:
                    continue
                if inside and 0 < facts.st_size <= MAX_FILE_BYTES:
                    yield File(source.name, f"{source.name}: {name}", path, f"{facts.st_mtime_ns}:{facts.st_size}")


def _package_roots(name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations or ()]
