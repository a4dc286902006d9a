"""Contrastive reinforcement learning (CUDA-L1; CUDA-L2, section 3.2.3) through TRL's GRPOTrainer.

A group's question shows scored kernels that are drawn from the archive when the group is written, so the last step's
kernels can be among them. A reward is equation 3 of the measured speedup, smoothed and clipped by the task's history;
TRL computes group advantages.
"""

import contextlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
from trl import GRPOConfig, GRPOTrainer

from cuda_l2.archive import Archive
from cuda_l2.learn import models, ranks
from cuda_l2.learn.run import Run
from cuda_l2.learn.settings import StageSettings
from cuda_l2.learn.tune import Say, adapters, on_one_gpu, train, trainer_options
from cuda_l2.learn.writer import Questions, Writer
from cuda_l2.measure.clock import CLOCK
from cuda_l2.propose._answer import parse_answer
from cuda_l2.records import Candidate, Task, TimingStatus, Trial
from cuda_l2.reward import RewardSettings, count_tokens, reward, smooth
from cuda_l2.rigs import Rig
from cuda_l2.runs.judging import Evaluators
from cuda_l2.search import Group, Judges, comparable, judge_group
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.text import counted

CORRECT = (TimingStatus.MEASURED, TimingStatus.BUSY)
"""Statuses of correct answers, timed or not."""


class Judge(Closing):
    """Rewards of answers, from the real evaluator; every trial goes into the archive. A context manager.

    name: the model's name as candidates' proposer. judges: processes that judge in this one's place, also while the
    model writes; this one's GPU is locked meanwhile, so that nothing is timed on it.
    """

    def __init__(
        self, rig: Rig, archive: Archive, rewards: RewardSettings, name: str, judges: Judges | None = None
    ) -> None:
        self._rig, self._archive, self._rewards, self._name = rig, archive, rewards, name
        self._judges, self._evaluators = judges, Evaluators(rig, judges_here=judges is None)
        self._histories: dict[Task, list[Trial]] = {}
        self._begun: dict[tuple[Task, tuple[str, ...]], Group] = {}
        self._writing = contextlib.ExitStack()

    def history(self, task: Task) -> list[Trial]:
        """The task's trials so far, on this machine."""
        if task not in self._histories:
            self._histories[task] = comparable(self._archive, task, self._rig.target.machine)
        return self._histories[task]

    def writing(self) -> None:
        """The model is at work from now on, until a group's rewards are asked for."""
        self._writing.close()
        if self._judges and self._rig.gpu:
            self._writing.enter_context(machine_lock(self._rig.gpu))

    def begin(self, task: Task, answers_G: Sequence[str]) -> None:
        """Have other processes judge a group while the next is written."""
        if self._judges and (group := self._group(task, answers_G)):
            self._begun[task, tuple(answers_G)] = group

    def judge(self, task: Task, answers_G: Sequence[str]) -> tuple[list[float], list[Trial | None]]:
        """Smoothed rewards of a group's answers, and their trials; None where an answer held no code."""
        self._writing.close()
        history = self.history(task)
        before = [self.reward(trial) for trial in history]
        sources = self._sources(answers_G)
        group = self._begun.pop((task, tuple(answers_G)), None) or self._group(task, answers_G)
        with group or contextlib.nullcontext():
            judged = list(group or [])
        seen = {trial.candidate.id for trial in history}
        for trial, _ in judged:
            if trial.candidate.id not in seen:
                seen.add(trial.candidate.id)
                history.append(trial)
        left = iter(judged)
        trials = [next(left)[0] if source else None for source in sources]
        raw = [self.reward(trial) if trial else self._rewards.unbuildable for trial in trials]
        return self._smoothed(raw, before), trials

    def _sources(self, answers_G: Sequence[str]) -> list[str]:
        return [parse_answer(answer).source for answer in answers_G]

    def _group(self, task: Task, answers_G: Sequence[str]) -> Group | None:
        """The answers that hold code, if any do; other processes have begun with them when this returns."""
        candidates = [Candidate(source, self._name) for source in self._sources(answers_G) if source]
        if not candidates:
            return None
        evaluator = self._evaluators.of(task, self._rewards)
        evaluator.recall(self.history(task))  # a jump is relative to the best of it
        return judge_group(evaluator, self._archive, candidates, judges=self._judges)

    def reward(self, trial: Trial) -> float:
        """Equation 3 with this run's coefficients, also for earlier trials; NaN for a correct kernel not timed."""
        tokens = count_tokens(trial.candidate.source)
        return reward(trial.build.status, trial.verdict, trial.timing, tokens, self._rewards)

    def _smoothed(self, rewards_G: Sequence[float], history: Sequence[float]) -> list[float]:
        known = [value for value in rewards_G if not math.isnan(value)]
        earlier = [value for value in history if not math.isnan(value)]
        smoothed = smooth(known, earlier or known, self._rewards.smoothing_clip)
        middle = statistics.fmean(smoothed) if smoothed else 0.0  # neither good nor bad where nothing was timed
        left = iter(smoothed)
        return [middle if math.isnan(value) else next(left) for value in rewards_G]

    def close(self) -> None:
        self._writing.close()
        for begun in self._begun.values():
            begun.close()
        self._evaluators.close()


