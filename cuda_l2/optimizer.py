"""The main job: search for a task's best kernel, then report it from another run on other inputs."""

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import overload

import numpy as np

from cuda_l2 import tasks
from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.library.kernel import Kernel, TorchKernel
from cuda_l2.library.saved import Reports, TorchsOwn, ratio_text, torchs_best, why_no_win
from cuda_l2.llm._base import is_model, is_unread
from cuda_l2.machine import chosen
from cuda_l2.machine._base import Target
from cuda_l2.measure.baselines._base import TorchBaseline, baselines_of
from cuda_l2.measure.clock import CLOCK, Clock
from cuda_l2.measure.profile import summary
from cuda_l2.measure.protocols import FINALS, SEARCH
from cuda_l2.plan import CHOICE, LATE_CHOICE, Plan, plan, share
from cuda_l2.propose._base import Hooks, Proposer, proposer_maker
from cuda_l2.propose._policy import default_candidates, open_policy
from cuda_l2.records import FOUND_WRONG, Candidate, Task, TimingStatus, Trial, VerdictStatus
from cuda_l2.review._base import Checker
from cuda_l2.review.checker import open_checker
from cuda_l2.rigs import Request, Rig, open_rig
from cuda_l2.search import Judges, Progress, Scope, comparable, search
from cuda_l2.settings import REPORTED, Settings
from cuda_l2.system import paths, sandbox
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.place import folder_of
from cuda_l2.system.steps import step
from cuda_l2.system.values import seconds

FINALISTS = 3
LAUNCHES_OF_ONE_CHECK = 25
"""Approximate number of launches of one verification and a short timing."""


@dataclass
class Result:
    """The result of optimising one task."""

    task: Task
    target: Target
    search: Progress
    reports: Reports  # from runs after the search on other inputs; empty if interrupted
    source_path: Path | None
    not_reported: str = ""
    """Why a report is missing, where other work had the machine or the time was up."""

    @property
    def best(self) -> Trial | None:
        """The reported winner; the best trial of the search where that was interrupted."""
        return None if self.search.refuted else next(iter(self.reports.values()), self.search.best)

    @property
    def why_no_win(self) -> str:
        """Why no kernel is handed out; empty where the best one wins."""
        if self.best is None:
            return self.search.why_none
        why = why_no_win(list(self.reports.values()))
        return f"{why}: {self.not_reported}" if self.not_reported and not self.reports else why

    @property
    def wins(self) -> bool:
        """Whether there is a kernel, and it is faster than every baseline by its report."""
        return not self.why_no_win

    @property
    def handed_out(self) -> str:
        """What `kernel` gives: the winner's id or the name of torch's product; empty where nothing can be called."""
        if self.target.name != "cpu" or not self.task.product:
            return ""
        best = self.best
        return best.candidate.id if best and self.wins else torchs_best(self.task, best.timing if best else None)

    @cached_property
    def kernel(self) -> Kernel | TorchKernel:
        """What to call: kernel(a, b, out). The winner, or torch's own product where nothing wins, which says why.

        One object, made at the first access. UserError where the task is no product of the CPU's.
        """
        if self.best is None and not self.handed_out:
            raise UserError(f"there is no kernel for {self.task}: {self.why_no_win}")
        if not self.task.product:
            raise UserError(f"kernels for tasks cannot be called from torch yet; the source is {self.source_path}")
        if self.target.name != "cpu":
            raise UserError(
                "result.kernel is for the CPU; on a Hopper GPU `cuda-l2 library import"
                f" {self.source_path} {self.task}` has cuda_l2.matmul call the winner (docs/deploy.md)"
            )
        if self.best is None or self.why_no_win:
            return TorchKernel(TorchsOwn(self.task, self.handed_out, self.why_no_win, self.target.machine))
        if is_unread(self.best.candidate.proposer):
            raise UserError(
                f"{self.best.candidate.proposer} wrote the winner: read {self.source_path}, then cuda_l2.load that path"
            )
        return Kernel(self.task, self.best.candidate, self.best.build, self.best.machine)

    def __repr__(self) -> str:
        """One line: the winner and its speedup by protocol, or why there is none."""
        if self.best is None:
            last = (
                "; cuda_l2.load(result.source_path) gives the last one" if self.source_path and self.handed_out else ""
            )
            return f"<Result for {self.task}: {self.why_no_win}{last}>"
        won = f"kernel {self.best.candidate.id} has {'; '.join(map(ratio_text, self.reports.values()))}"
        return f"<Result for {self.task}: {won if self.wins else f'no kernel wins: {self.why_no_win}'}>"

    def save(self, path: Path | str) -> None:
        """Write `kernel` as JSON, a winner's source or the name of torch's product; `cuda_l2.load` reads it."""
        self.kernel.save(path)

    def export(self, folder: Path | str, name: str = "") -> Path:
        """Write the winner as a shared library and its C header; the library's path. name: of the C function."""
        return self.kernel.export(folder, name)


