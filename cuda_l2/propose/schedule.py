"""The embedded policy: a small network that chooses among candidate schedules and learns from every group by GRPO.

The prompt is contrastive, as in CUDA-L1: the task, the machine, and a few of the archive's schedules with their
scores. Candidates are what the families' own models rank first, random schedules, and changed copies of the best
measured ones; all are valid.
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

from cuda_l2.propose._base import Proposer, Space, Values, mutated
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.propose._grpo import Adam, Group, GrpoSettings, draw_groups, group_loss, one_thread, reference_of
from cuda_l2.propose._network import Question, ScheduleNetwork
from cuda_l2.propose._weights import Weights
from cuda_l2.records import Candidate, Trial
from cuda_l2.reward import group_advantages, smooth
from cuda_l2.system.text import counted

SETTINGS = GrpoSettings()
TRAINED = replace(SETTINGS, learning_rate=3e-4)
"""Step sizes of a policy that begins trained: it must not forget in one search what it learnt of many tasks."""
EXEMPLARS = 2
RANKED, DRAWN = 256, 128
"""Candidates at first: those that the families' models rank first, and random ones."""
MORE, PARENTS, CHILDREN = 32, 4, 16
"""Candidates that every later group adds: random ones, and changed copies of the best measured schedules."""


class SchedulePolicy(Proposer):
    """Chooses schedules and updates its network by their rewards.

    learns=False freezes it: the control that a live update must beat. weights: of a trained network, of this space's
    choices; then the most likely candidates are chosen, without them candidates are drawn.
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
        seed = int(rng.integers(1 << 62))
        self._generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._network = ScheduleNetwork(space.choices)
        self._weights, self._settings = weights, SETTINGS
        if weights:
            self._network.load_state_dict(weights.state)
            self._settings = TRAINED
            self.name = f"schedule-{weights.fingerprint}"  # the archive keeps its state apart from an untrained one's
        self._reference = copy.deepcopy(self._network).requires_grad_(False)
        self._optimizer = Adam(self._network, self._settings.learning_rate)
        self._rows: dict[Values, int] = {}  # of the candidates
        self._inputs = torch.empty(0, self._network.encoder.size)
        self._group: Group | None = None
        self.updates = 0
        self.skipped_groups = 0

    def propose(self, count: int) -> list[Candidate]:
        scored = {self._space.values_of(trial): trial.reward for trial in self._trials() if trial.candidate.schedule}
        scored = {values: score for values, score in scored.items() if self._known(values)}
        self._add(list(scored))
        self._add_new({values: score for values, score in scored.items() if not math.isnan(score)})
        open_N = torch.ones(len(self._rows), dtype=torch.bool)
        open_N[[self._rows[values] for values in scored]] = False
        if not open_N.any():  # a small space that is known: again
            open_N[:] = True
        question = Question(self._inputs, open_N, self._exemplars(scored))
        with one_thread():
            (self._group,) = draw_groups(self._network, [question], count, None if self._weights else self._generator)
        schedules = list(self._rows)
        return [self._space.render(schedules[row], self.name) for row in self._group.rows_G.tolist()]

    def observe(self, trials: Sequence[Trial]) -> None:
        group, self._group = self._group, None
        if group is None or not self._learns or len(trials) != len(group.rows_G):
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
            self._update(group, advantages)

    def summary(self) -> str:
        if not self.updates:
            return "too few different results to learn from" if self.skipped_groups else ""
        return f"learnt from {counted(self.updates, 'group')} of kernels"

    def state(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(
            {
                "choices": self._choices,
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
            if kept["choices"] == self._choices:
                self._restore(kept)
        except (RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError):
            self._restore(torch.load(io.BytesIO(before), weights_only=True))

    @property
    def _choices(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(choice.name, choice.values) for choice in self._space.choices]

    def _restore(self, kept: dict[str, Any]) -> None:
        self._network.load_state_dict(kept["network"])
        self._reference.load_state_dict(kept["reference"])
        self._optimizer.load_state_dict(kept["optimizer"])
        self.updates, self.skipped_groups = kept["updates"], kept["skipped_groups"]

    def _known(self, values: Values) -> bool:
        """Whether a schedule of the archive is one of today's: a family's choices may have changed since."""
        choices = self._space.choices
        return len(values) == len(choices) and all(v in c.values for v, c in zip(values, choices, strict=True))

    def _add(self, schedules: Sequence[Values]) -> None:
        """More candidates."""
        new = [values for values in dict.fromkeys(schedules) if values not in self._rows]
        if new:
            self._rows |= {values: len(self._rows) + i for i, values in enumerate(new)}
            self._inputs = torch.cat([self._inputs, self._network.encoder(self._space, new)])

    def _add_new(self, scored: dict[Values, float]) -> None:
        """More candidates from the space. scored: what was measured."""
        if len(self._rows) <= len(scored):
            self._add(self._space.ranked(RANKED))
            self._add(self._space.some(DRAWN, self._rng))
        else:
            self._add(self._space.some(MORE, self._rng))
        best = sorted(scored, key=scored.__getitem__, reverse=True)[:PARENTS]
        self._add([mutated(self._space, values, self._rng) for values in best for _ in range(CHILDREN)])

    def _exemplars(self, scored: dict[Values, float]) -> list[tuple[int, float]]:
        count = self._weights.exemplars if self._weights else EXEMPLARS
        scores = self._weights is None or self._weights.scores
        timed = [(score, values) for values, score in scored.items() if not math.isnan(score)]
        chosen = sample_exemplars(timed, count, self._rng)
        return [(self._rows[values], score if scores else 1.0) for score, values in chosen]

    def _update(self, group: Group, advantages_G: Sequence[float]) -> None:
        references = reference_of(self._reference, [group])
        for _ in range(self._settings.epochs):
            loss = group_loss(self._network, references, [group], [advantages_G], self._settings)
            self._network.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._settings.max_gradient_norm)
            self._optimizer.step()
        self.updates += 1


PROPOSER = SchedulePolicy
