"""What a test draws by chance depends on the run's key and the test alone: the same tree gives the same results again.

Judges draw inputs that no candidate can know, and so would one run of the tests in some hundred fail for what the runs
before it did not show. Another key, or another tree, draws others. Not so for races, clocks and threads that draw in
turns.
"""

import contextlib
import os
import random
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

SAID = "TESTS_CHANCE"
"""The environment variable by which processes that a test starts draw as it does."""
REAL = {"randbits": secrets.randbits, "default_rng": np.random.default_rng}

_source = random.Random()
_of_run = [""]


def settle(key: str) -> None:
    """Let this key be the run's."""
    _of_run[:] = [key]


def begin(name: str) -> None:
    """Draw by the key and a test's name from now on, here and in processes that are started from here."""
    os.environ[SAID] = f"{_of_run[0]} {name}"
    take_up()


def take_up() -> None:
    """Draw as the test that started this process does, if one did."""
    text = os.environ.get(SAID)
    if text is not None:
        _source.seed(text)
        random.seed(text)
        np.random.seed(zlib.crc32(text.encode()))
        torch.manual_seed(zlib.crc32(text.encode()))


@contextlib.contextmanager
def apart(name: str) -> Iterator[None]:
    """Within, draw inputs by the key and this name: of what tests share, whichever of them comes first."""
    before = _source.getstate()
    _source.seed(f"{_of_run[0]} {name}")
    try:
        yield
    finally:
        _source.setstate(before)


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """What is drawn without a seed is drawn so. replace: sets an attribute, as `setattr` does."""
    replace(secrets, "randbits", _source.getrandbits)
    replace(np.random, "default_rng", _generator)
    take_up()


def _generator(seed: Any = None) -> np.random.Generator:
    made: np.random.Generator = REAL["default_rng"](_source.getrandbits(64) if seed is None else seed)
    return made
