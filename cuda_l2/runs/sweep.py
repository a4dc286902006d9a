"""Many shapes in one run: every shape's best kernel, or the baselines alone, under every protocol asked for."""

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import cuda_l2
from cuda_l2.archive import Archive
from cuda_l2.build.build_server import BuildServers
from cuda_l2.contract import ContractError
from cuda_l2.families._base import families_for
from cuda_l2.measure.baselines._base import named
from cuda_l2.measure.cpu_rounds import SAMPLES
from cuda_l2.measure.protocols import SEARCH, brief
from cuda_l2.optimizer import FINALISTS, LAUNCHES_OF_ONE_CHECK, Optimizer, Workbench
from cuda_l2.propose._base import proposer_maker, space_for
from cuda_l2.records import Candidate, Gemm, Timing, Trial
from cuda_l2.rigs import ADAPTIVE, open_rig
from cuda_l2.runs.library_run import Library, figures, headline
from cuda_l2.runs.results import FAILED, MEASURED, NO_KERNEL, SKIPPED, Header, Measurement, ResultsFile
from cuda_l2.runs.settings import SweepSettings
from cuda_l2.search import Progress, judge_group
from cuda_l2.system import paths
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import EndOfRunError, UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.values import listed, now, seconds

AHEAD = 24
"""Shapes of a library whose kernels are being built while one is measured: together they share many."""
FAILURES_IN_A_ROW = 5
"""So many shapes that fail one after the other end a run: then it is not the shapes."""
LEAST_OF_SHAPE_S = 1.0
"""Time of a shape beside its launches: inputs, processes, comparisons."""


