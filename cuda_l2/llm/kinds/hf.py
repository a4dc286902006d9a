"""A model that runs in this process through transformers: hf:PATH_OR_ID. Code that comes with a model is never run."""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import jinja2
import torch
import transformers
from huggingface_hub import constants

from cuda_l2.llm._base import Messages, Model, Outcome, Pace, Reply, Request, one_line, without_system
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.llm.thoughts import opens_thoughts
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.system.lock import machine_lock

LEAST_ANSWER = 16
"""Tokens that must be left for an answer in the model's window."""
WIDENED = 2_000_000_000
"""Models of at most as many weights compute in float32 on a CPU: most CPUs take half as long as for bfloat16."""
HUB_TIMEOUT_S = 5.0
TRIAL_TOKENS = 128, 4
"""Tokens read and written to measure the model's pace."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class LocalModel(Model):
    """Generates on the GPU where there is one, else on the CPU; a group of answers at once."""

    def __init__(self, rest: str, settings: ModelSettings) -> None:
        self.name, self.where = f"hf:{rest}", rest
        self._model, self._tokenizer = load(rest, "auto", padding_side="left")
        self._model.generation_config = only(self._model.generation_config, *SAMPLING)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        if self._device == "cpu" and self._model.num_parameters() <= WIDENED:
            self._model.float()
        try:
            self._model.to(self._device).eval()
        except torch.OutOfMemoryError:
            raise UserError(f"the model {rest} does not fit this GPU's memory; take a smaller one") from None
        self._special = _special(self._tokenizer)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token or self._tokenizer.convert_ids_to_tokens(0)
        self.window = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._concurrency = settings.concurrency

    def count_tokens(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @functools.cached_property
    def _pace(self) -> Pace | None:
        def moments(read: int, written: int) -> list[float]:
            """When generating began, and when each token was there."""
            ids = torch.ones(1, read, dtype=torch.long, device=self._device)
            lengths = {"max_new_tokens": written, "min_new_tokens": written}
            clock = _Clock()
            self._model.generate(input_ids=ids, attention_mask=ids, do_sample=False, streamer=clock, **lengths)
            return clock.moments

        read, written = TRIAL_TOKENS
        try:
            with torch.inference_mode(), machine_lock():
                moments(1, 1)  # what is done once is not measured
                began, first, *_, last = moments(read, 1 + written)
        except (RuntimeError, ValueError, IndexError, NotImplementedError):  # asking tells
            return None
        return Pace(read / max(first - began, 1e-6), written / max(last - first, 1e-6))

    def pace(self) -> Pace | None:
        return self._pace

    def ask(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None], deadline: float = math.inf
    ) -> None:
        for start in range(0, len(requests), self._concurrency):
            batch = requests[start : start + self._concurrency]
            for i, reply in enumerate(self._batch(batch, deadline)):
                on_reply(start + i, reply)

    def close(self) -> None:
        del self._model
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _batch(self, requests: Sequence[Request], deadline: float) -> list[Reply]:
        began = time.perf_counter()
        if began >= deadline:
            return [Reply(Outcome.TIMED_OUT, reason="the time was up; give more with --budget")] * len(requests)
        try:
            texts = [self._text(request.messages) for request in requests]
        except jinja2.TemplateError as error:
            reason = one_line(f"the chat template of {self.where} does not take the conversation: {error}")
            return [Reply(Outcome.REFUSED, reason=reason)] * len(requests)
        inputs = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False, verbose=False)
        longest = inputs["input_ids"].shape[1]
        room = requests[0].answer_tokens
        if self.window is not None:
            room = min(room, self.window - longest)
        if room < min(LEAST_ANSWER, requests[0].answer_tokens):
            if len(requests) > 1:  # the longest must not keep the others from being answered
                return [reply for request in requests for reply in self._batch([request], deadline)]
            reason = f"a prompt of {longest} tokens does not fit the window of {self.window} of {self.where}"
            return [Reply(Outcome.REFUSED, reason=f"{reason}; lower --prompt-tokens")]
        try:
            outputs = self._generate(inputs, requests[0], room, deadline)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(requests) > 1:
                return [reply for request in requests for reply in self._batch([request], deadline)]
            return [Reply(Outcome.REFUSED, reason=f"{self.where}: out of GPU memory; lower --prompt-tokens")]
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:  # a model that cannot do this
            return [Reply(Outcome.REFUSED, reason=one_line(f"{self.where} fails: {error}"))] * len(requests)
        seconds = time.perf_counter() - began
        late = time.perf_counter() >= deadline
        prompts = inputs["attention_mask"].sum(1).tolist()
        replies = [
            self._reply(row[longest:].tolist(), prompts[i], late, seconds) for i, row in enumerate(outputs.cpu())
        ]
        thinking = opens_thoughts(texts[0])  # by the template: the answer has the closing tag alone
        return [replace(reply, text=f"<think>{reply.text}") if thinking else reply for reply in replies]

    @torch.inference_mode()
    def _generate(self, inputs: Any, request: Request, room: int, deadline: float) -> torch.Tensor:
        options: dict[str, Any] = {"max_new_tokens": room, "pad_token_id": self._tokenizer.pad_token_id}
        options["do_sample"] = request.temperature > 0
        if request.temperature > 0:
            options["temperature"] = request.temperature
        devices = [torch.cuda.current_device()] if self._device == "cuda" else []
        # other searches' timings must not share the machine with a model at work
        with machine_lock(), torch.random.fork_rng(devices=devices):
            if not math.isinf(deadline):
                options["max_time"] = max(0.0, deadline - time.perf_counter())
            torch.manual_seed(request.seed)
            outputs: torch.Tensor = self._model.generate(**inputs.to(self._device), **options)
        return outputs

    def _reply(self, tokens: list[int], prompt_tokens: int, late: bool, seconds: float) -> Reply:
        own = self._model.generation_config.eos_token_id
        ends = {self._tokenizer.eos_token_id, self._tokenizer.pad_token_id, *(own if isinstance(own, list) else [own])}
        stopped = next((i for i, token in enumerate(tokens) if token in ends), None)
        if stopped is None and late:
            return Reply(
                Outcome.TIMED_OUT,
                reason="the time was up before the answer was whole; give more with --budget",
                prompt_tokens=prompt_tokens,
                answer_tokens=len(tokens),
                seconds=seconds,
            )
        text = self._tokenizer.decode(tokens[:stopped], skip_special_tokens=True)
        finish = "length" if stopped is None else "stop"
        count = len(tokens) if stopped is None else stopped
        return Reply(Outcome.ANSWERED, text, finish, prompt_tokens, count, seconds=seconds)

    def _text(self, messages: Messages) -> str:
        """The conversation as the model was trained to read it, or plainly where nobody says how."""
        if self._tokenizer.chat_template:
            try:
                return self._templated(messages)
            except jinja2.TemplateError:  # many know no system prompt
                return self._templated(without_system(messages))
        return "\n\n".join(self._tamed(message.text) for message in messages) + "\n\n"

    def _templated(self, messages: Messages) -> str:
        turns = [{"role": message.role, "content": self._tamed(message.text)} for message in messages]
        text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text

    def _tamed(self, text: str) -> str:
        """The text without special tokens: a compiler's message must not end its turn."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