class Counts:
    """Says how many answers of each step are correct, how fast they came, and what to do where they become few."""

    def __init__(self, say: Say) -> None:
        self._say, self._most = say, 0
        self._began_s = self._wrote_s = 0.0

    def begin(self) -> None:
        """The step's questions are asked now."""
        self._began_s = CLOCK.now()

    def written(self) -> None:
        """The step's answers have been written now."""
        self._wrote_s = CLOCK.now()

    def add(self, trials: Sequence[Trial | None]) -> None:
        """The trials of a step's answers, all judged now; None where one held no code."""
        correct = sum(bool(trial and trial.timing and trial.timing.status in CORRECT) for trial in trials)
        writing_s, judging_s = self._wrote_s - self._began_s, CLOCK.now() - self._wrote_s
        self._say(
            f"{correct} of {counted(len(trials), 'answer')} correct; written in {writing_s:.1f} s, then judged in"
            f" {judging_s:.1f}: {len(trials) / max(writing_s + judging_s, 1e-9):.1f} a second"
        )
        if correct < self._most / 4:
            self._say(
                f"up to {self._most} were correct before: too large steps can spoil a model. If the next steps are no"
                " better, stop, and start again with a lower tuning.learning_rate"
            )
        self._most = max(self._most, correct)


def contrastive_rl(
    model: str, tasks: Sequence[Task], settings: StageSettings, run: Run, judge: Judge, questions: Questions, say: Say
) -> None:
    """GRPO on these tasks. Goes on from the run's last checkpoint; the archive keeps what was judged after it."""
    tuning, rl, sampling = settings.tuning, settings.rl, settings.sampling
    assert rl is not None and sampling is not None
    if tuning.batch % (rl.group * ranks.count()):
        raise UserError(
            f"{ranks.count()} GPUs need tuning.batch as a multiple of {ranks.count()} x rl.group, {rl.group}"
        )
    pupil = models.load(model, tuning.precision)
    if pupil.note:
        say(pupil.note)
    by_text = {str(task): task for task in tasks}
    step = f"{counted(tuning.batch // rl.group, 'group')} of {counted(rl.group, 'answer')}"
    say(
        f"{counted(len(tasks), 'task')}, {step} a step. The next line comes when all are written, up to"
        f" {counted(sampling.answer_tokens, 'token')} each, and judged"
    )

    counts = Counts(say)

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts and answers as tokens. texts: each group's task as often as it has answers."""
        writer = Writer(trainer.accelerator.unwrap_model(trainer.model), pupil.tokenizer, sampling)
        asked = [by_text[text] for text in texts[:: rl.group]]
        counts.begin()
        judge.writing()
        prompts: list[list[int]] = []
        for task in asked:
            question = questions.ask(task, judge.history(task), pupil.tokenizer)
            prompts += [writer.prompt_ids(question)] * rl.group
        together = max(1, sampling.at_once // rl.group) * rl.group
        answers: list[list[int]] = []
        for start in range(0, len(prompts), together):
            answers += writer.write(prompts[start : start + together])
            for first in range(start, len(answers), rl.group):
                written = [writer.text(answer) for answer in answers[first : first + rl.group]]
                judge.begin(asked[first // rl.group], written)
        counts.written()
        return {"prompt_ids": prompts, "completion_ids": answers, "logprobs": None}

    def measured(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        rewards: list[float] = []
        judged: list[Trial | None] = []
        for start in range(0, len(prompts), rl.group):
            task = by_text[prompts[start]]
            group, trials = judge.judge(task, completions[start : start + rl.group])
            rewards += group
            judged += trials
            run.log(_group_line(task, trials, [judge.reward(trial) if trial else None for trial in trials]))
        counts.add(judged)
        return rewards

    datasets.disable_progress_bars()
    groups = tuning.steps * tuning.batch // rl.group
    rows = [{"prompt": str(tasks[i % len(tasks)])} for i in range(groups)]
    trainer = GRPOTrainer(
        model=pupil.model,
        reward_funcs=measured,
        args=on_one_gpu(
            GRPOConfig(
                **trainer_options(tuning, run),
                num_generations=rl.group,
                num_iterations=rl.iterations,
                max_completion_length=sampling.answer_tokens,
                temperature=sampling.temperature,
                beta=rl.kl_weight,
                epsilon=rl.clip,
                loss_type="grpo",
                scale_rewards="group",
            )
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
