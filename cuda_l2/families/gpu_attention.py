"""The schedule space of gpu_attention.cu: queries a block, keys a tile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cuda_l2.families import _gpu_task as gpu
from cuda_l2.families._base import Choice, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Operation

WARPS = Choice("WARPS", (1, 2, 4, 8), "of a block, 16 queries each")
KEYS = Choice("KEYS", (16, 32, 64, 128), "of a tile")
MAX_DEPTH = 128
QKV = "batch heads length depth"


@dataclass(frozen=True, slots=True)
class Attending(gpu.Computed):
    """What heads and queries are called; sharing: heads of q that have one of k and v."""

    heads: str = "heads"
    queries: str = "length"
    sharing: str = "1"


class GpuAttention(gpu.GpuTaskFamily):
    """Attention in one pass, for types of 16 bits and depths that tensor cores take."""

    name = "gpu_attention"
    choices = (WARPS, KEYS)
    table: ClassVar[Mapping[str, Attending]] = {
        "attention": Attending(0, (QKV,) * 4),
        "attention_written_out": Attending(0, (QKV,) * 4),
        "attention_causal": Attending(1, (QKV,) * 4),
        "attention_window": Attending(2, (QKV,) * 4),
        "attention_alibi": Attending(3, (QKV, QKV, QKV, "heads", QKV)),
        "attention_key_padding": Attending(4, (QKV, QKV, QKV, "batch length", QKV)),
        "attention_grouped_query": Attending(
            0,
            ("batch sharing*heads length depth", QKV, QKV, "batch sharing*heads length depth"),
            heads="sharing * heads",
            sharing="sharing",
        ),
        "attention_cross": Attending(
            0, ("batch heads queries depth", QKV, QKV, "batch heads queries depth"), queries="queries"
        ),
    }

    def serves(self, task: Operation, target: Target) -> bool:
        if not super().serves(task, target) or task.dtype == "float32":
            return False
        depth = task.inputs[0].shape[-1]
        return depth % 16 == 0 and depth <= MAX_DEPTH

    def fits_work(self, name: str, value: int, choice: dict[str, int], task: Operation, target: CudaTarget) -> bool:
        queries, length, depth = task.inputs[0].shape[-2], task.inputs[1].shape[-2], task.inputs[0].shape[-1]
        if name == "WARPS":
            return value == 1 or 16 * value < 2 * queries
        registers = value // 2 + depth // 2 + depth // 4  # scores, sums, queries
        fits = registers <= 160 and _shared_bytes(value, depth) <= target.shared_bytes - gpu.SPARE_SHARED_BYTES
        return value == KEYS.values[0] or (value < 2 * length and fits)

    def wanted(self, task: Operation, target: CudaTarget) -> dict[str, int]:
        return {"WARPS": 4, "KEYS": 64}

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {**super().macros(schedule), "DEPTH": schedule.task.inputs[0].shape[-1]}

    def contract(self, schedule: Schedule) -> str:
        task, choice = schedule.task, schedule.named
        attending, depth = self.table[task.name], task.inputs[0].shape[-1]
        given = [tensor.name for tensor in task.inputs]
        names = {"no_deeper": f"{depth} - depth", "no_shallower": f"depth - {depth}"}
        sharing = ["sharing"] if attending.sharing == "sharing" else []
        lines = [*gpu.head(names, sizes=sharing), *self.buffers(task)]
        extra = given[3] if len(given) > 3 else given[0]
        sizes = [f'int32 = "{size}"' for size in (attending.heads, attending.sharing, attending.queries)]
        args = [*given[:3], extra, task.outputs[0].name, *sizes, "length"]
        grid = [f"cdiv({attending.queries}, {16 * choice['WARPS']})", attending.heads, "batch"]
        shared = _shared_bytes(choice["KEYS"], depth)
        return "\n".join([*lines, *gpu.launch("attend", grid, 32 * choice["WARPS"], args, shared)])


def _shared_bytes(keys: int, depth: int) -> int:
    """Two tiles each of K and V."""
    return math.prod((2, 2, keys, depth + 8, 2))


FAMILY = GpuAttention()
