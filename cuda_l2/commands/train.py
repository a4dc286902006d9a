"""cuda-l2 train: one stage of training a language model that writes kernels, or the schedule policy."""

import contextlib
import hashlib
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cuda_l2 import machine, tasks
from cuda_l2.commands._options import require_default, require_target
from cuda_l2.records import Task
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.system.place import Place
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.learn.settings import StageSettings
    from cuda_l2.rigs import Rig
    from cuda_l2.runs.judging import JudgePool

ON_DATA = ("pretrain", "sft")
SELF_TAUGHT = "self-supervised"
ON_ALL, ON_PRODUCTS = "general-rl", "hgemm-rl"
"""The stage that takes all tasks of our own where none is named, and the one that takes matrix products alone."""
RESUMABLE = ("save_every", "checkpoints")
"""Settings that may change when an interrupted run goes on."""
COEFFICIENTS = ("alpha", "beta", "unbuildable", "incorrect", "smoothing_clip")
"""Settings of a stage with rewards that are the rewards' own."""
WORLDS = ("world", "held_out")
"""Options of the stage that learns from recorded worlds."""


@Parameter(name="*")
@dataclass(frozen=True)
class TrainSettings:
    """The model, its data and the run."""

    model: str = ""
    """Folder, GGUF file or Hub id of the model to begin with; `scratch` makes a small one of random weights."""
    data: Annotated[list[Path] | None, Parameter(negative=())] = None
    """Folder of a dataset, as `cuda-l2 corpus` (pretrain) and `cuda-l2 collect` (sft) write them, or a file of JSON
    lines, JSON or Parquet with a column text or messages; may be given several times."""
    out: Path | None = None
    """Folder of the run; a run that was interrupted goes on."""
    config: Path | None = None
    """TOML file with settings of the stage; the packaged ones hold for keys that it leaves out."""
    set: Annotated[list[str] | None, Parameter(negative=())] = None
    """One setting, as in tuning.steps=100; may be given several times."""
    kernelbench: Path | None = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19."""
    archive: Place | None = None
    """File that keeps every trial, or postgresql://USER@HOST/DATABASE; its scored kernels are the exemplars."""
    target: str = "auto"
    """Machine that judges: cpu, cuda, or auto for the GPU where there is one."""
    workers: str = ""
    """Several GPUs that judge answers, a process each, also while the model writes the next: auto for all of this
    machine, or how many; ray://HOST:PORT for those of a Ray cluster, ray for one that is started here. The model's own
    GPU, the first, judges when it has written. For stages with measured rewards."""
    judges: int = 1
    """Processes that judge answers on each GPU of this machine, as many as its memory holds: they verify at once, and
    take turns to time. For stages with measured rewards."""
    gpus: str = ""
    """Several GPUs of this machine that train together, a process each with a share of every batch: auto for all, or
    how many. Each judges its own answers."""
    hold_out: Path | None = None
    """File of shapes, other tasks, kernels' ids, schedules and files that the model must not see, see
    docs/training.md."""
    prompts: Path | None = None
    """Folder with prompt templates of your own, as `cuda-l2 prompts FOLDER` writes them."""
    without_sandbox: Annotated[bool, Parameter(negative=())] = False
    """Build and run the model's kernels also where no sandbox shuts them off from the file system."""
    show: Annotated[bool, Parameter(negative=())] = False
    """Print the stage's packaged settings and do nothing."""
    world: Annotated[list[Path] | None, Parameter(negative=())] = None
    """Recorded world to train the schedule policy from, as `cuda-l2 record` writes it; may be given several times."""
    held_out: str = ""
    """Tasks of the world that the schedule policy must not see: a number of them, always the same; their texts with
    commas; or a file with one a line."""


