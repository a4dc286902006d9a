"""A family of whole CUDA files of 107 to 116 lines with a pipeline, for a pretrained language model to write.

Four sources (fragments by ldmatrix or by words of 32 bits; C stored in pairs, or through shared memory in 16 bytes) and
nine numbers, on cp.async and mma.sync, for every GPU from Ampere on. They compute only shapes whose M, N and K are
multiples of 256, with a column-major B.
"""

from dataclasses import dataclass
from pathlib import Path

from cuda_l2.families._base import Choice, Family, Schedule
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Gemm, Layout

SHARED_BYTES = 227 << 10
WARPS = 16
SUMS = 32768  # of a block, all warps along K: half of the registers
CHOICES = (
    Choice("WM", (1, 2, 4), "warps along M"),
    Choice("WN", (1, 2, 4), "warps along N"),
    Choice("WK", (1, 2, 4), "warps along K, which share a tile and add up last"),
    Choice("MT", (1, 2, 4), "products of 16 rows in a warp's tile"),
    Choice("NT", (2, 4, 8), "products of 8 columns in a warp's tile"),
    Choice("KS", (1, 2, 4), "steps of 16 along K of a warp between two barriers"),
    Choice("ST", (2, 3, 4, 6), "parts of A and B in shared memory at once"),
    Choice("PAD", (0, 8), "elements between rows in shared memory; without them fragments' rows share banks"),
    Choice("VEC", (4, 8), "elements that one cp.async copies"),
)


@dataclass(frozen=True)
class Pipeline(Family):
    """One of the four sources."""

    fragments: str
    stores: str
    kind = Gemm
    choices = CHOICES

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.fragments}_{self.stores}"

    @property
    def source(self) -> Path:
        return Path(__file__).parent / "kernels" / f"{self.name}.cu"

    def serves(self, gemm: Gemm, target: Target) -> bool:
        whole = all(size % 256 == 0 for size in (gemm.m, gemm.n, gemm.k))
        plain = gemm.accumulate is Accumulate.FP32 and gemm.dtype == "float16" and gemm.layout is Layout.TN
        return isinstance(target, CudaTarget) and whole and plain

    def fits(self, name: str, value: int, chosen: dict[str, int], gemm: Gemm, target: Target) -> bool:
        now = {"WN": 1, "WK": 1, "ST": 2} | chosen | {name: value}
        warps = now["WM"] * now["WN"] * now["WK"]
        if name in ("WM", "WN", "WK"):
            return warps <= WARPS
        if name == "NT":
            return warps * 128 * now["MT"] * value <= SUMS
        if name not in ("KS", "ST"):
            return True
        rows, columns = 16 * now["MT"] * now["WM"], 8 * now["NT"] * now["WN"]
        depth = 16 * now["KS"] * now["WK"]
        ring = 2 * now["ST"] * (rows + columns)
        # sums of warps along K, and C before wide stores, take the ring's place
        reused = max(4 * (now["WK"] - 1) * rows * columns, 2 * rows * (columns + 8) * (self.stores == "wide"))
        return ring * (depth + 8) <= SHARED_BYTES and (name == "KS" or ring * depth >= reused)

    def default(self, gemm: Gemm, target: Target) -> tuple[int, ...]:
        return (2, 2, 1, 2, 4, 2, 4, 8, 8)

    def macros(self, schedule: Schedule) -> dict[str, int]:
        return {}

    def contract(self, schedule: Schedule) -> str:
        names = [f"{name} = {value}" for name, value in schedule.named.items() if name != "VEC"]
        return "\n".join(
            [
                'target = "cuda"',
                'arch = "sm_80"',
                'layouts = ["tn"]',
                "[names]",
                *names,
                'x = "16 * MT * WM"',
                'y = "8 * NT * WN"',
                "[[launch]]",
                'kernel = "gemm"',
                'grid = ["n / y", "m / x"]',
                'block = ["32 * WM * WN * WK"]',
                'shared_bytes = "2 * ST * (x + y) * (16 * KS * WK + PAD)"',
                'args = ["a", "b", "c", "n", "k"]',
            ]
        )


FAMILIES = tuple(Pipeline(fragments, stores) for fragments in ("matrices", "words") for stores in ("pairs", "wide"))
