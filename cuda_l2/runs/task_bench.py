"""Many tasks one after the other: each searched and its winner reported, figures as CUDA-L1 tells them.

The archive is what an interrupted run goes on from: a task whose winner was reported there is not searched again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cuda_l2 import tasks
from cuda_l2.families._base import families_for
from cuda_l2.machine._base import Target
from cuda_l2.measure.protocols import OFFLINE
from cuda_l2.optimizer import Optimizer
from cuda_l2.records import Operation, TimingStatus, Trial
from cuda_l2.search import Progress
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import definition, definitions
from cuda_l2.tasks.optional import is_foreign, load_kernelbench

SAMPLED = (
    *("gelu", "silu_gate", "bias_gelu_residual"),  # element by element
    *("softmax", "residual_rms_norm", "layer_norm", "variance_rows", "max_rows"),  # rows
    *("temperature_softmax", "greedy_token"),  # long rows
    *("cross_entropy", "cross_entropy_gradient", "mse"),  # losses
    *("mean_columns", "embedding_bag_sum", "embedding_position_norm"),  # columns and tables
    *("adamw", "clip_gradient_norm", "lamb"),  # optimizer steps
    *("transpose_add", "max_pool2d", "conv2d_depthwise"),  # across rows
)
SAMPLED_IN_16_BITS = ("attention_causal", "attention_grouped_query")
"""Some tasks of each kind of work, for figures that a few minutes must do for."""


def sample(target: str) -> list[Operation]:
    """The tasks of SAMPLED at their sizes for a target, cpu or cuda."""
    named = [(name, "float32") for name in SAMPLED] + [(name, "float16") for name in SAMPLED_IN_16_BITS]
    return [definition(name).task(dtype=dtype, target=target) for name, dtype in named]


ALL, SERVED, SAMPLE = "all", "served", "sample"
"""Every task of our own; those that a kernel family serves on the machine; of these some of each kind."""
MAX_REASON = 300


class File(Protocol):
    """A file of a checkout that was not tried yet."""

    @property
    def name(self) -> str: ...
    @property
    def revision(self) -> str: ...


@dataclass(frozen=True)
class TaskResult:
    """What became of one task. level: KernelBench's, or the group of ours; reason: why there is no trial."""

    task: Operation
    level: str
    trial: Trial | None = None
    reason: str = ""


def read_tasks(text: str, target: Target, checkout: Path | None = None) -> list[Operation | File]:
    """Tasks from a list with commas, each once; UserError where a part names none.

    checkout: of KernelBench, for `kernelbench`, `kernelbench/level1` or one of its tasks; the first two stand for
    files, each of which becomes a task, or does not, when its turn comes.


    A part is a task's text, a group's name, or `all`, `served`, `sample`. Sizes left out are those for the target.
    A comma inside a task's sizes does not end it: softmax:rows=64,columns=100,gelu are two.
    """
    found: list[Operation | File] = []
    for part in _parts(text):
        files = load_kernelbench("checkout").checkout_entries(checkout, part) if checkout else ()
        if files:
            found += files
            continue
        named = _named(part, target)
        if named:
            found += named
            continue
        task = tasks.parse(part, target.name, checkout)
        if task.product:
            raise UserError(f"{part} is a matrix product: `cuda-l2 bench {part}`")
        found.append(task)
    if not found:
        raise UserError("give tasks to --tasks: all, a group as reduction, or tasks as softmax,gelu:rows=64")
    return list(dict.fromkeys(found))


def _named(word: str, target: Target) -> list[Operation]:
    """The tasks that one word stands for; empty where it is no such word."""
    known = definitions().values()
    found = [each.task(target=target.name) for each in known if word in (ALL, SERVED, each.group)]
    if word == SAMPLE:
        found = sample(target.name)
    return [task for task in found if word not in (SERVED, SAMPLE) or families_for(task, target)]


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if parts and ":" in parts[-1] and "=" in part and ":" not in part.partition("=")[0]:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def run(
    optimizer: Optimizer,
    wanted: Sequence[Operation | File],
    on_task: Callable[[Operation], tuple[Callable[[Progress], None], Callable[[str], None]]],
) -> Iterator[TaskResult]:
    """Every task's result in turn; ends early where one is interrupted. on_task: shows a task's progress and stages."""
    for each in wanted:
        level = level_of(each.name)
        if isinstance(each, Operation):
            task = each
        else:
            checkout = load_kernelbench("checkout")
            try:
                task = checkout.admit(each, checkout.effort_for(gpu=optimizer.target.name == "cuda"))
            except UserError as error:
                nothing = Operation(each.name, revision=each.revision)
                yield TaskResult(nothing, level, reason=_line(error))
                continue
        reported = optimizer.archive.trials(task, optimizer.target.machine, OFFLINE.name)
        if reported and reported[-1].status == TimingStatus.MEASURED:
            yield TaskResult(task, level, reported[-1])
            continue
        try:
            result = optimizer.optimize(task, *on_task(task))
        except (UserError, RuntimeError) as error:  # the driver's and torch's errors are the latter
            yield TaskResult(task, level, reason=_line(error))
            continue
        if result.search.interrupted:
            return
        trial = result.reports.get(OFFLINE.name)
        yield TaskResult(task, level, trial, "" if trial else "no correct kernel was found")


def level_of(name: str) -> str:
    """KernelBench's level of a task, or the group of one of ours."""
    if is_foreign(name):
        words = name.split("/")
        return words[1] if len(words) > 2 else words[0]
    return definition(name).group


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_REASON]
