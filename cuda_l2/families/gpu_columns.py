"""The schedule space of gpu_columns.cu: tiles of columns, rows in flight, blocks that share a column."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule, cdiv
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

WIDE = Choice("WIDE", (4, 8, 16, 32, 64, 128), "threads along a row")
ITEMS = Choice("ITEMS", (1, 2, 4, 8, 16), "rows that a thread has in flight")
SPLITS = Choice("SPLITS", (1, 2, 4, 8, 16, 32, 64, 128), "blocks that share a column")
MAX_STATIC_BYTES = 1 << 15
TABLE = "vocabulary columns"


@dataclass(frozen=True, slots=True)
class Columnwise(gpu.Computed):
    """state_bytes: of what is reduced. bags: matrices of rows that the first input chooses from a table."""

    state_bytes: int = 4
    bags: bool = False


class GpuColumns(gpu.GpuTaskFamily):
    """Means and choices by columns, bags of embeddings."""

    name = "gpu_columns"
    choices = (gpu.VEC, gpu.THREADS, WIDE, ITEMS, SPLITS, gpu.TAIL, gpu.LOAD)
    table: ClassVar[Mapping[str, Columnwise]] = {
        "mean_columns": Columnwise(0, ("rows columns", "columns")),
        "argmin_columns": Columnwise(1, ("rows columns", "columns"), state_bytes=8),
        "embedding_bag_sum": Columnwise(2, ("batch rows", TABLE, "batch columns"), bags=True),
        "embedding_bag_weighted": Columnwise(3, ("batch rows", "batch rows", TABLE, "batch columns"), bags=True),
    }

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        (_, rows), columns = self._extent(task), task.outputs[0].shape[-1]
        match name:
            case "VEC":
                return value <= gpu.widest(task) and columns % value == 0
            case "THREADS":
                return value * choice["VEC"] * self.table[task.name].state_bytes <= MAX_STATIC_BYTES
            case "WIDE":
                useful = value < 2 * columns // choice["VEC"] and choice["THREADS"] // value < 2 * rows
                return value == WIDE.values[0] or (value <= choice["THREADS"] and useful)
            case "ITEMS":
                registers = value * choice["VEC"] * gpu.element_bytes(task) // 4
                useful = value * choice["THREADS"] // choice["WIDE"] < 2 * rows
                return value == 1 or (registers <= min(64, 32768 // choice["THREADS"]) and useful)
            case "SPLITS":
                return value == 1 or value * choice["ITEMS"] * choice["THREADS"] // choice["WIDE"] <= rows
            case "TAIL":
                return not value or choice["SPLITS"] > 1
        return True

    def _extent(self, task: Operation) -> tuple[int, int]:
        """Matrices, and rows of each."""
        first = task.inputs[0].shape
        return (first[0], first[1]) if self.table[task.name].bags else (1, first[0])

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        (matrices, rows), columns = self._extent(task), task.outputs[0].shape[-1]
        vec = gpu.widest(task)
        tiles = matrices * cdiv(columns, 32 * vec)
        splits = min(rows // 32, 8 * target.sms // tiles)
        wanted = {"VEC": vec, "THREADS": 256, "WIDE": 32, "ITEMS": 4}
        return {**wanted, "SPLITS": max(1, splits), "TAIL": 1}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        columnwise, splits = self.table[task.name], choice["SPLITS"]
        names = [tensor.name for tensor in (*task.inputs, *task.weights)]
        x, numbers, shares = (names[-1], names[0], names[1]) if columnwise.bags else (names[0], names[0], names[0])
        matrices, out = "batch" if columnwise.bags else "1", task.outputs[0].name
        tiles = f"cdiv(columns, {choice['WIDE'] * choice['VEC']})"
        lines = [*gpu.head({"whole_vectors": f"0 - columns % {choice['VEC']}", "tiles": tiles}), *self.buffers(task)]
        if splits > 1:
            lines += gpu.workspace("of_splits", f"{splits * columnwise.state_bytes} * {matrices} * columns")
        if choice["TAIL"]:
            lines += gpu.workspace("ended", f"4 * {matrices} * tiles", persistent=True)
        of_splits, ended = "of_splits" if splits > 1 else x, "ended" if choice["TAIL"] else x
        args = [x, numbers, shares, out, of_splits, ended, "rows", "columns"]
        lines += gpu.launch("by_columns", ["tiles", splits, matrices], choice["THREADS"], args)
        if splits > 1 and not choice["TAIL"]:
            args = ["of_splits", out, "rows", f'int32 = "{matrices} * columns"']
            lines += gpu.launch("join_splits", [f"cdiv({matrices} * columns, 256)"], 256, args)
        return "\n".join(lines)


FAMILY = GpuColumns()
