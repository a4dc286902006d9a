"""Prompt templates from the package or the user's folder, and text of others in a prompt."""

import re
from pathlib import Path

from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text
from cuda_l2.system.text import counted, plain

MESSAGE_CHARS = 2_000
"""Limit of a message of a compiler or checker."""


def read_template(packaged: Path, folder: Path | None) -> str:
    """The user's template of the same name where the folder has one, else the packaged one.

    UserError where the folder is not there or the file cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"there is no folder {folder}; `cuda-l2 prompts {folder}` makes one with the templates")
    own = folder / packaged.name if folder else packaged
    return read_text(own if own.exists() else packaged)


def fenced(text: str, language: str = "", limit_chars: int = MESSAGE_CHARS) -> str:
    """A text of others between fences that it cannot close, without invisible characters, cut in its middle."""
    text = plain(text).strip("\n")
    if len(text) > limit_chars:
        head, tail = limit_chars * 3 // 4, limit_chars // 4
        text = f"{text[:head]}\n... {counted(len(text) - head - tail, 'character')} left out ...\n{text[-tail:]}"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
