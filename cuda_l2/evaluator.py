"""The stages in order for the candidates of one task: build -> verify -> measure -> reward.

The same object serves the search, `cuda-l2 check`, and `cuda_l2.evaluate` as a reward function.
"""

import contextlib
import datetime
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

from cuda_l2 import contract, sources, tasks
from cuda_l2.contract import ContractError
from cuda_l2.machine import chosen
from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.protocols import FINALS, SEARCH, Protocol
from cuda_l2.measure.rounds import Kernel, Limits
from cuda_l2.records import (
    Build,
    BuildStatus,
    Candidate,
    Review,
    Task,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
)
from cuda_l2.review._base import Checker, weigh
from cuda_l2.review.jumps import compare_elsewhere, jump, measure_again, repeated
from cuda_l2.reward import RewardSettings, count_tokens, reward
from cuda_l2.rigs import Bench, Rig, open_rig
from cuda_l2.sources import Source
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.steps import step
from cuda_l2.system.text import counted
from cuda_l2.system.values import require
from cuda_l2.version import __version__

TOLD = (TimingStatus.MEASURED, TimingStatus.BUSY)
"""Statuses of timings that count against no candidate."""
MOST_TOGETHER, TOGETHER_ROUNDS = 8, 10
"""Candidates that are timed in one run, and its fewest rounds."""
POOR = 0.9
"""Timing of a candidate in a search ends once its speedup is surely below this share of the best."""


