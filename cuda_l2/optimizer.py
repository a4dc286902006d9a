"""The main job: search for a shape's best kernel, then report it from another run on other inputs."""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, overload

import numpy as np

from cuda_l2 import tasks
from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.library.kernel import Kernel
from cuda_l2.llm._base import is_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine import chosen
from cuda_l2.machine._base import Target
from cuda_l2.measure.profile import summary
from cuda_l2.measure.protocols import FINALS, OFFLINE, PAPER, SEARCH, SERVER
from cuda_l2.propose._base import FamilySpace, Proposer, UnionSpace, proposer_maker, space_for
from cuda_l2.records import Candidate, Gemm, Task, Trial, VerdictStatus
from cuda_l2.review.checker import Checker, open_checker
from cuda_l2.review.settings import ReviewSettings
from cuda_l2.reward import RewardSettings
from cuda_l2.rigs import ADAPTIVE, Request, Rig, open_rig
from cuda_l2.search import Progress, search
from cuda_l2.system import paths, sandbox
from cuda_l2.system.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.propose._model_policy import ModelPolicy

FINALISTS = 3
REPORTED = {"standard": (OFFLINE.name, SERVER.name), "offline": (OFFLINE.name,), "paper": (PAPER.name,)}
"""Protocols under which a winner is reported, by the setting's word."""
LAUNCHES_OF_ONE_CHECK = 25
"""About how often one verification and a short timing launch a kernel."""


@dataclass(frozen=True)
class Settings:
    """How to optimise one shape."""

    budget_s: float = 60.0
    trials: int | None = None
    policy: str = "schedule"
    seed: int = 0
    archive: Path | str | None = None
    protocol: str = "standard"  # "standard": offline and server; "offline" alone; "paper": the paper's 10 s + 30 s
    again: bool = False  # time candidates anew that the archive knows
    target: str = "auto"  # cpu, cuda, or auto for the best one present
    retune: bool = False  # baselines that choose an algorithm do so anew
    tuning: str = ADAPTIVE  # how they time algorithms: adaptive or paper
    model: ModelSettings = ModelSettings()  # where the policy, or the checker, is a language model
    review: ReviewSettings = ReviewSettings()  # of jumps in reward

    def __post_init__(self) -> None:
        if not self.budget_s > 0:
            raise UserError(f"the budget must be a positive time, as in 60s or 2m, not {self.budget_s:g} s")
        if self.seed < 0:
            raise UserError(f"the seed must not be negative, as {self.seed} is")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"the number of trials must be at least 1, not {self.trials}")
        if self.protocol not in REPORTED:
            raise UserError(f"there is no protocol {self.protocol!r}; choose from {', '.join(REPORTED)}")


@dataclass
class Result:
    """What optimising one shape gave."""

    task: Task
    target: Target
    search: Progress
    reports: dict[str, Trial]  # by protocol, from runs after the search on other inputs; empty if interrupted
    source_path: Path | None

    @property
    def best(self) -> Trial | None:
        """The winner, as reported, or as found where the search was interrupted."""
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


class Workbench:
    """A machine with the archive of what was found on it: what several tasks share. A context manager."""

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
        """The fastest of what was found and what the archive knows, timed once more, so that no lucky timing wins."""
        measured = {trial.candidate.id: trial for trial in found if trial.timing and trial.speedup}
        stored = {
            t.candidate.id: t for t in self.archive.best(evaluator.task, self.target.machine, SEARCH.name, FINALISTS)
        }
        known = [trial for trial in (stored | measured).values() if self._may_run(trial.candidate)]
        finalists = sorted(known, key=lambda trial: trial.speedup, reverse=True)[:FINALISTS]
        protocol = self.rig.protocols[FINALS.name]
        trials = list(evaluator.evaluate([trial.candidate for trial in finalists], protocol))
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
                self.archive.append(trial)
                yield trial

    def close(self) -> None:
        self.rig.close()
        self.archive.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _may_run(self, candidate: Candidate) -> bool:
        """Not what a model wrote in an earlier search, where there is no sandbox any more."""
        sandboxed = sandbox.kind() is not sandbox.Kind.LIMITS or self._trusts_models
        return sandboxed or not is_model(candidate.proposer)


