"""Chooses few kernels for many shapes: a pool of kernels, each compiled once, timed on every shape, the best set kept.

Stages: pool -> build -> time -> choose. An interrupted run goes on from the pool and the times in its folder, also on a
bare machine: kernels that its cache does not hold are compiled again. What became of each build is only for readers.
What is timed here is for choosing; a kernel's figures are reported from another run, after verification.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuda_l2.build.build_server import BuildServers
from cuda_l2.library.kernels import kernels_of
from cuda_l2.library.table import PoolRow, Row, pool_of, read_pool, read_table, read_times, schedule_text, write_pool
from cuda_l2.machine.cuda.driver import bus_id
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.measure.quick import COLD_FINAL_ROUNDS, FINAL_ROUNDS, Item, QuickTimer, Sampled
from cuda_l2.records import Accumulate, Build, BuildStatus, Candidate, Gemm, Layout
from cuda_l2.runs import reported
from cuda_l2.runs.results import Header, RunFile
from cuda_l2.runs.settings import SurveySettings
from cuda_l2.runs.shortlist import Option, Shortlist, default_pool, near_pool
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lock import machine_lock
from cuda_l2.system.text import counted
from cuda_l2.system.values import now

POOL, BUILDS, TIMES = "pool.csv", "builds.jsonl", "times.jsonl"
KIND = "cuda-l2 survey"
VERSION = 2
EACH, FINALISTS = 6, 8
"""Schedules of each family and shape in the pool that is made where none is given; those timed twice."""


Sample = Callable[[Gemm, Sequence[Option]], list[Sampled]]
"""Times options on a shape, in order."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One kernel in one order of tiles on one shape: microseconds plain and as a dependent, nan where not timed."""

    row: int
    layout: Layout
    launch: tuple[tuple[str, int], ...]
    kernel: str
    first: tuple[float, ...]
    final: tuple[float, ...]
    reason: str = ""


@dataclass(frozen=True)
class Record:
    """What one shape gave, both layouts."""

    gemm: Gemm
    """With row-major B, for both."""
    arms: tuple[Arm, ...]
    seconds: float = 0.0

    @property
    def key(self) -> Gemm:
        return self.gemm


class Times(RunFile[Record]):
    """What a run timed. A context manager."""

    record = Record
    advice = "choose another folder with --out"


