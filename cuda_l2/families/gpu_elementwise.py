"""The schedule space of gpu_elementwise.cu: vectors, vectors in flight, threads, blocks, caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

GRID = Choice("GRID", (0, 1, 2, 4, 8, 16), "blocks a multiprocessor that go through all, 0: a block for each part")
MATRIX = "rows columns"
ROW = "rows 1"


@dataclass(frozen=True, slots=True)
class Each(gpu.Computed):
    """matrices: operands of the output's shape. vectors: over columns, the task's last operands. unit: see source."""

    matrices: int = 1
    vectors: int = 0
    row_number: str = ""  # the operand that has one number a row
    unit: int = 1
    rows: str = "rows"
    columns: str = "columns"
    period: str = "1"  # rows after which vectors over the columns repeat

    @property
    def by_columns(self) -> bool:
        return bool(self.vectors or self.row_number)


def _flat(
    number: int, inputs: int, outputs: int = 1, shape: str = MATRIX, *, quick: bool = False, unit: int = 1
) -> Each:
    """An operation on tensors of one shape."""
    return Each(number, (shape,) * (inputs + outputs), quick=quick, matrices=inputs, unit=unit)


class GpuElementwise(gpu.GpuTaskFamily):
    """Activations, gates, fused chains, optimizer steps."""

    name = "gpu_elementwise"
    choices = (gpu.VEC, gpu.THREADS, gpu.ITEMS, GRID, gpu.LOAD, gpu.STORE, gpu.QUICK)
    table: ClassVar[Mapping[str, Each]] = {
        "relu": _flat(0, 1),
        "add": _flat(1, 2),
        "sigmoid": _flat(2, 1, quick=True),
        "gelu": _flat(3, 1),
        "gelu_tanh": _flat(4, 1, quick=True),
        "softplus": _flat(5, 1, quick=True),
        "mish": _flat(6, 1, quick=True),
        "hardswish": _flat(7, 1),
        "relu_squared": _flat(8, 1),
        "silu_gate": _flat(9, 2, quick=True),
        "bias_gelu_residual": Each(10, (MATRIX, MATRIX, "columns", MATRIX), matrices=2, vectors=1),
        "scale_shift_clamp": Each(11, (MATRIX, "columns", "columns", MATRIX), vectors=2),
        "masked_dropout": _flat(12, 2),
        "complex_multiply": _flat(13, 2, shape="rows columns 2", unit=2),
        "dequantise_int8": Each(14, (MATRIX, ROW, MATRIX), row_number="scale"),
        "outer_product_update": Each(15, (MATRIX, "rows", "columns", MATRIX), vectors=1, row_number="x"),
        "sgd_momentum": _flat(16, 3, 2, "count"),
        "adam": _flat(17, 4, 3, "count"),
        "adamw": _flat(18, 4, 3, "count"),
        "lion": _flat(19, 3, 2, "count"),
        "rmsprop": _flat(20, 3, 2, "count"),
        "adagrad": _flat(21, 3, 2, "count"),
        "moving_average": _flat(22, 2, 1, "count"),
        "rotary_embedding": Each(
            23,
            ("batch heads length 2*half", "length half", "length half", "batch heads length 2*half"),
            vectors=2,
            rows="batch * heads * length",
            columns="half",
            period="length",
        ),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        each = self.table[task.name]
        _, columns = self._extent(task)
        registers = choice["VEC"] * choice.get("ITEMS", 1) * each.matrices * gpu.element_bytes(task) // 4
        match name:
            case "VEC":
                fits = value <= gpu.widest(task) and value >= each.unit
                return fits and not (each.by_columns and columns % value)
            case "ITEMS":
                room = min(64, 32768 // choice["THREADS"])
                return value == 1 or (registers <= room and self._blocks(choice, task) > 1)
            case "GRID":
                blocks = self._blocks(choice, task)
                return not value or (
                    value * choice["THREADS"] <= gpu.MAX_THREADS_PER_SM and blocks > value * target.sms
                )
        return True

    def _blocks(self, choice: dict[str, int], task: Operation) -> int:
        """With GRID 0."""
        width = choice["THREADS"] * choice["VEC"]
        if self.table[task.name].by_columns:
            rows, columns = self._extent(task)
            wide = self._wide(choice, task)
            return cdiv(columns, wide * choice["VEC"]) * cdiv(rows, choice["THREADS"] // wide * choice["ITEMS"])
        return cdiv(task.outputs[0].elements, width * choice["ITEMS"])

    def _wide(self, choice: dict[str, int], task: Operation) -> int:
        """Threads along a row: a power of two that a row has work for."""
        wide, vectors = 1, self._extent(task)[1] // choice["VEC"]
        while 2 * wide <= choice["THREADS"] and wide < vectors:
            wide *= 2
        return wide

    def macros(self, schedule: Schedule) -> dict[str, int]:
        task = schedule.task
        wide = {"WIDE": self._wide(schedule.named, task)} if self.table[task.name].by_columns else {}
        return {**super().macros(schedule), **wide}

    def _extent(self, task: Operation) -> tuple[int, int]:
        """Rows and columns, of a half where a row has two."""
        out = task.outputs[0]
        columns = out.shape[-1] // (2 if task.name == "rotary_embedding" else 1)
        return out.elements // out.shape[-1], columns

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        each, vec = self.table[task.name], gpu.widest(task)
        threads = task.outputs[0].elements // vec
        items = 1 if threads < 2 * gpu.MAX_THREADS_PER_SM * target.sms else max(1, 4 // each.matrices)
        return {"VEC": vec, "THREADS": 256, "ITEMS": items, "GRID": 0}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        each, vec, threads, items = self.table[task.name], choice["VEC"], choice["THREADS"], choice["ITEMS"]
        outputs = [tensor.name for tensor in task.outputs]
        if each.by_columns:
            wide = self._wide(choice, task)
            along, down = f"cdiv({each.columns}, {vec * wide})", f"cdiv({each.rows}, {threads // wide * items})"
            limit = f"cdiv({choice['GRID']} * sms, {along})" if choice["GRID"] else "65535"
            given = [tensor.name for tensor in (*task.inputs, *task.weights)]
            vectors = given[len(given) - each.vectors :] if each.vectors else [given[0]]
            number = each.row_number or given[0]
            args = [*_padded(given[: each.matrices], 2), *_padded(vectors, 2), number, *outputs]
            args += [f'int32 = "{size}"' for size in (each.rows, each.columns, each.period)]
            names = {"whole_vectors": f"0 - {each.columns} % {vec}"}
            started = gpu.launch("by_columns", [along, f"min({limit}, {down})"], threads, args)
        else:
            count = " * ".join(each.shapes[0].split())
            blocks = f"cdiv({count}, {vec * threads * items})"
            grid = f"min({choice['GRID']} * sms, {blocks})" if choice["GRID"] else blocks
            args = [*_padded([t.name for t in task.inputs], 4), *_padded(outputs, 3), f'int64 = "{count}"']
            names, started = {}, gpu.launch("flat", [grid], threads, args)
        return "\n".join([*gpu.head(names), *self.buffers(task), *started])


def _padded(names: list[str], count: int) -> list[str]:
    """So many names, the first again for operands that the operation does not have."""
    return names + [names[0]] * (count - len(names))


FAMILY = GpuElementwise()
