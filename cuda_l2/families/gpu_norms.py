"""The schedule space of gpu_norms.cu: vectors, vectors in flight, blocks, the order of the second reading, caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

VEC = Choice("VEC", (1, 2, 4), "elements a load")
BACKWARDS = Choice("BACKWARDS", (0, 1), "1 reads the second time from the end on, where the cache still has it")
LAYERS = ("small", "middle", "large", "small", "middle", "large")


@dataclass(frozen=True, slots=True)
class Measured(gpu.Computed):
    """operands: read at once. sums: of squares of every block that the second gpu.launch needs."""

    operands: int = 1
    sums: int = 1


class GpuNorms(gpu.GpuTaskFamily):
    """Gradient clipping and LAMB: a norm of everything, then a step."""

    name = "gpu_norms"
    choices = (VEC, gpu.THREADS, gpu.ITEMS, gpu.BLOCKS, BACKWARDS, gpu.LOAD, gpu.STORE)
    table: ClassVar[Mapping[str, Measured]] = {
        "clip_gradient_norm": Measured(0, LAYERS),
        "clip_gradient_value": Measured(1, LAYERS, sums=0),
        "lamb": Measured(2, ("count",) * 7, operands=4, sums=2),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        measured = self.table[task.name]
        match name:
            case "ITEMS":
                registers = value * choice["VEC"] * measured.operands * gpu.element_bytes(task) // 4
                return value == 1 or registers <= min(64, 24576 // choice["THREADS"])
            case "BLOCKS":
                largest = max(tensor.elements for tensor in task.inputs)
                parts = cdiv(largest, choice["THREADS"] * choice["VEC"] * choice["ITEMS"])
                fits = value * choice["THREADS"] <= gpu.MAX_THREADS_PER_SM
                return value == 1 or (fits and parts > value // 2 * target.sms)
            case "BACKWARDS":
                return not value or measured.sums > 0
        return True

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        items = 1 if self.table[task.name].operands > 1 else 4
        wanted = {"VEC": gpu.widest(task), "THREADS": 256, "ITEMS": items}
        return {**wanted, "BLOCKS": 8, "BACKWARDS": 1}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        measured, threads = self.table[task.name], choice["THREADS"]
        given, out = [tensor.name for tensor in task.inputs], [tensor.name for tensor in task.outputs]
        sizes = [dim for shape in dict.fromkeys(measured.shapes) for dim in shape.split()]
        largest = sizes[0] if len(sizes) == 1 else f"max(max({sizes[0]}, {sizes[1]}), {sizes[2]})"
        parts = f"cdiv({largest}, {threads * choice['VEC'] * choice['ITEMS']})"
        lines = [*gpu.head({"blocks": f"min({choice['BLOCKS']} * sms, {parts})"}), *self.buffers(task)]
        counts = [f'int64 = "{size}"' for size in sizes]
        of_blocks = "of_blocks" if measured.sums else given[0]
        if measured.sums:
            lines += gpu.workspace("of_blocks", f"{4 * measured.sums} * blocks")
        if task.name == "lamb":
            parameter, (new, *moments) = given[0], out
            lines += gpu.launch("measure", ["blocks"], threads, [*given, *moments, of_blocks, *counts])
            args = [parameter, *moments, new, of_blocks, 'int32 = "blocks"', *counts]
            lines += gpu.launch("apply", ["blocks"], threads, args)
        else:
            if measured.sums:
                lines += gpu.launch("measure", ["blocks"], threads, [*given, of_blocks, *counts])
            lines += gpu.launch("apply", ["blocks"], threads, [*given, *out, of_blocks, 'int32 = "blocks"', *counts])
        return "\n".join(lines)


FAMILY = GpuNorms()