class Workbench(Closing):
    """A machine and the archive of what was found on it, shared by several tasks. A context manager."""

    judges: Judges | None = None
    """Judge what is searched in this process's place."""

    def __init__(
        self,
        archive: Archive,
        rig: Rig,
        checker: Checker | None = None,
        *,
        trusts_models: bool = False,
        clock: Clock = CLOCK,
    ) -> None:
        """trusts_models: whether what models wrote in earlier searches may run where there is no sandbox."""
        self.archive, self.rig, self.target, self.clock = archive, rig, rig.target, clock
        self._checker, self._trusts_models = checker, trusts_models

    def evaluator(self, task: Task) -> Evaluator:
        """The stages for one task."""
        return Evaluator(task, self.rig, checker=self._checker, clock=self.clock, judges_here=not self.judges)

    def choose(self, evaluator: Evaluator, found: Sequence[Trial] = ()) -> Trial | None:
        """The fastest of what was found, what the archive knows and the default, timed side by side once more.

        So no lucky timing wins, nor a figure of another hour. None where nothing has a time, now or before.
        """
        measured = {trial.candidate.id: trial for trial in found if trial.timing and trial.speedup}
        stored = {
            t.candidate.id: t for t in self.archive.best(evaluator.task, self.target.machine, SEARCH.name, FINALISTS)
        }
        known = [trial for trial in (stored | measured).values() if self._may_run(trial.candidate)]
        finalists = sorted(known, key=lambda trial: trial.speedup, reverse=True)[:FINALISTS]
        # earlier searches may have compared with a slower baseline
        finalists += sorted((t for t in known if t.candidate.id in measured), key=lambda trial: trial.speedup)[-1:]
        wanted = {trial.candidate.id: trial.candidate for trial in finalists}
        default = default_candidates(evaluator.task, self.target)[:1]
        wanted |= {candidate.id: candidate for candidate in default}
        protocol = self.rig.protocols[FINALS.name]
        if self.target.name == "cpu":
            trials = evaluator.compare(list(wanted.values()), protocol)
        else:  # where the clocks of two runs drifted apart, they are repeated
            trials = list(evaluator.evaluate(list(wanted.values()), protocol))
        best = max(trials, key=lambda trial: trial.speedup)
        return best if best.speedup else next(iter(finalists), None)

    def report(
        self,
        winner: Trial,
        protocols: Sequence[str],
        on_stage: Callable[[str], None],
        *,
        full: bool = True,
        within_s: float = math.inf,
    ) -> Iterator[Trial]:
        """Verify and time a winner anew, on inputs it has not met, under one protocol after the other.

        full: also by the checks that are too slow for a search, once. within_s: for all of them; a protocol whose time
        is up before it begins is left out, but never the first.
        """
        began = self.clock.now()
        with self.evaluator(winner.task) as evaluator:
            for number, name in enumerate(protocols):
                left_s = within_s - (self.clock.now() - began - evaluator.queued_s)
                if number and left_s <= 0:
                    return
                evaluator.ends = self.clock.now() + left_s * share(number, len(protocols))
                on_stage(name)
                slow = full and name == protocols[0]
                (trial,) = evaluator.evaluate([winner.candidate], self.rig.protocols[name], full=slow)
                if trial.status != TimingStatus.BUSY:
                    self.archive.append(trial)
                if trial.status in FOUND_WRONG:  # a search does not take it up again
                    self.archive.append(replace(trial, protocol=SEARCH.name))
                yield trial

    def close(self) -> None:
        self.rig.close()
        self.archive.close()

    def _may_run(self, candidate: Candidate) -> bool:
        """Not what a model wrote in an earlier search, where there is no sandbox any more."""
        sandboxed = sandbox.kind() is not sandbox.Kind.LIMITS or self._trusts_models
        return sandboxed or not is_unread(candidate.proposer)


