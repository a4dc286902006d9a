"""The schedule space of cpu_rows.c: vectors, threads, rows a task, exponentials kept or computed twice."""

from collections.abc import Mapping
from typing import ClassVar

from cuda_l2.families._base import Choice
from cuda_l2.families._cpu_task import DEGREE, STREAM, THREADS, UNROLL, VECTOR_BITS, Computed, CpuTaskFamily, far
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.records import Operation

ROWS = Choice("ROWS", (1, 2, 4, 8, 16, 32, 64), "rows a task")
KEEP = Choice("KEEP", (0, 1), "1 keeps exponentials in the output, 0 computes them twice")
TWO, LABELLED = ("matrix", "matrix"), ("matrix", "row")


class CpuRows(CpuTaskFamily):
    """Softmaxes, norms, reductions and losses by rows."""

    name = "cpu_rows"
    entry = "by_rows"
    choices = (VECTOR_BITS, THREADS, UNROLL, KEEP, STREAM, ROWS, DEGREE)
    table: ClassVar[Mapping[str, Computed]] = {
        "softmax": Computed(0, exponential=True, kept=True),
        "log_softmax": Computed(1, exponential=True),
        "logsumexp": Computed(2, out="row", exponential=True),
        "layer_norm": Computed(3, ("matrix", "column", "column")),
        "rms_norm": Computed(4, ("matrix", "column")),
        "normalise_rows": Computed(5),
        "sum_rows": Computed(6, out="row"),
        "variance_rows": Computed(7, out="row"),
        "l2_norm_rows": Computed(8, out="row"),
        "sum_all": Computed(9, out="number", total=True),
        "mse": Computed(10, TWO, out="number", total=True),
        "cross_entropy": Computed(11, LABELLED, out="number", exponential=True, total=True),
        "cross_entropy_smoothed": Computed(12, LABELLED, out="row", exponential=True),
        "cross_entropy_gradient": Computed(13, LABELLED, exponential=True, kept=True),
        # of equal rows PyTorch's result in half precision is 0, where 1 less a product in floats is not
        "cosine_distance": Computed(14, TWO, out="row", dtypes=("float32",)),
        "kl_divergence": Computed(15, TWO, out="number", exponential=True, total=True),
    }

    def fits_work(self, name: str, value: int, task: Operation, chosen: dict[str, int]) -> bool:
        return name != "ROWS" or value == 1 or value * chosen["THREADS"] <= task.inputs[0].shape[0]

    def wanted(self, task: Operation, target: CpuTarget) -> dict[str, int]:
        return {"ROWS": 4, "KEEP": int(not far(task, target))}


FAMILY = CpuRows()
