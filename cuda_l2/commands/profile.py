"""cuda-l2 profile: what the GPU's counters say of a kernel."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from cuda_l2 import tasks
from cuda_l2.commands._options import read_source
from cuda_l2.records import Candidate, Task, TimingStatus
from cuda_l2.system.errors import UserError
from cuda_l2.system.place import Place

if TYPE_CHECKING:
    from cuda_l2.archive import Archive

BEST = "best"


def command(
    kernel: str, shape: str, /, *, archive: Place | None = None, json: Annotated[bool, Parameter(negative=())] = False
) -> None:
    """Verify and time a CUDA kernel, then read the GPU's counters during a launch with Nsight Compute.

    Tensor core use, L2 and DRAM traffic, occupancy, what warps wait for. The trial is kept in the archive with them.
    Exits with 1 where the kernel is not correct.

    Args:
        kernel: CUDA source that follows the launch contract in docs/contract.md, or the word best: the fastest kernel
            that the archive knows for the shape.
        shape: The shape to profile it on, as in 4096x4096x4096, or another task as in softmax:rows=8192,columns=8192.
        archive: File that keeps the trials, or postgresql://USER@HOST/DATABASE.
        json: Print the trial as JSON.
    """
    task = tasks.parse(shape, "cuda")
    given = None if kernel == BEST else Candidate(read_source(Path(kernel)))

    from cuda_l2.archive import Archive
    from cuda_l2.evaluator import Evaluator
    from cuda_l2.measure.profile import find, summary
    from cuda_l2.measure.protocols import OFFLINE
    from cuda_l2.report.tables import print_trial, trials_json
    from cuda_l2.rigs import open_rig
    from cuda_l2.system import paths

    with Archive(archive or paths.default_archive()) as opened, open_rig("cuda") as rig:
        find()  # before anything takes time
        candidate = given or _best(opened, task, rig.target.machine)
        with Evaluator(task, rig) as evaluator:
            (trial,) = evaluator.evaluate([candidate], rig.protocols[OFFLINE.name])
            correct = trial.timing is not None and trial.timing.status is TimingStatus.MEASURED
            if correct:
                trial = evaluator.profile(trial)
            opened.append(trial)
    if json:
        print(trials_json([trial]))
    else:
        print_trial(trial)
        if correct:
            print("\n".join(f"profile  {line}" for line in summary(trial.profile).splitlines()))
    sys.exit(0 if correct else 1)


def _best(archive: "Archive", task: Task, machine: str) -> Candidate:
    """The fastest kernel known for the shape on this machine; what reports timed goes before what searches did."""
    trials = [trial for trial in archive.trials(task, machine) if trial.timing and trial.speedup]
    if not trials:
        raise UserError(
            f"no kernel is known for {task} on this GPU; run `cuda-l2 optimize {task}` first, or give a file"
        )
    return max(trials, key=lambda trial: (trial.protocol != "search", trial.speedup)).candidate
