"""The schedule space of gpu_total.cu: vectors, vectors in flight, threads, blocks, who adds up."""

from collections.abc import Mapping
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Schedule, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

ONE, TWO = ("rows columns", ""), ("rows columns", "rows columns", "")


class GpuTotal(gpu.GpuTaskFamily):
    """Sums of everything, and losses that are means over everything."""

    name = "gpu_total"
    choices = (gpu.VEC, gpu.THREADS, gpu.ITEMS, gpu.BLOCKS, gpu.TAIL, gpu.LOAD, gpu.QUICK)
    table: ClassVar[Mapping[str, gpu.Computed]] = {
        "sum_all": gpu.Computed(0, ONE),
        "mse": gpu.Computed(1, TWO),
        "huber": gpu.Computed(2, TWO),
        "binary_cross_entropy": gpu.Computed(3, TWO, quick=True),
        "focal": gpu.Computed(4, TWO, quick=True),
        "hinge": gpu.Computed(5, TWO),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        match name:
            case "VEC":
                return value <= gpu.widest(task)
            case "ITEMS":
                registers = value * choice["VEC"] * len(task.inputs) * gpu.element_bytes(task) // 4
                return value == 1 or registers <= min(64, 32768 // choice["THREADS"])
            case "BLOCKS":
                parts = cdiv(task.inputs[0].elements, choice["THREADS"] * choice["VEC"] * choice["ITEMS"])
                fits = value * choice["THREADS"] <= gpu.MAX_THREADS_PER_SM
                return value == 1 or (fits and parts > value // 2 * target.sms)
        return True

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        return {"VEC": gpu.widest(task), "THREADS": 256, "ITEMS": 4, "BLOCKS": 8, "TAIL": 1}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        given, result = [tensor.name for tensor in task.inputs], task.outputs[0].name
        parts = f"cdiv(rows * columns, {choice['THREADS'] * choice['VEC'] * choice['ITEMS']})"
        lines = gpu.head({"blocks": f"min({choice['BLOCKS']} * sms, {parts})"})
        lines += [*self.buffers(task), *gpu.workspace("of_blocks", "4 * blocks")]
        if choice["TAIL"]:
            lines += gpu.workspace("ended", "4", persistent=True)
        ended, count = "ended" if choice["TAIL"] else given[0], 'int64 = "rows * columns"'
        args = [given[0], given[-1], "of_blocks", ended, result, count]
        lines += gpu.launch("partial", ["blocks"], choice["THREADS"], args)
        if not choice["TAIL"]:
            lines += gpu.launch("add_up", [1], 1024, ["of_blocks", result, 'int32 = "blocks"', count])
        return "\n".join(lines)


FAMILY = GpuTotal()
