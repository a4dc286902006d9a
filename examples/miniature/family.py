"""Families of small CPU kernels, 30 to 55 lines each: small enough for a language model of a million weights.

For matrix products four sources (B read in place or widened into a panel; threads share rows or columns) and four
numbers. They compute only shapes whose M is a multiple of MR and N of NV x VW. For three other tasks a source each and
three numbers; they compute all sizes. cuda_family.py has kernels for GPUs.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda_family

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Gemm, Layout, Operation, Task

CHOICES = (
    Choice("THREADS", (1, 2, 4), "threads that share the work"),
    Choice("VW", (4, 8, 16), "floats in a vector"),
    Choice("NV", (1, 2, 3, 4), "vectors in a row of the register tile"),
    Choice("MR", (1, 2, 3, 4, 6, 8, 12), "rows of the register tile"),
)


@dataclass(frozen=True)
class SmallGemm(Family):
    """One of the four sources."""

    name: str
    choices = CHOICES

    @property
    def source(self) -> Path:
        return Path(__file__).parent / "kernels" / f"{self.name}.c"

    def serves(self, gemm: Gemm, target: Target) -> bool:
        return isinstance(target, CpuTarget) and gemm.layout is Layout.NN and gemm.m % 24 == 0 and gemm.n % 192 == 0

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: Target) -> bool:
        assert isinstance(target, CpuTarget)
        return name != "THREADS" or value <= target.cores

    def default(self, gemm: Gemm, target: Target) -> tuple[int, ...]:
        return (1, 8, 2, 4)

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {}

    def contract(self, schedule: Schedule) -> str:
        return f'target = "cpu"\nthreads = {schedule.named["THREADS"]}'


@dataclass(frozen=True)
class SmallTask(Family):
    """One task on one thread: vectors of VW floats, NV of them in flight, rows fetched AHEAD floats before use."""

    task: str
    name = "small_task"
    kind = Operation
    choices = (
        Choice("VW", (2, 4, 8, 16, 32), "floats in a vector"),
        Choice("NV", (1, 2, 3, 4, 6, 8), "vectors in flight"),
        Choice("AHEAD", (0, 64, 256), "floats from what is read to what is fetched"),
    )

    @property
    def source(self) -> Path:
        return Path(__file__).parent / "kernels" / f"{self.task}.c"

    def serves(self, task: Operation, target: Target) -> bool:
        return isinstance(target, CpuTarget) and task.name == self.task and task.dtype == "float32"

    def default(self, task: Operation, target: Target) -> tuple[int, ...]:
        return (8, 2, 0)

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {}

    def contract(self, schedule: Schedule) -> str:
        lines = ['target = "cpu"', 'entry = "f"']
        for tensor, kind in ((schedule.task.inputs[0], "input"), (schedule.task.outputs[0], "output")):
            dims = '"rows", "columns"' if len(tensor.shape) == 2 else '"rows"'
            lines += ["[[buffer]]", f'name = "{tensor.name}"', f"shape = [{dims}]", f'kind = "{kind}"']
        return "\n".join(lines)


FAMILIES = (
    *(SmallGemm(f"{panel}_{share}") for panel in ("direct", "packed") for share in ("rows", "columns")),
    *cuda_family.FAMILIES,
)
TASK_FAMILIES = tuple(SmallTask(name) for name in ("sum_rows", "variance_rows", "relu_squared"))


def families_for(task: Task, target: Target) -> tuple[Family, ...]:
    """Those that serve a task."""
    families: tuple[Family, ...] = FAMILIES if isinstance(task, Gemm) else TASK_FAMILIES
    return tuple(family for family in families if family.serves(task, target))
