"""The schedule space of gpu_transpose.cu: vectors, tiles, threads, caches."""

import math
from collections.abc import Mapping
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

TILE = Choice("TILE", (16, 32, 64, 96), "rows and columns of a block's tile")


class GpuTranspose(gpu.GpuTaskFamily):
    """A matrix and the transpose of another."""

    name = "gpu_transpose"
    choices = (gpu.VEC, TILE, gpu.THREADS, gpu.LOAD, gpu.STORE)
    table: ClassVar[Mapping[str, gpu.Computed]] = {
        "transpose_add": gpu.Computed(0, ("rows columns", "columns rows", "rows columns"))
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        match name:
            case "VEC":
                return value <= gpu.widest(task) and math.gcd(*task.outputs[0].shape) % value == 0
            case "THREADS":
                vectors = choice["TILE"] ** 2 // choice["VEC"]
                registers = -(-vectors // value) * 2 * choice["VEC"] * gpu.element_bytes(task) // 4
                fits = value <= max(64, vectors) and registers <= min(64, 32768 // value)
                return value == gpu.THREADS.values[0] if vectors <= 64 else fits
        return True

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        return {"VEC": gpu.widest(task), "TILE": 64, "THREADS": 256}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        vec, tile = choice["VEC"], choice["TILE"]
        args = [*(tensor.name for tensor in (*task.inputs, *task.outputs)), "rows", "columns"]
        lines = [*gpu.head({"whole_vectors": f"0 - rows % {vec} - columns % {vec}"}), *self.buffers(task)]
        lines += gpu.launch("transpose_add", [f"cdiv(columns, {tile})", f"cdiv(rows, {tile})"], choice["THREADS"], args)
        return "\n".join(lines)


FAMILY = GpuTranspose()
