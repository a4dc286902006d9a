"""The schedule space of cpu_elementwise.c: vectors, threads, elements a task, stores around the caches."""

from collections.abc import Mapping
from typing import ClassVar

from cuda_l2.families._base import Choice
from cuda_l2.families._cpu_task import DEGREE, STREAM, THREADS, UNROLL, VECTOR_BITS, Computed, CpuTaskFamily
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Operation

BLOCK = Choice("BLOCK", (1024, 4096, 16384, 65536, 262144), "elements a task")
TWO = ("matrix", "matrix")


class CpuElementwise(CpuTaskFamily):
    """Activations, gates, and sums with what is usually fused to them."""

    name = "cpu_elementwise"
    entry = "elementwise"
    choices = (VECTOR_BITS, THREADS, UNROLL, STREAM, BLOCK, DEGREE)
    table: ClassVar[Mapping[str, Computed]] = {
        "relu": Computed(0),
        "add": Computed(1, TWO),
        "sigmoid": Computed(2, exponential=True),
        "gelu": Computed(3, exponential=True),
        "gelu_tanh": Computed(4, exponential=True),
        "softplus": Computed(5, exponential=True),
        "mish": Computed(6, exponential=True),
        "hardswish": Computed(7),
        "relu_squared": Computed(8),
        "silu_gate": Computed(9, TWO, exponential=True),
        "bias_gelu_residual": Computed(10, (*TWO, "column"), exponential=True),
        "scale_shift_clamp": Computed(11, ("matrix", "column", "column")),
    }

    def fits_work(self, name: str, value: int, task: Operation, chosen: dict[str, int]) -> bool:
        elements = task.outputs[0].shape[-1] if "column" in self.table[task.name].given else task.outputs[0].elements
        return name != "BLOCK" or value == BLOCK.values[0] or value < 2 * elements

    def wanted(self, task: Operation, target: CpuTarget) -> dict[str, int]:
        return {"BLOCK": 16384}


FAMILY = CpuElementwise()
