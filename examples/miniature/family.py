"""A family of small CPU kernels, about 45 lines each: small enough for a language model of a million weights.
cuda_family.py has one for GPUs.

Four sources (B read in place or widened into a panel; threads share rows or columns) and four numbers. They compute
only shapes whose M is a multiple of MR and N of NV x VW.
"""

from dataclasses import dataclass
from pathlib import Path

import cuda_family

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.records import Gemm, Layout, Task
from cuda_l2.targets._base import Target
from cuda_l2.targets.cpu import CpuTarget

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


FAMILIES = (
    *(SmallGemm(f"{panel}_{share}") for panel in ("direct", "packed") for share in ("rows", "columns")),
    *cuda_family.FAMILIES,
)


def families_for(task: Task, target: Target) -> list[Family]:
    """Those that serve a task."""
    return [family for family in FAMILIES if isinstance(task, family.kind) and family.serves(task, target)]
