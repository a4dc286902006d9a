"""cuda-l2 select: few kernels for many shapes, chosen by timing a pool of them on every shape."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cyclopts import Parameter

from cuda_l2.commands._options import require_cuda_packages, require_writable
from cuda_l2.runs.settings import SurveySettings
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text
from cuda_l2.system.text import counted

if TYPE_CHECKING:
    from cuda_l2.runs.survey import Survey

TABLE, SUMMARY, ENVIRONMENT = "schedules.csv", "summary.md", "environment.json"


@Parameter(name="*")
@dataclass(frozen=True)
class SelectSettings(SurveySettings):
    """How to choose."""

    most: int = 150
    """Distinct compiled kernels to keep at most. Those that --table has for other shapes or modes count and stay."""
    weights: str = "1,0.6,0.5,0.3"
    """What the modes count: fp32 plain, fp32 dependent, fp16 plain, fp16 dependent."""


def command(*, settings: SelectSettings = SelectSettings()) -> None:
    """Time a pool of kernels on every shape, and keep the best few for all of them.

    Writes pool.csv and times.jsonl, from which an interrupted run goes on, builds.jsonl with what became of each build,
    then the dispatch table schedules.csv, summary.md and environment.json. These times choose; they are not for
    reporting.
    """
    settings.gemms()
    weights = _weights(settings.weights)
    if settings.most < 1:
        raise UserError(f"at least 1 kernel must be kept, not {settings.most}")
    assert settings.budget_s > 0  # or the text is refused
    require_writable(settings.out / TABLE)
    require_cuda_packages()

    import time

    from cuda_l2.library.table import joined, write_table
    from cuda_l2.machine.cuda import target as cuda
    from cuda_l2.runs import selection
    from cuda_l2.runs.survey import Survey

    start, cold = time.monotonic(), settings.cold
    with Survey(settings, cuda.detect(), lambda text: print(text, file=sys.stderr, flush=True)) as survey:
        finished, interrupted = _timed(survey)
    shapes = counted(len(survey.records), "shape")
    print(f"{shapes} timed ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
    named = selection.current(survey.table, survey.target)
    chosen = selection.select(survey.records.values(), settings.most, weights, cold=cold, table=named)
    rows = joined(survey.table, selection.table(chosen, survey.rows))
    write_table(settings.out / TABLE, rows)
    text = selection.summary(chosen, survey.rows)
    write_text(settings.out / SUMMARY, text)
    print(text)
    if not finished:
        print("not all shapes are timed: the same command goes on from here", file=sys.stderr)
        sys.exit(130 if interrupted else 0)


def _timed(survey: "Survey") -> tuple[bool, bool]:
    """Every stage of a survey up to the times: whether it has all, and whether an interrupt ended it."""
    import json

    from cuda_l2.report.live import GridProgress

    survey.pool()
    survey.load()
    write_text(survey.settings.out / ENVIRONMENT, json.dumps(survey.target.environment(), indent=1) + "\n")
    pending = survey.pending()
    if not pending:
        return True, False
    survey.build()
    try:
        with GridProgress(len(pending), 0) as line:
            return survey.time(line.stage, line.done), False
    except KeyboardInterrupt:
        return False, True


def _weights(text: str) -> tuple[float, ...]:
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if len(weights) != 4 or min(weights, default=-1) < 0:
        raise UserError(f"--weights takes four numbers, as in 1,0.6,0.5,0.3, not {text!r}")
    return weights
