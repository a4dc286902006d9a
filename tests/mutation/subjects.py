"""The kernels that are mutated: schedules of families that together reach most of their source."""

from dataclasses import dataclass, field
from functools import cached_property

from cuda_l2 import tasks
from cuda_l2.families._base import Schedule, all_families
from cuda_l2.machine._base import Target
from cuda_l2.records import Candidate, Task


@dataclass(frozen=True)
class Subject:
    """One schedule for one shape or another task. Choices not named here take their first valid value."""

    name: str
    family: str
    shape: str
    choices: dict[str, int] = field(hash=False)

    @cached_property
    def task(self) -> Task:
        return tasks.parse(self.shape)

    def candidate(self, target: Target) -> Candidate:
        """The kernel before any mutation; ValueError where the family does not take a choice named here."""
        family = next(family for family in all_families() if family.name == self.family)
        values: list[int] = []
        for choice in family.choices:
            valid = family.valid_values(self.task, target, values)
            wanted = self.choices.get(choice.name, valid[0])
            if wanted not in valid:
                raise ValueError(f"{self.name}: {choice.name}={wanted} is not valid here; choose from {valid}")
            values.append(wanted)
        return family.render(Schedule(family, self.task, target, tuple(values)), self.name)


# Shapes are ragged where the family allows it: a bound that is wrong only beyond the edge must have an edge. What a
# mutant changes must do something there: rings wrap, and may end in their first stage, which the epilogue overwrites;
# copies are asynchronous; bands of tiles do not divide C.
SUBJECTS = (
    Subject(
        *("direct", "sm80_gemm", "77x90x200"),
        {"LOAD": 0, "BM": 16, "BN": 16, "WARPS_M": 1, "WARPS_N": 1, "WARPS_K": 2, "BK": 128},
    ),
    Subject(
        *("pipelined", "sm80_gemm", "200x184x328"),
        {"LOAD": 2, "BM": 64, "BN": 64, "WARPS_M": 2, "WARPS_N": 2, "WARPS_K": 1, "BK": 32, "STAGES": 3}
        | {"SWIZZLE_BITS": 2, "SWIZZLE_BASE": 3, "SWIZZLE_SHIFT": 3, "DOUBLE_BUFFER": 1, "PREFETCH": 1, "EPILOGUE": 2},
    ),
    Subject(
        *("split", "sm80_gemm", "136x121x1036:tn"),
        {"LOAD": 2, "BM": 32, "BN": 32, "WARPS_M": 1, "WARPS_N": 2, "WARPS_K": 2, "BK": 64, "STAGES": 3}
        | {"SPLIT_K": 3, "PDL": 2, "EDGE": 1},
    ),
    Subject(
        *("wave", "sm90_wave", "200x168x680"),
        {"SWAP": 0, "BM": 128, "BN": 64, "KB": 1, "STAGES": 5, "PDL": 2, "EDGE": 1},
    ),
    Subject(
        *("wave swapped", "sm90_wave", "221x157x712:tn"),
        {"SWAP": 1, "BM": 64, "BN": 48, "KB": 2, "CN": 2, "PDL": 1, "EDGE": 1},
    ),
    Subject(
        *("wave in clusters", "sm90_wave", "320x400x1096:tn"),
        {"SWAP": 0, "BM": 64, "BN": 64, "KB": 1, "CM": 2, "LOCAL": 1, "CK": 2, "PDL": 0},
    ),
    Subject(
        *("wave polled", "sm90_wave", "121x141x5576:tn"),
        {"SWAP": 0, "BM": 64, "BN": 64, "KB": 1, "SL": 4, "COUNT": 0, "PDL": 0},
    ),
    Subject(
        *("wave counted", "sm90_wave", "250x192x1096"),
        {"SWAP": 0, "BM": 128, "BN": 64, "KB": 1, "SL": 2, "COUNT": 1, "PDL": 2, "EDGE": 1},
    ),
    Subject(
        *("persistent", "sm90_persistent", "2376x1608x200"),
        {"SWAP": 0, "PINGPONG": 0, "BM": 128, "BN": 128, "OUT": 2, "STAGES": 5, "BAND": 4, "PDL": 2, "EDGE": 1},
    ),
    Subject(
        *("persistent in turns", "sm90_persistent", "2312x1800x264:tn"),
        {"SWAP": 0, "PINGPONG": 1, "BM": 64, "BN": 160, "CM": 2, "OUT": 1, "BAND": 2, "GPC": 1, "PDL": 0},
    ),
    Subject(
        *("persistent by warpgroups", "sm90_persistent", "2056x1736x328"),
        {"SWAP": 0, "PINGPONG": 0, "BM": 128, "BN": 128, "CN": 2, "WGSTORE": 1, "OUT": 1, "COLUMNS": 1, "BAND": 4},
    ),
)

