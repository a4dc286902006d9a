"""Modules load without a look for garbage: nothing of them becomes any, and looking takes a fifth of their time.

As a program, with a module's name and arguments for it: loads that module so and calls its `main`.
"""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

PROGRAM = (sys.executable, "-P", "-m", "cuda_l2.system.loading")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Look for no garbage meanwhile, and afterwards never in what is there by then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Argument: the module; those behind it are its own."""
    with loading():
        module = importlib.import_module(sys.argv.pop(1))
    module.main()


if __name__ == "__main__":
    main()