class Evaluator(Closing):
    """The stages of one task, set up once. A context manager.

    seed: seed of the inputs, random by default, so that no candidate can know them. checker: reviews candidates whose
    reward jumps. weights_ahead: candidates may declare inputs constant; elsewhere that is an unfair advantage.
    """

    def __init__(
        self,
        task: Task,
        rig: Rig,
        *,
        seed: int | None = None,
        rewards: RewardSettings = RewardSettings(),
        checker: Checker | None = None,
        clock: Clock = CLOCK,
        weights_ahead: bool = False,
        judges_here: bool = True,
    ) -> None:
        """judges_here: whether inputs are drawn at once; otherwise when something is judged in this process."""
        self.clock, self._weights_ahead = clock, weights_ahead
        self.task, self.rig, self.target, self.rewards = task, rig, rig.target, rewards
        self._seed = secrets.randbits(48) if seed is None else seed
        self._checker = checker
        self._environment: dict[str, Any] = {}
        self.best_speedup = 0.0
        """The best speedup known; a jump is relative to it."""
        self.ends = math.inf
        """When timings are to have ended, by the clock; waiting for the machine's lock moves it on."""
        self.stage_seconds = {"build": 0.0, "verify": 0.0, "measure": 0.0, "review": 0.0}
        self.queued_s = 0.0
        """Time spent waiting for the machine's lock; it belongs to no stage."""
        self.waited_s = 0.0
        """Time that timings spent waiting while other programs had the cores; it belongs to the stage."""
        self._opened: Bench | None = None
        if judges_here:
            self._opened = self._bench

    @property
    def _bench(self) -> Bench:
        if self._opened is None:
            with step("drawing inputs"):
                self._opened = self.rig.open(self.task, self._seed)
        return self._opened

    @property
    def left_s(self) -> float:
        """Seconds until timings are to have ended."""
        return self.ends - self.clock.now()

    def recall(self, trials: Sequence[Trial]) -> None:
        """Take the best speedup of earlier trials as the one that jumps are relative to."""
        self.best_speedup = max([self.best_speedup, *(trial.speedup for trial in trials)])

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        """Builds in order; each is awaited when it is taken."""
        what = f"compiling {counted(len(candidates), 'kernel')}"
        with self._turn() if self.rig.builds_disturb else contextlib.nullcontext(), self._stage("build", what):
            builds = self._bench.build(candidates)
        for _ in candidates:
            with self._stage("build", what):
                build = next(builds)
            yield build

    def judge(
        self, candidate: Candidate, build: Build, protocol: Protocol | None = None, *, full: bool = False
    ) -> Trial:
        """Verify and time one built candidate, and reward it."""
        protocol = protocol or self.rig.protocols[SEARCH.name]
        verdict: Verdict | None = None
        timing: Timing | None = None
        review: Review | None = None
        with self._turn():
            if build.status is BuildStatus.BUILT:
                verdict = self._verified(candidate, build, full)
            if verdict and verdict.status is VerdictStatus.CORRECT:
                with self._stage("measure", "timing a kernel"):
                    verdict, timing, review = self._confirmed(candidate, build, verdict, protocol)
        trial = self._trial(candidate, build, verdict, timing, review, protocol)
        with self._stage("review", "reviewing a kernel"):
            trial = self._second_look(trial)  # takes the lock itself
        self.best_speedup = max(self.best_speedup, trial.speedup)
        return trial

    def take(self, trial: Trial, stage_seconds: Mapping[str, float], queued_s: float) -> Trial:
        """The trial of another process as if it were judged here: counted, and shown to the checker.

        UserError where its machine is another one than this evaluator's.
        """
        if trial.machine != self.target.machine:
            raise UserError(
                f"one GPU is {trial.machine}, the first {self.target.machine}: their figures do not compare; choose"
                " GPUs that are alike with CUDA_VISIBLE_DEVICES"
            )
        for stage, took_s in stage_seconds.items():
            self.stage_seconds[stage] += took_s
        self.queued_s += queued_s
        self.ends += queued_s
        with self._stage("review", "reviewing a kernel"):
            trial = self._opinion(trial)
        self.best_speedup = max(self.best_speedup, trial.speedup)
        return trial

    def failed(self, candidate: Candidate, reason: str) -> Trial:
        """The trial of a candidate that ended every process that tried to build and judge it."""
        build = Build(candidate.id, BuildStatus.FAILED, reason)
        return self._trial(candidate, build, None, None, None, self.rig.protocols[SEARCH.name])

    def evaluate(
        self, candidates: Sequence[Candidate], protocol: Protocol | None = None, *, full: bool = False
    ) -> Iterator[Trial]:
        """Trials of several candidates, in order; later ones build while earlier ones are judged where that is fair."""
        for candidate, build in zip(candidates, self.build(candidates), strict=True):
            yield self.judge(candidate, build, protocol, full=full)

    def compare(self, candidates: Sequence[Candidate], protocol: Protocol, *, full: bool = False) -> list[Trial]:
        """Trials of candidates that are timed side by side in one run: their figures can be compared with one another.

        Where one turns out wrong there, or their workspaces do not fit beside one another, each is timed by itself.
        """
        found = self._compared(candidates, protocol, full)
        return list(self.evaluate(candidates, protocol, full=full)) if found is None else found

    def together(self, candidates: Sequence[Candidate], protocol: Protocol, *, full: bool = False) -> list[Trial]:
        """Trials whose rewards can be compared with one another, whatever the candidates' order.

        On a CPU candidates are timed side by side, each round in new processes, and all of them again on fresh inputs
        where one speedup is a jump; what spoils a run is left out of the next. On a GPU each is judged as if it were
        the first.
        """
        if self.target.name != "cpu":
            trials = []
            for candidate, build in zip(candidates, self.build(candidates), strict=True):
                self.best_speedup = 0.0
                trials.append(self.judge(candidate, build, protocol, full=full))
            return trials
        protocol = replace(protocol, fresh=True, min_rounds=max(protocol.min_rounds, TOGETHER_ROUNDS))
        found = self._compared(candidates, protocol, full)
        if found is None:
            found = list(self.evaluate(candidates, protocol, full=full))
            good = [trial.candidate for trial in found if trial.timing and trial.timing.status in TOLD]
            again = self._compared(good, protocol) if 1 < len(good) < len(found) else None
            found = _in_place_of(found, again or [])
        if any(jump(trial.speedup, 0.0) for trial in found):
            found = self._together_again(found, protocol)
        return [self._second_look(trial) for trial in found]

    def time(self, candidate: Candidate, build: Build, protocol: Protocol) -> Timing:
        """Time a correct candidate; a search cuts the timing of a poor one short."""
        beat = POOR * self.best_speedup if protocol.selects else 0.0
        timing = self._bench.time(candidate, build, protocol, Limits(beat, self.left_s))
        self.waited_s += timing.conditions.waited_s or 0.0
        return timing

    def profile(self, trial: Trial) -> Trial:
        """The trial with the hardware's counters of its candidate; UserError where they cannot be read."""
        with self._turn():
            return replace(trial, profile=self._bench.profile(trial.candidate, trial.build))

    @property
    def environment(self) -> dict[str, Any]:
        if not self._environment:
            self._environment = self.rig.environment() | {"cuda_l2": __version__}
        return self._environment

    def close(self) -> None:
        if self._opened:
            self._opened.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the machine's lock. What waiting for it takes is no stage's time, nor the search's or the report's."""
        if not self.rig.measures:
            yield
            return
        with machine_lock(self.rig.gpu, several=self.rig.turns.several) as queued_s:
            self.queued_s += queued_s
            self.ends += queued_s
            with self.rig.turns.taken():
                yield

    @contextlib.contextmanager
    def _stage(self, name: str, what: str) -> Iterator[None]:
        """Count the time of a stage, and show what it does."""
        start = self.clock.now()
        with step(what):
            try:
                yield
            finally:
                self.stage_seconds[name] += self.clock.now() - start

    def _verified(self, candidate: Candidate, build: Build, full: bool = False) -> Verdict:
        if not self._weights_ahead and contract.declares_constant(candidate.source):
            return Verdict(VerdictStatus.FORBIDDEN, reason="declares an input constant, which needs --weights-ahead")
        slow = " with sanitizers and stress builds" if full and self.target.name == "cuda" else ""
        with self._stage("verify", f"checking a kernel{slow}"):
            return self._bench.verify(candidate, build, full=full)

    def _compared(self, candidates: Sequence[Candidate], protocol: Protocol, full: bool = False) -> list[Trial] | None:
        """Trials of candidates that are timed side by side; None where they cannot be, or one spoils the run."""
        builds = list(self.build(candidates))
        with self._turn():
            verdicts = [
                self._verified(candidate, build, full) if build.status is BuildStatus.BUILT else None
                for candidate, build in zip(candidates, builds, strict=True)
            ]
            kernels = {
                candidate.id: Kernel(candidate, build)
                for candidate, build, verdict in zip(candidates, builds, verdicts, strict=True)
                if verdict and verdict.status is VerdictStatus.CORRECT
            }
            with self._stage("measure", f"timing {counted(len(kernels), 'kernel')} side by side"):
                try:
                    timings = (
                        self._bench.time_kernels(kernels, protocol, Limits(within_s=self.left_s)) if kernels else {}
                    )
                except ContractError:
                    return None
                self.waited_s += max((timing.conditions.waited_s or 0.0 for timing in timings.values()), default=0.0)
        if any(timing.status not in TOLD for timing in timings.values()):
            return None
        return [
            self._trial(candidate, build, verdict, timings.get(candidate.id), None, protocol)
            for candidate, build, verdict in zip(candidates, builds, verdicts, strict=True)
        ]

    def _together_again(self, trials: Sequence[Trial], protocol: Protocol) -> list[Trial]:
        """Trials after one of them is a jump: verified and timed once more on fresh inputs, in more rounds.

        The second figures count, but the first where they were lower by more than noise.
        """
        self._renewed()
        longer = replace(self.rig.protocols[FINALS.name], name=protocol.name, fresh=True)
        measured = [trial for trial in trials if trial.speedup]
        again = self.compare([trial.candidate for trial in measured], longer)
        decided = [repeated(first, second) for first, second in zip(measured, again, strict=True)]
        return _in_place_of(trials, decided)

    def _trial(
        self,
        candidate: Candidate,
        build: Build,
        verdict: Verdict | None,
        timing: Timing | None,
        review: Review | None,
        protocol: Protocol,
    ) -> Trial:
        tokens = count_tokens(candidate.source) if timing else 0
        return Trial(
            task=self.task,
            candidate=candidate,
            machine=self.target.machine,
            protocol=protocol.name,
            build=build,
            verdict=verdict,
            timing=timing,
            reward=reward(build.status, verdict, timing, tokens, self.rewards),
            environment=self.environment,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            review=review,
        )

    def _confirmed(
        self, candidate: Candidate, build: Build, verdict: Verdict, protocol: Protocol
    ) -> tuple[Verdict, Timing | None, Review | None]:
        """Verdict and timing. A search's new best is judged again in fresh processes; the slower time counts.

        A jump is reviewed: verified and timed on fresh inputs, in more rounds.
        """
        timing = self.time(candidate, build, protocol)
        if not protocol.selects or timing.speedup is None or timing.speedup.estimate <= self.best_speedup:
            return verdict, timing, None
        why = jump(timing.speedup.estimate, self.best_speedup)
        if why:
            return measure_again(why, timing, partial(self._on_fresh_inputs, candidate, build, protocol))
        if self.left_s <= 0:  # the finalists are verified and timed again anyway
            return verdict, timing, None
        self._bench.renew()
        second = self._bench.verify(candidate, build)
        if second.status is not VerdictStatus.CORRECT:
            return second, None, None
        again = self.time(candidate, build, protocol)
        if again.speedup is None or again.speedup.estimate < timing.speedup.estimate:
            return verdict, again, None
        return verdict, timing, None

    def _on_fresh_inputs(self, candidate: Candidate, build: Build, protocol: Protocol) -> tuple[Verdict, Timing | None]:
        self._renewed()
        verdict = self._bench.verify(candidate, build)
        if verdict.status is not VerdictStatus.CORRECT:
            return verdict, None
        longer = replace(self.rig.protocols[FINALS.name], name=protocol.name)
        return verdict, self.time(candidate, build, longer)

    def _renewed(self) -> None:
        """Let what comes next run in fresh processes on fresh inputs."""
        self._seed += 1
        self._bench.renew()
        self._bench.redraw(self._seed)

    def _second_look(self, trial: Trial) -> Trial:
        """The trial after the review of a repeated jump by a second device and by the checker."""
        if self._jumps(trial) and trial.timing and trial.review:
            found = self.rig.elsewhere(trial.task, trial.candidate)
            if found:
                trial = self._reviewed(trial, *compare_elsewhere(trial.timing, found, trial.machine, trial.review))
        return self._opinion(trial)

    def _opinion(self, trial: Trial) -> Trial:
        """The trial after the review of a repeated jump by the checker."""
        if self._checker and self._jumps(trial) and trial.timing and trial.review and trial.review.counts:
            opinion = self._checker.opinion(trial, self.target)
            return self._reviewed(trial, *weigh(trial.timing, trial.review, self._checker.name, opinion))
        return trial

    def _jumps(self, trial: Trial) -> bool:
        """Whether a trial's speedup was a jump, and still is one."""
        return bool(trial.review and trial.speedup and jump(trial.speedup, self.best_speedup))

    def _reviewed(self, trial: Trial, timing: Timing, review: Review) -> Trial:
        value = trial.reward if review.counts else self.rewards.incorrect
        return replace(trial, timing=timing, review=review, reward=value)


