"""The embedded policy: a small transformer that writes schedules and learns from every group by GRPO.

The prompt is contrastive, as in CUDA-L1: the task, the machine, and a few of the archive's schedules with
their scores. Invalid choices are masked, so every answer is a schedule.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from cuda_l2.propose._base import Exemplar, Proposer, Space, Values
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.propose._grpo import GrpoSettings
from cuda_l2.propose._network import ScheduleTransformer, Vocabulary
from cuda_l2.propose._sampling import Group, group_loss, one_thread, reference_of, sample_group, values_of
from cuda_l2.propose._weights import Weights
from cuda_l2.records import Candidate, Trial
from cuda_l2.reward import group_advantages, smooth
from cuda_l2.system.text import counted

SETTINGS = GrpoSettings()
TRAINED = replace(SETTINGS, learning_rate=3e-4)
"""Step sizes of a policy that begins trained: it must not forget in one search what it learnt of many tasks."""
EXEMPLARS = 2


class SchedulePolicy(Proposer):
    """Samples schedules and updates its network by their rewards.

    learns=False freezes it: the control that a live update must beat. weights: of a trained network, of this space's
    choices; its most likely schedule comes first.
    """

    name = "schedule"

    def __init__(
        self,
        space: Space,
        trials: Callable[[], list[Trial]],
        rng: np.random.Generator,
        learns: bool = True,
        weights: Weights | None = None,
    ) -> None:
        self._space, self._trials, self._rng, self._learns = space, trials, rng, learns
        self._vocabulary = Vocabulary(space.choices)
        seed = int(rng.integers(1 << 62))
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = ScheduleTransformer(self._vocabulary)
        self._weights, self._settings = weights, SETTINGS
        if weights:
            self._network.load_state_dict(weights.state)
            self._settings = TRAINED
            self.name = f"schedule-{weights.fingerprint}"  # the archive keeps its state apart from an untrained one's
        self._reference = copy.deepcopy(self._network).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=self._settings.learning_rate, weight_decay=0.0
        )
        self._group: Group | None = None
        self._known: set[Values] = set()
        self.updates = 0
        self.skipped_groups = 0

    def propose(self, count: int) -> list[Candidate]:
        history = [trial for trial in self._trials() if trial.candidate.schedule]
        self._known.update(self._space.values_of(trial) for trial in history)
        with one_thread():
            self._group = sample_group(
                self._network,
                self._space,
                self._exemplars(history),
                count,
                self._generator,
                self._known,
                greedy=self._weights is not None,
            )
        answers = [values_of(self._network, row) for row in self._group.answer_GT]
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
        with one_thread():
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
        count = self._weights.exemplars if self._weights else EXEMPLARS
        scores = self._weights is None or self._weights.scores
        chosen = sample_exemplars(valid, count, self._rng)
        return [Exemplar(values, score if scores else 0.0) for score, values in chosen]

    def _update(self, group: Group, advantages_G: torch.Tensor) -> None:
        reference = reference_of(self._reference, self._space, group)
        for _ in range(self._settings.epochs):
            loss = group_loss(self._network, reference, self._space, group, advantages_G, self._settings)
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._settings.max_gradient_norm)
            self._optimizer.step()
        self.updates += 1


PROPOSER = SchedulePolicy