@dataclass
class Survey(Closing):
    """One run on one machine. A context manager; stages are called in order."""

    settings: SurveySettings
    target: CudaTarget
    on_stage: Callable[[str], None] = print
    rows: list[PoolRow] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)  # of built kernels, by identity
    records: dict[Gemm, Record] = field(default_factory=dict)  # by the product with row-major B

    def __post_init__(self) -> None:
        self.gemms = self.settings.gemms()
        self.table: list[Row] = []
        """The rows of the table, if one gives the kernels."""
        self._options: dict[Gemm, list[Option]] = {}
        self._finalists: dict[Gemm, list[Option]] = {}  # of the fp32 class
        self._times: Times | None = None

    def pool(self) -> None:
        """The kernels to choose from: of the run's folder, else of the files given, else of the families' ranking."""
        path, given = self.settings.out / POOL, self.settings.table or self.settings.pool
        if self.settings.table:
            self.table = read_table(self.settings.table)
            rows = pool_of(self.table)
            if self.settings.near:
                rows += near_pool(self.table, self.target, self.settings.near, self.settings.seed)
        else:
            rows = read_pool(given) if given else []
        if path.exists():
            self.rows = read_pool(path)
            if given and rows != self.rows:
                raise UserError(f"{path} holds another pool than {given}: choose another folder with --out")
            return
        self.rows = rows or default_pool(self.gemms, self.target, EACH)
        write_pool(path, self.rows)

    def build(self) -> None:
        """Compile every kernel that some shape will try, each once; the build cache answers for earlier runs."""
        start = time.monotonic()
        pending = [gemm for gemm in self.gemms if gemm.any_layout not in self.records]
        self._options = self._shortlists(pending)
        needed: dict[str, Candidate] = {}
        shortlist, kept = Shortlist(self.rows, self.target), self._table_kernels()
        given = set(pool_of(self.table))
        for gemm in pending:
            if gemm.accumulate is Accumulate.FP16:
                self._recall_finalists(gemm, shortlist)
            self._options[gemm] = [
                option for option in self._options[gemm] if self.rows[option.row] not in given or option.kernel in kept
            ]
            for option in [*self._options[gemm], *self._finalists.get(_wide(gemm), [])]:
                if option.kernel not in needed:
                    needed[option.kernel] = shortlist.candidate(option, gemm)
        self.on_stage(f"{counted(len(needed), 'kernel')} to try ({time.monotonic() - start:.0f} s)")
        servers, failed = BuildServers(self.target), 0
        try:
            with (self.settings.out / BUILDS).open("a") as file:
                builds = servers.build(list(needed.values()))
                for number, (kernel, build) in enumerate(zip(needed, builds, strict=True), 1):
                    file.write(json.dumps(_built(kernel, needed[kernel], build)) + "\n")
                    if build.status is BuildStatus.BUILT:
                        self.artifacts[kernel] = build.artifact
                    else:
                        failed += 1
                    if number % 50 == 0:
                        self.on_stage(f"{number} of {len(needed)} kernels built ({time.monotonic() - start:.0f} s)")
        finally:
            servers.close()
        self.on_stage(
            f"{counted(len(self.artifacts), 'kernel')} built, {failed} refused ({time.monotonic() - start:.0f} s)"
        )

    def load(self) -> None:
        """What an earlier run timed."""
        self._times = Times(self.settings.out / TIMES, self._header())
        self.records = {record.gemm: record for record in self._times.records}

    def time(self, on_shape: Callable[[Gemm, str], None], on_done: Callable[[Gemm], None]) -> bool:
        """Time what is not yet timed, until the budget is spent; whether all is."""
        assert self._times
        end = time.monotonic() + self.settings.budget_s
        with self._sampler() as sample:
            for gemm in self.pending():
                if time.monotonic() > end:
                    return False
                on_shape(gemm, "timing")
                record = self._time_shape(gemm, sample)
                self._times.append(record)
                self.records[record.gemm] = record
                on_done(gemm)
        return True

    def close(self) -> None:
        if self._times:
            self._times.close()

    def pending(self) -> list[Gemm]:
        """A shape of each size and class not timed yet; fp32 first, whose finalists the fp16 class tries too."""
        order = sorted(self.gemms, key=lambda gemm: gemm.accumulate is Accumulate.FP16)
        sizes = {gemm.any_layout: gemm for gemm in order}
        return [gemm for key, gemm in sizes.items() if key not in self.records]

    @contextlib.contextmanager
    def _sampler(self) -> Iterator[Sample]:
        """What times options on a shape."""
        settings = self.settings
        if settings.reports:
            shortlist = Shortlist(self.rows, self.target)
            with reported.ReportTimer(settings.choices, cold=settings.cold) as timer:
                yield lambda gemm, options: timer.time(
                    gemm, [self._entry(option, gemm, shortlist) for option in options]
                )
            return
        with QuickTimer(settings.seed, FINALISTS, cold=settings.cold) as timer:
            yield lambda gemm, options: timer.time(
                gemm, [Item(o.layout, self.artifacts[o.kernel], o.plan, o.dependent, o.own) for o in options]
            )

    def _entry(self, option: Option, gemm: Gemm, shortlist: Shortlist) -> reported.Entry:
        """An option for reports. As dependents only the table's own are timed."""
        dependent = None
        if option.own and option.dependent and not self.settings.cold:
            schedule = shortlist.schedule(option, gemm, 1)
            assert schedule
            dependent = schedule.family.render(schedule, "pool")
        return reported.Entry(option.layout, shortlist.candidate(option, gemm), dependent, option.own)

    def _time_shape(self, gemm: Gemm, sample: Sample) -> Record:
        start = time.monotonic()
        layouts = [g for g in self.gemms if g.any_layout == gemm.any_layout]
        options = list(itertools.chain.from_iterable(self._options.pop(g, []) for g in layouts))
        if gemm.accumulate is Accumulate.FP16:
            options += self._finalists.pop(_wide(gemm), [])
        options = [option for option in options if option.kernel in self.artifacts]
        with machine_lock(bus_id()):
            samples = sample(gemm, options)
        arms = tuple(
            Arm(*option.key, option.kernel, tuple(sampled.first), tuple(sampled.final), sampled.reason)
            for option, sampled in zip(options, samples, strict=True)
        )
        if gemm.accumulate is Accumulate.FP32:
            self._finalists[_wide(gemm)] = [options[i] for i in _best(arms)]
        return Record(gemm.any_layout, arms, time.monotonic() - start)

    def _recall_finalists(self, gemm: Gemm, shortlist: Shortlist) -> None:
        """What was best with fp32 sums, which the fp16 class allows, where an earlier run found it."""
        record = self.records.get(_wide(gemm))
        if record and _wide(gemm) not in self._finalists:
            best = [record.arms[i] for i in _best(record.arms)]
            keys = [(arm.row, arm.layout, arm.launch) for arm in best]
            self._finalists[_wide(gemm)] = shortlist.repeat(gemm, keys)

    def _table_kernels(self) -> set[str]:
        """Identities of the kernels that the table uses: no variant of them for other sizes is to be added."""
        return {kernel.id for kernel in kernels_of(self.table, self.target)}

    def _shortlists(self, gemms: Sequence[Gemm]) -> dict[Gemm, list[Option]]:
        """What to try on each shape; worked out on all cores."""
        settings = self.settings
        context = multiprocessing.get_context("spawn")
        # a table's kernels are few: those that a model of their times ranks low may win by a fifth
        modes = bool(settings.table), bool(settings.near), settings.reports, settings.cold
        arguments = (settings.out / POOL, self.target, settings.table or settings.known, *modes)
        with concurrent.futures.ProcessPoolExecutor(
            max(1, self.target.cores - 1), context, _prepare, arguments
        ) as pool:
            return dict(zip(gemms, pool.map(_options_of, gemms, chunksize=8), strict=True))

    def _header(self) -> Header:
        pool = hashlib.sha256(repr(self.rows).encode()).hexdigest()[:16]
        settings: dict[str, object] = {"pool": pool, "cold": self.settings.cold}
        if self.settings.reports:
            rounds = " and ".join(str(each.max_rounds) for each in reported.protocols(cold=self.settings.cold))
            settings |= {"tried": f"{self.settings.reports} alike", "finalists": reported.FINALISTS, "rounds": rounds}
        else:  # by other numbers times differ
            settings |= {"finalists": FINALISTS, "rounds": COLD_FINAL_ROUNDS if self.settings.cold else FINAL_ROUNDS}
            if self.settings.table:
                settings["tried"] = f"{self.settings.near} near" if self.settings.near else "whole table, orders"
        return Header(self.target.machine, {}, settings, now(), KIND, VERSION)


