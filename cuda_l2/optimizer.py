"""The main job: search for a task's best kernel, then report it from another run on other inputs."""

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import overload

import numpy as np

from cuda_l2 import tasks
from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.library.kernel import Kernel
from cuda_l2.llm._base import is_model
from cuda_l2.machine import chosen
from cuda_l2.machine._base import Target
from cuda_l2.measure.profile import summary
from cuda_l2.measure.protocols import FINALS, SEARCH
from cuda_l2.propose._base import Proposer, proposer_maker
from cuda_l2.propose._policy import default_candidates, open_policy
from cuda_l2.records import Candidate, Gemm, Task, Trial, VerdictStatus
from cuda_l2.review.checker import open_checker
from cuda_l2.rigs import open_rig
from cuda_l2.search import Progress, search
from cuda_l2.settings import REPORTED, Settings
from cuda_l2.system import paths, sandbox
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError

FINALISTS = 3
LAUNCHES_OF_ONE_CHECK = 25
"""Approximate number of launches of one verification and a short timing."""


@dataclass
class Result:
    """The result of optimising one task."""

    task: Task
    target: Target
    search: Progress
    reports: dict[str, Trial]  # by protocol, from runs after the search on other inputs; empty if interrupted
    source_path: Path | None

    @property
    def best(self) -> Trial | None:
        """The reported winner; the best trial of the search where that was interrupted."""
        return next(iter(self.reports.values()), self.search.best)

    @property
    def kernel(self) -> Kernel:
        """The winner as a callable: kernel(a, b, out)."""
        if self.best is None:
            raise UserError(f"no correct kernel was found for {self.task}; search longer with --budget")
        if is_model(self.best.candidate.proposer):
            raise UserError(
                f"{self.best.candidate.proposer} wrote the winner: read {self.source_path}; if you trust it, load it"
                " with cuda_l2.library.kernel.Kernel(result.task, result.best.candidate, result.best.build)"
            )
        if self.target.name != "cpu":
            raise UserError(f"GPU kernels cannot be called from torch yet; the winner's source is {self.source_path}")
        if not isinstance(self.task, Gemm):
            raise UserError(
                f"kernels for tasks cannot be called from torch yet; the winner's source is {self.source_path}"
            )
        return Kernel(self.task, self.best.candidate, self.best.build)


