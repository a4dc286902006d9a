"""The loop: propose -> build -> verify -> measure -> reward, every result into the archive and back to the proposer."""

import collections
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from cuda_l2.archive import LEASE_S, Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._base import Proposer
from cuda_l2.propose._policy import default_candidates
from cuda_l2.records import Build, BuildStatus, Candidate, Task, TimingStatus, Trial
from cuda_l2.reward import RewardSettings
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import DeadlyError, UserError
from cuda_l2.system.steps import step
from cuda_l2.system.text import counted

LATE = 0.1
"""Share of the budget by which the last candidate may be expected to end late."""
RENEW_S = LEASE_S / 3
"""How often the claims of candidates that other processes judge, or that wait for one, are renewed."""
POLL_S = 0.2
"""How often a search asks for the trial of a kernel that another one judges."""


@dataclass
class Progress:
    """The counts of a search so far; the caller gets them after every candidate."""

    proposed: int = 0
    built: int = 0
    known: int = 0  # judged by an earlier run; the trial comes from the archive
    repeated: int = 0  # judged before in this run
    correct: int = 0  # timed or not
    timed: int = 0  # of these
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)  # by status
    best: Trial | None = None
    last: Trial | None = None
    seconds: float = 0.0  # wall time without queued_s
    queued_s: float = 0.0  # waiting for the machine's lock
    stage_seconds: dict[str, float] = field(default_factory=dict)
    waited_s: float = 0.0  # of these, while other programs had the cores
    interrupted: bool = False
    summary: str = ""  # the proposer's own
    trials: list[Trial] = field(default_factory=list)
    reviews: collections.Counter[str] = field(default_factory=collections.Counter)  # of jumps in reward, by status
    refuted: str = ""  # why the winner is none: what it was found to do when it was checked again
    untimed: Trial | None = None  # the last that was correct, and not timed because the machine was busy
    checker: str = ""  # the checker's questions and their cost, in one line
    ended: float = 0.0  # by the evaluator's clock
    unjudged: int = 0  # proposed, and left out because the time was up

    @property
    def overhead(self) -> float:
        """Share of the wall time outside all stages and outside waiting for a language model."""
        return 1 - sum(self.stage_seconds.values()) / self.seconds if self.seconds else 0.0

    @property
    def why_none(self) -> str:
        """Why a search has no best kernel, where it has none."""
        if self.refuted:
            return self.refuted
        if self.untimed:
            found = f"{counted(self.correct, 'correct kernel')}, none timed"
            return f"{found}: {self.untimed.reason}; search again when the machine is quiet, or longer"
        return "no correct kernel was found; search longer"

    def count(self, trial: Trial, known: bool, repeated: bool = False) -> None:
        """Count one trial. known: not judged now. repeated: judged before in this run, which excludes known."""
        self.proposed += 1
        self.known += known and not repeated
        self.repeated += repeated
        self.last = trial
        self.trials.append(trial)
        if trial.review and not known:
            self.reviews[trial.review.status] += 1
        if trial.build.status is BuildStatus.BUILT:
            self.built += 1
        if trial.timing and trial.timing.speedup:
            self.correct += 1
            self.timed += 1
            if self.best is None or trial.speedup > self.best.speedup:
                self.best = trial
        elif trial.status == TimingStatus.BUSY:
            self.correct += 1
            self.untimed = trial
        else:
            self.rejected[trial.status] += 1


@dataclass(frozen=True)
class Scope:
    """How far a search goes. first: candidates to try before the proposer's. again: time known candidates anew."""

    budget_s: float
    max_trials: int | None = None
    first: Sequence[Candidate] = ()
    again: bool = False


@dataclass(frozen=True)
class Order:
    """A candidate to be judged by another process: what it must know of this one's evaluator.

    build: where it was built here, and built_s is how long a process waited for it. full: with the slow checks.
    """

    task: Task
    candidate: Candidate
    rewards: RewardSettings
    best_speedup: float
    left_s: float
    build: Build | None = None
    built_s: float = 0.0
    full: bool = False


@dataclass(frozen=True)
class Judged:
    """The answer. stage_seconds, queued_s: what it took of that process's, as an evaluator counts them."""

    trial: Trial
    stage_seconds: Mapping[str, float]
    queued_s: float