_SHORTLIST: list[Shortlist] = []
"""State of a process that works out shortlists."""


def _prepare(
    pool: Path, target: CudaTarget, known: Path | None, whole: bool, near: bool, alike: int, cold: bool
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    times = read_times(known) if known else ()
    _SHORTLIST[:] = [Shortlist(read_pool(pool), target, times, whole=whole, near=near, alike=alike, cold=cold)]


def _options_of(gemm: Gemm) -> list[Option]:
    return _SHORTLIST[0].options(gemm)


def _best(arms: Sequence[Arm]) -> list[int]:
    """Indices of the arms that were timed twice; of a layout where none was, that of the fastest."""
    found: list[int] = []
    for layout in Layout:
        mine = [i for i, arm in enumerate(arms) if arm.layout is layout]
        final = [i for i in mine if any(map(math.isfinite, arms[i].final))]
        measured = [i for i in mine if math.isfinite(arms[i].first[0])]
        found += final or sorted(measured, key=lambda i: arms[i].first[0])[:1]
    return found


def _built(kernel: str, candidate: Candidate, build: Build) -> dict[str, Any]:
    about = {"kernel": kernel, "family": candidate.family, "schedule": schedule_text(candidate.schedule)}
    facts = [[k.name, k.registers, k.spill_bytes, k.instructions] for k in build.kernels]
    return {**about, "status": build.status, "reason": build.reason, "kernels": facts}


def _wide(gemm: Gemm) -> Gemm:
    """The same product with fp32 sums, in both layouts."""
    return replace(gemm.any_layout, accumulate=Accumulate.FP32)
