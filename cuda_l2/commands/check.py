"""cuda-l2 check: judge a kernel of one's own."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.errors import UserError
from cuda_l2.records import TimingStatus


def command(
    file: Path,
    task: str,
    /,
    *,
    protocol: str = "offline",
    target: str = "auto",
    full: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Build, verify and time a kernel: the verdict with the failing element, the timing, the reward.

    Exits with 1 where the kernel is not correct.

    Parameters
    ----------
    file
        C or CUDA source that follows the launch contract in docs/contract.md, for tasks also docs/tasks.md.
    task
        What to judge it on: a shape as in 512x512x512, or another task as in softmax:rows=64,columns=1000.
    protocol
        offline, server, paper, or search; on a GPU also rotating and server-10ms.
    target
        The machine to judge it on: cpu, cuda, or auto for the one its contract names.
    full
        Also run the checks that are too slow for every candidate of a search: sanitizers and stress builds.
    json
        Print the trial as JSON.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None

    from cuda_l2 import contract
    from cuda_l2.optimizer import evaluate
    from cuda_l2.report.tables import print_trial, trials_json
    from cuda_l2.rigs import chosen

    if target == "auto":
        try:
            target = "cuda" if isinstance(contract.parse(text), contract.CudaContract) else "cpu"
        except contract.ContractError:
            pass  # the build says what is wrong with it
    judged = tasks.parse(task, chosen(target))
    trial = evaluate(text, judged, protocol=protocol, target=target, full=full)
    if json:
        print(trials_json([trial]))
    else:
        print_trial(trial)
    sys.exit(0 if trial.timing and trial.timing.status is TimingStatus.MEASURED else 1)
