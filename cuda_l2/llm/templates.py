"""Prompt templates from the package or the user's folder."""

from pathlib import Path

from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text


def read_template(packaged: Path, folder: Path | None) -> str:
    """The user's template of the same name where the folder has one, else the packaged one.

    UserError where the folder is not there or the file cannot be read.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"there is no folder {folder}; `cuda-l2 prompts {folder}` makes one with the templates")
    own = folder / packaged.name if folder else packaged
    return read_text(own if own.exists() else packaged)
