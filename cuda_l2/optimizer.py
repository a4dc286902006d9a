"""The main job: search for a task's best kernel, then report it from another run on other inputs."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
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
from cuda_l2.records import Candidate, Task, TimingStatus, Trial, VerdictStatus
from cuda_l2.review._base import Checker
from cuda_l2.review.checker import open_checker
from cuda_l2.rigs import Request, Rig, open_rig
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
    not_reported: str = ""
    """Why a report is missing, where other work had the machine."""

    @property
    def best(self) -> Trial | None:
        """The reported winner; the best trial of the search where that was interrupted."""
        return next(iter(self.reports.values()), self.search.best)

    @cached_property
    def kernel(self) -> Kernel:
        """The winner as a callable: kernel(a, b, out). One object, made at the first access."""
        if self.best is None:
            raise UserError(f"no correct kernel was found for {self.task}; search longer with --budget")
        if is_model(self.best.candidate.proposer):
            raise UserError(
                f"{self.best.candidate.proposer} wrote the winner: read {self.source_path}; if you trust it, load it"
                " with cuda_l2.library.kernel.Kernel(result.task, result.best.candidate, result.best.build)"
            )
        if not self.task.product:
            raise UserError(
                f"kernels for tasks cannot be called from torch yet; the winner's source is {self.source_path}"
            )
        if self.target.name != "cpu":
            raise UserError(
                "result.kernel is for the CPU; on a Hopper GPU `cuda-l2 library import"
                f" {self.source_path} {self.task}` has cuda_l2.matmul call the winner (docs/deploy.md)"
            )
        return Kernel(self.task, self.best.candidate, self.best.build, self.best.machine)

    def save(self, path: Path | str) -> None:
        """Write the winner's source, task, contract and hash as JSON; `cuda_l2.load` reads it."""
        self.kernel.save(path)

    def export(self, folder: Path | str, name: str = "") -> Path:
        """Write the winner as a shared library and its C header; the library's path. name: of the C function."""
        return self.kernel.export(folder, name)


class Workbench(Closing):
    """A machine and the archive of what was found on it, shared by several tasks. A context manager."""

    def __init__(
        self, archive: Archive, rig: Rig, checker: Checker | None = None, *, trusts_models: bool = False
    ) -> None:
        """trusts_models: whether what models wrote in earlier searches may run where there is no sandbox."""
        self.archive, self.rig, self.target = archive, rig, rig.target
        self._checker, self._trusts_models = checker, trusts_models

    def evaluator(self, task: Task) -> Evaluator:
        """The stages for one task."""
        return Evaluator(task, self.rig, checker=self._checker)

    def choose(self, evaluator: Evaluator, found: Sequence[Trial] = ()) -> Trial:
        """The fastest of what was found, what the archive knows and the default, timed side by side once more.

        So no lucky timing wins, nor a figure of another hour.
        """
        measured = {trial.candidate.id: trial for trial in found if trial.timing and trial.speedup}
        stored = {
            t.candidate.id: t for t in self.archive.best(evaluator.task, self.target.machine, SEARCH.name, FINALISTS)
        }
        known = [trial for trial in (stored | measured).values() if self._may_run(trial.candidate)]
        finalists = sorted(known, key=lambda trial: trial.speedup, reverse=True)[:FINALISTS]
        wanted = {trial.candidate.id: trial.candidate for trial in finalists}
        default = default_candidates(evaluator.task, self.target)[:1]
        wanted |= {candidate.id: candidate for candidate in default}
        protocol = self.rig.protocols[FINALS.name]
        if self.target.name == "cpu":
            trials = evaluator.compare(list(wanted.values()), protocol)
        else:  # where the clocks of two runs drifted apart, they are repeated
            trials = list(evaluator.evaluate(list(wanted.values()), protocol))
        best = max(trials, key=lambda trial: trial.speedup)
        return best if best.speedup else finalists[0]

    def report(
        self, winner: Trial, protocols: Sequence[str], on_stage: Callable[[str], None], *, full: bool = True
    ) -> Iterator[Trial]:
        """Verify and time a winner anew, on inputs it has not met, under one protocol after the other.

        full: also by the checks that are too slow for a search, once.
        """
        with self.evaluator(winner.task) as evaluator:
            for name in protocols:
                on_stage(name)
                slow = full and name == protocols[0]
                (trial,) = evaluator.evaluate([winner.candidate], self.rig.protocols[name], full=slow)
                if trial.status != TimingStatus.BUSY:
                    self.archive.append(trial)
                yield trial

    def close(self) -> None:
        self.rig.close()
        self.archive.close()

    def _may_run(self, candidate: Candidate) -> bool:
        """Not what a model wrote in an earlier search, where there is no sandbox any more."""
        sandboxed = sandbox.kind() is not sandbox.Kind.LIMITS or self._trusts_models
        return sandboxed or not is_model(candidate.proposer)