class Judges(Protocol):
    """Several processes that judge candidates, each on a GPU. count: of them."""

    count: int

    def begin(self, order: Order, build: Callable[[], Build | None] = lambda: None) -> "Future[Judged]":
        """Have it judged when a process is free. An order that is under way is not given out twice.

        build: awaits the candidate's build here; None where that process is to build it.
        """


def begin(
    judges: Judges,
    evaluator: Evaluator,
    candidate: Candidate,
    build: Callable[[], Build | None] = lambda: None,
    *,
    full: bool = False,
) -> "Future[Judged]":
    """Have a candidate judged in place of an evaluator. build: as in `Judges.begin`."""
    task, rewards, best, left_s = evaluator.task, evaluator.rewards, evaluator.best_speedup, evaluator.left_s
    return judges.begin(Order(task, candidate, rewards, best, left_s, full=full), build)


def taken(judges: Judges, evaluator: Evaluator, judged: "Future[Judged]") -> Trial:
    """The trial once it is there, counted as the evaluator's own: of its time as if all processes were at work."""
    with step("waiting for the workers"):
        found = judged.result()
    shares = {stage: s / judges.count for stage, s in found.stage_seconds.items()}
    return evaluator.take(found.trial, shares, found.queued_s / judges.count)


def comparable(archive: Archive, task: Task, machine: str) -> list[Trial]:
    """The trials of earlier searches; of a product on a CPU those over the baseline of the latest one."""
    trials = [(trial, trial.timing) for trial in archive.standing(task, machine, SEARCH.name)]
    latest = next((timing.reference for trial, timing in reversed(trials) if timing and trial.speedup), "")
    one = task.product and machine.startswith("cpu:")
    return [trial for trial, timing in trials if not (one and timing and timing.reference != latest)]


def search(
    evaluator: Evaluator,
    proposer: Proposer,
    archive: Archive,
    scope: Scope,
    judges: Judges | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    on_group: Callable[[], None] = lambda: None,
) -> Progress:
    """Search until the budget or the number of trials is spent; an interrupt ends it with what is there.

    judges: judge the candidates in this process's place. on_progress is called after every candidate, on_group when the
    proposer has learnt from a group.
    """
    evaluator.recall(comparable(archive, evaluator.task, evaluator.target.machine))
    run = _Run(evaluator, proposer, scope, judges.count if judges else 1)
    progress = run.progress
    met: set[str] = set()  # ids of this run's candidates
    try:
        for group in _groups(proposer, run.room, list(scope.first), progress):
            trials = []
            with judge_group(evaluator, archive, group, scope.again, judges) as judged:
                for trial, known in judged:
                    trials.append(trial)
                    progress.count(trial, known, repeated=known and trial.candidate.id in met)
                    if trial.status != TimingStatus.BUSY:
                        met.add(trial.candidate.id)
                    ended = run.spent()
                    on_progress(progress)
                    if ended:
                        break
            progress.unjudged = len(group) - len(trials) if run.trials_left() > 0 else 0
            if progress.proposed > len(scope.first):
                proposer.observe([trial for trial in trials if trial.status != TimingStatus.BUSY])
                progress.summary = proposer.summary()
                on_group()
            if run.spent():
                break
    except KeyboardInterrupt:
        progress.interrupted = True
    run.left_s()
    if proposer.waited_s:
        progress.stage_seconds["waiting"] = proposer.waited_s
    evaluator.ends, progress.ended = math.inf, evaluator.clock.now()
    progress.summary = progress.summary or proposer.summary()  # also where the time was up before the first proposal
    return progress


