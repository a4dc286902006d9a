"""The schedule space of gpu_elementwise.cu: vectors, vectors in flight, threads, one wave or all blocks at once, caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from cuda_l2.families._base import Choice, Schedule
from cuda_l2.families._gpu_task import (
    LOAD,
    MAX_THREADS_PER_SM,
    QUICK,
    STORE,
    THREADS,
    VEC,
    VECTOR_BYTES,
    Computed,
    GpuTaskFamily,
    cdiv,
    element_bytes,
    launch,
    operation,
    product,
)
from cuda_l2.records import Operation
from cuda_l2.targets.cuda import CudaTarget

ITEMS = Choice("ITEMS", (1, 2, 4, 8), "vectors of each operand that a thread has in flight")
GRID = Choice("GRID", (0, 1, 2, 4, 8, 16), "blocks a multiprocessor that go through all, 0: a block for each part")
MATRIX = "rows columns"
ROW = "rows 1"


@dataclass(frozen=True, slots=True)
class Each(Computed):
    """matrices: operands of the output's shape. vectors: over columns, of the task's last operands. unit: see source."""

    matrices: int = 1
    vectors: int = 0
    row_number: str = ""  # the operand that has one number a row
    unit: int = 1

    @property
    def by_columns(self) -> bool:
        return bool(self.vectors or self.row_number)


def flat(
    number: int, inputs: int, outputs: int = 1, shape: str = MATRIX, *, quick: bool = False, unit: int = 1
) -> Each:
    """An operation on tensors of one shape."""
    return Each(number, (shape,) * (inputs + outputs), quick=quick, matrices=inputs, unit=unit)


class GpuElementwise(GpuTaskFamily):
    """Activations, gates, fused chains, optimizer steps."""

    name = "gpu_elementwise"
    choices = (VEC, THREADS, ITEMS, GRID, LOAD, STORE, QUICK)
    table: ClassVar[Mapping[str, Each]] = {
        "relu": flat(0, 1),
        "add": flat(1, 2),
        "sigmoid": flat(2, 1, quick=True),
        "gelu": flat(3, 1),
        "gelu_tanh": flat(4, 1, quick=True),
        "softplus": flat(5, 1, quick=True),
        "mish": flat(6, 1, quick=True),
        "hardswish": flat(7, 1),
        "relu_squared": flat(8, 1),
        "silu_gate": flat(9, 2, quick=True),
        "bias_gelu_residual": Each(10, (MATRIX, MATRIX, "columns", MATRIX), matrices=2, vectors=1),
        "scale_shift_clamp": Each(11, (MATRIX, "columns", "columns", MATRIX), vectors=2),
        "masked_dropout": flat(12, 2),
        "complex_multiply": flat(13, 2, shape="rows columns 2", unit=2),
        "dequantise_int8": Each(14, (MATRIX, ROW, MATRIX), row_number="scale"),
        "outer_product_update": Each(15, (MATRIX, "rows", "columns", MATRIX), vectors=1, row_number="x"),
        "sgd_momentum": flat(16, 3, 2, "count"),
        "adam": flat(17, 4, 3, "count"),
        "adamw": flat(18, 4, 3, "count"),
        "lion": flat(19, 3, 2, "count"),
        "rmsprop": flat(20, 3, 2, "count"),
        "adagrad": flat(21, 3, 2, "count"),
        "moving_average": flat(22, 2, 1, "count"),
    }

    @property
    def source(self) -> Path:
        return Path(__file__).with_name("gpu_elementwise.cu")

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        each = self.table[task.name]
        columns = task.outputs[0].shape[-1]
        registers = choice["VEC"] * choice.get("ITEMS", 1) * each.matrices * element_bytes(task) // 4
        match name:
            case "VEC":
                fits = value * element_bytes(task) <= VECTOR_BYTES and value >= each.unit
                return fits and not (each.by_columns and columns % value)
            case "THREADS":
                useful = not each.by_columns or value < 2 * columns // choice["VEC"]
                return value == THREADS.values[0] or useful
            case "ITEMS":
                return value == 1 or (
                    registers <= min(64, 32768 // choice["THREADS"]) and self._blocks(choice, task) > 1
                )
            case "GRID":
                blocks = self._blocks(choice, task)
                return not value or (value * choice["THREADS"] <= MAX_THREADS_PER_SM and blocks > value * target.sms)
        return True

    def _blocks(self, choice: dict[str, int], task: Operation) -> int:
        """With GRID 0."""
        width, out = choice["THREADS"] * choice["VEC"], task.outputs[0]
        if self.table[task.name].by_columns:
            return cdiv(out.shape[-1], width) * cdiv(out.shape[0], choice["ITEMS"])
        return cdiv(out.elements, width * choice["ITEMS"])

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        each, vec = self.table[task.name], VECTOR_BYTES // element_bytes(task)
        threads = task.outputs[0].elements // vec
        items = 1 if threads < 2 * MAX_THREADS_PER_SM * target.sms else max(1, 4 // each.matrices)
        return {"VEC": vec, "THREADS": 256, "ITEMS": items, "GRID": 0}

    def contract(self, schedule: Schedule) -> str:
        task, choice = operation(schedule), schedule.named
        each, vec, threads, items = self.table[task.name], choice["VEC"], choice["THREADS"], choice["ITEMS"]
        lines = ['target = "cuda"', 'arch = "sm_80"']
        outputs = [tensor.name for tensor in task.outputs]
        if each.by_columns:
            along, down = f"cdiv(columns, {vec * threads})", f"cdiv(rows, {items})"
            limit = f"cdiv({choice['GRID']} * sms, {along})" if choice["GRID"] else "65535"
            given = [tensor.name for tensor in (*task.inputs, *task.weights)]
            vectors = given[len(given) - each.vectors :] if each.vectors else [given[0]]
            number = each.row_number or given[0]
            args = [*_padded(given[: each.matrices], 2), *_padded(vectors, 2), number, *outputs, "rows", "columns"]
            names = ["[names]", f'whole_vectors = "0 - columns % {vec}"', ""]
            started = launch("by_columns", [along, f"min({limit}, {down})"], threads, args)
        else:
            count = product(each.shapes[0])
            blocks = f"cdiv({count}, {vec * threads * items})"
            grid = f"min({choice['GRID']} * sms, {blocks})" if choice["GRID"] else blocks
            args = [*_padded([t.name for t in task.inputs], 4), *_padded(outputs, 3), f'int64 = "{count}"']
            names, started = [], launch("flat", [grid], threads, args)
        return "\n".join([*lines, *names, *self.buffers(task), *started])


def _padded(names: list[str], count: int) -> list[str]:
    """So many names, the first again for operands that the operation does not have."""
    return names + [names[0]] * (count - len(names))


FAMILY = GpuElementwise()