class Optimizer(Workbench):
    """Searches for the best kernels of one task after another. A context manager."""

    def __init__(self, settings: Settings = Settings(), request: Request | None = None) -> None:
        """request: what is asked of the rig, beyond what the settings say."""
        self.settings = settings
        by_model = is_model(settings.policy)
        if not by_model:
            proposer_maker(settings.policy)
        request = request or Request(retune=settings.retune, tuning=settings.tuning)
        self._rng = np.random.default_rng(settings.seed)
        archive = Archive(Path(settings.archive or paths.default_archive()))
        self._model: ModelPolicy | None = None
        if by_model:
            from cuda_l2.propose import _model_policy  # noqa: PLC0415 - parts of it are optional

            self._model = _model_policy.ModelPolicy(settings.policy, settings.model, archive.path)
        checker = open_checker(settings.review, settings.model, archive.path)
        self._profiles: dict[tuple[str, str], str] = {}  # by task and candidate
        self._profiles_here = True
        rig = open_rig(settings.target, request)
        super().__init__(archive, rig, checker, trusts_models=settings.model.without_sandbox)
        try:
            self.rig.require_tools()
        except UserError:
            self.close()
            raise

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
            if winner is not None:
                self._report(winner, reports, on_stage)
        except KeyboardInterrupt:
            progress.interrupted = True
        result = Result(task, self.target, progress, reports, None)
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
        settings, machine = self.settings, self.target.machine
        history = {trial.candidate.id: trial for trial in self.archive.trials(task, machine, SEARCH.name)}
        families = families_for(task, self.target)
        # a model can write for a shape that no family serves
        space = space_for(families, task, self.target) if families or not self._model else None
        winner: Trial | None = None

        def remember(progress: Progress) -> None:
            assert progress.last is not None
            history[progress.last.candidate.id] = progress.last  # a known one must not weigh twice
            on_progress(progress)

        with self.evaluator(task) as evaluator:
            on_stage("searching")
            if self._model:
                proposer = self._model_proposer(self._model, evaluator, lambda: list(history.values()), on_stage)
            else:
                assert space is not None  # only a model does without families
                proposer = self._proposer(space, lambda: list(history.values()))
            progress = search(
                evaluator,
                proposer,
                self.archive,
                budget_s=settings.budget_s,
                max_trials=settings.trials,
                first=[space.render(values, "default") for values in space.defaults()] if space else [],
                again=settings.again,
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
        self.rig.close()
        if self._model:
            self._model.close()
        if self._checker:
            self._checker.close()
        self.archive.close()

    def _proposer(self, space: FamilySpace | UnionSpace, trials: Callable[[], list[Trial]]) -> Proposer:
        """The proposer asked for, going on from its kept state."""
        seed = np.random.default_rng(int(self._rng.integers(1 << 62)))
        proposer = proposer_maker(self.settings.policy)(space, trials, seed)
        state = self.archive.load_policy(proposer.name, self.target.machine)
        if state:
            proposer.load_state(state)
        return proposer

    def _model_proposer(
        self,
        model: "ModelPolicy",
        evaluator: Evaluator,
        trials: Callable[[], list[Trial]],
        on_stage: Callable[[str], None],
    ) -> Proposer:
        """The language model asked for, going on from the exchanges in the archive."""
        seed = np.random.default_rng(int(self._rng.integers(1 << 62)))
        return model.proposer(evaluator.task, self.target, trials, seed, partial(self._profile, evaluator), on_stage)

    def _profile(self, evaluator: Evaluator, trial: Trial) -> str:
        """What the hardware's counters say of a kernel, read once and kept; empty where they cannot be read."""
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

    def _report(self, winner: Trial, reports: dict[str, Trial], on_stage: Callable[[str], None]) -> None:
        """Fill `reports` with the winner's trials under the protocols to report."""
        names = self.rig.reports(winner.task, REPORTED[self.settings.protocol])
        for trial in self.report(winner, names, lambda name: on_stage(f"reporting: {name}")):
            if trial.verdict is None or trial.verdict.status is not VerdictStatus.CORRECT:
                raise UserError(f"the winner {winner.candidate.id} failed when checked again: {trial.reason}")
            if trial.timing and trial.timing.speedup:
                reports[trial.protocol] = trial

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


@overload
def evaluate(
    source: str,
    task: str | Task,
    *,
    protocol: str = ...,
    seed: int | None = None,
    rewards: RewardSettings = ...,
    target: str = ...,
    full: bool = ...,
) -> Trial: ...
@overload
def evaluate(
    source: list[str] | tuple[str, ...],
    task: str | Task,
    *,
    protocol: str = ...,
    seed: int | None = None,
    rewards: RewardSettings = ...,
    target: str = ...,
    full: bool = ...,
) -> list[Trial]: ...
def evaluate(
    source: str | list[str] | tuple[str, ...],
    task: str | Task,
    *,
    protocol: str = SEARCH.name,
    seed: int | None = None,
    rewards: RewardSettings = RewardSettings(),
    target: str = "auto",
    full: bool = False,
) -> Trial | list[Trial]:
    """Build, verify, time and reward sources for a shape or another task: a reward function for any trainer.

    task: as `tasks.parse` reads it, 512x512x512 or softmax:rows=64,columns=1000.
    One source gives one Trial, a sequence gives a list; builds run in parallel. Timings hold the machine's lock.
    full: also the checks that are too slow for every candidate (sanitizers, stress builds).
    """
    task = tasks.parse(task, chosen(target)) if isinstance(task, str) else task
    with open_rig(target) as rig:
        if protocol not in rig.protocols:
            raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(rig.protocols)}")
        rig.reports(task, [protocol])
        with Evaluator(task, rig, seed=seed, rewards=rewards) as evaluator:
            candidates = [Candidate(text) for text in ([source] if isinstance(source, str) else source)]
            trials = list(evaluator.evaluate(candidates, rig.protocols[protocol], full=full))
    return trials[0] if isinstance(source, str) else trials