def command(shapes: list[str] | None = None, /, *, stage: str, settings: TrainSettings = TrainSettings()) -> None:
    """Train a language model to write kernels, one stage at a time.

    Args:
        shapes: What to write kernels for, as in 512x512x512, or other tasks, as in softmax or gelu:rows=64, or
            kernelbench/level1/19 with --kernelbench; for self-supervised and general-rl (by default all tasks of our
            own), for hgemm-rl shapes alone.
        stage: pretrain (on text), sft (on conversations that end in a verified kernel), self-supervised (on verified
            kernels of the model's own), general-rl and hgemm-rl (by measured rewards, on tasks of every kind, on matrix
            products); schedule (the schedule policy that `cuda-l2 optimize` searches with, from --world alone).
    """
    from cuda_l2.learn import ranks
    from cuda_l2.learn.settings import SCHEDULE, packaged, read
    from cuda_l2.runs import workers

    if stage == SCHEDULE:
        _train_schedule(shapes or [], settings)
        return
    for option in WORLDS:
        if getattr(settings, option):
            raise UserError(f"--{option.replace('_', '-')} goes with --stage {SCHEDULE} alone")
    chosen = read(stage, settings.config, settings.set or [])
    if settings.show:
        print(packaged(stage).read_text(), end="")
        return
    for option, value in (("--model", settings.model), ("--out", settings.out)):
        if not value:
            raise UserError(f"{option} is missing; `cuda-l2 train --help` says what it is")
    assert settings.out is not None
    if settings.judges < 1:
        raise UserError(f"the number of judges must be at least 1, not {settings.judges}")
    if settings.judges > 1 and settings.workers.startswith("ray"):
        raise UserError("--judges goes with GPUs of this machine: leave it out with --workers ray")
    pooled = "--workers" if settings.workers else "--judges" if settings.judges > 1 else ""
    if settings.gpus:
        if pooled or stage == SELF_TAUGHT:
            raise UserError(f"--gpus goes neither with --workers, --judges nor with the stage {SELF_TAUGHT}")
        ranks.launch(workers.gpus(settings.gpus, option="--gpus"))
        return
    ranks.join()
    if pooled:
        if chosen.rl is None:
            raise UserError(f"{pooled} goes with measured rewards, which the stage {stage} does not have")
        from cuda_l2.runs.on_ray import require_gpus

        require_gpus(settings.workers or "1", settings.target, pooled)  # an error leaves no run behind
    if stage in ON_DATA:
        if shapes:
            raise UserError(f"the stage {stage} learns from --data alone and takes no shapes")
        _train_on_data(chosen, settings, settings.out)
    else:
        require_target(settings.target)

        target = machine.chosen(settings.target)
        named = list(dict.fromkeys(tasks.parse(shape, target, settings.kernelbench) for shape in shapes or []))
        _train_on_tasks(chosen, settings, settings.out, named)
    print(f"the model is in {settings.out / 'model'}; use it with --policy hf:{settings.out / 'model'}")