class _Run:
    """What one search has spent, and what is left of its scope."""

    def __init__(self, evaluator: Evaluator, proposer: Proposer, scope: Scope, at_once: int) -> None:
        """at_once: candidates that are judged at the same time."""
        self.progress, self._evaluator, self._proposer, self._scope = Progress(), evaluator, proposer, scope
        self._group = proposer.group or evaluator.rig.group * at_once
        self._before, self._queued_before = dict(evaluator.stage_seconds), evaluator.queued_s
        self._waited_before = evaluator.waited_s
        self._start = evaluator.clock.now()
        self.left_s()

    def left_s(self) -> float:
        progress, evaluator, budget_s = self.progress, self._evaluator, self._scope.budget_s
        progress.queued_s = evaluator.queued_s - self._queued_before
        progress.waited_s = evaluator.waited_s - self._waited_before
        progress.seconds = evaluator.clock.now() - self._start - progress.queued_s
        self._proposer.deadline = evaluator.ends = self._start + budget_s + progress.queued_s
        progress.stage_seconds = {stage: s - self._before[stage] for stage, s in evaluator.stage_seconds.items()}
        return budget_s - progress.seconds

    def trials_left(self) -> float:
        most = self._scope.max_trials
        return math.inf if most is None else most - self.progress.proposed

    def spent(self) -> bool:
        """Whether nothing more is judged: the next one is expected to take as long as the others did."""
        left = self.left_s()
        late_s = LATE * self._scope.budget_s
        return left <= 0 or left + late_s < _usual_s(self.progress) or self.trials_left() <= 0

    def room(self) -> int:
        """How many candidates the next group may have."""
        usual_s = _usual_s(self.progress)
        fit = max(1.0, self.left_s() / usual_s) if usual_s else math.inf
        return int(min(self._group, fit, self.trials_left()))


def _usual_s(progress: Progress) -> float:
    """Mean time that a candidate took of the stages so far, while the cores were ours; 0 where none was judged."""
    judged = progress.proposed - progress.known - progress.repeated
    return max(0.0, sum(progress.stage_seconds.values()) - progress.waited_s) / judged if judged else 0.0


def _groups(
    proposer: Proposer, room: Callable[[], int], first: list[Candidate], progress: Progress
) -> Iterator[list[Candidate]]:
    if first:
        yield first
    begun = False
    while True:
        left = room()
        if left <= 0:
            return
        try:
            with step("choosing the next kernels"):
                group = proposer.propose(left)
        except UserError as error:
            if not begun or progress.best is None:  # a model that never worked is an error, not an end
                raise
            progress.summary = f"{proposer.summary()}; ended: {error}"  # the trials so far can be reported
            return
        if not group:
            progress.summary = proposer.summary()
            return
        begun = True
        yield group


def judge_group(
    evaluator: Evaluator,
    archive: Archive,
    candidates: list[Candidate],
    again: bool = False,
    judges: Judges | None = None,
) -> "Group":
    """Trials of candidates in order, and whether each was known: known ones from the archive, others into it.

    One that another search judges now is left to it; its trial is known once that search has stored it. One that a
    busy machine left untimed is not kept: the next search tries it again. With judges all have begun when this returns;
    those that are not awaited are not kept.
    """
    machine, found = evaluator.target.machine, {}
    if not again:
        found = {c.id: archive.find(evaluator.task, c, machine, SEARCH.name) for c in candidates}
    known = {key: trial for key, trial in found.items() if trial}
    return Group(evaluator, archive, candidates, known, again, judges)


