"""Finds the known cheats that are nearest to a kernel."""

import re
from collections.abc import Sequence
from pathlib import Path

from cuda_l2.retrieve.nearest import Nearest
from cuda_l2.system.paths import PACKAGE

SUFFIXES = {"cpu": (".c",), "cuda": (".cu",)}
MAX_FILE_BYTES = 1 << 18
_HONEST = re.compile(r"expect: measured \*/")
"""Marks an honest control among the repository's cheats."""


def default_folders() -> list[Path]:
    """The repository's own corpora where the package runs from a checkout; none in a wheel."""
    root = PACKAGE.parent
    return [folder for name in ("cheats", "cuda_cheats") if (folder := root / "tests" / name).is_dir()]


class Cheats:
    """The cheats for one kind of machine. UserError without the package bm25s."""

    def __init__(self, folders: Sequence[Path], target: str) -> None:
        self._texts: list[tuple[str, str]] = []
        for folder in folders:
            for path in sorted(folder.iterdir()):
                if path.suffix in SUFFIXES[target] and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                    text = path.read_text(errors="replace")
                    if not _HONEST.search(text):
                        self._texts.append((path.stem, text))
        self._index = Nearest([text for _, text in self._texts])

    def __len__(self) -> int:
        return len(self._texts)

    def nearest(self, source: str, count: int) -> list[tuple[str, str]]:
        """Names and texts, the nearest first."""
        return [self._texts[place] for place in self._index.search(source, count)]