def _train_schedule(shapes: list[str], settings: TrainSettings) -> None:
    """The stage `schedule`: from worlds alone, without a machine."""
    from cuda_l2.learn.settings import SCHEDULE, packaged, read_schedule

    chosen = read_schedule(settings.config, settings.set or [])
    if settings.show:
        print(packaged(SCHEDULE).read_text(), end="")
        return
    if shapes:
        raise UserError(f"the stage {SCHEDULE} learns from --world alone and takes no shapes")
    require_default(settings, ("out", "config", "set", "show", *WORLDS), f"does not go with --stage {SCHEDULE}")
    if not settings.world or settings.out is None:
        missing = "--out" if settings.world else "--world"
        raise UserError(f"{missing} is missing; `cuda-l2 train --help` says what it is")

    from cuda_l2.learn.run import Run
    from cuda_l2.learn.schedule import ScheduleTraining
    from cuda_l2.propose._recorded import recorded_space
    from cuda_l2.propose._weights import FILE
    from cuda_l2.worlds.split import split
    from cuda_l2.worlds.world import read

    spaces, digests = [], []
    for path in settings.world:
        world = read(path, _say)
        learnt, held_out = split(world.tasks, settings.held_out)
        spaces += [recorded_space(world, task) for task in learnt]
        digests.append(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
        _say(f"{path}: {world}; {counted(len(held_out), 'task')} held out")
    same = {name: value for name, value in asdict(chosen).items() if name not in RESUMABLE}
    decisive = {"stage": SCHEDULE, "world": digests, "held_out": settings.held_out, **same}
    with Run(settings.out, decisive) as run:
        if not run.done:
            ScheduleTraining(spaces, chosen, run, _say).train()
    print(f"the policy is in {run.model / FILE}; use it with `cuda-l2 optimize --weights {run.model / FILE}`")


def _train_on_data(stage: "StageSettings", settings: TrainSettings, out: Path) -> None:
    if not settings.data:
        made = "cuda-l2 corpus" if stage.stage == "pretrain" else "cuda-l2 collect"
        raise UserError(f"--data is missing: the folder of a dataset, as `{made}` writes it, or a file")
    from cuda_l2.corpus import dataset

    texts = dataset.texts(settings.data) if stage.stage == "pretrain" else []
    conversations = _conversations(settings.data) if stage.stage == "sft" else []
    _require_packages()
    from cuda_l2.learn.run import Run
    from cuda_l2.learn.tune import fine_tune, pretrain

    with Run(out, _decisive(stage, settings, texts or conversations)) as run:
        if not run.done and stage.stage == "pretrain":
            pretrain(settings.model, texts, stage, run, _say)
        elif not run.done:
            fine_tune(settings.model, conversations, stage, run, _say)


def _train_on_tasks(stage: "StageSettings", settings: TrainSettings, out: Path, named: list[Task]) -> None:
    from cuda_l2.corpus.holdout import HoldOut

    hold_out = HoldOut.read(settings.hold_out)
    if not named and stage.stage != ON_ALL:
        raise UserError("shapes are missing, as in 512x512x512: what should the model write kernels for?")
    if named and all(hold_out.task(task) for task in named):
        raise UserError(f"every task is held out by {settings.hold_out}: what should the model write kernels for?")
    if stage.stage == ON_PRODUCTS and not all(task.product for task in named):
        raise UserError(f"the stage {ON_PRODUCTS} is on matrix products alone; take {ON_ALL} for other tasks")
    if settings.data and stage.rl is not None:
        raise UserError(f"the stage {stage.stage} learns from rewards alone and takes no --data")
    others = _conversations(settings.data or [])
    _require_packages()
    import numpy as np

    from cuda_l2.archive import Archive
    from cuda_l2.learn.rl import Judge, contrastive_rl
    from cuda_l2.learn.run import Run
    from cuda_l2.learn.selftaught import SelfSupervision
    from cuda_l2.learn.writer import Questions
    from cuda_l2.propose._model_policy import require_sandbox
    from cuda_l2.propose._prompt import Templates
    from cuda_l2.reward import RewardSettings
    from cuda_l2.rigs import open_rig
    from cuda_l2.system import paths
    from cuda_l2.tasks._base import definitions

    require_sandbox(settings.without_sandbox)
    templates = Templates(settings.prompts)
    own = (known.task(target=machine.chosen(settings.target)) for known in definitions().values())
    asked = [task for task in named or own if not hold_out.task(task)]
    decisive = _decisive(stage, settings, others) | {
        "tasks": [str(task) for task in asked],
        "prompts": templates.fingerprint,
        "hold_out": hold_out.fingerprint,
    }
    path = settings.archive or paths.default_archive()
    with Run(out, decisive) as run, Archive(path) as archive, open_rig(settings.target) as rig:
        if run.done:
            return
        wanted = _feasible(asked, rig, skip=not named)
        rng = np.random.default_rng([stage.tuning.seed, run.logged])  # going on draws others than before
        assert stage.sampling is not None
        questions = Questions(rig.target, templates, stage.sampling, hold_out, rng)
        if stage.rl is None:
            SelfSupervision(wanted, stage, rig, archive, questions, _say).train(settings.model, run, others)
            return
        rewards = RewardSettings(**{name: getattr(stage.rl, name) for name in COEFFICIENTS})
        with _judges(settings, rig, wanted) as judges, Judge(rig, archive, rewards, stage.stage, judges) as judge:
            contrastive_rl(settings.model, wanted, stage, run, judge, questions, _say)


def _judges(settings: TrainSettings, rig: "Rig", wanted: Sequence[Task]) -> "AbstractContextManager[JudgePool | None]":
    """The processes of --workers or --judges, if any."""
    if not settings.workers and settings.judges == 1:
        return contextlib.nullcontext()
    from cuda_l2.runs.judging import judge_pool, require_known

    for task in wanted:
        require_known(task, "--workers" if settings.workers else "--judges")
    each = min(rig.together(task, settings.judges) for task in wanted)
    if each < settings.judges:
        _say(f"{counted(each, 'process', 'processes')} of {settings.judges} on each GPU: more do not fit")
    return judge_pool(settings.workers or "1", rig.target.name, _say, each=each)


def _feasible(asked: Sequence[Task], rig: "Rig", *, skip: bool) -> list[Task]:
    """The tasks that fit this machine. UserError where one does not fit; with `skip`, where none fits."""
    found: list[Task] = []
    why = ""
    for task in asked:
        try:
            rig.require_feasible(task)
            found.append(task)
        except UserError as error:
            if not skip:
                raise
            why = str(error)
            _say(f"left out: {error}")
    if not found:
        raise UserError(why)
    return found


def _decisive(stage: "StageSettings", settings: TrainSettings, data: Any) -> dict[str, Any]:
    """The settings that decide a run's outcome."""
    values = {name: value for name, value in asdict(stage).items() if value is not None}
    for name in RESUMABLE:
        del values["tuning"][name]
    return {"model": settings.model, "data": hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16], **values}


def _say(text: str) -> None:
    """Print a line to standard error, in the first of the processes that train together alone."""
    from cuda_l2.learn import ranks

    if not ranks.rank():
        print(text, file=sys.stderr, flush=True)


def _require_packages() -> None:
    """UserError where a package that training needs is missing."""
    for package in ("datasets", "peft", "trl"):
        imported(package, "training needs", "train")


def _conversations(folders: Sequence[Path]) -> list[list[dict[str, str]]]:
    from cuda_l2.corpus import dataset

    read = dataset.conversations(folders)
    if read.unanswered:
        many = counted(len(read.unanswered), "conversation")
        _say(f"{many} without an answer at the end skipped, the first in {read.unanswered[0]}")
    return read.found
