"""Pretraining and supervised fine-tuning through TRL's SFTTrainer."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import jinja2
import transformers
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from cuda_l2.learn import models, ranks
from cuda_l2.learn.models import Pupil
from cuda_l2.learn.run import Run
from cuda_l2.learn.settings import Lora, StageSettings, Tuning
from cuda_l2.llm._base import Message, one_line, without_system
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import counted

Say = Callable[[str], None]


def pretrain(model: str, texts: Sequence[str], settings: StageSettings, run: Run, say: Say) -> None:
    """Train on plain text, joined and cut to equal lengths. Goes on from the run's last checkpoint."""
    pupil = _pupil(model, texts, settings, say)
    if not any(texts):
        raise UserError("the text to train on is empty")
    tokens = sum(len(ids) for ids in pupil.tokenizer(list(texts), verbose=False)["input_ids"])
    say(f"{counted(len(texts), 'text')} of {counted(tokens, 'token')}; {_size(pupil)}")
    _fit(pupil, [{"text": text} for text in texts], settings, run, say, packing=True)


def fine_tune(
    model: str, conversations: Sequence[Sequence[Mapping[str, str]]], settings: StageSettings, run: Run, say: Say
) -> None:
    """Train on the last answer of each conversation, given all before it. Goes on from the run's last checkpoint.

    conversations: messages with role and content, the last the assistant's. Those longer than the sequence are left
    out: half a kernel would teach to stop early.
    """
    texts = ["\n\n".join(turn["content"] for turn in turns) for turns in conversations]
    pupil = _pupil(model, texts, settings, say)
    if any(turns[0]["role"] == "system" for turns in conversations) and models.without_system_role(pupil.tokenizer):
        say(f"the chat template of {model} has no system role: system prompts go before the first question")
        conversations = [_without_system(turns) for turns in conversations]
    limit = settings.tuning.sequence_tokens
    short = [turns for turns in conversations if _tokens(pupil, turns) <= limit]
    left_out = len(conversations) - len(short)
    if not short:
        raise UserError(
            f"all {len(conversations)} conversations are longer than {limit} tokens; raise tuning.sequence_tokens"
        )
    note = f", {left_out} longer than {limit} tokens left out" if left_out else ""
    say(f"{counted(len(short), 'conversation')}{note}; {_size(pupil)}")
    rows = [{"prompt": list(turns[:-1]), "completion": [turns[-1]]} for turns in short]
    _fit(pupil, rows, settings, run, say, packing=False)


def trainer_options(tuning: Tuning, run: Run) -> dict[str, Any]:
    """The options that all trainers share. UserError where processes that train together cannot have equal shares."""
    share, left_over = divmod(tuning.batch, ranks.count())
    micro_batch = min(tuning.micro_batch, share)
    if left_over or share % micro_batch:
        raise UserError(
            f"{ranks.count()} GPUs cannot share tuning.batch = {tuning.batch} in parts of tuning.micro_batch ="
            f" {tuning.micro_batch}: choose multiples of one another"
        )
    on_gpu = models.device() == "cuda"
    # transformers 5.17 has the older name, 5.23 the newer
    newer = "activation_checkpointing" in transformers.TrainingArguments.__dataclass_fields__
    return {
        "output_dir": str(run.checkpoints),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": share // micro_batch,
        "num_train_epochs": tuning.epochs,
        "max_steps": tuning.steps or -1,
        "learning_rate": tuning.learning_rate,
        "warmup_steps": tuning.warmup,
        "weight_decay": tuning.weight_decay,
        "lr_scheduler_type": "cosine",
        "activation_checkpointing" if newer else "gradient_checkpointing": tuning.activation_checkpointing,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "save_strategy": "steps",
        "save_steps": tuning.save_every,
        "save_total_limit": tuning.checkpoints,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "seed": tuning.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": on_gpu,
        "ddp_find_unused_parameters": False,
    }


def on_one_gpu(config: Any) -> Any:
    """A trainer's options without what transformers does where several GPUs are visible: it would share every batch
    among them by threads of one process, beside those that judge. `--gpus` is for several.
    """
    if config.n_gpu > 1:
        config._n_gpu = 1
    return config