def _in_place_of(trials: Sequence[Trial], newer: Sequence[Trial]) -> list[Trial]:
    """The trials, newer ones of the same candidates in their place."""
    found = {trial.candidate.id: trial for trial in newer}
    return [found.get(trial.candidate.id, trial) for trial in trials]


@overload
def evaluate(
    source: Source,
    task: tasks.TaskLike,
    *,
    protocol: str = ...,
    seed: int | None = None,
    rewards: RewardSettings = ...,
    target: str = ...,
    full: bool = ...,
    weights_ahead: bool = ...,
) -> Trial: ...
@overload
def evaluate(
    source: list[Source] | tuple[Source, ...],
    task: tasks.TaskLike,
    *,
    protocol: str = ...,
    seed: int | None = None,
    rewards: RewardSettings = ...,
    target: str = ...,
    full: bool = ...,
    weights_ahead: bool = ...,
) -> list[Trial]: ...
def evaluate(
    source: Source | list[Source] | tuple[Source, ...],
    task: tasks.TaskLike,
    *,
    protocol: str = SEARCH.name,
    seed: int | None = None,
    rewards: RewardSettings = RewardSettings(),
    target: str = "auto",
    full: bool = False,
    weights_ahead: bool = False,
) -> Trial | list[Trial]:
    """Build, verify, time and reward sources for a shape or another task: a reward function for any trainer.

    source: a kernel's text, a Path to its file, or a Candidate; a list or tuple of them gives a list of trials, whose
    builds run in parallel. task: as `tasks.read` takes it, 512x512x512 or softmax:rows=64,columns=1000.
    target: cpu, cuda, or auto for the one that the sources' contracts name. A trainer names it, so that a source for
    another machine is the author's mistake, and has the reward of one.
    Timings hold the machine's lock. On a CPU up to 8 sources are timed side by side in one run, so that the
    `reward_interval` of one kernel overlaps that of an equal one. Where other work disturbed that run, status is
    `busy`, the reward NaN, and the reason says so. full: also the checks that are too slow for every candidate
    (sanitizers, stress builds). weights_ahead: sources may declare inputs constant. UserError where what is asked for
    cannot be judged at all; it says what to do.
    """
    several = isinstance(source, list | tuple)
    texts = sources.read(source)
    target = sources.target_of(texts) if target == "auto" else target
    wanted = tasks.read(task, chosen(target))
    sources.require_seed(seed)
    require(rewards, RewardSettings, "rewards must be cuda_l2.reward.RewardSettings")
    if not texts:
        return []
    with open_rig(target) as rig:
        if not isinstance(protocol, str) or protocol not in rig.protocols:
            raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(rig.protocols)}")
        rig.reports(wanted, [protocol])
        with Evaluator(wanted, rig, seed=seed, rewards=rewards, weights_ahead=weights_ahead) as evaluator:
            candidates = [Candidate(text) for text in texts]
            parts = [candidates[i : i + MOST_TOGETHER] for i in range(0, len(candidates), MOST_TOGETHER)]
            terms = rig.protocols[protocol]
            if not several:
                return next(evaluator.evaluate(candidates, terms, full=full))
            return [trial for part in parts for trial in evaluator.together(part, terms, full=full)]
