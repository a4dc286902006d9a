"""cuda-l2 show: the best kernels known for a shape or another task."""

import sys
from typing import Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place, is_there
from cuda_l2.system.text import plain


def command(
    shape: str,
    /,
    *,
    archive: Place | None = None,
    count: int = 5,
    source: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Show the best kernels known for a shape, their source, and how they were measured.

    Args:
        shape: As in 512x512x512:tn, or another task as in softmax:rows=64,columns=1000.
        archive: File that keeps the trials, or postgresql://USER@HOST/DATABASE.
        count: Largest number of kernels shown.
        source: Print the best kernel's source instead of the table.
        json: Print the trials as JSON, sources included.
    """
    if count < 1:
        raise UserError(f"the number of kernels must be at least 1, not {count}")
    if source and json:
        raise UserError("ask for --source or for --json: the JSON holds the sources of all kernels shown")

    from cuda_l2.archive import Archive
    from cuda_l2.machine import chosen
    from cuda_l2.report.tables import print_known, trials_json
    from cuda_l2.system import paths

    task = tasks.identity(shape, chosen("auto"))
    path = archive or paths.default_archive()
    if not is_there(path):
        raise UserError(f"there is no archive {path} yet; run `cuda-l2 optimize {task}` first")
    with Archive(path, reading=True) as opened:
        measured = [trial for trial in opened.trials(task) if trial.timing and trial.speedup]
    # the latest word on each kernel, machine and protocol
    trials = list({(trial.candidate.id, trial.machine, trial.protocol): trial for trial in measured}.values())
    if not trials:
        raise UserError(
            f"no kernel for {task} has been timed, by {path}: run `cuda-l2 optimize {task}` until it ends with a table,"
            " which needs quiet cores"
        )
    # reported figures before those a search chose by, the fastest first
    trials.sort(key=lambda trial: (trial.protocol == "search", -trial.speedup))
    if source:
        text = trials[0].candidate.source  # into a file as it is; a terminal would obey what it may hold
        print(plain(text) if sys.stdout.isatty() else text, end="")
    elif json:
        print(trials_json(trials[:count]))
    else:
        print_known(task, trials[:count], path)
