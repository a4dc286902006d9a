"""cuda-l2 optimize: search for the best kernels of shapes and other tasks on this machine."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import (
    end_interrupted,
    require_policy,
    require_target,
    require_weights,
    require_writable,
    tell,
)
from cuda_l2.machine import chosen
from cuda_l2.measure.clock import CLOCK
from cuda_l2.records import Task
from cuda_l2.settings import Settings
from cuda_l2.system import paths
from cuda_l2.system.errors import DeadlyError, UserError
from cuda_l2.system.files import require_own, write_text
from cuda_l2.system.place import Place, file_of, is_there, place_of, require_folder
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.optimizer import Optimizer, Result

COMMAND = "cuda-l2", "optimize"
"""What a page says that made it."""
REPORT_S = 1800.0
"""Guard against a process that hangs: how long the report after a search takes at most."""


@Parameter(name="*", negative=())
@dataclass(frozen=True)
class OptimizeSettings(Settings):
    """How to search and to print."""

    kernelbench: Annotated[Path | None, Parameter(group="Tasks of KernelBench")] = None
    """Folder of a KernelBench checkout, for tasks as kernelbench/level1/19."""
    json: bool = False
    """Print one JSON object a shape instead of tables."""
    page: Path | None = None
    """Write what the archive holds of these tasks as one HTML page too. It replaces the page of an earlier search, and
    no other file."""
    workers: Annotated[str, Parameter(group="Several GPUs")] = ""
    """Several GPUs, a process each: auto for all of this machine, or how many. Of several shapes each searches one at a
    time; the candidates of a single one are shared. ray://HOST:PORT for GPUs of a Ray cluster, ray for one that is
    started here: they share the candidates of one shape after the other (docs/scale.md)."""
    judges: Annotated[int, Parameter(group="Several GPUs")] = 1
    """Processes that judge on each GPU of this machine, as many as its memory holds: they verify at once, and take
    turns to time."""


def command(
    shapes: Annotated[list[str], Parameter(required=True)], /, *, settings: OptimizeSettings = OptimizeSettings()
) -> None:
    """Search for the fastest correct kernel of each shape, then report it from another run.

    Where no kernel is faster than the strongest library the report says so (JSON: "wins" is false), and what is handed
    out is torch's own product. Exits with 1 where no correct kernel was found, or other work left no time to be
    measured.

    Args:
        shapes: One or more shapes, as in 512x512x512 or 64x4096x4096:tn, or other tasks, as in
            softmax:rows=64,columns=1000, or kernelbench/level1/19 with --kernelbench.
    """
    from cuda_l2.rigs import Request
    from cuda_l2.runs import on_ray, workers

    require_target(settings.target)
    require_policy(settings.policy)
    require_weights(settings.weights, settings.policy)
    Request(tuning=settings.tuning)  # UserError for a word that it does not know
    _require_usable(_archive(settings))
    if settings.judges < 1:
        raise UserError(f"the number of judges must be at least 1, not {settings.judges}")
    if settings.workers and settings.judges > 1 and (len(shapes) > 1 or settings.workers.startswith("ray")):
        raise UserError("--judges goes with GPUs of this machine, and with --workers for one shape alone")
    if settings.page:
        _require_replaceable(settings.page)
        require_writable(settings.page)
    asked = settings.workers or ("1" if settings.judges > 1 else "")
    if asked:
        on_ray.require_gpus(asked, settings.target, "--workers" if settings.workers else "--judges")

    from cuda_l2.report.live import Stages

    began = CLOCK.now()
    with Stages("cuda-l2", quiet=settings.json) as stages:
        stages.stage("loading PyTorch", always=False)

        parsed = [tasks.parse(shape, chosen(settings.target), settings.kernelbench) for shape in shapes]

        from cuda_l2.report.tables import ended, print_result, result_json

        stages.stage("preparing", always=False)
        if settings.workers and len(parsed) > 1 and not on_ray.is_ray(settings.workers):
            results = _searched_apart(settings, parsed, workers.gpus(settings.workers, settings.target))
        else:
            results = _searched(_optimizer(settings, parsed), parsed, asked, began)
    found, endings = True, []
    with contextlib.closing(results):
        for result in results:
            if settings.json:
                print(result_json(result), flush=True)
            else:
                print_result(result)
            if result.search.interrupted:
                sys.exit(130)
            found = found and result.best is not None
            endings.append(ended(result))
    if settings.page:
        _write_page(settings.page, place_of(_archive(settings)), parsed, endings)
    if not found:
        sys.exit(1)


def _archive(settings: Settings) -> Place | Path:
    return settings.archive or paths.default_archive()


def _require_usable(archive: Place | Path) -> None:
    """UserError where something is there that is no archive, or there is no folder for it."""
    from cuda_l2.archive import Archive

    require_folder(archive)
    if isinstance(archive, Path) and is_there(archive) and archive.stat().st_size:
        Archive(archive, reading=True).close()


def _optimizer(settings: Settings, wanted: Sequence[Task]) -> "Optimizer":
    """UserError where it cannot search one of the tasks."""
    from cuda_l2.optimizer import Optimizer

    with contextlib.ExitStack() as held:
        optimizer = held.enter_context(Optimizer(settings))
        for task in wanted:
            optimizer.require_feasible(task)
        held.pop_all()
    return optimizer


def _searched(optimizer: "Optimizer", wanted: Sequence[Task], asked: str, began: float) -> Generator["Result"]:
    """One task after the other; closes the optimizer.

    asked: workers that judge the candidates, if any. began: when the command did.
    """
    from cuda_l2.report.live import LiveProgress
    from cuda_l2.rigs import Request
    from cuda_l2.runs.judging import judge_pool

    settings = optimizer.settings
    assert isinstance(settings, OptimizeSettings)
    with optimizer, contextlib.ExitStack() as held:
        if asked:
            request = Request(retune=settings.retune, tuning=settings.tuning)
            each = min(optimizer.rig.together(task, settings.judges) for task in wanted)
            if each < settings.judges:
                tell(f"{counted(each, 'process', 'processes')} of {settings.judges} on each GPU: more do not fit")
            pool = judge_pool(asked, optimizer.target.name, tell, request, each)
            optimizer.judges = held.enter_context(pool)
        for number, task in enumerate(wanted):
            plan = optimizer.plan(task)
            if not settings.json:
                tell(f"{task}: {plan}")
            spent_s = 0.0 if number else CLOCK.now() - began
            beside = file_of(optimizer.archive.path)
            with LiveProgress(task, settings.json, most_s=plan.most_s, spent_s=spent_s, beside=beside) as live:
                result = optimizer.optimize(task, live.progress, live.stage, spent_s=spent_s)
            yield result


def _searched_apart(settings: OptimizeSettings, wanted: Sequence[Task], gpus: Sequence[str]) -> Generator["Result"]:
    """The tasks in order, each searched and reported by the next of the GPUs' processes that is free.

    UserError before any search where a task cannot be searched. One that ends its processes comes last: this process
    searches it, and those of the GPUs judge its candidates.
    """
    from cuda_l2.archive import Archive
    from cuda_l2.runs.judging import require_known
    from cuda_l2.runs.pool import Pool
    from cuda_l2.store import holder

    model = settings.model
    if (model.tokens, model.money, model.model_seconds) != (None, None, None):
        raise UserError("with --workers each process would spend the whole budget of a model: limit --trials instead")
    for task in wanted:
        require_known(task)
    if not settings.json:
        tell(f"{counted(len(wanted), 'task')} on {counted(len(gpus), 'GPU')}, {settings.budget_s:g} s of search each")
    left = []
    with contextlib.ExitStack() as held:
        names, archive = [holder.new() for _ in wanted], held.enter_context(Archive(_archive(settings)))
        for name in names:
            held.callback(archive.release_all, name)
        pool = held.enter_context(Pool(gpus, Searching(settings, tuple(wanted)), tell, settings.budget_s + REPORT_S))
        results = [pool.begin(request) for request in zip(wanted, names, strict=True)]
        try:
            for task, result in zip(wanted, results, strict=True):
                try:
                    yield result.result()
                except DeadlyError as error:  # one of its candidates may be at fault
                    left.append(task)
                    tell(f"{task}: {error}; it comes last, with its candidates judged apart from the search")
        except KeyboardInterrupt:
            end_interrupted()
    yield from _searched(_optimizer(settings, left), left, settings.workers, CLOCK.now()) if left else ()


@dataclass(frozen=True)
class Searching:
    """What a process does for `_searched_apart`: the command's work for one task, on the GPU that it sees first.

    A request is a task and who holds the claims of its search: another process that goes on with it has them too.
    """

    settings: OptimizeSettings
    wanted: tuple[Task, ...]

    @contextlib.contextmanager
    def opened(self) -> "Iterator[Callable[[tuple[Task, str]], Result]]":
        from cuda_l2.report.live import LiveProgress

        with _optimizer(self.settings, self.wanted) as optimizer:
            beside = file_of(optimizer.archive.path)

            def optimize(request: tuple[Task, str]) -> "Result":
                task, optimizer.archive.holder = request
                most_s = optimizer.plan(task).most_s
                with LiveProgress(task, self.settings.json, most_s=most_s, beside=beside) as live:
                    return optimizer.optimize(task, live.progress, live.stage)

            yield optimize


def _write_page(page: Path, archive: Place, searched: list[Task], endings: Sequence[str]) -> None:
    """A line says where it is, or why there is none: a search that ended well does not fail for it.

    endings: how each search ended.
    """
    from cuda_l2.report.page.reading import of_tasks
    from cuda_l2.report.page.whole import html

    try:
        found = of_tasks(archive, searched)
        if found.empty:
            raise UserError("nothing of what was searched has been timed")
        text = html(found, shlex.join([*COMMAND, *map(str, searched), "--page", page.name]), endings)
        _require_replaceable(page)
        write_text(page, text, "choose another file with --page")
        tell(f"the search as a page: {page}")
    except UserError as error:
        tell(f"{page} was not written: {error}")


def _require_replaceable(page: Path) -> None:
    mark = f'.*<meta name="generator" content="{" ".join(COMMAND)}">'
    require_own(page, mark, "page of an earlier search", "choose another file with --page")
