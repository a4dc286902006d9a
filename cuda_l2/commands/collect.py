"""cuda-l2 collect: verified kernels of models, as data for supervised fine-tuning."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import LANGUAGE_MODELS, REVIEWS, require_target
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.system.counted import counted
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import seconds

if TYPE_CHECKING:
    from cuda_l2.corpus.holdout import HoldOut
    from cuda_l2.evaluator import Evaluator
    from cuda_l2.propose._model_policy import ModelPolicy
    from cuda_l2.review.checker import Checker
    from cuda_l2.runs.collect import Make, Pair


@Parameter(name="*")
@dataclass(frozen=True)
class CollectSettings:
    """How to collect."""

    policy: Annotated[list[str], Parameter(negative=())]
    """Who writes: openai:NAME@URL, hf:PATH_OR_ID, or schedule, random, tpe; may be given several times."""
    out: Path
    """Folder of the collection; an earlier run's goes on."""
    tries: int = 20
    """At most so many answers a task and model."""
    keep: int = 2
    """Enough verified kernels a task and model."""
    round: int = 0
    """Of self-supervision: each round counts its tries anew, and asks anew what was asked in others."""
    least_speedup: float = 0.0
    """Keep only kernels at least so many times as fast as the strongest library."""
    budget: str = "10m"
    """Time a task and model, as in 60s or 2m."""
    hold_out: Path | None = None
    """File of shapes, other tasks, kernels' ids, schedules and files that must not be kept, see docs/training.md."""
    target: str = "auto"
    """Machine: cpu, cuda, or auto for the GPU where there is one."""
    seed: int = 0
    """Of policies that draw schedules."""
    kernelbench: Path | None = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19."""
    archive: Path | None = None
    """File that keeps every trial and every exchange."""
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings()
    """Prompts show no exemplars here: what is kept is to be the model's own. Budgets hold for each model."""
    review: Annotated[ReviewSettings, REVIEWS] = ReviewSettings()


def command(shapes: Annotated[list[str], Parameter(required=True)], /, *, settings: CollectSettings) -> None:
    """Let models write kernels, keep few verified ones a task and model, with how they were asked and timed.

    Parameters
    ----------
    shapes
        One or more shapes, as in 512x512x512 or 64x4096x4096:tn, or other tasks, as in softmax:rows=64,columns=1000,
        or kernelbench/level1/19 with --kernelbench.
    """
    require_target(settings.target)
    budget_s = seconds(settings.budget)

    from cuda_l2.machine import chosen

    target = chosen(settings.target)
    wanted = list(dict.fromkeys(tasks.parse(shape, target, settings.kernelbench) for shape in shapes))

    from cuda_l2.archive import Archive
    from cuda_l2.corpus.holdout import HoldOut
    from cuda_l2.review.checker import open_checker
    from cuda_l2.rigs import open_rig
    from cuda_l2.runs.collect import Collection, Settings, collect
    from cuda_l2.system import paths

    hold_out = HoldOut.read(settings.hold_out) if settings.hold_out else HoldOut()
    limits = Settings(settings.tries, settings.keep, settings.round, budget_s, settings.least_speedup, hold_out)
    held = [str(task) for task in wanted if hold_out.task(task)]
    if len(held) == len(wanted):
        raise UserError(f"every task is held out by {settings.hold_out}")
    if held:
        print(f"held out: {', '.join(held)}", file=sys.stderr)
    path = settings.archive or paths.default_archive()
    with Archive(path) as archive, Collection(settings.out) as collection:
        models: list[ModelPolicy] = []
        checker = open_checker(settings.review, settings.model, path)
        try:
            makers = _makers(settings, path, models, hold_out)
            with open_rig(settings.target) as rig:
                for task in wanted:
                    rig.require_feasible(task)
                pairs = collect(wanted, makers, rig, archive, collection, limits, checker=checker, on_try=_say)
        finally:
            count = collection.export()
            asked: list[ModelPolicy | Checker] = [*models, *filter(None, [checker])]
            for model in asked:
                print(model.summary())
                model.close()
        done = sum(pair.done(limits) for pair in pairs)
        print(
            f"{counted(count, 'kernel')} in {settings.out}, part sft;"
            f" {done} of {counted(len(pairs), 'pair')} of task and model done"
        )


def _makers(
    settings: CollectSettings, archive: Path, models: "list[ModelPolicy]", hold_out: "HoldOut"
) -> "dict[str, Make]":
    """By the name under which tries are counted; opened models are added to the list."""
    from cuda_l2.llm._base import is_model
    from cuda_l2.propose._base import proposer_maker
    from cuda_l2.propose._model_policy import ModelPolicy

    makers: dict[str, Make] = {}
    for policy in settings.policy:
        if is_model(policy):
            purpose = f"collect {settings.round}"
            model = ModelPolicy(policy, replace(settings.model, exemplars=0), archive, purpose, hold_out.text)
            models.append(model)
            name, make = model.name, _asking(model)
        else:
            proposer_maker(policy)
            name, make = policy, _drawing(policy, settings.seed)
        if name in makers:
            raise UserError(f"two models are named {name}: their tries could not be told apart; collect from one a run")
        makers[name] = make
    return makers


def _asking(model: "ModelPolicy") -> "Make":
    import numpy as np

    def make(evaluator: "Evaluator", history):  # type: ignore[no-untyped-def]
        task, rng = evaluator.task, np.random.default_rng(0)
        return model.proposer(task, evaluator.target, history, rng, lambda trial: "", lambda stage: None, anew=True)

    return make


def _drawing(policy: str, seed: int) -> "Make":
    """A policy that writes schedules; one that goes on draws others than before."""
    import numpy as np

    from cuda_l2.families._base import families_for
    from cuda_l2.propose._base import proposer_maker, space_for

    def make(evaluator: "Evaluator", history):  # type: ignore[no-untyped-def]
        task, target = evaluator.task, evaluator.target
        space = space_for(families_for(task, target), task, target)
        return proposer_maker(policy)(space, history, np.random.default_rng([seed, len(history())]))

    return make


def _say(pair: "Pair") -> None:
    if pair.failure:
        text = pair.failure
    else:
        became = ", ".join(f"{count} {status}" for status, count in pair.statuses.items())
        best = f", best {pair.best:.3f}x" if pair.kept else ""
        text = f"{counted(pair.tries, 'try', 'tries')} ({became}), {pair.kept} kept{best}"
    print(f"{pair.task} {pair.model}: {text}", file=sys.stderr, flush=True)
