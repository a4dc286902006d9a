"""The schedule space of gpu_transpose.cu: vectors, tiles, threads, caches."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from cuda_l2.families._base import Choice, Schedule
from cuda_l2.families._gpu_task import (
    LOAD,
    STORE,
    THREADS,
    VEC,
    VECTOR_BYTES,
    Computed,
    GpuTaskFamily,
    element_bytes,
    head,
    launch,
    operation,
)
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

TILE = Choice("TILE", (16, 32, 64, 96), "rows and columns of a block's tile")


class GpuTranspose(GpuTaskFamily):
    """A matrix and the transpose of another."""

    name = "gpu_transpose"
    choices = (VEC, TILE, THREADS, LOAD, STORE)
    table: ClassVar[Mapping[str, Computed]] = {
        "transpose_add": Computed(0, ("rows columns", "columns rows", "rows columns")),
    }

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("gpu_transpose.cu")

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        match name:
            case "VEC":
                return value * element_bytes(task) <= VECTOR_BYTES and math.gcd(*task.outputs[0].shape) % value == 0
            case "THREADS":
                vectors = choice["TILE"] ** 2 // choice["VEC"]
                registers = -(-vectors // value) * 2 * choice["VEC"] * element_bytes(task) // 4
                fits = value <= max(64, vectors) and registers <= min(64, 32768 // value)
                return value == THREADS.values[0] if vectors <= 64 else fits
        return True

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        return {"VEC": VECTOR_BYTES // element_bytes(task), "TILE": 64, "THREADS": 256}

    def contract(self, schedule: Schedule) -> str:
        task, choice = operation(schedule), schedule.named
        vec, tile = choice["VEC"], choice["TILE"]
        args = [*(tensor.name for tensor in (*task.inputs, *task.outputs)), "rows", "columns"]
        lines = [*head({"whole_vectors": f"0 - rows % {vec} - columns % {vec}"}), *self.buffers(task)]
        lines += launch("transpose_add", [f"cdiv(columns, {tile})", f"cdiv(rows, {tile})"], choice["THREADS"], args)
        return "\n".join(lines)


FAMILY = GpuTranspose()
