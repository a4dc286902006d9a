"""Settings of a language model; their fields are options of the command line."""

import math
from dataclasses import dataclass, fields
from pathlib import Path

from cuda_l2.system.errors import UserError

CONTRACTS = ("short", "long")


@dataclass(frozen=True)
class ModelSettings:
    """How to ask a language model."""

    prompts: Path | None = None
    """Folder with prompt templates of your own, as `cuda-l2 prompts FOLDER` writes them."""
    contract: str = "short"
    """The launch contract in prompts: short, followed by the long one where a file was refused, or long."""
    tokens: int | None = None
    """Budget: tokens of prompts and answers together, for the whole command."""
    money: float | None = None
    """Budget: what it may cost, in the unit of the prices; needs both prices."""
    price_in: float | None = None
    """Price of a million prompt tokens."""
    price_out: float | None = None
    """Price of a million answer tokens."""
    model_seconds: float | None = None
    """Budget: seconds of waiting for the model, for the whole command."""
    concurrency: int = 4
    """Questions asked at once; as many candidates make a group."""
    retries: int = 4
    """How often a question is sent again after a rate limit or a server's failure, each time after a longer pause."""
    repairs: int = 2
    """Largest number of turns in which a model repairs a failing kernel, given its outcome."""
    temperature: float = 1.0
    """Sampling temperature; 0 takes the likeliest token each time."""
    prompt_tokens: int = 32_000
    """Approximate limit of a prompt in tokens; excerpts of headers and exemplars but the best are left out first."""
    answer_tokens: int = 16_384
    """Limit of an answer in tokens; a longer one is cut off."""
    exemplars: int = 2
    """Scored kernels shown in a prompt."""
    reference_tokens: int = 3_000
    """Tokens of retrieved headers in a prompt; needs the index of `cuda-l2 index`."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key."""
    without_sandbox: bool = False
    """Build and run a model's kernels also where no sandbox shuts them off from the file system."""

    def __post_init__(self) -> None:
        if self.contract not in CONTRACTS:
            raise UserError(f"there is no contract {self.contract!r}; choose from {', '.join(CONTRACTS)}")
        positive = ("tokens", "money", "model_seconds", "concurrency", "prompt_tokens", "answer_tokens")
        others = ("price_in", "price_out", "temperature", "retries", "repairs", "exemplars", "reference_tokens")
        for name in (*positive, *others):
            option, value = f"--{name.replace('_', '-')}", getattr(self, name)
            if value is None or (math.isfinite(value) and (value > 0 or (value == 0 and name in others))):
                continue
            if name in positive:
                raise UserError(f"{option} must be a number above 0, not {value}")
            raise UserError(f"{option} must not be negative, as {value} is")
        if (self.price_in is None) != (self.price_out is None):
            raise UserError("give both prices, --price-in and --price-out, or neither")
        if self.money is not None and self.price_in is None:
            raise UserError("--money needs the prices of a million tokens: --price-in and --price-out")

    def require_none(self) -> None:
        """UserError where something is set that only a language model has use for.

        The sandbox is none of it: it concerns kernels that a model wrote in an earlier search.
        """
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        named = ", ".join(f"--{name.replace('_', '-')}" for name in changed if name != "without_sandbox")
        if named:
            raise UserError(
                f"{named}: these are for a language model; name one with --policy openai:MODEL@URL or hf:FOLDER,"
                " or with --checker"
            )
