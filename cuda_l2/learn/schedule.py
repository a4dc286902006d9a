"""The schedule policy's training from recorded worlds.

First a warm start: the network learns to choose the best schedules of each task, and how fast the others are. Then
contrastive GRPO as the papers have it: a group of schedules of a task, with some of its measurements as exemplars in
the question, and advantages of their recorded rewards. Half of all questions hold no exemplar, since the first guess
of a search has none.
"""

import copy
import io
import json
import math
import pickle
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cuda_l2.learn.run import Run
from cuda_l2.learn.settings import Schedule
from cuda_l2.propose._base import Values
from cuda_l2.propose._exemplars import sample_exemplars
from cuda_l2.propose._grpo import GrpoSettings, draw_groups, group_loss, one_thread, reference_of
from cuda_l2.propose._network import Encoder, Question, ScheduleNetwork
from cuda_l2.propose._recorded import RecordedSpace, recorded_reward
from cuda_l2.propose._weights import FILE, Weights
from cuda_l2.reward import RewardSettings, group_advantages, smooth
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_bytes

WARM, RL = "warm start", "GRPO"
STATE, DONE = "state.pt", "trainer_state.json"
"""Files of a checkpoint; the second is written last."""
SHOWN_EVERY = 50
RISE = 0.1
"""Share of the warm start in which its learning rate rises; then it falls to zero."""
SLOWEST = math.log(4)
"""A schedule without a time, or slower, counts as so much slower than the best, in the logarithm."""
HUBER = 0.3
"""Where the error of a predicted time begins to count linearly, in the logarithm."""


