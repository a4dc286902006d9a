"""The loop: propose -> build -> verify -> measure -> reward, every result into the archive and back to the proposer."""

import collections
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._base import Proposer
from cuda_l2.records import BuildStatus, Candidate, Trial

GROUP = 8


@dataclass
class Progress:
    """Where a search stands; given to the caller after every candidate."""

    proposed: int = 0
    built: int = 0
    known: int = 0  # proposed again, answered from the archive
    correct: int = 0
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)  # by status
    best: Trial | None = None
    last: Trial | None = None
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    trials: list[Trial] = field(default_factory=list)

    @property
    def overhead(self) -> float:
        """Share of the wall time that was neither building, verifying nor timing."""
        return 1 - sum(self.stage_seconds.values()) / self.seconds if self.seconds else 0.0


def search(
    evaluator: Evaluator,
    proposer: Proposer,
    archive: Archive,
    *,
    budget_s: float,
    max_trials: int | None = None,
    first: list[Candidate] | None = None,
    again: bool = False,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Search until the budget or the number of trials is spent; an interrupt ends it with what is there.

    first: candidates to try before the proposer's. again: time known candidates anew.
    """
    progress = Progress()
    before = dict(evaluator.stage_seconds)
    start = time.perf_counter()

    def spent() -> bool:
        progress.seconds = time.perf_counter() - start
        progress.stage_seconds = {stage: s - before[stage] for stage, s in evaluator.stage_seconds.items()}
        return progress.seconds >= budget_s or (max_trials is not None and progress.proposed >= max_trials)

    try:
        for group in _groups(proposer, first or [], max_trials, progress):
            known = [None if again else _find(archive, evaluator, candidate) for candidate in group]
            builds = iter(evaluator.build([c for c, trial in zip(group, known, strict=True) if trial is None]))
            trials = []
            for candidate, trial in zip(group, known, strict=True):
                if trial is None:
                    trial = evaluator.judge(candidate, next(builds))
                    archive.append(trial)
                else:
                    progress.known += 1
                trials.append(trial)
                _count(progress, trial)
                ended = spent()
                on_progress(progress)
                if ended:
                    break
            if group is not first:
                proposer.observe(trials)
            if spent():
                break
    except KeyboardInterrupt:
        progress.interrupted = True
    spent()
    return progress


def _groups(
    proposer: Proposer, first: list[Candidate], max_trials: int | None, progress: Progress
) -> Iterator[list[Candidate]]:
    if first:
        yield first
    while True:
        left = GROUP if max_trials is None else min(GROUP, max_trials - progress.proposed)
        if left <= 0:
            return
        yield proposer.propose(left)


def _find(archive: Archive, evaluator: Evaluator, candidate: Candidate) -> Trial | None:
    return archive.find(evaluator.gemm, candidate, evaluator.target.machine, SEARCH.name)


def _count(progress: Progress, trial: Trial) -> None:
    progress.proposed += 1
    progress.last = trial
    progress.trials.append(trial)
    if trial.build.status is BuildStatus.BUILT:
        progress.built += 1
    if trial.timing and trial.timing.speedup:
        progress.correct += 1
        if progress.best is None or trial.speedup > progress.best.speedup:
            progress.best = trial
    else:
        progress.rejected[trial.status] += 1
