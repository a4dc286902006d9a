"""Settings of searches and collections. Their fields are options of `cuda-l2 optimize` and `cuda-l2 collect`."""

import numbers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2.llm._base import is_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.measure.protocols import OFFLINE, PAPER, SERVER
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, Server
from cuda_l2.system.values import require, seconds

REPORTED = {"standard": (OFFLINE.name, SERVER.name), "offline": (OFFLINE.name,), "paper": (PAPER.name,)}
"""Protocols under which a winner is reported, by the setting's word."""

LANGUAGE_MODELS = Parameter(name="*", group="Language models", negative=())
"""How commands take `ModelSettings`."""
REVIEWS = Parameter(name="*", group="Review of suspicious speedups")
"""How commands take `ReviewSettings`."""
TRAINED = Parameter(group="Trained schedule policy")
"""How commands take the weights of the schedule policy."""
GPU_LIBRARIES = Parameter(group="Libraries on a GPU")
"""How commands take what concerns cuBLASLt."""
BUDGET = Parameter(
    name="--budget", converter=lambda kind, tokens: seconds(tokens[0].value), show_default=lambda value: f"{value:g}s"
)
"""How commands take a time: 60s, 2m."""


@dataclass(frozen=True)
class Settings:
    """How to search, and how to report the winner."""

    budget_s: Annotated[float, BUDGET] = 60.0
    """Time to prepare and search a shape, as in 60s or 2m. The report comes after it: the first line says how long."""
    trials: int | None = None
    """Largest number of candidates a shape."""
    policy: str = "schedule"
    """The proposer: schedule (the embedded policy), random, ranked (the kernels' own models of their time), boosted (a
    cost model of the trials so far, needs scikit-learn), tpe (needs optuna), or a language model, see docs/llm.md:
    openai:NAME@URL behind an OpenAI-compatible endpoint, hf:PATH_OR_ID in this process."""
    weights: Annotated[Path | None, TRAINED] = None
    """File of a trained schedule policy, as `cuda-l2 train --stage schedule` leaves it; without one the package's on
    Hopper GPUs, elsewhere untrained."""
    target: str = "auto"
    """Machine to optimise for: cpu, cuda, or auto for the GPU where there is one."""
    archive: Place | None = None
    """File that keeps every trial, or postgresql://USER@HOST/DATABASE; searches resume from it and may share it."""
    protocol: str = "standard"
    """How the winner is reported: standard (offline: calls back to back; server: single calls, caches cold), offline,
    or paper (10 s warm-up, 30 s measured)."""
    again: bool = False
    """Time candidates anew that the archive knows."""
    seed: int = 0
    """Seed of the search; inputs are always fresh."""
    retune: Annotated[bool, GPU_LIBRARIES] = False
    """Time cuBLASLt's algorithms anew, where an earlier run's choice would be kept."""
    tuning: Annotated[str, GPU_LIBRARIES] = "adaptive"
    """How cuBLASLt's algorithms are timed: adaptive (rounds of back-to-back launches until the best is clear) or paper
    (50 + 100 rounds of single launches, fresh operands each)."""
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings()
    review: Annotated[ReviewSettings, REVIEWS] = ReviewSettings()

    def __post_init__(self) -> None:
        seconds(self.budget_s)
        for name in ("target", "policy", "protocol", "tuning"):
            require(getattr(self, name), str, f"{name} must be a text")
        require(self.seed, numbers.Integral, "the seed must be a whole number")
        require(self.trials, (numbers.Integral, type(None)), "the number of trials must be a whole number")
        require(self.weights, (str, os.PathLike, type(None)), "the weights must be a file's path")
        places = str, os.PathLike, Server, type(None)
        require(self.archive, places, "the archive must be a file's path or a server's URL")
        require(self.model, ModelSettings, "model must be cuda_l2.llm.settings.ModelSettings")
        require(self.review, ReviewSettings, "review must be cuda_l2.review.settings.ReviewSettings")
        if self.seed < 0:
            raise UserError(f"the seed must not be negative, as {self.seed} is")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"the number of trials must be at least 1, not {self.trials}")
        if self.protocol not in REPORTED:
            raise UserError(f"there is no protocol {self.protocol!r}; choose from {', '.join(REPORTED)}")
        if not (is_model(self.policy) or self.review.checker):
            self.model.require_none()


@dataclass(frozen=True)
class Limits:
    """When collecting for a pair of task and model ends, and which kernels it keeps."""

    tries: int = 20
    """Largest number of answers a task and model."""
    keep: int = 2
    """Number of verified kernels a task and model after which it ends."""
    round: int = 0
    """Round of self-supervision: each counts its tries anew, and asks anew the questions of others."""
    least_speedup: float = 0.0
    """Keep only kernels at least this many times as fast as the strongest library."""
    budget_s: Annotated[float, BUDGET] = 600.0
    """Time a task and model, as in 60s or 2m."""

    def __post_init__(self) -> None:
        if self.tries < 1 or self.keep < 1:
            raise UserError("tries and kernels to keep must be at least 1")
        if self.round < 0 or not self.least_speedup >= 0:
            raise UserError("the round and the least speedup must not be negative")
        if not self.budget_s > 0:
            raise UserError(f"the budget must be a positive time, as in 60s or 2m, not {self.budget_s:g} s")
