"""Kernels' texts as Python callers give them, and the machine that they are for."""

import numbers
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.machine import gpu_present
from cuda_l2.records import Candidate
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text
from cuda_l2.system.values import require, short

Source = str | Candidate | os.PathLike[str]
"""A kernel's text, or where it lies."""
MOST_PATH = 4096
_FILE = re.compile(r"[^\n;{}()]+\.(c|cu|py)")


def read(given: object) -> list[str]:
    """The texts of one source or of a list or tuple of them; UserError where one can be none."""
    return [_text(each) for each in (given if isinstance(given, list | tuple) else [given])]


def require_seed(seed: object) -> None:
    """UserError unless it is None or a whole number that is not negative."""
    require(seed, (numbers.Integral, type(None)), "the seed must be a whole number")
    if isinstance(seed, numbers.Integral) and int(seed) < 0:
        raise UserError(f"the seed must not be negative, as {seed} is")


def target_of(texts: Sequence[str]) -> str:
    """The target that sources' contracts name, auto where they name none; UserError where it is not here."""
    stated = {contract.target_of(text) for text in texts} - {""}
    if len(stated) > 1:
        raise UserError("some of the sources are for cpu, some for cuda: judge each kind by itself, or give target")
    if stated == {"cuda"} and not gpu_present():
        raise UserError(
            'the contract says target = "cuda", and there is no NVIDIA GPU here: judge it on a machine that has one;'
            " `cuda-l2 check FILE SHAPE --compile-only sm_90a` builds it anywhere"
        )
    return stated.pop() if stated else "auto"


def _text(source: object) -> str:
    """A kernel's text as a caller gives it; UserError where it can be none."""
    if isinstance(source, Candidate):
        return source.source
    if isinstance(source, os.PathLike):
        return read_text(Path(source))
    if not isinstance(source, str):
        raise UserError(f"a source is a kernel's text, a Path to its file, or a list of them, not {short(source)}")
    line = source.strip()
    if _FILE.fullmatch(line) or ("\n" not in line and len(line) <= MOST_PATH and os.path.isfile(line)):  # noqa: PTH113
        raise UserError(f"{short(line)} is a file's path and no source: give pathlib.Path({line!r})")
    return source.removeprefix("\ufeff")
