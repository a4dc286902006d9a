"""Short-lived folders under the cache. What a killed process left behind goes when a later one starts."""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

STALE_S = 3600.0


def make_folder() -> Path:
    """A new folder, the caller's to rename or remove; UserError where the cache cannot be written."""
    parent = paths.cache_dir() / "scratch"
    with writing():
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent)
        return Path(tempfile.mkdtemp(dir=parent))


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A new folder that is removed in the end, where it is still there; UserError where the cache cannot be written."""
    made = make_folder()
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove what can be removed of a folder; follows no link."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # folders in folders, a thousand deep
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)


def require_executable(folder: Path) -> None:
    """UserError where the folder lies on a mount from which no program runs and no library loads."""
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise UserError(
            f"the cache {paths.cache_dir()} lies on a mount with noexec, from which no kernel can be loaded; set"
            " CUDA_L2_CACHE to a folder on another"
        )


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache through a name of its own, so that a reader sees all or nothing."""
    with writing(), folder() as own:
        path.parent.mkdir(parents=True, exist_ok=True)
        (own / path.name).write_bytes(content)
        (own / path.name).replace(path)


def seal(path: Path) -> None:
    """Keep a file's hash beside it, by which `is_whole` knows it. OSError where it cannot be written."""
    _seal(path).write_bytes(hashlib.sha256(path.read_bytes()).digest())


def is_whole(path: Path) -> bool:
    """Whether a sealed file is there and as it was sealed: a crash or a full disk may have cut it short."""
    try:
        return _seal(path).read_bytes() == hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return False


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """UserError in place of an OSError, which means that the cache cannot be written."""
    try:
        yield
    except OSError as error:
        raise unwritable(error) from None


def unwritable(error: OSError) -> UserError:
    """The error for a cache that cannot be written."""
    return UserError(
        f"cannot write the cache {paths.cache_dir()}: {error.strerror}; free some space, or set CUDA_L2_CACHE"
    )


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


@functools.cache
def _sweep(parent: Path) -> None:
    for folder in parent.iterdir():
        try:
            stale = time.time() - folder.stat().st_mtime > STALE_S
        except OSError:
            continue  # gone meanwhile
        if stale:
            remove(folder)
