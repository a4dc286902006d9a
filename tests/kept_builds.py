"""The part of the cache that runs of pytest share: what was compiled, addressed by content.

Everything else of a run's cache, and its home, is its own. What builds and holds candidates is part of the address: when
it changes, everything is built afresh.
"""

import os
import shutil
import time
from pathlib import Path

from drawing import ROOT, digest

FOLDER = ROOT / ".build-cache"
ADDRESS = ("cuda_l2/build", "cuda_l2/contract", "cuda_l2/system/sandbox.py")
KEPT = ("builds", "helpers", "inductor", "locks", "on-cpu", "scratch")
MOST_FOLDERS = 3
LONGEST_S = 14 * 24 * 3600.0


def link(cache: Path) -> None:
    """Let a run's cache use what earlier runs compiled."""
    shared = FOLDER / digest(*ADDRESS)
    cache.mkdir(parents=True)
    for name in KEPT:
        (shared / name).mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(shared / name)
    os.utime(shared)


def prune() -> None:
    """Remove what earlier trees compiled, but of the last few, and what was compiled weeks ago."""
    if not FOLDER.exists():
        return
    trees = sorted(FOLDER.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    entries = [entry for tree in trees[:MOST_FOLDERS] for name in KEPT for entry in (tree / name).glob("*")]
    old = [entry for entry in entries if time.time() - entry.stat().st_mtime > LONGEST_S]
    for folder in [*trees[MOST_FOLDERS:], *old]:
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
