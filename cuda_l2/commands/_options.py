"""Readers of option values, and the end of an interrupted run, for several commands."""

import dataclasses
import importlib
import sys
from collections.abc import Container
from pathlib import Path
from typing import Any, NoReturn

from cuda_l2.llm._base import is_model
from cuda_l2.machine import chosen
from cuda_l2.machine.gpus import NO_DEVICE, gpu_present
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text


def require_target(name: str) -> None:
    """UserError where the target is not one this version has, or a GPU and there is none."""
    chosen(name)
    if name == "cuda" and not gpu_present():
        raise UserError(f"no GPU: {NO_DEVICE}")


def require_weights(path: Path | None, policy: str) -> None:
    """UserError where weights of the schedule policy are not there; whether they are any is known later."""
    from cuda_l2.propose._policy import TRAINED

    if path is not None and policy == TRAINED and not path.exists():
        raise UserError(f"there are no weights at {path}; `cuda-l2 train --stage schedule` makes them")


def require_policy(name: str) -> None:
    """UserError where there is neither a proposer nor a language model of this name."""
    from cuda_l2.propose._base import require_proposer

    if not is_model(name):
        require_proposer(name)


def require_default(settings: Any, allowed: Container[str], said: str) -> None:
    """UserError where a setting that is not allowed here is not at its default: the option and what is said of it."""
    for field in dataclasses.fields(settings):
        if field.name not in allowed and getattr(settings, field.name) != field.default:
            raise UserError(f"--{field.name.replace('_', '-')} {said}")


def tell(text: str) -> None:
    """Print a line to standard error at once."""
    print(f"cuda-l2: {text}", file=sys.stderr, flush=True)


def require_cuda_packages(why: str = "this needs an NVIDIA GPU") -> None:
    """UserError where a package that a command for a GPU needs is missing. why: what it has to do with one."""
    try:
        importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        lacks = f"{error.name} is not installed: pip install 'cuda-l2[cuda]'" if gpu_present() else NO_DEVICE
        raise UserError(f"{why}; {lacks}") from None


def read_source(file: Path, contracted: bool = True) -> str:
    """A candidate's text; UserError where it cannot be read. contracted: also where it states no launch contract."""
    from cuda_l2 import contract
    from cuda_l2.contract.text import document

    text = read_text(file)
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


def part(text: str) -> tuple[int, int]:
    """`1/2` as its number and the number of parts."""
    number, slash, parts = text.partition("/")
    if not (slash and number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise UserError(f"{text!r} is no part of a grid: give one as 1/2, 2/2")
    return int(number), int(parts)