class Optimizer(Workbench):
    """Searches for the best kernels of one task after another. A context manager."""

    def __init__(
        self, settings: Settings = Settings(), request: Request | None = None, *, clock: Clock = CLOCK
    ) -> None:
        """request: what is asked of the rig, beyond what the settings say."""
        self.settings = settings
        self._rng = np.random.default_rng(settings.seed)
        self._profiles: dict[tuple[str, str], str] = {}  # by task and candidate
        self._profiles_here = True
        request = request or Request(retune=settings.retune, tuning=settings.tuning)
        with contextlib.ExitStack() as stack:
            if not is_model(settings.policy):
                proposer_maker(settings.policy)  # an unknown name leaves no archive behind
            archive = stack.enter_context(Archive(settings.archive or paths.default_archive()))
            weights = Path(settings.weights) if settings.weights else None
            self._policy = open_policy(settings.policy, settings.model, archive.path, weights=weights)
            stack.callback(self._policy.close)
            checker = open_checker(settings.review, settings.model, archive.path)
            if checker:
                stack.callback(checker.close)
            rig = stack.enter_context(open_rig(settings.target, request))
            rig.require_tools()
            self._held = stack.pop_all()
        super().__init__(archive, rig, checker, trusts_models=settings.model.without_sandbox, clock=clock)

    def require_feasible(self, task: Task) -> None:
        """UserError where the task does not fit this machine's memory or the budget, or cannot be timed as asked."""
        self.rig.require_feasible(task)
        self.rig.reports(task, REPORTED[self.settings.protocol])
        once = self.target.bound_us(task) * 1e-6 * LAUNCHES_OF_ONE_CHECK
        if once > self.settings.budget_s:
            least = f"takes at least {math.ceil(1e3 * once) / 1e3:g} s on this machine"
            raise UserError(f"checking one kernel for {task} {least}; give it that, or more, with --budget")

    def plan(self, task: Task) -> Plan:
        """How long a task takes, searching and reporting."""
        target = self.target
        reported = [self.rig.protocols[name] for name in self.rig.reports(task, REPORTED[self.settings.protocol])]
        compiles = any(each.compiled and each.serves(task) for each in baselines_of(TorchBaseline, target.name))
        bound_s, on_cpu = target.bound_us(task) * 1e-6, target.name == "cpu"
        return plan(self.settings.budget_s, bound_s, task.bytes, reported, compiles=compiles, on_cpu=on_cpu)

    def optimize(
        self,
        task: Task,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_stage: Callable[[str], None] = lambda stage: None,
        *,
        spent_s: float = 0.0,
    ) -> Result:
        """Search, choose among the finalists, report the winner. spent_s: time of the budget that is gone already."""
        self.require_feasible(task)
        progress, winner = self.find(task, on_progress, on_stage, spent_s=spent_s)
        return self.conclude(task, progress, winner, on_stage)

    def conclude(
        self, task: Task, progress: Progress, winner: Trial | None, on_stage: Callable[[str], None] = lambda stage: None
    ) -> Result:
        """Report the winner of a search from another run, and keep its source."""
        result = Result(task, self.target, progress, Reports(), None)
        try:
            left_s = progress.ended + self.plan(task).report_s - self.clock.now()
            if winner is not None:
                self._report(winner, result, on_stage, left_s)
        except KeyboardInterrupt:
            progress.interrupted = True
        if result.not_reported or not result.reports:
            again = "; search again when the machine is quiet, or longer" if result.best else ""
            result.reports.why = f"{result.not_reported or result.why_no_win}{again}"
        if kept := result.best or progress.untimed:
            result.source_path = self.save_source(kept)
        return result

    def find(
        self,
        task: Task,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_stage: Callable[[str], None] = lambda stage: None,
        *,
        spent_s: float = 0.0,
    ) -> tuple[Progress, Trial | None]:
        """Search, then choose among the finalists.

        No winner where nothing is correct and timed, or the search is interrupted. spent_s: time of the budget that is
        gone already; preparing the task's inputs counts too.
        """
        ends = self.clock.now() + self.settings.budget_s - spent_s
        history = {t.candidate.id: t for t in comparable(self.archive, task, self.target.machine)}
        winner: Trial | None = None

        def remember(progress: Progress) -> None:
            assert progress.last is not None
            history[progress.last.candidate.id] = progress.last  # a known one must not weigh twice
            on_progress(progress)

        with self.evaluator(task) as evaluator:
            on_stage("searching")
            with step("opening the policy"):
                proposer = self._proposer(evaluator, lambda: list(history.values()), on_stage)
            progress = search(
                evaluator,
                proposer,
                self.archive,
                Scope(
                    max(0.0, ends - self.clock.now()),
                    self.settings.trials,
                    default_candidates(task, self.target),
                    self.settings.again,
                ),
                self.judges,
                on_progress=remember,
                on_group=lambda: self._keep(proposer),
            )
            try:
                if not progress.interrupted and (progress.best or progress.untimed):
                    on_stage("comparing the best kernels side by side")
                    winner = self.decide(evaluator, progress)
            except KeyboardInterrupt:
                progress.interrupted = True
        progress.checker = self._checker.summary() if self._checker else ""
        return progress, winner

    def decide(self, evaluator: Evaluator, progress: Progress) -> Trial | None:
        """The winner after a search, as `choose` has it, within a share of the report's time."""
        share = CHOICE if progress.best else LATE_CHOICE
        evaluator.ends = progress.ended + share * self.plan(evaluator.task).report_s
        queued_before_s = evaluator.queued_s
        winner = self.choose(evaluator, progress.trials)
        progress.queued_s += evaluator.queued_s - queued_before_s
        progress.ended += evaluator.queued_s - queued_before_s
        return winner

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
        proposer = self._policy.proposer(evaluator.task, self.target, trials, rng, Hooks(profile, on_stage))
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

    def _report(self, winner: Trial, result: Result, on_stage: Callable[[str], None], within_s: float) -> None:
        """Verify and time the winner on fresh inputs under the protocols to report: fills a result's reports."""
        missing = last = ""
        names = self.rig.reports(winner.task, REPORTED[self.settings.protocol])
        for trial in self.report(winner, names, lambda name: on_stage(f"reporting: {name}"), within_s=within_s):
            last = trial.protocol
            correct = trial.verdict and trial.verdict.status is VerdictStatus.CORRECT
            if not correct or trial.status in FOUND_WRONG:
                failed = f"the winner {winner.candidate.id} failed when it was checked again"
                result.reports, result.search.refuted = Reports(), f"{failed}: {trial.reason}"
                return
            if trial.timing and trial.timing.speedup:
                result.reports[trial.protocol] = trial
            elif trial.timing and trial.timing.status is TimingStatus.BUSY:
                missing = f"{trial.protocol}: {trial.reason}"
        left_out = ", ".join(names[names.index(last) + 1 :])
        result.not_reported = "; ".join(
            filter(None, [missing, left_out and f"{left_out}: the time for the report was up"])
        )

    def save_source(self, trial: Trial) -> Path:
        """Write a winner's source beside the archive, or in the home folder where that is on a server."""
        folder = folder_of(self.archive.path) / "kernels"
        path = folder / f"{re.sub('[:/]', '-', str(trial.task))}-{trial.candidate.id}{self.rig.suffix}"
        write_text(path, trial.candidate.source, f"the kernel is in the archive, see `cuda-l2 show {trial.task}`")
        return path


