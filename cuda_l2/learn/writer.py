"""Questions to a model in training, and its answers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.learn import decode
from cuda_l2.learn.settings import Sampling
from cuda_l2.llm._base import without_system
from cuda_l2.llm.kinds import hf
from cuda_l2.machine._base import Target
from cuda_l2.propose import _question
from cuda_l2.propose._prompt import Templates
from cuda_l2.records import Candidate, Task, Trial


@dataclass(frozen=True)
class Questions:
    """Prompts as a search makes them, as one message of the user. Nothing that is held out is shown."""

    target: Target
    templates: Templates
    sampling: Sampling
    hold_out: HoldOut
    rng: np.random.Generator
    _held: dict[str, bool] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Whether a candidate is held out, by id: texts are compared once. A copy with another hold-out begins anew."""

    def ask(self, task: Task, history: Sequence[Trial], tokenizer: Any) -> str:
        """One question; its exemplars are drawn anew from the task's trials so far."""
        parts = _question.parts(
            task,
            self.target,
            [self._begun(trial) for trial in history if not self._held_out(trial.candidate)],
            self.rng,
            exemplars=self.sampling.exemplars,
        )
        messages = self.templates.ask(
            parts,
            self.sampling.prompt_tokens,
            lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        )
        (question,) = without_system(messages)
        return question.text

    def _held_out(self, candidate: Candidate) -> bool:
        if candidate.id not in self._held:
            self._held[candidate.id] = self.hold_out.candidate(candidate)
        return self._held[candidate.id]

    def _begun(self, trial: Trial) -> Trial:
        """The trial with as much of its kernel as questions show."""
        lines = self.sampling.exemplar_lines
        if not lines:
            return trial
        source = "".join(trial.candidate.source.splitlines(keepends=True)[:lines])
        return replace(trial, candidate=replace(trial.candidate, source=source))


@dataclass(frozen=True)
class Writer:
    """A model that answers; it may be in training."""

    model: Any
    tokenizer: Any
    sampling: Sampling

    def prompt_ids(self, question: str) -> list[int]:
        """The question's tokens as the model reads them."""
        turn = [{"role": "user", "content": question}]
        ids: list[int] = self.tokenizer.apply_chat_template(
            turn, tokenize=True, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    def write(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """An answer's tokens for each prompt, with the end's token where it came to one. torch's generator decides."""
        answers: list[list[int]] = []
        for start in range(0, len(prompts), self.sampling.at_once):
            answers += self._batch(prompts[start : start + self.sampling.at_once])
        return answers

    def text(self, answer: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(answer, skip_special_tokens=True)
        return text

    @torch.no_grad()
    def _batch(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        model = self.model
        if next(model.parameters()).device.type == "cuda" and decode.serves(model):
            rows = decode.write(model, prompts, self.sampling.answer_tokens, self.sampling.temperature, pad, end)
            return [_ended(row, end) for row in rows]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device, training = next(self.model.parameters()).device, self.model.training
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        config, inner.generation_config = inner.generation_config, hf.only(inner.generation_config)
        self.model.eval()  # without dropout
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):  # as trainers compute
                output = self.model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    do_sample=True,
                    temperature=self.sampling.temperature,
                    top_k=0,
                    top_p=1.0,
                    use_cache=True,
                    max_new_tokens=self.sampling.answer_tokens,
                    pad_token_id=pad,
                    eos_token_id=end,
                )
        finally:
            inner.generation_config = config
            self.model.train(training)
        return [_ended(row, end) for row in output[:, longest:].tolist()]


def _ended(answer: list[int], end: int) -> list[int]:
    return answer[: answer.index(end) + 1] if end in answer else answer
