"""Contrastive reinforcement learning (CUDA-L1; CUDA-L2, section 3.2.3) through TRL's GRPOTrainer.

A group's question shows scored kernels that are drawn from the archive when the group is written, so the last step's
kernels can be among them. A reward is equation 3 of the measured speedup, smoothed and clipped by the task's history;
TRL computes group advantages.
"""

import collections
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
from cuda_l2.records import Candidate, Task, Trial
from cuda_l2.reward import RewardSettings, count_tokens, reward, smooth
from cuda_l2.rigs import Rig
from cuda_l2.search import judge_group
from cuda_l2.system.closing import Closing
from cuda_l2.system.text import counted

OPEN = 4
"""Evaluators kept open: each holds memory for its inputs, outputs and references."""


class Judge(Closing):
    """Rewards of answers, from the real evaluator; every trial goes into the archive. A context manager.

    name: the model's name as candidates' proposer.
    """

    def __init__(self, rig: Rig, archive: Archive, rewards: RewardSettings, name: str) -> None:
        self._rig, self._archive, self._rewards, self._name = rig, archive, rewards, name
        self._evaluators: collections.OrderedDict[Task, Evaluator] = collections.OrderedDict()
        self._histories: dict[Task, list[Trial]] = {}

    def history(self, task: Task) -> list[Trial]:
        """The task's trials so far, on this machine."""
        if task not in self._histories:
            self._histories[task] = self._archive.trials(task, self._rig.target.machine, SEARCH.name)
        return self._histories[task]

    def judge(self, task: Task, answers_G: Sequence[str]) -> tuple[list[float], list[Trial | None]]:
        """Smoothed rewards of a group's answers, and their trials; None where an answer held no code."""
        history = self.history(task)
        before = [self.reward(trial) for trial in history]
        sources = [parse_answer(answer).source for answer in answers_G]
        candidates = [Candidate(source, self._name) for source in sources if source]
        judged = list(judge_group(self._evaluator(task), self._archive, candidates)) if candidates else []
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
        """Equation 3 with this run's coefficients, also for earlier trials; NaN for a correct kernel not timed."""
        tokens = count_tokens(trial.candidate.source)
        return reward(trial.build.status, trial.verdict, trial.timing, tokens, self._rewards)

    def _evaluator(self, task: Task) -> Evaluator:
        if task not in self._evaluators:
            while len(self._evaluators) >= OPEN:
                _, longest_unused = self._evaluators.popitem(last=False)
                longest_unused.close()
            self._evaluators[task] = Evaluator(task, self._rig, rewards=self._rewards)
            self._evaluators[task].recall(self.history(task))  # a jump is relative to the best of it
        self._evaluators.move_to_end(task)
        return self._evaluators[task]

    def _smoothed(self, rewards_G: Sequence[float], history: Sequence[float]) -> list[float]:
        known = [value for value in rewards_G if not math.isnan(value)]
        earlier = [value for value in history if not math.isnan(value)]
        smoothed = smooth(known, earlier or known, self._rewards.smoothing_clip)
        middle = statistics.fmean(smoothed) if smoothed else 0.0  # neither good nor bad where nothing was timed
        left = iter(smoothed)
        return [middle if math.isnan(value) else next(left) for value in rewards_G]

    def close(self) -> None:
        for evaluator in self._evaluators.values():
            evaluator.close()


def contrastive_rl(
    model: str, tasks: Sequence[Task], settings: StageSettings, run: Run, judge: Judge, questions: Questions, say: Say
) -> None:
    """GRPO on these tasks. Goes on from the run's last checkpoint; the archive keeps what was judged after it."""
    tuning, rl, sampling = settings.tuning, settings.rl, settings.sampling
    assert rl is not None and sampling is not None
    pupil = models.load(model, tuning.precision)
    if pupil.note:
        say(pupil.note)
    by_text = {str(task): task for task in tasks}
    step = f"{counted(tuning.batch // rl.group, 'group')} of {counted(rl.group, 'answer')}"
    say(f"{counted(len(tasks), 'task')}, {step} a step")

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts and answers as tokens. texts: each group's task as often as it has answers."""
        writer = Writer(trainer.accelerator.unwrap_model(trainer.model), pupil.tokenizer, sampling)
        prompts: list[list[int]] = []
        for start in range(0, len(texts), rl.group):
            task = by_text[texts[start]]
            question = questions.ask(task, judge.history(task), pupil.tokenizer)
            prompts += [writer.prompt_ids(question)] * rl.group
        return {"prompt_ids": prompts, "completion_ids": writer.write(prompts), "logprobs": None}

    def measured(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards: list[float] = []
        for start in range(0, len(prompts), rl.group):
            task = by_text[prompts[start]]
            group, trials = judge.judge(task, completions[start : start + rl.group])
            rewards += group
            run.log(_group_line(task, trials, [judge.reward(trial) if trial else None for trial in trials]))
        return rewards

    datasets.disable_progress_bars()
    groups = tuning.steps * tuning.batch // rl.group
    rows = [{"prompt": str(tasks[i % len(tasks)])} for i in range(groups)]
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


def _group_line(task: Task, trials: Sequence[Trial | None], rewards: Sequence[float | None]) -> Mapping[str, Any]:
    """A group as a line of the run's file; rewards before smoothing."""
    return {
        "task": str(task),
        "candidates": [trial.candidate.id if trial else "" for trial in trials],
        "statuses": [trial.status if trial else "no-code" for trial in trials],
        "speedups": [trial.speedup if trial else 0.0 for trial in trials],
        "rewards": [None if value is None or math.isnan(value) else round(value, 4) for value in rewards],
    }