# Loops over several vectors, over one and over what is left all run, and one element more or less would be beyond an edge;
# there are several tasks, and the last has fewer rows.
CPU_SUBJECTS = (
    Subject(
        *("cpu product in blocks", "cpu_gemm", "45x47x335"),
        {"VECTOR_BITS": 256, "THREADS": 2, "NV": 2, "MR": 4, "KC": 128, "NC": 64, "WIDEN": 1, "UNROLL": 2},
    ),
    Subject(
        *("cpu product in panels", "cpu_gemm", "50x77x150:tn"),
        {"VECTOR_BITS": 256, "THREADS": 2, "SWAP": 1, "NV": 1, "WIDEN": 2, "UNROLL": 1},
    ),
    Subject(
        *("cpu gelu", "cpu_elementwise", "bias_gelu_residual:rows=5,columns=1215"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "BLOCK": 1024, "DEGREE": 6},
    ),
    Subject(
        *("cpu mish", "cpu_elementwise", "mish:rows=7,columns=345:bfloat16"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "BLOCK": 1024, "DEGREE": 5},
    ),
    Subject(
        *("cpu softmax", "cpu_rows", "softmax:rows=37,columns=79"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "KEEP": 1, "ROWS": 4, "DEGREE": 6},
    ),
    Subject(
        *("cpu norm", "cpu_rows", "layer_norm:rows=37,columns=73"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 4, "ROWS": 4},
    ),
    Subject(
        *("cpu cross entropy", "cpu_rows", "cross_entropy_smoothed:rows=37,classes=95:float16"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "ROWS": 4, "DEGREE": 6},
    ),
    Subject(
        *("cpu sum", "cpu_columns", "sum_columns:rows=333,columns=207"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "BLOCK": 64, "PARTS": 2},
    ),
    Subject(
        *("cpu maximum", "cpu_columns", "max_columns:rows=150,columns=201"),
        {"VECTOR_BITS": 256, "THREADS": 2, "UNROLL": 2, "BLOCK": 64, "PARTS": 1},
    ),
)
# Here the last vectors are an odd number, and not the first that a thread loads at once; there are more rows than threads
# where one block adds numbers of rows up, and more columns than threads where a launch of its own joins splits.
TASK_SUBJECTS = (
    Subject(
        *("gpu softmax", "gpu_rows", "softmax:rows=37,columns=1188"),
        {"VEC": 4, "LANES": 32, "CLUSTER": 1, "KEEP": 0, "ITEMS": 2, "ROWS": 4},
    ),
    Subject(
        *("gpu norm", "gpu_rows", "layer_norm:rows=37,columns=1000:float16"),
        {"VEC": 2, "LANES": 64, "CLUSTER": 1, "KEEP": 2, "ROWS": 2},
    ),
    Subject(
        *("gpu softmax in clusters", "gpu_rows", "temperature_softmax:rows=5,vocabulary=4100"),
        {"VEC": 4, "LANES": 256, "CLUSTER": 2, "KEEP": 1},
    ),
    Subject(
        *("gpu cross entropy", "gpu_rows", "cross_entropy:rows=150,classes=1234"),
        {"VEC": 2, "LANES": 32, "KEEP": 0, "ITEMS": 4, "ROWS": 4, "TAIL": 1},
    ),
    Subject(
        *("gpu gelu", "gpu_elementwise", "bias_gelu_residual:rows=37,columns=1036"),
        {"VEC": 4, "THREADS": 128, "ITEMS": 2},
    ),
    Subject(
        *("gpu mean", "gpu_columns", "mean_columns:rows=333,columns=204"),
        {"VEC": 4, "THREADS": 128, "ITEMS": 2, "SPLITS": 4, "TAIL": 1},
    ),
    Subject(
        *("gpu least", "gpu_columns", "argmin_columns:rows=333,columns=299"),
        {"VEC": 1, "THREADS": 128, "ITEMS": 2, "SPLITS": 4, "TAIL": 0},
    ),
    Subject(
        *("gpu total", "gpu_total", "mse:rows=37,columns=1037"),
        {"VEC": 1, "THREADS": 128, "ITEMS": 2, "BLOCKS": 1, "TAIL": 0},
    ),
    Subject(*("gpu clipped norm", "gpu_norms", "clip_gradient_norm"), {"VEC": 4, "THREADS": 128, "ITEMS": 2}),
    Subject(
        *("gpu transpose", "gpu_transpose", "transpose_add:rows=250,columns=334"),
        {"VEC": 2, "TILE": 32, "THREADS": 128},
    ),
    Subject(*("gpu pool", "gpu_images", "max_pool2d:batch=2,channels=3,height=37,width=45"), {"VEC": 1, "WIDE": 16}),
    Subject(
        *("gpu attention", "gpu_attention", "attention_causal:batch=1,heads=2,length=75,depth=32:float16"),
        {"WARPS": 2, "KEYS": 32},
    ),
)
KERNELS = {"products": SUBJECTS, "tasks": TASK_SUBJECTS, "cpu": CPU_SUBJECTS}
"""Subjects by what is asked for: the GPU's matrix products, its other tasks, or what a CPU runs."""
