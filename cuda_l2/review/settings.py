"""Settings of reviews; their fields are options of the command line."""

from dataclasses import dataclass
from pathlib import Path

from cuda_l2.llm._base import is_model
from cuda_l2.system.errors import UserError


@dataclass(frozen=True)
class ReviewSettings:
    """Who reviews kernels whose speedup is suspicious: over 3x, or over twice the best known."""

    checker: str = ""
    """A language model that is shown kernels with a suspicious speedup, and may reject them: openai:NAME@URL or
    hf:PATH_OR_ID."""
    checker_key_variable: str = ""
    """Environment variable that holds the key for the checker's endpoint; that of --key-variable if not given."""
    cheats: Path | None = None
    """Folder of known cheats, as .c or .cu files: the checker is shown the nearest. In a checkout of the repository its
    own, else none."""

    def __post_init__(self) -> None:
        if not self.checker and (self.cheats or self.checker_key_variable):
            raise UserError("--cheats and --checker-key-variable go with --checker")
        if self.checker and not is_model(self.checker):
            raise UserError(f"{self.checker!r} is no language model: write --checker openai:MODEL@URL or hf:PATH_OR_ID")