@overload
def optimize(shapes: tasks.TaskLike, *, budget: float | str = 60.0, **settings: object) -> Result: ...
@overload
def optimize(
    shapes: list[tasks.TaskLike] | tuple[tasks.TaskLike, ...], *, budget: float | str = 60.0, **settings: object
) -> list[Result]: ...
def optimize(
    shapes: tasks.TaskLike | list[tasks.TaskLike] | tuple[tasks.TaskLike, ...],
    *,
    budget: float | str = 60.0,
    **settings: object,
) -> Result | list[Result]:
    """Optimise one shape or other task, or several in turn, on this machine.

    shapes: one, or a list or tuple of several, each as `tasks.read` takes it. budget: time of search each, in seconds
    or as in "2m". Further keywords: see Settings. UserError where one of them cannot be; it says what can.
    """
    known = sorted({field.name for field in fields(Settings)} - {"budget_s"})
    for name in settings:
        if name not in known:
            raise UserError(f"there is no setting {name!r}; choose from budget, {', '.join(known)}")
    wanted = Settings(budget_s=seconds(budget), **settings)  # type: ignore[arg-type]
    several = tasks.several(shapes, chosen(wanted.target))
    parsed = several or [tasks.read(shapes, chosen(wanted.target))]
    with Optimizer(wanted) as optimizer:
        for task in parsed:
            optimizer.require_feasible(task)
        results = []
        for task in parsed:
            results.append(optimizer.optimize(task))
            if results[-1].search.interrupted:
                raise KeyboardInterrupt
    return results if several else results[0]
