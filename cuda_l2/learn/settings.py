"""Settings of a training stage: one TOML file a stage; the packaged file gives the keys that a user's leaves out."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text

PACKAGED = Path(__file__).with_name("stages")
STAGES = ("pretrain", "sft", "self-supervised", "general-rl", "hgemm-rl")
SCHEDULE = "schedule"
"""The stage that trains no language model but the schedule policy, with settings of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Gradient steps."""

    epochs: float = 1.0
    steps: int
    batch: int
    micro_batch: int
    learning_rate: float
    warmup: float
    weight_decay: float
    sequence_tokens: int = 4096
    precision: str
    activation_checkpointing: bool
    save_every: int
    checkpoints: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("batch", "micro_batch", "sequence_tokens", "save_every", "checkpoints", "learning_rate"):
            _require(getattr(self, name) > 0, f"tuning.{name} must be above 0")
        _require(self.steps > 0 or self.epochs > 0, "tuning needs steps or epochs above 0")
        _require(self.batch % self.micro_batch == 0, "tuning.batch must be a multiple of tuning.micro_batch")
        _require(0 <= self.warmup < 1, "tuning.warmup is a share of the steps, from 0 to 1")
        _require(self.weight_decay >= 0 and self.seed >= 0, "tuning.weight_decay and seed must not be negative")
        _require(self.precision in ("float32", "bfloat16"), "tuning.precision is float32 or bfloat16")


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters in place of all weights."""

    rank: int
    alpha: int
    dropout: float

    def __post_init__(self) -> None:
        _require(self.rank >= 0 and self.alpha > 0, "lora.rank must not be negative, lora.alpha must be above 0")
        _require(0 <= self.dropout < 1, "lora.dropout is a share, from 0 to 1")


@dataclass(frozen=True, slots=True)
class Scratch:
    """A new model: a small Llama."""

    layers: int
    width: int
    heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        _require(min(self.layers, self.heads) > 0, "scratch.layers and scratch.heads must be above 0")
        _require(self.vocabulary >= 300, "scratch.vocabulary must be at least 300: 256 bytes and some pieces")
        _require(
            self.width > 0 and self.width % (2 * self.heads) == 0,
            "scratch.width must be a multiple of 2 x scratch.heads",
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """Prompts and sampling of the model in training."""

    temperature: float
    prompt_tokens: int
    answer_tokens: int
    exemplars: int
    at_once: int
    exemplar_lines: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "prompt_tokens", "answer_tokens", "at_once"):
            _require(getattr(self, name) > 0, f"sampling.{name} must be above 0")
        _require(min(self.exemplars, self.exemplar_lines) >= 0, "sampling.exemplars and lines must not be negative")


@dataclass(frozen=True, slots=True)
class Collecting:
    """Self-supervised rounds."""

    rounds: int
    tries: int
    keep: int
    least_speedup: float

    def __post_init__(self) -> None:
        for name in ("rounds", "tries", "keep"):
            _require(getattr(self, name) > 0, f"collecting.{name} must be above 0")
        _require(self.least_speedup >= 0, "collecting.least_speedup must not be negative")