class Sweep(Closing):
    """One machine, set up once for all shapes. A context manager."""

    def __init__(
        self, settings: SweepSettings, library: Library | None = None, builders: BuildServers | None = None
    ) -> None:
        """library: the settings' table, read. builders: of a GPU, if some are at work already."""
        settings.require_protocols()
        self.settings, request = settings, settings.request()
        self._library = library or (Library(settings.library) if settings.library else None)
        self._kernels: Workbench | None = None
        self._optimizer: Optimizer | None = None
        """The same, where kernels are searched for."""
        if settings.baselines_only or self._library:
            self.rig = open_rig(settings.target, request, builders)
        elif settings.searches:
            self._kernels = self._optimizer = Optimizer(settings.search(settings.budget_s), request)
            self.rig = self._optimizer.rig
        else:
            proposer_maker(settings.policy)  # part of the header, so that a word that means nothing is refused
            archive = Archive(settings.archive or paths.default_archive())
            self.rig = open_rig(settings.target, request)
            self._kernels = Workbench(archive, self.rig)
        try:
            if self._library and self.rig.target.name != "cuda":
                raise UserError("--library times CUDA kernels: it needs an NVIDIA GPU")
            if self._kernels:
                self.rig.require_tools()
        except UserError:
            self.close()
            raise

    def header(self, gemms: Sequence[Gemm]) -> Header:
        """What the figures of a run share with all others of its file."""
        settings = self.settings
        shapes = "\n".join(sorted(str(gemm) for gemm in gemms))
        fixed: dict[str, object] = {
            "shapes": f"{len(gemms)} of hash {hashlib.sha256(shapes.encode()).hexdigest()[:8]}",
            "baselines_only": settings.baselines_only,
            "arms": ", ".join(listed(settings.arms)) or "all",
            "compile": settings.compile,
            "retune": settings.retune,
            "rounds": self._rounds_hash(),
        }
        if settings.tuning != ADAPTIVE:  # files made before there was a choice have none
            fixed["tuning"] = settings.tuning
        if settings.brute:
            fixed["brute_s"] = seconds(settings.brute)
        if self._library:
            fixed |= self._library.described()
        elif not settings.baselines_only:
            fixed |= {"budget_s": settings.budget_s, "policy": settings.policy, "full": settings.full}
        environment = self.rig.environment() | {"cuda_l2": cuda_l2.__version__}
        return Header(self.rig.target.machine, environment, fixed, now())

    def _rounds_hash(self) -> str:
        """Changes with how any protocol takes times."""
        protocols = self.rig.protocols.values()
        taken: list[object] = [brief(protocol) if self._library else protocol for protocol in protocols]
        if self.rig.target.name == "cpu":
            taken.append(SAMPLES)
        return hashlib.sha256(repr(taken).encode()).hexdigest()[:8]

    def least_s(self, gemms: Sequence[Gemm], results: ResultsFile) -> tuple[float, int]:
        """The least time that shapes take, at the machine's measured peak, and how many of them its memory holds."""
        total, feasible = 0.0, 0
        for gemm in gemms:
            try:
                self._require_feasible(gemm)
            except _CannotMeasure:
                continue
            feasible += 1
            launch_s = self.rig.target.bound_us(gemm) * 1e-6
            total += LEAST_OF_SHAPE_S + self.settings.budget_s
            total += LAUNCHES_OF_ONE_CHECK * launch_s if self._kernels else 0.0
            protocols = [self.rig.protocols[name] for name in results.missing(gemm, self.settings.protocol_names)]
            total += sum(each.least_s(launch_s, 2 if self._kernels else 1) for each in protocols)
        return total, feasible

    def run(
        self,
        gemms: Sequence[Gemm],
        results: ResultsFile,
        on_stage: Callable[[Gemm, str], None] = lambda gemm, stage: None,
        on_done: Callable[[Gemm], None] = lambda gemm: None,
        take: Callable[[Gemm], bool] = lambda gemm: True,
    ) -> bool:
        """Measure what `results` does not hold yet, in this order; False where an interrupt ended it.

        take: whether a shape is this run's, asked when it is its turn. A shape that fails is recorded as failed,
        and the others go on, but after EndOfRunError.
        """
        failures = 0
        names = self.settings.protocol_names
        pending = results.pending(gemms, names)
        ahead = AHEAD if self._library else 1
        try:
            for number, gemm in enumerate(pending):
                self._prefetch(pending[number + ahead if number else 0 : number + ahead + 1])
                if not take(gemm):
                    continue
                for measurement in self._outcomes(gemm, results.missing(gemm, names), results, on_stage):
                    results.append(measurement)
                failures = failures + 1 if measurement.status == FAILED else 0
                if failures == FAILURES_IN_A_ROW:
                    raise UserError(f"{failures} shapes in a row failed, {gemm} as follows: {measurement.reason}")
                on_done(gemm)
        except KeyboardInterrupt:
            return False
        return True

    def close(self) -> None:
        (self._kernels or self.rig).close()

    def _prefetch(self, gemms: Sequence[Gemm]) -> None:
        """Begin to build what these shapes will need first."""
        for gemm in gemms:
            with contextlib.suppress(UserError):  # said when it is the shape's turn
                if self._kernels:
                    self.rig.prefetch(self._first(self._kernels, gemm))
                if self._library:
                    self.rig.prefetch(self._library.candidates(gemm, self.rig.target))

    def _outcomes(
        self, gemm: Gemm, protocols: Sequence[str], results: ResultsFile, on_stage: Callable[[Gemm, str], None]
    ) -> Iterator[Measurement]:
        """What becomes of a shape: one measurement a protocol, whatever happens."""
        missing = list(protocols)
        status, reason = FAILED, ""
        try:
            with self._alone(gemm):
                self._require_feasible(gemm)
                measured = self._report_kernel if self._kernels else self._report_baselines
                measured = self._report_library if self._library else measured
                start = time.perf_counter()
                for measurement in measured(gemm, protocols, results, lambda stage: on_stage(gemm, stage)):
                    arms = self._described(gemm, measurement.timing)
                    missing.remove(measurement.protocol)
                    created = measurement.created or now()
                    yield replace(measurement, arms=arms, created=created, seconds=time.perf_counter() - start)
                    start = time.perf_counter()
        except EndOfRunError as error:
            raise EndOfRunError(f"{gemm}: {error}") from error
        except _CannotMeasure as error:
            status, reason = error.status, str(error)
        except (UserError, ContractError, RuntimeError) as error:  # a library's or the driver's on one shape is no end
            reason = " ".join(str(error).split()) or type(error).__name__
        for name in missing:
            yield Measurement(gemm, name, status, reason, created=now())

    @contextlib.contextmanager
    def _alone(self, gemm: Gemm) -> Iterator[None]:
        """Hold the machine or GPU for all of a shape: memory and the inputs' drawing disturb who measures there too.

        Not while kernels are built. Where kernels are searched for or verified, each such part takes it for itself.
        """
        with contextlib.ExitStack() as held:
            if self._library:
                for built in self.rig.prefetch(self._library.candidates(gemm, self.rig.target)):
                    built()
            if not self._kernels:
                held.enter_context(machine_lock(self.rig.gpu))
            yield

    def _require_feasible(self, gemm: Gemm) -> None:
        try:
            (self._optimizer or self.rig).require_feasible(gemm)
        except UserError as error:
            raise _CannotMeasure(SKIPPED, str(error)) from None

    def _report_baselines(
        self, gemm: Gemm, protocols: Sequence[str], _: ResultsFile, on_stage: Callable[[str], None]
    ) -> Iterator[Measurement]:
        with self.rig.open(gemm, secrets.randbits(48)) as bench:
            for name in protocols:
                on_stage(name)
                timing = bench.time_baselines(self.rig.protocols[name])
                yield Measurement(gemm, name, str(timing.status), timing.reason, timing)

    def _report_kernel(
        self, gemm: Gemm, protocols: Sequence[str], results: ResultsFile, on_stage: Callable[[str], None]
    ) -> Iterator[Measurement]:
        assert self._kernels
        kernels = self._kernels
        before = [results.find(gemm, name) for name in self.settings.protocol_names]
        known = next((m.kernel for m in before if m and m.status == MEASURED), "")  # one kernel under all protocols
        reported = kernels.archive.trials(gemm, kernels.target.machine) if known else []
        winner = next((trial for trial in reported if trial.candidate.id == known), None)
        winner = winner or self._find(kernels, gemm, on_stage)
        for trial in kernels.report(winner, protocols, on_stage, full=self.settings.full):
            candidate = trial.candidate
            yield Measurement(
                gemm,
                trial.protocol,
                trial.status,
                trial.reason,
                trial.timing,
                kernel=candidate.id,
                proposer=candidate.proposer,
                family=candidate.family,
                schedule=candidate.schedule,
                verdict=trial.verdict,
                created=trial.created,
            )

    def _report_library(
        self, gemm: Gemm, protocols: Sequence[str], _: ResultsFile, on_stage: Callable[[str], None]
    ) -> Iterator[Measurement]:
        assert self._library
        if not self._library.serves(gemm):
            raise _CannotMeasure(NO_KERNEL, f"{self.settings.library} has no kernel for {gemm}")
        reported = [self.rig.protocols[name] for name in protocols]
        with contextlib.closing(self._library.time(gemm, reported, self.rig)) as runs:
            for name in protocols:
                on_stage(name)
                timed = next(runs)
                timing, (row, candidate) = headline(timed), timed[0][:2]
                yield Measurement(
                    gemm,
                    name,
                    str(timing.status),
                    timing.reason,
                    timing,
                    kernel=candidate.id,
                    proposer="library",
                    family=row.family,
                    schedule=row.schedule,
                    kernels=figures(timed),
                )

    def _described(self, gemm: Gemm, timing: Timing | None) -> dict[str, dict[str, object]]:
        """What the baselines of a timing ran."""
        if not timing or not timing.candidate:
            return {}
        names = [arm.name for arm in timing.baselines]
        names += [timing.candidate.name] * self.settings.baselines_only
        described: dict[str, dict[str, object]] = {}
        for name in names:
            try:
                described[name] = self.rig.describe(gemm, named(name))
            except RuntimeError as error:  # what a library does not tell must not cost a measurement
                described[name] = {"error": str(error)}
        return described

    def _first(self, kernels: Workbench, gemm: Gemm) -> list[Candidate]:
        """What is tried first: what the archive knows, unless there will be a search, else the families' defaults."""
        best = [] if self._optimizer else kernels.archive.best(gemm, kernels.target.machine, SEARCH.name, FINALISTS)
        if best:
            return [trial.candidate for trial in best]
        space = space_for(families_for(gemm, kernels.target), gemm, kernels.target)
        return [space.render(values, "default") for values in space.defaults()]

    def _find(self, kernels: Workbench, gemm: Gemm, on_stage: Callable[[str], None]) -> Trial:
        """The fastest kernel of a search, or without one the best known, or the best of the families' defaults."""
        progress, winner = Progress(), None
        if self._optimizer:
            progress, winner = self._optimizer.find(gemm, on_stage=on_stage)
            if progress.interrupted:
                raise KeyboardInterrupt
            if winner:
                self._optimizer.save_source(winner)
        else:
            with kernels.evaluator(gemm) as evaluator:
                if not kernels.archive.best(gemm, kernels.target.machine, SEARCH.name):
                    on_stage("defaults")
                    first = self._first(kernels, gemm)
                    progress.trials = [trial for trial, _ in judge_group(evaluator, kernels.archive, first)]
                    winner = max(progress.trials, key=lambda trial: trial.speedup)
                else:
                    on_stage("choosing among the known")
                    winner = kernels.choose(evaluator)
        if winner is None or not winner.speedup:
            if not progress.trials:
                raise _CannotMeasure(NO_KERNEL, f"no kernel was proposed; {progress.summary}")
            last = progress.trials[-1]
            what = f"no correct kernel among {len(progress.trials)}"
            raise _CannotMeasure(NO_KERNEL, f"{what}, the last one: {last.status}, {last.reason}")
        return winner


class _CannotMeasure(Exception):
    """Why a shape has no figures, though nothing went wrong."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