class Optimizer(Workbench):
    """Searches for the best kernels of one task after another. A context manager."""

    def __init__(self, settings: Settings = Settings(), request: Request | None = None) -> None:
        """request: what is asked of the rig, beyond what the settings say."""
        self.settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._profiles: dict[tuple[str, str], str] = {}  # by task and candidate
        self._profiles_here = True
        request = request or Request(retune=settings.retune, tuning=settings.tuning)
        with contextlib.ExitStack() as stack:
            if not is_model(settings.policy):
                proposer_maker(settings.policy)  # an unknown name leaves no archive behind
            archive = stack.enter_context(Archive(Path(settings.archive or paths.default_archive())))
            self._policy = open_policy(settings.policy, settings.model, archive.path)
            stack.callback(self._policy.close)
            checker = open_checker(settings.review, settings.model, archive.path)
            if checker:
                stack.callback(checker.close)
            rig = stack.enter_context(open_rig(settings.target, request))
            rig.require_tools()
            self._held = stack.pop_all()
        super().__init__(archive, rig, checker, trusts_models=settings.model.without_sandbox)

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
        progress, winner = self.find(task, on_progress, on_stage)
        reports: dict[str, Trial] = {}
        try:
            not_reported = self._report(winner, reports, on_stage) if winner is not None else ""
        except KeyboardInterrupt:
            progress.interrupted, not_reported = True, ""
        result = Result(task, self.target, progress, reports, None, not_reported)
        if result.best:
            result.source_path = self.save_source(result.best)
        return result

    def find(
        self,
        task: Task,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> tuple[Progress, Trial | None]:
        """Search, then choose among the finalists; no winner where nothing is correct, or the search is interrupted."""
        history = {t.candidate.id: t for t in self.archive.trials(task, self.target.machine, SEARCH.name)}
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
                    winner = self.choose(evaluator, progress.trials)
            except KeyboardInterrupt:
                progress.interrupted = True
        progress.checker = self._checker.summary() if self._checker else ""
        return progress, winner

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

    def _report(self, winner: Trial, reports: dict[str, Trial], on_stage: Callable[[str], None]) -> str:
        """Verify and time the winner on fresh inputs under the protocols to report; fills `reports`.

        Why one is missing, where other work had the machine.
        """
        missing = ""
        names = self.rig.reports(winner.task, REPORTED[self.settings.protocol])
        for trial in self.report(winner, names, lambda name: on_stage(f"reporting: {name}")):
            if trial.verdict is None or trial.verdict.status is not VerdictStatus.CORRECT:
                raise UserError(f"the winner {winner.candidate.id} failed when checked again: {trial.reason}")
            if trial.timing and trial.timing.speedup:
                reports[trial.protocol] = trial
            elif trial.timing and trial.timing.status is TimingStatus.BUSY:
                missing = f"{trial.protocol}: {trial.reason}"
        return missing

    def save_source(self, trial: Trial) -> Path:
        """Write a winner's source beside the archive."""
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
