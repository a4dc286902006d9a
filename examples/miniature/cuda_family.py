"""A family of small GPU kernels, 50 to 70 lines each, for a language model of a few million weights.

Four sources (fragments read from global memory, or from shared memory that cp.async fills; warps stacked along rows
or columns of C) and four or five numbers, on mma.sync, for every GPU from Ampere on. They compute only shapes whose M,
N and K are multiples of the tile, with a column-major B.
"""

from dataclasses import dataclass
from pathlib import Path

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Gemm, Layout

STATIC_SHARED_BYTES = 48 << 10
MAX_TILE = 256  # rows or columns of a block: every side of that many or fewer divides 768
CHOICES = (
    Choice("WARPS", (1, 2, 4, 8), "warps that share a block's tile"),
    Choice("MT", (1, 2, 3, 4), "products of 16 rows in a warp's tile"),
    Choice("NT", (1, 2, 3, 4, 6, 8), "products of 8 columns in a warp's tile"),
    Choice("KS", (1, 2, 4), "steps of 16 along K between two looks at the loop's end"),
)
STAGES = Choice("STAGES", (1, 2, 3, 4), "parts of A and B in shared memory at once")


@dataclass(frozen=True)
class SmallMma(Family):
    """One of the four sources."""

    loads: str
    warps: str
    kind = Gemm

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.loads}_{self.warps}"

    @property
    def choices(self) -> tuple[Choice, ...]:  # type: ignore[override]
        return (*CHOICES, STAGES) if self.loads == "staged" else CHOICES

    @property
    def source(self) -> Path:
        return Path(__file__).parent / "kernels" / f"{self.name}.cu"

    def serves(self, gemm: Gemm, target: Target) -> bool:
        whole = gemm.m % 768 == 0 and gemm.n % 768 == 0 and gemm.k % 64 == 0
        fp32 = gemm.accumulate is Accumulate.FP32
        return isinstance(target, CudaTarget) and gemm.layout is Layout.TN and fp32 and whole

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: Target) -> bool:
        now = chosen | {name: value}
        if name not in ("NT", "STAGES"):
            return name != "MT" or self.warps == "columns" or now["WARPS"] * 16 * value <= MAX_TILE
        rows, columns = self._tile(now)
        if max(rows, columns) > MAX_TILE:
            return False
        return name != "STAGES" or 2 * value * (rows + columns) * (16 * now["KS"] + 8) <= STATIC_SHARED_BYTES

    def _tile(self, chosen: dict[str, int]) -> tuple[int, int]:
        """Rows and columns of a block."""
        down, across = (chosen["WARPS"], 1) if self.warps == "rows" else (1, chosen["WARPS"])
        return 16 * chosen["MT"] * down, 8 * chosen["NT"] * across

    def default(self, gemm: Gemm, target: Target) -> tuple[int, ...]:
        return (4, 2, 4, 2, 2)[: len(self.choices)]

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {}

    def contract(self, schedule: Schedule) -> str:
        rows, columns = ("16 * MT * WARPS", "8 * NT") if self.warps == "rows" else ("16 * MT", "8 * NT * WARPS")
        names = [f"{name} = {schedule.named[name]}" for name in ("WARPS", "MT", "NT")]
        return "\n".join(
            [
                'target = "cuda"',
                'arch = "sm_80"',
                'layouts = ["tn"]',
                "[names]",
                *names,
                "[[launch]]",
                'kernel = "gemm"',
                f'grid = ["n / ({columns})", "m / ({rows})"]',
                'block = ["32 * WARPS"]',
                'args = ["a", "b", "c", "n", "k"]',
            ]
        )


FAMILIES = tuple(SmallMma(loads, warps) for loads in ("straight", "staged") for warps in ("rows", "columns"))
