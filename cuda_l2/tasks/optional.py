"""The optional room kernelbench, loaded by name at run time: nothing imports it."""

import importlib
from typing import Any

from cuda_l2.system.errors import UserError

ROOM = "cuda_l2.kernelbench"
KERNELBENCH = "kernelbench"
"""What the names of tasks from a KernelBench checkout begin with, as in kernelbench/level1/19_ReLU."""


def is_foreign(name: str) -> bool:
    """Whether a task's name or text is that of a file in a checkout."""
    return name.strip().partition("/")[0] == KERNELBENCH


def load_kernelbench(module: str) -> Any:
    """A module of the room, as `auditor`; UserError where this installation is without the room."""
    try:
        return importlib.import_module(f"{ROOM}.{module}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(ROOM):
            raise
        raise UserError(f"files of KernelBench are not served: this installation has no {ROOM}") from None
