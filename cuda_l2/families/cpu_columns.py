"""The schedule space of cpu_columns.c: vectors, threads, columns a task, parts of the rows."""

from collections.abc import Mapping
from typing import ClassVar

from cuda_l2.families._base import Choice, Schedule
from cuda_l2.families._cpu_task import THREADS, UNROLL, VECTOR_BITS, Computed, CpuTaskFamily
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Operation

BLOCK = Choice("BLOCK", (64, 256, 1024, 4096, 16384), "columns a task")
PARTS = Choice("PARTS", (1, 2, 4, 8, 16, 32), "parts of the rows, reduced apart")
LEAST_ROWS = 8
"""A part of fewer rows is not worth putting together."""


class CpuColumns(CpuTaskFamily):
    """Reductions over the rows of a matrix."""

    name = "cpu_columns"
    entry = "by_columns"
    choices = (VECTOR_BITS, THREADS, UNROLL, BLOCK, PARTS)
    table: ClassVar[Mapping[str, Computed]] = {
        "sum_columns": Computed(0, out="column", dtypes=("float32",)),
        "mean_columns": Computed(1, out="column", dtypes=("float32",)),
        "max_columns": Computed(2, out="column", dtypes=("float32",)),
    }

    def fits_work(self, name: str, value: int, task: Operation, chosen: dict[str, int]) -> bool:
        rows, columns = task.inputs[0].shape
        if name == "BLOCK":
            return value == BLOCK.values[0] or value < 2 * columns
        return name != "PARTS" or value == 1 or value * LEAST_ROWS <= rows

    def wanted(self, task: Operation, target: CpuTarget) -> dict[str, int]:
        tasks = -(-task.inputs[0].shape[1] // 1024)
        return {"BLOCK": 1024, "PARTS": max(1, 2 * target.cores // tasks)}

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {"OPERATION": self.table[schedule.task.name].number}

    def workspace(self, schedule: Schedule) -> str:
        parts = schedule.named["PARTS"]
        return f"{4 * parts} * columns" if parts > 1 else ""


FAMILY = CpuColumns()
