"""What was built, addressed by content. An entry appears by one rename: a killed build leaves nothing half-written."""

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from cuda_l2.records import Build, from_json, to_json
from cuda_l2.system import lock, paths, scratch

RECORD = "build.json"


def entry(parts: Iterable[str]) -> Path:
    """The folder of what was built from these: source, flags, compiler, rules, sandbox."""
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()
    return (paths.cache_dir() / "builds").resolve() / digest[:32]


@functools.cache
def rules_version(*modules: ModuleType) -> str:
    """Changes with the rules' own text, so that what older ones let through is judged again."""
    return hashlib.sha256(b"".join(Path(module.__file__ or "").read_bytes() for module in modules)).hexdigest()


def find(folder: Path) -> Build | None:
    """What was built there before; None where nothing was, or it is damaged."""
    if not (folder / RECORD).exists():
        return None
    try:
        found = from_json(Build, (folder / RECORD).read_text())
        if not found.artifact or scratch.is_whole(Path(found.artifact)):
            return found
    except (ValueError, TypeError):
        pass  # written by another version
    shutil.rmtree(folder, ignore_errors=True)
    return None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold what is to become an entry against other threads and processes: who waits finds it there."""
    with lock.held(f"locks/{folder.name}") as path:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who comes now finds the entry


def publish(work: Path, folder: Path, result: Build) -> None:
    """Make the work folder the entry, with its record in it. OSError where the disk does not take it."""
    if result.artifact:
        scratch.seal(work / Path(result.artifact).name)
    (work / RECORD).write_text(to_json(result))
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        work.rename(folder)
    except OSError:
        if not (folder / RECORD).exists():  # another process published the same content: as good as ours
            raise
