"""Programs and headers of the CUDA toolkit: in packages or in a folder of the toolkit; programs on the PATH too."""

import shutil
from collections.abc import Callable
from pathlib import Path

from cuda_l2.system.errors import UserError

TRIES = 3
"""How often cuda-pathfinder is asked: it may ask a process of its own, which on a busy machine does not answer in the
ten seconds that it has."""


def program(name: str) -> Path | None:
    """A program, as in nvdisasm; None where it is not installed. UserError where that could not be found out.

    The one on the PATH, which may be of another version, counts where there is no other or the machine does not answer.
    """
    from cuda.pathfinder import find_nvidia_binary_utility  # noqa: PLC0415 - not on machines without CUDA

    on_path = shutil.which(name)
    try:
        found = _asked(find_nvidia_binary_utility, name) or on_path
    except UserError:
        if not on_path:
            raise
        found = on_path
    return Path(found) if found else None


def headers(library: str) -> Path | None:
    """The folder of a library's headers, as of cudart; None and UserError as above."""
    from cuda.pathfinder import find_nvidia_header_directory  # noqa: PLC0415

    found = _asked(find_nvidia_header_directory, library)
    return Path(found) if found else None


def _asked(find: Callable[[str], str | None], name: str) -> str | None:
    for _ in range(TRIES):
        try:
            return find(name)
        except ChildProcessError as error:
            last = error
    raise UserError(f"CUDA's {name} could not be looked for; try again when less is running ({last})")