class Group(Closing, Iterator[tuple[Trial, bool]]):
    """Candidates that are judged together: their builds, claims and trials. A context manager, which judges need."""

    def __init__(
        self,
        evaluator: Evaluator,
        archive: Archive,
        candidates: list[Candidate],
        known: dict[str, Trial],
        again: bool,
        judges: Judges | None,
    ) -> None:
        self._evaluator, self._archive, self._again, self._judges = evaluator, archive, again, judges
        self._coming = iter(candidates)
        self._trials = dict(known)
        self._own: set[str] = set()
        """Ids of those that were judged here and not given out yet."""
        new = {c.id: c for c in candidates if c.id not in known}
        self._left = list(new.values())
        self._builds: dict[str, Build] = {}
        self._begun: dict[str, tuple[Candidate, Future[Judged]]] = {}
        """Those that other processes judge for this search, by id."""
        if judges:
            archive.renew()  # those of groups that are judged meanwhile
            builds = dict(zip(new, evaluator.rig.prefetch(self._left), strict=True))  # by all cores
            for candidate in filter(self._mine, self._left):
                self._begun[candidate.id] = candidate, begin(judges, evaluator, candidate, builds[candidate.id])
        else:
            self._building = zip(new, evaluator.build(self._left), strict=True)  # in the order of `candidates`

    def __next__(self) -> tuple[Trial, bool]:
        return self._trial(next(self._coming))

    def close(self) -> None:
        """Leave those that other processes judge and nobody has awaited."""
        while self._begun:
            _, (candidate, future) = self._begun.popitem()
            future.cancel()
            self._release(candidate)

    def _trial(self, candidate: Candidate) -> tuple[Trial, bool]:
        """A candidate's trial, and whether it was known. While another search judges it, those after it are judged."""
        clock, waited_s = self._evaluator.clock, 0.0
        while candidate.id not in self._trials:
            if not any(self._judge(each) for each in [candidate, *self._left]):
                if waited_s >= LEASE_S or clock.now() >= self._evaluator.ends:
                    self._judge(candidate, claimed=True)  # work done twice is better than none
                else:
                    with step("waiting for another search that judges the same kernel"):
                        clock.sleep(POLL_S)
                    waited_s += POLL_S
        known = candidate.id not in self._own
        self._own.discard(candidate.id)
        return self._trials[candidate.id], known

    def _judge(self, candidate: Candidate, *, claimed: bool = False) -> bool:
        """Judge one candidate, unless another search does: then False. claimed: without asking who does."""
        if candidate.id in self._trials:
            return False
        _, begun = self._begun.pop(candidate.id, (None, None))
        if not self._mine(candidate, claimed=claimed or begun is not None):
            return candidate.id in self._trials
        stored = False
        try:
            trial = self._trials[candidate.id] = self._judged(candidate, begun)
            self._own.add(candidate.id)
            if trial.status != TimingStatus.BUSY:
                self._archive.append(trial)
                stored = True
        finally:
            if not stored:
                self._release(candidate)
        return True

    def _judged(self, candidate: Candidate, begun: "Future[Judged] | None") -> Trial:
        if not self._judges:
            return self._evaluator.judge(candidate, self._build(candidate))
        future = begun or begin(self._judges, self._evaluator, candidate)
        try:
            return taken(self._judges, self._evaluator, self._awaited(future))
        except DeadlyError as error:
            return self._deadly(candidate, self._judges, str(error))

    def _deadly(self, candidate: Candidate, judges: Judges, how: str) -> Trial:
        """The trial of a candidate of which all processes died. how: what became of them.

        UserError where they die of a kernel of ours too, or there is none to try: that says nothing of the candidate.
        """
        ours = default_candidates(self._evaluator.task, self._evaluator.target)
        other = next((each for each in ours if each.id != candidate.id), None)
        try:
            if other is None:
                raise DeadlyError(how)
            self._awaited(begin(judges, self._evaluator, other)).result()
        except DeadlyError as error:
            raise UserError(
                f"no process judges a kernel and lives: {error}; `cuda-l2 doctor` says what this machine has"
            ) from None
        return self._evaluator.failed(candidate, how)

    def _awaited(self, future: "Future[Judged]") -> "Future[Judged]":
        """The future when it is done; what waits behind it stays claimed."""
        with step("waiting for the workers"):
            while not wait([future], RENEW_S).done:
                self._archive.renew()
        return future

    def _mine(self, candidate: Candidate, *, claimed: bool = False) -> bool:
        """Whether this search is to judge a candidate: no other does, or has done since the group began."""
        if self._again:
            return True
        task, machine = self._evaluator.task, self._evaluator.target.machine
        if not (claimed or self._archive.claim(task, candidate, machine, SEARCH.name)):
            self._learn(candidate)
            return False
        if self._learn(candidate):
            self._release(candidate)
            return False
        return True

    def _release(self, candidate: Candidate) -> None:
        if not self._again:
            self._archive.release(self._evaluator.task, candidate, self._evaluator.target.machine, SEARCH.name)

    def _learn(self, candidate: Candidate) -> bool:
        """Whether the candidate's trial has been stored by now, by another search or another group of this one."""
        trial = self._archive.find(self._evaluator.task, candidate, self._evaluator.target.machine, SEARCH.name)
        if trial:
            self._trials[candidate.id] = trial
        return trial is not None

    def _build(self, candidate: Candidate) -> Build:
        while candidate.id not in self._builds:
            key, build = next(self._building)
            self._builds[key] = build
        return self._builds[candidate.id]
