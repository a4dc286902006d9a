"""The schedule space of gpu_total.cu: vectors, vectors in flight, threads, blocks, who adds up."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from cuda_l2.families._base import Choice, Schedule
from cuda_l2.families._gpu_task import (
    LOAD,
    MAX_THREADS_PER_SM,
    QUICK,
    TAIL,
    THREADS,
    VEC,
    VECTOR_BYTES,
    Computed,
    GpuTaskFamily,
    cdiv,
    element_bytes,
    head,
    launch,
    operation,
    workspace,
)
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

ITEMS = Choice("ITEMS", (1, 2, 4, 8), "vectors of each operand that a thread has in flight")
BLOCKS = Choice("BLOCKS", (1, 2, 4, 8, 16), "a multiprocessor", compiled=False)
ONE, TWO = ("rows columns", ""), ("rows columns", "rows columns", "")


class GpuTotal(GpuTaskFamily):
    """Sums of everything, and losses that are means over everything."""

    name = "gpu_total"
    choices = (VEC, THREADS, ITEMS, BLOCKS, TAIL, LOAD, QUICK)
    table: ClassVar[Mapping[str, Computed]] = {
        "sum_all": Computed(0, ONE),
        "mse": Computed(1, TWO),
        "huber": Computed(2, TWO),
        "binary_cross_entropy": Computed(3, TWO, quick=True),
        "focal": Computed(4, TWO, quick=True),
        "hinge": Computed(5, TWO),
    }

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("gpu_total.cu")

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        match name:
            case "VEC":
                return value * element_bytes(task) <= VECTOR_BYTES
            case "ITEMS":
                registers = value * choice["VEC"] * len(task.inputs) * element_bytes(task) // 4
                return value == 1 or registers <= min(64, 32768 // choice["THREADS"])
            case "BLOCKS":
                parts = cdiv(task.inputs[0].elements, choice["THREADS"] * choice["VEC"] * choice["ITEMS"])
                fits = value * choice["THREADS"] <= MAX_THREADS_PER_SM
                return value == 1 or (fits and parts > value // 2 * target.sms)
        return True

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        return {"VEC": VECTOR_BYTES // element_bytes(task), "THREADS": 256, "ITEMS": 4, "BLOCKS": 8, "TAIL": 1}

    def contract(self, schedule: Schedule) -> str:
        task, choice = operation(schedule), schedule.named
        given, result = [tensor.name for tensor in task.inputs], task.outputs[0].name
        parts = f"cdiv(rows * columns, {choice['THREADS'] * choice['VEC'] * choice['ITEMS']})"
        lines = head({"blocks": f"min({choice['BLOCKS']} * sms, {parts})"})
        lines += [*self.buffers(task), *workspace("of_blocks", "4 * blocks")]
        if choice["TAIL"]:
            lines += workspace("ended", "4", persistent=True)
        ended, count = "ended" if choice["TAIL"] else given[0], 'int64 = "rows * columns"'
        args = [given[0], given[-1], "of_blocks", ended, result, count]
        lines += launch("partial", ["blocks"], choice["THREADS"], args)
        if not choice["TAIL"]:
            lines += launch("add_up", [1], 1024, ["of_blocks", result, 'int32 = "blocks"', count])
        return "\n".join(lines)


FAMILY = GpuTotal()
