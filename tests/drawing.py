"""Which tests a run of pytest takes: all of them, or those that are quick and a sample of every corpus.

A corpus is a parametrised test with the marker `corpus(count)`: `make test` takes that many of its cases, drawn by a
hash, and one more that carries the marker `honest`, where there are such cases. The hash is of the tree's files, so
that every change of the tree draws other cases, and `--draw KEY` repeats a drawing. Inputs are drawn by it too.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cuda_l2", "tests")


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests marked `full`, and whole corpora")
    parser.addoption("--draw", metavar="KEY", help="draw the corpora's samples by this key, not by the tree's files")


@cache
def digest(*folders: str) -> str:
    """A hash of the files under these folders or at these paths of the tree, without what Python leaves there."""
    found = hashlib.sha256()
    for path in sorted(path for name in folders for path in _files(ROOT / name)):
        found.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return [each for each in path.rglob("*") if each.is_file() and "__pycache__" not in each.parts]


def cases(files: Iterable[Any], honest: Callable[[Any], bool], name: Callable[[Any], str]) -> list[Any]:
    """Parameters for `parametrize`, one a file of a corpus, with marks on the honest ones."""
    return [pytest.param(file, id=name(file), marks=[pytest.mark.honest] if honest(file) else []) for file in files]


def is_honest(path: Path) -> bool:
    """Whether a corpus of C files expects this one to be accepted."""
    return "expect: measured */" in path.read_text()


def prepare(config: pytest.Config) -> None:
    """Settle the key, which the workers get with the options."""
    config.option.draw = config.option.draw or digest(*FOLDERS)


def header(config: pytest.Config) -> str:
    if config.option.all:
        return f"corpora: whole; `--draw {config.option.draw}` draws the same inputs again"
    return f"corpora: a sample each; `--draw {config.option.draw}` draws the same again, `--all` takes everything"


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what this run leaves out. What is named on the command line with `::`, and what asks for a GPU, stays."""
    named = any("::" in argument for argument in config.args)
    if config.option.all or named or "gpu" in (config.option.markexpr or ""):
        return
    corpora: dict[str, list[pytest.Item]] = defaultdict(list)
    left_out = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        if item.get_closest_marker("corpus") and item not in left_out:
            corpora[item.nodeid.split("[")[0]].append(item)
    for cases in corpora.values():
        left_out |= set(cases) - set(drawn(cases, config.option.draw))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def drawn(cases: Sequence[pytest.Item], key: str) -> list[pytest.Item]:
    """The sample of one corpus. Tests over the same cases draw the same ones."""

    def rank(item: pytest.Item) -> str:
        case = item.nodeid.partition("[")[2].removesuffix("]")
        return hashlib.sha256(f"{key} {case}".encode()).hexdigest()

    marker = cases[0].get_closest_marker("corpus")
    assert marker is not None
    ranked = sorted(cases, key=rank)
    honest = [item for item in ranked if item.get_closest_marker("honest")]
    return [item for item in ranked if item not in honest][: marker.args[0]] + honest[:1]
