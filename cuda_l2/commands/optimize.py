"""cuda-l2 optimize: search for the best kernels of shapes and other tasks on this machine."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import LANGUAGE_MODELS, REVIEWS, require_target
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.values import seconds


@Parameter(name="*")
@dataclass(frozen=True)
class OptimizeSettings:
    """How to search."""

    target: str = "auto"
    """Machine to optimise for: cpu, cuda, or auto for the GPU where there is one."""
    budget: str = "60s"
    """Time of search a shape, as in 60s or 2m."""
    trials: int | None = None
    """At most so many candidates a shape."""
    policy: str = "schedule"
    """Who proposes: schedule (the embedded policy), random, tpe (needs optuna), or a language model, see docs/llm.md:
    openai:NAME@URL behind an OpenAI-compatible endpoint, hf:PATH_OR_ID in this process."""
    seed: int = 0
    """Seed of the search; inputs are always fresh."""
    archive: Path | None = None
    """File that keeps every trial; searches resume from it and may share it."""
    protocol: str = "standard"
    """How the winner is reported: standard (offline and server), offline, or paper (10 s warm-up, 30 s measured)."""
    again: Annotated[bool, Parameter(negative=())] = False
    """Time candidates anew that the archive knows."""
    retune: Annotated[bool, Parameter(negative=())] = False
    """Time cuBLASLt's algorithms anew, where an earlier run's choice would be kept."""
    tuning: str = "adaptive"
    """How cuBLASLt's algorithms are timed: adaptive (rounds of back-to-back launches until the best is clear) or paper
    (50 + 100 rounds of single launches, fresh operands each)."""
    kernelbench: Path | None = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print one JSON object a shape instead of tables."""
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings()
    review: Annotated[ReviewSettings, REVIEWS] = ReviewSettings()


def command(
    shapes: Annotated[list[str], Parameter(required=True)], /, *, settings: OptimizeSettings | None = None
) -> None:
    """Search for the fastest correct kernel of each shape, then report it from another run.

    Exits with 1 where no correct kernel was found.

    Parameters
    ----------
    shapes
        One or more shapes, as in 512x512x512 or 64x4096x4096:tn, or other tasks, as in
        softmax:rows=64,columns=1000, or kernelbench/level1/19 with --kernelbench.
    """
    settings = settings or OptimizeSettings()
    require_target(settings.target)
    budget_s = seconds(settings.budget)

    from cuda_l2.machine import chosen

    parsed = [tasks.parse(shape, chosen(settings.target), settings.kernelbench) for shape in shapes]

    from cuda_l2.optimizer import Optimizer, Settings
    from cuda_l2.report.live import LiveProgress
    from cuda_l2.report.tables import print_result, result_json

    search_settings = Settings(
        budget_s=budget_s,
        trials=settings.trials,
        policy=settings.policy,
        seed=settings.seed,
        archive=settings.archive,
        protocol=settings.protocol,
        again=settings.again,
        target=settings.target,
        retune=settings.retune,
        tuning=settings.tuning,
        model=settings.model,
        review=settings.review,
    )
    found = True
    with Optimizer(search_settings) as optimizer:
        for task in parsed:
            optimizer.require_feasible(task)
        for task in parsed:
            with LiveProgress(task, budget_s, quiet=settings.json) as live:
                result = optimizer.optimize(task, live.progress, live.stage)
            if settings.json:
                print(result_json(result), flush=True)
            else:
                print_result(result)
            if result.search.interrupted:
                sys.exit(130)
            found = found and result.best is not None
    if not found:
        sys.exit(1)
