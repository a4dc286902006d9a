"""What several commands share: readers of option values, and how an interrupted run ends."""

import enum
import importlib
import re
import sys
from pathlib import Path
from typing import NoReturn, TypeVar

from cyclopts import Parameter

from cuda_l2.system.errors import UserError

LANGUAGE_MODELS = Parameter(name="*", group="Language models", negative=())
"""How commands take `ModelSettings`."""

REVIEWS = Parameter(name="*", group="Review of jumps in reward")
"""How commands take `ReviewSettings`."""

TARGETS = ("auto", "cpu", "cuda")

E = TypeVar("E", bound=enum.StrEnum)

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """`60`, `60s`, `2m`, `1.5h` in seconds; UserError where it is not a positive time."""
    match = re.fullmatch(r"(-?[\d.]+)\s*(s|m|min|h)?", text.strip())
    try:
        value = float(match.group(1)) * _UNITS[match.group(2) or ""] if match else -1.0
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UserError(f"the budget must be a positive time, as in 60s or 2m, not {text!r}")
    return value


def member(kind: type[E], text: str, what: str) -> E:
    """The member of an enum that a text names; UserError where there is none. what: the enum's members are."""
    try:
        return kind(text.strip())
    except ValueError:
        raise UserError(f"there is no {what} {text.strip()!r}; choose from {', '.join(kind)}") from None


def require_target(name: str) -> None:
    """UserError where the target is not one this version has."""
    if name not in TARGETS:
        raise UserError(f"there is no target {name!r}; choose from {', '.join(TARGETS)}")


def tell(text: str) -> None:
    """Say it at once, and apart from the results."""
    print(f"cuda-l2: {text}", file=sys.stderr, flush=True)


def require_cuda_packages() -> None:
    """UserError where what a command on a GPU needs is not installed."""
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UserError(
            f"this needs an NVIDIA GPU; {error.name} is not installed: pip install 'cuda-l2[cuda]'"
        ) from None


def read_source(file: Path, contracted: bool = True) -> str:
    """A candidate's text; UserError where it cannot be read. contracted: also where it states no launch contract."""
    from cuda_l2 import contract
    from cuda_l2.contract.text import document

    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if not contracted or contract.states_contract(text):
        return text
    if file.suffix == ".py":
        raise UserError(
            f"{file} is Python: its ModelNew is judged on a file in KernelBench's format, with --kernelbench FOLDER or"
            " --reference FILE"
        )
    raise UserError(
        f'{file} states no launch contract: begin it with a comment /* cuda-l2 ... */ that says target = "cpu" or'
        f' "cuda", and what else {document("contract.md")} describes, with examples'
    )


def require_writable(path: Path) -> None:
    """UserError where a result could not be written to this file; nothing is left behind."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from None


def end_interrupted() -> NoReturn:
    """Exit as an interrupted command does whose results are kept."""
    print("interrupted: the same command goes on from here", file=sys.stderr)
    sys.exit(130)
