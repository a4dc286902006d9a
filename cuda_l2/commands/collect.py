"""cuda-l2 collect: verified kernels of models, as data for supervised fine-tuning."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import part, require_target, tell
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.settings import LANGUAGE_MODELS, REVIEWS, Limits
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.evaluator import Evaluator
    from cuda_l2.propose._base import Policy, Proposer, Trials
    from cuda_l2.review._base import Checker
    from cuda_l2.runs.collect import Make, Pair


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CollectSettings(Limits):
    """How to collect."""

    policy: Annotated[list[str], Parameter(negative=())]
    """Proposers: openai:NAME@URL, hf:PATH_OR_ID, or schedule, random, tpe; may be given several times."""
    out: Path
    """Folder of the collection; an earlier run's goes on."""
    hold_out: Path | None = None
    """File of shapes, other tasks, kernels' ids, schedules and files that must not be kept, see docs/training.md."""
    target: str = "auto"
    """Machine: cpu, cuda, or auto for the GPU where there is one."""
    seed: int = 0
    """Seed of policies that draw schedules."""
    kernelbench: Path | None = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19."""
    archive: Place | None = None
    """File that keeps every trial and every exchange, or postgresql://USER@HOST/DATABASE."""
    part: str = "1/1"
    """Collect only for this part of the tasks, as in 1/2."""
    workers: str = ""
    """Several GPUs, a process each: auto for all of this machine, or how many; ray://HOST:PORT for those of a Ray
    cluster, ray for one that is started here (docs/scale.md)."""
    model: Annotated[ModelSettings, LANGUAGE_MODELS] = ModelSettings()
    """Prompts show no exemplars here: what is kept is to be the model's own. Budgets hold for each model."""
    review: Annotated[ReviewSettings, REVIEWS] = ReviewSettings()


def command(shapes: Annotated[list[str], Parameter(required=True)], /, *, settings: CollectSettings) -> None:
    """Let models write kernels, keep few verified ones a task and model, with how they were asked and timed.

    Args:
        shapes: One or more shapes, as in 512x512x512 or 64x4096x4096:tn, or other tasks, as in
            softmax:rows=64,columns=1000, or kernelbench/level1/19 with --kernelbench.
    """
    require_target(settings.target)
    number, count = part(settings.part)

    from cuda_l2.machine import chosen

    target = chosen(settings.target)
    wanted = list(dict.fromkeys(tasks.parse(shape, target, settings.kernelbench) for shape in shapes))

    from cuda_l2.archive import Archive
    from cuda_l2.corpus.holdout import HoldOut
    from cuda_l2.propose._policy import open_policy
    from cuda_l2.review.checker import open_checker
    from cuda_l2.rigs import open_rig
    from cuda_l2.runs import parts
    from cuda_l2.runs.collect import TRIES, Collection, Collector
    from cuda_l2.system import paths

    hold_out = HoldOut.read(settings.hold_out)
    held = [str(task) for task in wanted if hold_out.task(task)]
    if len(held) == len(wanted):
        raise UserError(f"every task is held out by {settings.hold_out}")
    if held:
        print(f"held out: {', '.join(held)}", file=sys.stderr)
    wanted = wanted[number - 1 :: count]
    if settings.workers:
        _by_workers(settings)
    path = settings.archive or paths.default_archive()
    with Archive(path) as archive, Collection(settings.out) as collection:
        parts.take_over(settings.out, TRIES, collection.take_over)
        policies: dict[str, Policy] = {}  # by the name by which tries are counted
        model = replace(settings.model, exemplars=0)
        checker = open_checker(settings.review, settings.model, path)
        try:
            for name in settings.policy:
                policy = open_policy(name, model, path, f"collect {settings.round}", hold_out.text, anew=True)
                if policy.name in policies:
                    policy.close()
                    raise UserError(
                        f"two models are named {policy.name}: their tries could not be told apart; collect from one a"
                        " run"
                    )
                policies[policy.name] = policy
            makers = {name: _making(policy, settings.seed) for name, policy in policies.items()}
            with open_rig(settings.target) as rig:
                for task in wanted:
                    rig.require_feasible(task)
                collector = Collector(rig, archive, collection, settings, hold_out, checker, _say)
                pairs = collector.collect(wanted, makers)
        finally:
            kernels = collection.export()
            asked: list[Policy | Checker] = [*policies.values(), *filter(None, [checker])]
            for each in asked:
                if each.summary():
                    print(each.summary())
                each.close()
        done = sum(pair.done(settings) for pair in pairs)
        print(
            f"{counted(kernels, 'kernel')} in {settings.out}, part sft;"
            f" {done} of {counted(len(pairs), 'pair')} of task and model done"
        )


def _by_workers(settings: CollectSettings) -> None:
    """Have every GPU collect for its part of the tasks."""
    from cuda_l2.runs import parts
    from cuda_l2.runs.collect import TRIES, Collection

    if settings.part != CollectSettings.part:
        raise UserError("--workers gives each GPU its part: leave --part out")
    if (settings.model.tokens, settings.model.money, settings.model.model_seconds) != (None, None, None):
        raise UserError("with --workers each process would spend the whole budget of a model: limit --tries instead")
    with Collection(settings.out) as collection:  # an error where the folder is another's
        parts.take_over(settings.out, TRIES, collection.take_over)  # the number of parts may be another now
    parts.share(settings.workers, settings.out, TRIES, tell)


def _making(policy: "Policy", seed: int) -> "Make":
    """Makes a policy's proposer. A run that goes on draws other schedules than before."""
    import numpy as np

    def make(evaluator: "Evaluator", history: "Trials") -> "Proposer":
        rng = np.random.default_rng([seed, len(history())])
        return policy.proposer(evaluator.task, evaluator.target, history, rng)

    return make


def _say(pair: "Pair") -> None:
    print(f"{pair.task} {pair.model}: {pair.failure or pair}", file=sys.stderr, flush=True)