class Lesson:
    """One task to learn from: its recorded schedules with their rewards."""

    def __init__(self, space: RecordedSpace, settings: Schedule, encoder: Encoder) -> None:
        self.space = space
        rewards = RewardSettings(alpha=settings.alpha, beta=settings.beta, smoothing_clip=settings.smoothing_clip)
        self.rewards = {values: recorded_reward(row, rewards) for values, row in space.by_values.items()}
        self.rewards = {values: reward for values, reward in self.rewards.items() if not math.isnan(reward)}
        self.schedules = list(self.rewards)
        self._rows = {values: row for row, values in enumerate(self.schedules)}
        self._inputs_ND = encoder(space, self.schedules)
        slow = np.array([math.log1p(space.regret(values)) for values in self.schedules])
        self.speeds_N = torch.tensor(-np.minimum(slow, SLOWEST), dtype=torch.float32)
        self.shares_N = torch.tensor(np.exp(-np.expm1(slow) / settings.near), dtype=torch.float32)
        """How often the warm start shows each schedule: falling with its time over the best."""

    def question(self, settings: Schedule, rng: np.random.Generator) -> Question:
        """The task's schedules without exemplars in half of all questions, else with some of a few measurements."""
        open_N = torch.ones(len(self.schedules), dtype=torch.bool)
        if not settings.exemplars or rng.random() < 0.5:
            return Question(self._inputs_ND, open_N)
        seen = min(int(rng.integers(1, settings.history + 1)), len(self.schedules) // 2)
        history = [self.schedules[i] for i in rng.choice(len(self.schedules), seen, replace=False)]
        chosen = sample_exemplars([(self.rewards[values], values) for values in history], settings.exemplars, rng)
        exemplars = [(self._rows[values], score if settings.scores else 1.0) for score, values in chosen]
        open_N[[row for row, _ in exemplars]] = False
        return Question(self._inputs_ND, open_N, exemplars)

    def advantages(self, schedules: Sequence[Values], settings: Schedule) -> list[float] | None:
        """The advantages of a group; None where all are alike."""
        rewards = [self.rewards[values] for values in schedules]
        if settings.smoothing:
            rewards = smooth(rewards, list(self.rewards.values()), settings.smoothing_clip)
        return group_advantages(rewards)


class ScheduleTraining:
    """One run: the network, its optimizer, and what a killed run goes on from."""

    def __init__(
        self, spaces: Sequence[RecordedSpace], settings: Schedule, run: Run, say: Callable[[str], None]
    ) -> None:
        """spaces: one for each task to learn from, all of the same families. UserError where none can be learnt."""
        self._settings, self._run, self._say = settings, run, say
        self._families = spaces[0].families
        if any(space.families != self._families for space in spaces):
            raise UserError("the worlds have schedules of different families: train from them one by one")
        self._machines = tuple(sorted({space.target.machine for space in spaces}))
        torch.manual_seed(settings.seed)
        self._network = ScheduleNetwork(spaces[0].choices)
        self._lessons = [Lesson(space, settings, self._network.encoder) for space in spaces]
        self._reference: ScheduleNetwork | None = None
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._rng = np.random.default_rng(settings.seed)
        self._optimizer = self._new_optimizer(settings.warm_learning_rate, settings.weight_decay)
        self._step = 0
        self._kept = 0  # the step of the last checkpoint

    def train(self) -> Path:
        """Train to the end, from the last checkpoint where there is one; the file of the weights.

        UserError where the loss is no number or a file cannot be written: the last checkpoint stays.
        """
        self._resume()
        total = self._settings.warm_steps + self._settings.steps
        with one_thread():
            while self._step < total:
                warm = self._step < self._settings.warm_steps
                if not warm and self._reference is None:
                    self._begin_rl()
                figures = self._taken(self._warm_loss() if warm else self._rl_loss())
                self._step += 1
                self._run.log({"step": self._step, "phase": WARM if warm else RL, **figures})
                if self._step % SHOWN_EVERY == 0 or self._step == total:
                    said = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                    self._say(f"step {self._step} of {total}, {WARM if warm else RL}: {said}")
                if self._step % self._settings.save_every == 0 and self._step < total:
                    self._save()
        self._run.finish(lambda folder: self.weights.save(folder / FILE))
        return self._run.model / FILE

    @property
    def weights(self) -> Weights:
        """What was learnt so far."""
        return Weights(
            self._families,
            {name: tensor.detach().clone().contiguous() for name, tensor in self._network.state_dict().items()},
            tuple(sorted({str(lesson.space.task) for lesson in self._lessons})),
            self._machines,
            self._settings.exemplars,
            self._settings.scores,
            asdict(self._settings),
        )

    def _new_optimizer(self, rate: float, decay: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._network.parameters(), lr=rate, weight_decay=decay)

    def _begin_rl(self) -> None:
        """What was learnt so far becomes the reference policy."""
        self._reference = copy.deepcopy(self._network).requires_grad_(False)
        self._optimizer = self._new_optimizer(self._settings.learning_rate, 0.0)

    def _drawn(self) -> tuple[list[Lesson], list[Question]]:
        count = min(self._settings.tasks, len(self._lessons))
        lessons = [self._lessons[i] for i in self._rng.choice(len(self._lessons), count, replace=False)]
        return lessons, [lesson.question(self._settings, self._rng) for lesson in lessons]

    def _warm_loss(self) -> tuple[torch.Tensor, dict[str, float]]:
        """The surprise at good schedules, plus the error of the predicted speeds."""
        settings = self._settings
        done = (self._step + 0.5) / settings.warm_steps
        slope = done / RISE if done < RISE else (1 + math.cos(math.pi * (done - RISE) / (1 - RISE))) / 2
        for group in self._optimizer.param_groups:
            group["lr"] = settings.warm_learning_rate * slope
        lessons, questions = self._drawn()
        log_probs_BN, predicted_BN = self._network(questions)
        losses = []
        for i, (lesson, question) in enumerate(zip(lessons, questions, strict=True)):
            count = len(lesson.schedules)
            shares_N = torch.where(question.open_N, lesson.shares_N, 0.0)
            chosen = shares_N > 0
            surprise = -(shares_N[chosen] * log_probs_BN[i, :count][chosen]).sum() / shares_N.sum().clamp(min=1e-9)
            error_N = predicted_BN[i, :count] - lesson.speeds_N
            error_N = error_N - error_N.mean()
            fit = torch.nn.functional.huber_loss(error_N, torch.zeros(count), delta=HUBER)
            losses.append(surprise + settings.fit_weight * fit)
        return torch.stack(losses).mean(), {}

    def _rl_loss(self) -> tuple[torch.Tensor | None, dict[str, float]]:
        """GRPO's loss over the groups that have different rewards, and the median regret of the groups."""
        assert self._reference is not None
        settings = self._settings
        grpo = GrpoSettings(settings.learning_rate, settings.clip, settings.kl_weight, epochs=1)
        lessons, questions = self._drawn()
        groups, advantages, regrets = [], [], []
        drawn = draw_groups(self._network, questions, settings.group, self._generator)
        for lesson, group in zip(lessons, drawn, strict=True):
            schedules = [lesson.schedules[row] for row in group.rows_G.tolist()]
            regrets.append(statistics.median(lesson.space.regret(values) for values in schedules))
            found = lesson.advantages(schedules, settings)
            if found is not None:
                groups.append(group)
                advantages.append(found)
        figures = {"median regret": statistics.median(regrets)}
        if not groups:
            return None, figures
        return group_loss(self._network, reference_of(self._reference, groups), groups, advantages, grpo), figures

    def _taken(self, found: tuple[torch.Tensor | None, dict[str, float]]) -> dict[str, float]:
        """One gradient step on the loss; the step's figures."""
        loss, figures = found
        if loss is None:
            return figures
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss is no number at step {self._step + 1}: the checkpoint of step {self._kept} is kept; lower"
                f" schedule.learning_rate or look into the world's figures ({self._run.folder})"
            )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), GrpoSettings().max_gradient_norm)
        self._optimizer.step()
        return {"loss": loss.item(), **figures}

    def _save(self) -> None:
        """Keep a checkpoint, then remove the oldest."""
        folder = self._run.checkpoints / f"checkpoint-{self._step}"
        buffer = io.BytesIO()
        torch.save(self._state(), buffer)
        for name, data in ((STATE, buffer.getvalue()), (DONE, json.dumps({"global_step": self._step}).encode())):
            write_bytes(folder / name, data, "started again it goes on from the last checkpoint")
        self._kept = self._step
        found = sorted(self._run.checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        for old in found[: -self._settings.checkpoints]:
            shutil.rmtree(old)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "network": self._network.state_dict(),
            "reference": self._reference.state_dict() if self._reference else None,
            "optimizer": self._optimizer.state_dict(),
            "generator": self._generator.get_state(),
            "rng": json.dumps(self._rng.bit_generator.state),
        }

    def _resume(self) -> None:
        folder = self._run.last_checkpoint()
        if folder is None:
            return
        try:
            kept = torch.load(io.BytesIO((folder / STATE).read_bytes()), weights_only=True)
            self._network.load_state_dict(kept["network"])
            if kept["reference"] is not None:
                self._begin_rl()
                assert self._reference is not None
                self._reference.load_state_dict(kept["reference"])
            self._optimizer.load_state_dict(kept["optimizer"])
            self._generator.set_state(kept["generator"])
            self._rng.bit_generator.state = json.loads(kept["rng"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{folder} is damaged ({error}): remove it to go on from the one before") from None
        self._step = self._kept = kept["step"]
        self._say(f"goes on from step {self._step}")
