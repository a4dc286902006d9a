"""cuda-l2 optimize: search for the best kernels of shapes and other tasks on this machine."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import require_target, tell
from cuda_l2.measure.clock import CLOCK
from cuda_l2.records import Task
from cuda_l2.settings import Settings
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text, write_text
from cuda_l2.system.place import Place, file_of

COMMAND = "cuda-l2", "optimize"
"""What a page says that made it."""


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
    require_target(settings.target)
    if settings.page:
        _require_replaceable(settings.page)

    from cuda_l2.report.live import LiveProgress, Stages

    began = CLOCK.now()
    with Stages("cuda-l2", quiet=settings.json) as stages:
        stages.stage("loading PyTorch", always=False)

        from cuda_l2.machine import chosen

        parsed = [tasks.parse(shape, chosen(settings.target), settings.kernelbench) for shape in shapes]

        from cuda_l2.optimizer import Optimizer
        from cuda_l2.report.tables import print_result, result_json

        stages.stage("preparing", always=False)
        optimizer = Optimizer(settings)
    found = True
    with optimizer:
        for task in parsed:
            optimizer.require_feasible(task)
        for number, task in enumerate(parsed):
            plan = optimizer.plan(task)
            if not settings.json:
                tell(f"{task}: {plan}")
            spent_s = 0.0 if number else CLOCK.now() - began
            archive, quiet = optimizer.archive.path, settings.json
            with LiveProgress(task, quiet, most_s=plan.most_s, spent_s=spent_s, beside=file_of(archive)) as live:
                result = optimizer.optimize(task, live.progress, live.stage, spent_s=spent_s)
            if settings.json:
                print(result_json(result), flush=True)
            else:
                print_result(result)
            if result.search.interrupted:
                sys.exit(130)
            found = found and result.best is not None
    if settings.page:
        _write_page(settings.page, archive, parsed)
    if not found:
        sys.exit(1)


def _write_page(page: Path, archive: Place, searched: list[Task]) -> None:
    """A line says where it is, or why there is none: a search that ended well does not fail for it."""
    from cuda_l2.report.page.reading import of_tasks
    from cuda_l2.report.page.whole import html

    try:
        found = of_tasks(archive, searched)
        if found.empty:
            raise UserError("nothing of what was searched has been timed")
        text = html(found, shlex.join([*COMMAND, *map(str, searched), "--page", page.name]))
        _require_replaceable(page)
        write_text(page, text, "choose another file with --page")
        tell(f"the search as a page: {page}")
    except UserError as error:
        tell(f"{page} was not written: {error}")


def _require_replaceable(page: Path) -> None:
    """UserError where a file is there that is no page of an earlier search."""
    if not page.exists():
        return
    begins = read_text(page)[:2000] if page.is_file() else ""
    if f'<meta name="generator" content="{" ".join(COMMAND)}">' not in begins:
        raise UserError(f"{page} is there, and is no page of an earlier search: choose another file with --page")