def adapters(lora: Lora) -> LoraConfig | None:
    """Adapters for all linear layers; None where all weights are trained."""
    if not lora.rank:
        return None
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def train(trainer: Any, run: Run, say: Say) -> None:
    """Let a trainer work from the run's last checkpoint on, and write the model."""
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(_Progress(run, say))
    last = run.last_checkpoint()
    if last is not None:
        say(f"goes on from {last.name}")
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    run.finish(Pupil(trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class).save)
    if ranks.count() > 1:
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()


def _fit(
    pupil: Pupil, rows: Sequence[Mapping[str, Any]], settings: StageSettings, run: Run, say: Say, *, packing: bool
) -> None:
    tuning = settings.tuning
    datasets.disable_progress_bars()
    config = on_one_gpu(
        SFTConfig(
            **trainer_options(tuning, run),
            max_length=tuning.sequence_tokens,
            packing=packing,
            packing_strategy="wrapped",
            completion_only_loss=not packing,
        )
    )
    data = datasets.Dataset.from_list([dict(row) for row in rows])
    trainer = SFTTrainer(
        model=pupil.model,
        args=config,
        train_dataset=data,
        processing_class=pupil.tokenizer,
        peft_config=adapters(settings.lora),
    )
    train(trainer, run, say)


def _pupil(model: str, texts: Sequence[str], settings: StageSettings, say: Say) -> Pupil:
    tuning = settings.tuning
    if model != models.SCRATCH:
        pupil = models.load(model, tuning.precision)
        if pupil.note:
            say(pupil.note)
        return pupil
    if settings.lora.rank:
        raise UserError("random weights have nothing to adapt: set lora.rank = 0 with --model scratch")
    assert settings.scratch is not None
    return models.make(settings.scratch, texts, tuning.sequence_tokens, tuning.seed)


def _tokens(pupil: Pupil, turns: Sequence[Mapping[str, str]]) -> int:
    try:
        return len(pupil.tokenizer.apply_chat_template(list(turns), tokenize=True, return_dict=True)["input_ids"])
    except jinja2.TemplateError as error:
        begins, roles = one_line(turns[0]["content"], 60), ", ".join(turn["role"] for turn in turns)
        raise UserError(
            f"the model's chat template does not take the conversation that begins {begins!r} ({roles}):"
            f" {one_line(str(error), 120)}"
        ) from None


def _without_system(turns: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    merged = without_system(tuple(Message(turn["role"], turn["content"]) for turn in turns))
    return [{"role": message.role, "content": message.text} for message in merged]


def _size(pupil: Pupil) -> str:
    return f"a model of {sum(weights.numel() for weights in pupil.model.parameters()) / 1e6:.2f} million weights"


class _Progress(transformers.TrainerCallback):  # type: ignore[misc]
    """Prints a line every few seconds and logs every step; a gradient that is not finite ends the run."""

    EVERY_S = 5.0

    def __init__(self, run: Run, say: Say) -> None:
        self._run, self._say = run, say
        self._began = self._said = time.perf_counter()
        self._first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()
        self._first = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        known = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self._run.log({"step": state.global_step, **{n: v for n, v in known.items() if math.isfinite(v)}})
        if not math.isfinite(known.get("grad_norm", 0.0)):  # before anything is saved
            raise UserError(
                f"the gradient of step {state.global_step} is not finite, which spoils every weight; the checkpoints in"
                f" {self._run.checkpoints} are from before: lower tuning.learning_rate in a new --out"
            )
        now = time.perf_counter()
        last = state.global_step >= state.max_steps
        if "loss" in known and (last or now - self._said >= self.EVERY_S):
            self._said = now
            done = state.global_step - self._first
            left = (now - self._began) / max(1, done) * (state.max_steps - state.global_step)
            extra = f", reward {known['reward']:.3f}" if "reward" in known else ""
            self._say(
                f"step {state.global_step} of {state.max_steps}: loss {known['loss']:.4f}{extra}, {left:.0f} s left"
            )