class _Clock:
    """Keeps when a model began to generate and when each token came, as transformers' streamers do with the tokens."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def put(self, tokens: Any) -> None:
        self.moments.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(name: str, dtype: Any, **options: Any) -> tuple[Any, Any]:
    """The model of a folder or of the Hub, and its tokenizer; UserError where they cannot be had.

    name: also a GGUF file, a folder that holds one and no other model, or one of adapters, which become part of the
    weights that they name. options: of the tokenizer. Code that comes with a model is not run.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, packed = _gguf(name)
    weights: dict[str, Any] = dict(packed)
    if packed and hasattr(transformers, "GgufConfig"):  # versions that leave weights packed otherwise
        weights["quantization_config"] = transformers.GgufConfig(dequantize=True)
    adapters = Path(folder) / "adapter_config.json"
    peft = imported("peft", f"the adapters in {folder} need", "train") if adapters.exists() else None
    silent = ""
    try:
        base = json.loads(adapters.read_text())["base_model_name_or_path"] if peft else folder
        if not Path(base).exists() and (silent := _why_silent()):
            silent = f"there is no folder {base}, {silent}"
            base = huggingface_hub.snapshot_download(base, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder if peft else base, trust_remote_code=False, **packed, **options
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            base, **(weights | {"dtype": dtype, "trust_remote_code": False})
        )
        if peft:
            model = peft.PeftModel.from_pretrained(model, folder).merge_and_unload().requires_grad_(True)
    except Exception as error:  # noqa: BLE001 - whatever loaders raise for a folder of others
        if silent:
            raise UserError(
                f"cannot load the model {name}: {silent}, and the Hub's cache on this machine does not hold all of it;"
                " give a folder that transformers' save_pretrained wrote"
            ) from None
        raise UserError(
            f"cannot load the model {name}: {one_line(str(error), 200)}; give a folder that transformers'"
            " save_pretrained wrote, or the id of a model on the Hub"
        ) from None
    return model, tokenizer


def _why_silent() -> str:
    """Why the Hub gives nothing; empty where it answers. Its own client asks for 23 s, and again for each file."""
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP client it has, or as HF_HUB_OFFLINE is set
        return f"{constants.ENDPOINT} does not answer ({one_line(str(error), 100)})"
    return ""


def only(config: Any, *names: str) -> Any:
    """Settings of generation with the named ones and the tokens alone: beams, stop strings, other kinds of results and
    the like would change what comes back.
    """
    kept = {name: value for name in (*TOKENS, *names) if (value := getattr(config, name, None)) is not None}
    return transformers.GenerationConfig(**kept)


def _gguf(name: str) -> tuple[str, dict[str, str]]:
    """The folder of a model, and the option that names its GGUF file where it has no other form."""
    path = Path(name)
    files = [path] if path.suffix == ".gguf" and path.is_file() else []
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if not files and not (path / "adapter_config.json").exists():
            raise UserError(f"{name} holds no model: no config.json; give a folder that save_pretrained wrote")
    if not files:
        return name, {}
    if len(files) > 1:
        raise UserError(f"{name} holds {len(files)} GGUF files; name one of them, as in {files[0]}")
    for package in ("accelerate", "gguf"):
        imported(package, f"{files[0]} needs", "gguf")
    return str(files[0].parent), {"gguf_file": files[0].name}


def _special(tokenizer: Any) -> list[str]:
    """The special tokens, the longest first. One of a single character is in any text and ends no turn."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({token for token in (*tokenizer.all_special_tokens, *added) if len(token) > 1}, key=len)[::-1]


MODEL = LocalModel
