"""The embedded policy: a small transformer that writes schedules and learns from every group by GRPO.

The prompt is contrastive, as in CUDA-L1: the task, the machine, and a few of the archive's schedules with
their scores. Invalid choices are masked, so every answer is a schedule.
"""

import contextlib
import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cuda_l2.propose._base import Exemplar, Proposer, Space, Values
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.propose._grpo import GrpoSettings, grpo_loss
from cuda_l2.propose._network import ScheduleTransformer, Vocabulary, log_probabilities
from cuda_l2.records import Candidate, Trial
from cuda_l2.reward import group_advantages, smooth
from cuda_l2.system.text import counted

SETTINGS = GrpoSettings()
EXEMPLARS = 2
NOVELTY_TRIES = 8
HEATING = 1.5
"""A known schedule is drawn again up to NOVELTY_TRIES times, each time at a temperature higher by this factor: a
repetition would earn nothing, and a policy that has converged must still explore."""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: four made each operator of a network this small three times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Group:
    """A sampled group with the inputs of its update."""

    exemplars: list[Exemplar]
    answer_GT: torch.Tensor
    masks_GTV: torch.Tensor
    log_probs_GT: torch.Tensor


class SchedulePolicy(Proposer):
    """Samples schedules and updates its network by their rewards.

    learns=False freezes it: the control that a live update must beat.
    """

    name = "schedule"

    def __init__(
        self,
        space: Space,
        trials: Callable[[], list[Trial]],
        rng: np.random.Generator,
        learns: bool = True,
    ) -> None:
        self._space, self._trials, self._rng, self._learns = space, trials, rng, learns
        self._vocabulary = Vocabulary(space.choices)
        seed = int(rng.integers(1 << 62))
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = ScheduleTransformer(self._vocabulary)
        self._reference = copy.deepcopy(self._network).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=SETTINGS.learning_rate, weight_decay=0.0)
        self._group: _Group | None = None
        self._known: set[Values] = set()
        self.updates = 0
        self.skipped_groups = 0

    def propose(self, count: int) -> list[Candidate]:
        history = [trial for trial in self._trials() if trial.candidate.schedule]
        self._known.update(self._space.values_of(trial) for trial in history)
        with _one_thread():
            self._group = self._sample(count, self._exemplars(history))
        answers = [self._values(row) for row in self._group.answer_GT]
        return [self._space.render(values, self.name) for values in answers]

    def observe(self, trials: Sequence[Trial]) -> None:
        group, self._group = self._group, None
        self._known.update(self._space.values_of(trial) for trial in trials)
        if group is None or not self._learns or len(trials) != len(group.answer_GT):
            return  # a group cut short teaches nothing
        history = [trial.reward for trial in self._trials() if not math.isnan(trial.reward)]
        rewards = [trial.reward for trial in trials]
        if any(math.isnan(reward) for reward in rewards):
            return
        advantages = group_advantages(smooth(rewards, history or rewards))
        if advantages is None:
            self.skipped_groups += 1
            return
        with _one_thread():
            self._update(group, torch.tensor(advantages))

    def summary(self) -> str:
        if not self.updates:
            return "too few different results to learn from" if self.skipped_groups else ""
        return f"learnt from {counted(self.updates, 'group')} of kernels"

    def state(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(
            {
                "choices": [(choice.name, choice.values) for choice in self._vocabulary.choices],
                "network": self._network.state_dict(),
                "reference": self._reference.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "updates": self.updates,
                "skipped_groups": self.skipped_groups,
            },
            buffer,
        )
        return buffer.getvalue()

    def load_state(self, state: bytes) -> None:
        """Go on from a kept state; one written for another schedule space or network is left alone."""
        before = self.state()
        try:
            kept = torch.load(io.BytesIO(state), weights_only=True)
            if kept["choices"] == [(choice.name, choice.values) for choice in self._vocabulary.choices]:
                self._restore(kept)
        except (RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError):
            self._restore(torch.load(io.BytesIO(before), weights_only=True))

    def _restore(self, kept: dict[str, Any]) -> None:
        self._network.load_state_dict(kept["network"])
        self._reference.load_state_dict(kept["reference"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self.updates, self.skipped_groups = kept["updates"], kept["skipped_groups"]

    def _exemplars(self, history: Sequence[Trial]) -> list[Exemplar]:
        scored = [(trial.reward, self._space.values_of(trial)) for trial in history if not math.isnan(trial.reward)]
        valid = [(reward, values) for reward, values in scored if len(values) == len(self._vocabulary.choices)]
        return [Exemplar(values, score) for score, values in sample_exemplars(valid, EXEMPLARS, self._rng)]

    @torch.no_grad()
    def _sample(self, count: int, exemplars: list[Exemplar]) -> _Group:
        """A group of answers, known ones drawn again a few times."""
        context = self._network.context(self._space, exemplars)
        answers, masks = self._draw(context, count)
        for attempt in range(1, NOVELTY_TRIES + 1):
            seen = set(self._known)
            again = []
            for i, row in enumerate(answers):
                values = self._values(row)
                if values in seen:
                    again.append(i)
                seen.add(values)
            if not again:
                break
            answers[again], masks[again] = self._draw(context, len(again), HEATING**attempt)
        return _Group(exemplars, answers, masks, log_probabilities(self._network, context, answers, masks))

    def _draw(self, context_P: torch.Tensor, count: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        answers = torch.empty(count, 0, dtype=torch.long)
        masks: list[torch.Tensor] = []
        for position in range(len(self._vocabulary.choices)):
            valid = [self._space.valid(self._values(row)) for row in answers]
            mask = torch.stack([self._vocabulary.mask(position, values) for values in valid])
            masks.append(mask)
            if all(len(values) == 1 for values in valid):
                probabilities = mask.float()  # nothing to decide
            else:
                logits = self._network.logits(context_P, answers)[:, -1]
                probabilities = (logits / temperature).masked_fill(~mask, -torch.inf).softmax(-1)
            token = torch.multinomial(probabilities, 1, generator=self._generator)
            answers = torch.cat([answers, token], dim=1)
        return answers, torch.stack(masks, dim=1)

    def _values(self, tokens: torch.Tensor) -> Values:
        return tuple(self._vocabulary.value(i, token) for i, token in enumerate(tokens.tolist()))

    def _update(self, group: _Group, advantages_G: torch.Tensor) -> None:
        with torch.no_grad():
            context = self._reference.context(self._space, group.exemplars)
            reference = log_probabilities(self._reference, context, group.answer_GT, group.masks_GTV)
        for _ in range(SETTINGS.epochs):
            context = self._network.context(self._space, group.exemplars)
            log_probs = log_probabilities(self._network, context, group.answer_GT, group.masks_GTV)
            loss = grpo_loss(log_probs, group.log_probs_GT, reference, advantages_G, SETTINGS)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), SETTINGS.max_gradient_norm)
            self._optimizer.step()
        self.updates += 1


PROPOSER = SchedulePolicy