@dataclass(frozen=True, slots=True)
class Rl:
    """GRPO, and equation 3's coefficients."""

    group: int
    iterations: int
    kl_weight: float
    clip: float
    alpha: float
    beta: float
    unbuildable: float
    incorrect: float
    smoothing_clip: float

    def __post_init__(self) -> None:
        _require(self.group >= 2, "rl.group must be at least 2: advantages are relative")
        _require(self.iterations > 0, "rl.iterations must be above 0")
        _require(min(self.kl_weight, self.alpha, self.beta) >= 0, "rl's weights must not be negative")
        _require(self.unbuildable < self.incorrect < 0, "rl.unbuildable must be below rl.incorrect, and that below 0")
        _require(self.clip > 0 and self.smoothing_clip > 0, "rl.clip and rl.smoothing_clip must be above 0")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule policy's training from worlds: a warm start, then contrastive GRPO."""

    warm_steps: int
    steps: int
    tasks: int
    group: int
    near: float
    fit_weight: float
    warm_learning_rate: float
    weight_decay: float
    learning_rate: float
    exemplars: int
    scores: bool
    history: int
    kl_weight: float
    clip: float
    smoothing: bool
    smoothing_clip: float
    alpha: float
    beta: float
    save_every: int
    checkpoints: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("tasks", "near", "warm_learning_rate", "learning_rate", "history", "save_every", "checkpoints"):
            _require(getattr(self, name) > 0, f"schedule.{name} must be above 0")
        _require(min(self.warm_steps, self.steps, self.seed) >= 0, "schedule's steps and seed must not be negative")
        _require(self.warm_steps + self.steps > 0, "schedule needs steps above 0")
        _require(self.group >= 2, "schedule.group must be at least 2: advantages are relative")
        _require(0 <= self.exemplars <= 8, "schedule.exemplars is a number from 0 to 8")
        _require(
            min(self.kl_weight, self.fit_weight, self.weight_decay, self.alpha, self.beta) >= 0,
            "schedule's weights must not be negative",
        )
        _require(self.clip > 0 and self.smoothing_clip > 0, "schedule.clip and smoothing_clip must be above 0")


@dataclass(frozen=True, slots=True)
class StageSettings:
    """A stage's sections; those that it does not have are None."""

    stage: str
    tuning: Tuning
    lora: Lora
    scratch: Scratch | None = None
    sampling: Sampling | None = None
    collecting: Collecting | None = None
    rl: Rl | None = None

    def __post_init__(self) -> None:
        _require(
            self.lora.rank > 0 or self.tuning.precision == "float32",
            "tuning.precision = bfloat16 needs adapters, lora.rank above 0: small steps of all weights are lost in it",
        )
        if self.rl is not None:
            _require(self.tuning.steps > 0, "tuning.steps must be above 0 here")
            _require(self.tuning.batch % self.rl.group == 0, "tuning.batch must be a multiple of rl.group")


KINDS: Sequence[type] = (Tuning, Lora, Scratch, Sampling, Collecting, Rl, Schedule)
SECTIONS = {kind.__name__.lower(): kind for kind in KINDS}


def read(stage: str, path: Path | None = None, changes: Sequence[str] = ()) -> StageSettings:
    """The settings of a stage. path: a file whose keys count before the packaged ones; changes: `section.key=value`,
    which count before both. UserError with what cannot be read.
    """
    if stage not in STAGES:
        raise UserError(f"there is no stage {stage!r}; choose from {', '.join((*STAGES, SCHEDULE))}")
    return StageSettings(stage, **_sections(stage, path, changes))


def read_schedule(path: Path | None = None, changes: Sequence[str] = ()) -> Schedule:
    """The settings of the stage `schedule`, as `read` reads those of others."""
    found: Schedule = _sections(SCHEDULE, path, changes)[SCHEDULE]
    return found


def _sections(stage: str, path: Path | None, changes: Sequence[str]) -> dict[str, Any]:
    values = tomllib.loads(packaged(stage).read_text())
    if path is not None:
        _merge(values, _parsed(read_text(path), str(path)), str(path))
    for change in changes:
        _merge(values, _parsed(change, f"--set {change}"), f"--set {change}")
    return {name: SECTIONS[name](**values[name]) for name in values}


def packaged(stage: str) -> Path:
    """The file with a stage's defaults."""
    return PACKAGED / f"{stage}.toml"


def _merge(values: dict[str, dict[str, Any]], others: Mapping[str, Any], where: str) -> None:
    for section, keys in others.items():
        if section not in values or not isinstance(keys, dict):
            raise UserError(f"{where}: there is no section {section!r} here; it has {', '.join(values)}")
        kinds = {field.name: field.type for field in fields(SECTIONS[section])}
        for key, value in keys.items():
            if key not in kinds:
                raise UserError(f"{where}: {section} has no {key!r}; it has {', '.join(kinds)}")
            kind = kinds[key]
            assert isinstance(kind, type)
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise UserError(f"{where}: {section}.{key} must be of type {kind.__name__}, not {value!r}")
            values[section][key] = value


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is no TOML: {error}") from None


def _require(right: bool, reason: str) -> None:
    if not right:
        raise UserError(reason)
