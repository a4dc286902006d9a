"""cuda-l2 train: one stage of training a language model that writes kernels."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cuda_l2.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.learn.settings import StageSettings

UNTOLD = ("save_every", "checkpoints")
"""Settings that a run may go on with another value of."""


@Parameter(name="*")
@dataclass(frozen=True)
class TrainSettings:
    """What to train, on what."""

    model: str = ""
    """Folder or Hub id of the model to begin with; `scratch` makes a small one of random weights."""
    data: Annotated[list[Path] | None, Parameter(negative=())] = None
    """Folder of a dataset, as `cuda-l2 corpus` (pretrain) and `cuda-l2 collect` (sft) write them; may be given several
    times."""
    out: Path | None = None
    """Folder of the run; a run that was interrupted goes on."""
    config: Path | None = None
    """TOML file with settings of the stage; what it leaves out is as packaged."""
    set: Annotated[list[str] | None, Parameter(negative=())] = None
    """One setting, as in tuning.steps=100; may be given several times."""
    show: Annotated[bool, Parameter(negative=())] = False
    """Print the stage's packaged settings and do nothing."""


def command(*, stage: str, settings: TrainSettings | None = None) -> None:
    """Train a language model to write kernels, one stage at a time.

    Parameters
    ----------
    stage
        pretrain (on text), sft (on conversations that end in a verified kernel).
    """
    from cuda_l2.learn.settings import packaged, read

    settings = settings or TrainSettings()
    chosen = read(stage, settings.config, settings.set or [])
    if settings.show:
        print(packaged(stage).read_text(), end="")
        return
    for option, value in (("--model", settings.model), ("--out", settings.out)):
        if not value:
            raise UserError(f"{option} is missing; `cuda-l2 train --help` says what it is")
    assert settings.out is not None
    _train_on_data(chosen, settings, settings.out)


def _train_on_data(stage: "StageSettings", settings: TrainSettings, out: Path) -> None:
    if not settings.data:
        made = "cuda-l2 corpus" if stage.stage == "pretrain" else "cuda-l2 collect"
        raise UserError(f"--data is missing: the folder of a dataset, as `{made}` writes it")
    texts = _texts(settings.data) if stage.stage == "pretrain" else []
    conversations = _conversations(settings.data) if stage.stage == "sft" else []
    require_packages()
    from cuda_l2.learn.run import Run
    from cuda_l2.learn.tune import fine_tune, pretrain

    with Run(out, told(stage, settings.model, digest(texts or conversations))) as run:
        if not run.done and stage.stage == "pretrain":
            pretrain(settings.model, texts, stage, run, say)
        elif not run.done:
            fine_tune(settings.model, conversations, stage, run, say)
        print(f"the model is in {run.model}; use it with --policy hf:{run.model}")


def told(stage: "StageSettings", model: str, data: str) -> dict[str, Any]:
    """What decides a run's outcome."""
    values = asdict(stage)
    for name in UNTOLD:
        del values["tuning"][name]
    return {"model": model, "data": data, **{name: value for name, value in values.items() if value is not None}}


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def require_packages() -> None:
    """UserError where what training needs is not installed."""
    try:
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import trl  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"training needs the package {error.name}: pip install 'cuda-l2[train]'") from None


def _texts(folders: Sequence[Path]) -> list[str]:
    from cuda_l2.corpus import dataset

    return [row["text"] for folder in folders for row in dataset.read(folder, "text")]


def _conversations(folders: Sequence[Path]) -> list[list[dict[str, str]]]:
    from cuda_l2.corpus import dataset

    return [row["messages"] for folder in folders for row in dataset.read(folder, "sft")]
