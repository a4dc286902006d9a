"""Contrastive reinforcement learning (CUDA-L1; CUDA-L2, section 3.2.3) through TRL's GRPOTrainer.

A group's question shows scored kernels that are drawn anew from the archive when the group is written, so what the
model found a step ago is what it is shown now. Rewards are equation 3 of what the evaluator measured, smoothed and
clipped by the task's history; TRL makes group advantages of them.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from trl import GRPOConfig, GRPOTrainer

from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.learn import models
from cuda_l2.learn.run import Run
from cuda_l2.learn.settings import StageSettings
from cuda_l2.learn.tune import Say, adapters, train, trainer_options
from cuda_l2.learn.writer import Questions, Writer
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._answer import parse_answer
from cuda_l2.records import Candidate, Gemm, Trial
from cuda_l2.reward import RewardSettings, count_tokens, reward, smooth
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group

NAME = "hgemm-rl"
"""Of the model as candidates' proposer."""


class Judge:
    """Rewards of answers, from the real evaluator; every trial goes into the archive. A context manager."""

    def __init__(self, rig: Rig, archive: Archive, rewards: RewardSettings) -> None:
        self._rig, self._archive, self._rewards = rig, archive, rewards
        self._evaluators: dict[Gemm, Evaluator] = {}
        self._histories: dict[Gemm, list[Trial]] = {}

    def history(self, gemm: Gemm) -> list[Trial]:
        """The task's trials so far, on this machine."""
        if gemm not in self._histories:
            self._histories[gemm] = self._archive.trials(gemm, self._rig.target.machine, SEARCH.name)
        return self._histories[gemm]

    def judge(self, gemm: Gemm, answers_G: Sequence[str]) -> tuple[list[float], list[Trial | None]]:
        """Smoothed rewards of a group's answers, and their trials; None where an answer held no code."""
        history = self.history(gemm)
        before = [self.reward(trial) for trial in history]
        if gemm not in self._evaluators:
            self._evaluators[gemm] = Evaluator(gemm, self._rig, rewards=self._rewards)
            self._evaluators[gemm].recall(history)  # a jump in reward is one from the best of it
        sources = [parse_answer(answer).source for answer in answers_G]
        candidates = [Candidate(source, NAME) for source in sources if source]
        judged = list(judge_group(self._evaluators[gemm], self._archive, candidates))
        seen = {trial.candidate.id for trial in history}
        for trial, _ in judged:
            if trial.candidate.id not in seen:
                seen.add(trial.candidate.id)
                history.append(trial)
        left = iter(judged)
        trials = [next(left)[0] if source else None for source in sources]
        raw = [self.reward(trial) if trial else self._rewards.unbuildable for trial in trials]
        return self._smoothed(raw, before), trials

    def reward(self, trial: Trial) -> float:
        """Equation 3 with this run's coefficients, whoever measured it; NaN where it was correct but not timed."""
        tokens = count_tokens(trial.candidate.source)
        return reward(trial.build.status, trial.verdict, trial.timing, tokens, self._rewards)

    def _smoothed(self, rewards_G: Sequence[float], history: Sequence[float]) -> list[float]:
        known = [value for value in rewards_G if not math.isnan(value)]
        earlier = [value for value in history if not math.isnan(value)]
        smoothed = iter(smooth(known, earlier or known, self._rewards.smoothing_clip))
        values = [math.nan if math.isnan(value) else next(smoothed) for value in rewards_G]
        timed = [value for value in values if not math.isnan(value)]
        middle = statistics.fmean(timed) if timed else 0.0  # neither good nor bad where nothing was timed
        return [middle if math.isnan(value) else value for value in values]

    def close(self) -> None:
        for evaluator in self._evaluators.values():
            evaluator.close()

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def contrastive_rl(
    model: str, gemms: Sequence[Gemm], settings: StageSettings, run: Run, judge: Judge, questions: Questions, say: Say
) -> None:
    """GRPO on these tasks. Goes on from the run's last checkpoint; the archive keeps what was judged after it."""
    tuning, rl, sampling = settings.tuning, settings.rl, settings.sampling
    assert rl is not None and sampling is not None
    pupil = models.load(model, tuning.precision)
    say(f"{len(gemms)} tasks, {tuning.batch // rl.group} groups of {rl.group} answers a step")

    def rollout(tasks: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts and answers as tokens. tasks: each group's as often as it has answers."""
        writer = Writer(trainer.accelerator.unwrap_model(trainer.model), pupil.tokenizer, sampling)
        prompts: list[list[int]] = []
        for start in range(0, len(tasks), rl.group):
            gemm = Gemm.parse(tasks[start])
            question = questions.ask(gemm, judge.history(gemm), pupil.tokenizer)
            prompts += [writer.prompt_ids(question)] * rl.group
        return {"prompt_ids": prompts, "completion_ids": writer.write(prompts), "logprobs": None}

    def measured(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards: list[float] = []
        for start in range(0, len(prompts), rl.group):
            gemm = Gemm.parse(prompts[start])
            group, trials = judge.judge(gemm, completions[start : start + rl.group])
            rewards += group
            run.log(_told(gemm, trials, [judge.reward(trial) if trial else None for trial in trials]))
        return rewards

    datasets.disable_progress_bars()
    groups = tuning.steps * tuning.batch // rl.group
    rows = [{"prompt": str(gemms[i % len(gemms)])} for i in range(groups)]
    trainer = GRPOTrainer(
        model=pupil.model,
        reward_funcs=measured,
        args=GRPOConfig(
            **trainer_options(tuning, run),
            per_device_train_batch_size=tuning.micro_batch,
            gradient_accumulation_steps=tuning.batch // tuning.micro_batch,
            num_generations=rl.group,
            num_iterations=rl.iterations,
            max_completion_length=sampling.answer_tokens,
            temperature=sampling.temperature,
            beta=rl.kl_weight,
            epsilon=rl.clip,
            loss_type="grpo",
            scale_rewards="group",
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=pupil.tokenizer,
        peft_config=adapters(settings.lora),
        rollout_func=rollout,
    )
    train(trainer, run, say)


def _told(gemm: Gemm, trials: Sequence[Trial | None], rewards: Sequence[float | None]) -> Mapping[str, Any]:
    """A group as the run's file keeps it; rewards before smoothing."""
    return {
        "task": str(gemm),
        "candidates": [trial.candidate.id if trial else "" for trial in trials],
        "statuses": [trial.status if trial else "no-code" for trial in trials],
        "speedups": [trial.speedup if trial else 0.0 for trial in trials],
        "rewards": [None if value is None or math.isnan(value) else round(value, 4) for value in rewards],
    }
