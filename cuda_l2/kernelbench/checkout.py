"""Files of a KernelBench checkout by the texts of tasks: `kernelbench/level1/19_ReLU@0f1e2d3c4b5a:batch_size=16`.

A record holds no code. What a file is, once it was tried, is known here by its task's text as long as this process
lives; the file itself is looked for again whenever its text is needed, and refused where it has changed.
"""

import atexit
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cuda_l2.kernelbench.examined import Effort, Examined, Readiness
from cuda_l2.kernelbench.files import Entry, entries, find_entry
from cuda_l2.kernelbench.opened import OpenedFile
from cuda_l2.records import Operation, Task
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import KERNELBENCH

GPU_EFFORT = Effort(budget_bytes=1 << 32, budget_flops=4 * 10**12, memory_bytes=64 << 30, device="cuda")
RUNNING = 4
"""Files whose sandboxes go on running for the next question; each holds a Python with torch loaded."""


@dataclass(frozen=True)
class ForeignTask:
    """One file that is a task on this machine."""

    entry: Entry
    examined: Examined
    file: OpenedFile


_tasks: dict[str, ForeignTask] = {}
_files: OrderedDict[tuple[Path, str, Effort], OpenedFile] = OrderedDict()


def effort_for(*, gpu: bool, as_written: bool = False) -> Effort:
    """Limits of references on a machine, and the budgets to which sizes are halved."""
    effort = GPU_EFFORT if gpu else Effort()
    return replace(effort, budget_bytes=0) if as_written else effort


def read(text: str, checkout: Path | None, effort: Effort | None = None) -> Operation:
    """The task that a text names, its file tried; sizes that are left out are halved until they suit the effort.

    UserError where there is no such file, or it cannot be a task here.
    """
    name, revision, sizes, dtype = Operation.read_identity(text.strip())
    if checkout is None:
        raise UserError(
            f"{text.strip()} is a file of a KernelBench checkout: give its folder with --kernelbench; from Python give"
            " cuda_l2.tasks.parse(TEXT, checkout=Path(FOLDER)) as the task"
        )
    if dtype != "float32":
        raise UserError(f"{text.strip()}: tasks of KernelBench have the types that their files give them")
    entry = find_entry(checkout, name)
    if revision and revision != entry.revision:
        raise UserError(f"{entry.path} is no longer the file that {text.strip()} was: it is @{entry.revision} now")
    return admit(entry, effort or Effort(), sizes)


def admit(
    entry: Entry, effort: Effort = Effort(), sizes: Mapping[str, int] | None = None, *, draws_numbers: bool = False
) -> Operation:
    """The task that a file is at these sizes, remembered with it; UserError with the reason why it is none.

    draws_numbers: its module may draw numbers that are neither parameters nor buffers.
    """
    if effort.device != "cpu":
        require_gpu_devices(entry.name)
    file = _open(entry, effort)
    examined = file.examine(sizes=sizes)
    if examined.status is not Readiness.READY or examined.task is None:
        raise UserError(f"{entry.name} is no task here: {examined.status}: {examined.reason}")
    if examined.keeps_numbers and not draws_numbers:
        raise UserError(
            f"{entry.name} is no task here: its module draws numbers that are neither parameters nor buffers, which a"
            " kernel cannot be given"
        )
    _tasks[str(examined.task)] = ForeignTask(entry, examined, file)
    return examined.task


def require_gpu_devices(what: str) -> None:
    """UserError where a file's sandbox cannot be given a GPU."""
    if not sandbox.gpu_devices():
        raise UserError(
            f"{what} cannot run on a GPU here: there is no device file /dev/nvidia* to give its sandbox;"
            " choose --target cpu"
        )


def foreign(task: Task) -> ForeignTask:
    """The file that a task comes from; UserError where this process was not shown its checkout."""
    if str(task) not in _tasks:
        raise UserError(f"{task} comes from a KernelBench checkout: give its folder with --kernelbench")
    keep_running(_tasks[str(task)].file)
    return _tasks[str(task)]


def keep_running(file: OpenedFile) -> None:
    """Close the sandboxes of files that were not asked for longest; one that is closed starts again when it is."""
    for key, known in list(_files.items()):
        if known is file:
            _files.move_to_end(key)
    for other in list(_files.values())[:-RUNNING]:
        other.close()


def _open(entry: Entry, effort: Effort) -> OpenedFile:
    key = (entry.path, entry.revision, effort)
    if key not in _files:
        _files[key] = OpenedFile(entry, effort)
    keep_running(_files[key])
    return _files[key]


def checkout_entries(checkout: Path, part: str) -> Sequence[Entry]:
    """The files that `kernelbench` or `kernelbench/level2` names; none where it names a single one."""
    if part == KERNELBENCH:
        return entries(checkout)
    level = re.fullmatch(rf"{KERNELBENCH}/level(\d{{1,3}})", part)
    return entries(checkout, [int(level[1])]) if level else ()


@atexit.register
def _close_all() -> None:
    for file in _files.values():
        file.close()