class Optimizer(Closing):
    """The archive, the rig, the policy and the checker that several tasks share. A context manager."""

    def __init__(self, settings: Settings = Settings()) -> None:
        self.settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._profiles: dict[tuple[str, str], str] = {}  # by task and candidate
        self._profiles_here = True
        with contextlib.ExitStack() as stack:
            if not is_model(settings.policy):
                proposer_maker(settings.policy)  # an unknown name leaves no archive behind
            self.archive = stack.enter_context(Archive(Path(settings.archive or paths.default_archive())))
            self._policy = open_policy(settings.policy, settings.model, self.archive.path)
            stack.callback(self._policy.close)
            self._checker = open_checker(settings.review, settings.model, self.archive.path)
            if self._checker:
                stack.callback(self._checker.close)
            self.rig = stack.enter_context(open_rig(settings.target))
            self.rig.retunes = settings.retune
            self.rig.tune_by(settings.tuning)
            self.rig.require_tools()
            self._held = stack.pop_all()
        self.target = self.rig.target

    def require_feasible(self, task: Task) -> None:
        """UserError where the task does not fit this machine's memory or the budget, or cannot be timed as asked."""
        self.rig.require_feasible(task)
        self.rig.reports(task, REPORTED[self.settings.protocol])
        once = self.target.bound_us(task) * 1e-6 * LAUNCHES_OF_ONE_CHECK
        if once > self.settings.budget_s:
            raise UserError(
                f"checking one kernel for {task} takes at least {once:.0f} s on this machine; raise --budget above that"
            )

    def optimize(
        self,
        task: Task,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> Result:
        """Search, choose among the finalists, report the winner."""
        self.require_feasible(task)
        history = {t.candidate.id: t for t in self.archive.trials(task, self.target.machine, SEARCH.name)}
        reports: dict[str, Trial] = {}
        winner: Trial | None = None

        def remember(progress: Progress) -> None:
            assert progress.last is not None
            history[progress.last.candidate.id] = progress.last  # a known one must not weigh twice
            on_progress(progress)

        with self.evaluator(task) as evaluator:
            on_stage("searching")
            proposer = self._proposer(evaluator, lambda: list(history.values()), on_stage)
            progress = search(
                evaluator,
                proposer,
                self.archive,
                budget_s=self.settings.budget_s,
                max_trials=self.settings.trials,
                first=default_candidates(task, self.target),
                again=self.settings.again,
                on_progress=remember,
                on_group=lambda: self._keep(proposer),
            )
            try:
                if not progress.interrupted and progress.best is not None:
                    on_stage("choosing among the finalists")
                    winner = self._choose(evaluator, progress)
            except KeyboardInterrupt:
                progress.interrupted = True
        progress.checker = self._checker.summary() if self._checker else ""
        try:
            if winner is not None:
                self._report(winner, reports, on_stage)
        except KeyboardInterrupt:
            progress.interrupted = True
        result = Result(task, self.target, progress, reports, None)
        if result.best:
            result.source_path = self._save_source(result.best)
        return result

    def evaluator(self, task: Task) -> Evaluator:
        """The stages for one task."""
        return Evaluator(task, self.rig, checker=self._checker)

    def close(self) -> None:
        self._held.close()

    def _proposer(
        self,
        evaluator: Evaluator,
        trials: Callable[[], list[Trial]],
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> Proposer:
        """The policy's proposer for the evaluator's task, going on from its kept state."""
        rng = np.random.default_rng(int(self._rng.integers(1 << 62)))
        profile = partial(self._profile, evaluator)
        proposer = self._policy.proposer(evaluator.task, self.target, trials, rng, profile=profile, on_stage=on_stage)
        state = self.archive.load_policy(proposer.name, self.target.machine)
        if state:
            proposer.load_state(state)
        return proposer

    def _profile(self, evaluator: Evaluator, trial: Trial) -> str:
        """The hardware's counters of a kernel as text, read once and kept; empty where they cannot be read."""
        key = (str(trial.task), trial.candidate.id)
        if trial.profile:
            self._profiles.setdefault(key, summary(trial.profile))
        can = self.target.name == "cuda" and self._profiles_here and Path(trial.build.artifact).exists()
        if key not in self._profiles and can:
            try:
                trial = evaluator.profile(trial)
                self.archive.append(trial)
                self._profiles[key] = summary(trial.profile)
            except UserError as error:  # mostly for every kernel alike, and trying takes time
                print(f"cuda-l2: prompts go without the GPU's counters: {error}", file=sys.stderr)
                self._profiles_here = False
        return self._profiles.get(key, "")

    def _keep(self, proposer: Proposer) -> None:
        state = proposer.state()
        if state:
            self.archive.save_policy(proposer.name, self.target.machine, state)

    def _choose(self, evaluator: Evaluator, progress: Progress) -> Trial:
        """The fastest of the finalists after one more timing of each, so that the luckiest timing does not win."""
        measured = {trial.candidate.id: trial for trial in progress.trials if trial.timing and trial.speedup}
        stored = {
            t.candidate.id: t for t in self.archive.best(evaluator.task, self.target.machine, SEARCH.name, FINALISTS)
        }
        known = [trial for trial in (stored | measured).values() if self._may_run(trial.candidate)]
        finalists = sorted(known, key=lambda trial: trial.speedup, reverse=True)[:FINALISTS]
        protocol = self.rig.protocols[FINALS.name]
        trials = list(evaluator.evaluate([trial.candidate for trial in finalists], protocol))
        best = max(trials, key=lambda trial: trial.speedup)
        return best if best.speedup else finalists[0]

    def _may_run(self, candidate: Candidate) -> bool:
        """Whether this machine may run the candidate: a model's needs a sandbox, or the user's consent."""
        sandboxed = sandbox.kind() is not sandbox.Kind.LIMITS or self.settings.model.without_sandbox
        return sandboxed or not is_model(candidate.proposer)

    def _report(self, winner: Trial, reports: dict[str, Trial], on_stage: Callable[[str], None]) -> None:
        """Verify and time the winner on fresh inputs under the protocols to report; fills `reports`."""
        names = self.rig.reports(winner.task, REPORTED[self.settings.protocol])
        with self.evaluator(winner.task) as evaluator:
            for name in names:
                on_stage(f"reporting: {name}")
                full = name == names[0]  # the slow checks once
                (trial,) = evaluator.evaluate([winner.candidate], self.rig.protocols[name], full=full)
                self.archive.append(trial)
                if trial.verdict is None or trial.verdict.status is not VerdictStatus.CORRECT:
                    raise UserError(f"the winner {winner.candidate.id} failed when checked again: {trial.reason}")
                if trial.timing and trial.timing.speedup:
                    reports[name] = trial

    def _save_source(self, trial: Trial) -> Path:
        folder = self.archive.path.resolve().parent / "kernels"
        path = folder / f"{re.sub('[:/]', '-', str(trial.task))}-{trial.candidate.id}{self.rig.suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(trial.candidate.source)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; the kernel is in the archive, see `cuda-l2 show {trial.task}`"
            ) from None
        return path


@overload
def optimize(shapes: str, *, budget: float = 60.0, **settings: object) -> Result: ...
@overload
def optimize(shapes: list[str] | tuple[str, ...], *, budget: float = 60.0, **settings: object) -> list[Result]: ...
def optimize(
    shapes: str | list[str] | tuple[str, ...], *, budget: float = 60.0, **settings: object
) -> Result | list[Result]:
    """Optimise one shape or other task, or several in turn, on this machine.

    shapes: as `tasks.parse` reads them. budget: seconds of search each. Further keywords: see Settings.
    """
    wanted = Settings(budget_s=budget, **settings)  # type: ignore[arg-type]
    listed = [shapes] if isinstance(shapes, str) else shapes
    parsed = [tasks.parse(shape, chosen(wanted.target)) for shape in listed]
    with Optimizer(wanted) as optimizer:
        for task in parsed:
            optimizer.require_feasible(task)
        results = []
        for task in parsed:
            results.append(optimizer.optimize(task))
            if results[-1].search.interrupted:
                raise KeyboardInterrupt
    return results[0] if isinstance(shapes, str) else results
