"""What the Hopper families share: wgmma as text, tensor maps of operands, sizes of a task as a kernel sees them.

X is the operand on the 64-row axis of wgmma, Y the one on its N axis. X is A and Y is B^T, or the other way round
where a schedule swaps them. An operand is K-major where K is innermost in memory (A; B of layout tn) and MN-major
where its rows are (row-major B).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from cuda_l2.families._base import Choice, Family, Schedule, toml_list
from cuda_l2.machine._base import Target
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Accumulate, Gemm, Layout

STATIC_BYTES = 512
"""Shared memory kept free for mbarriers where they stand apart, and for what a stress build adds."""
ALIGNMENT_BYTES = 1024
"""Alignment of swizzled tiles in shared memory. The ring starts at the next multiple: worked out by a kernel that asks
for so much more dynamic memory, or by the compiler, which puts mbarriers and padding, static memory, in front."""
T = TypeVar("T", bound=tuple[int, ...])


class HopperFamily(Family):
    """A family of wgmma and TMA: its first ranked schedule is its default."""

    warpgroups: Mapping[int, int]
    """Consumer warpgroups of a tile of so many rows."""

    def default(self, gemm: Gemm, target: CudaTarget) -> tuple[int, ...]:
        return self.ranked(gemm, target, 1)[0]

    def macros(self, schedule: Schedule) -> dict[str, int]:
        gemm, named = schedule.task, schedule.named
        x, y = sides(gemm, named["SWAP"])
        return {
            "BF16": int(gemm.dtype == "bfloat16"),
            "LAYOUT_TN": int(gemm.layout is Layout.TN),
            "NWG": self.warpgroups[named["BM"]],
            "X_FLAT": int(x.flat(gemm)),
            "Y_FLAT": int(y.flat(gemm)),
        }

    def generated(self, schedule: Schedule) -> str:
        """`wgmma` for the choices ACC, SWAP and BN."""
        named = schedule.named
        x, y = sides(schedule.task, named["SWAP"])
        return wgmma(named["BN"], named["ACC"], schedule.task.dtype, x.mn_major, y.mn_major)


class Tiles(tuple[T, ...]):
    """A family's tiles for a task, the values of its first choices."""

    def one_begins_with(self, chosen: Mapping[str, int]) -> bool:
        """Whether a tile has these values of its first choices, which come in the family's order."""
        return tuple(chosen.values()) in self._begun

    @cached_property
    def _begun(self) -> set[tuple[int, ...]]:
        return {tile[:count] for tile in self for count in range(1, len(tile) + 1)}


def needed(size: int, rows: int, sizes: Iterable[int]) -> bool:
    """Whether no smaller one of these tiles covers all rows."""
    return not any(rows <= smaller < size for smaller in sizes)


def most_stages(shared_bytes: Callable[[int], int], stages: Choice, target: CudaTarget, blocks: int = 1) -> int:
    """The most stages of a ring that fit, `blocks` blocks a multiprocessor; 0 where none do."""
    room = (target.shared_bytes + 1024) // blocks - 1024 - STATIC_BYTES
    return next((count for count in reversed(stages.values) if shared_bytes(count) <= room), 0)


def hopper(target: Target) -> CudaTarget | None:
    """The target, if it is one that runs sm_90a code."""
    return target if isinstance(target, CudaTarget) and target.runs("sm_90a") else None


def addressable(gemm: Gemm) -> bool:
    """Whether TMA can read the operands: rows are multiples of 16 bytes apart."""
    return gemm.k % 8 == 0 and (gemm.layout is Layout.TN or gemm.n % 8 == 0)


@dataclass(frozen=True, slots=True)
class Side:
    """One operand of a task: the contract's name of its tensor and its number of rows."""

    tensor: str
    rows: int
    size: str  # the contract's name of `rows`
    mn_major: bool

    def flat(self, gemm: Gemm) -> bool:
        """Whether the innermost size is no multiple of 64."""
        return (self.rows if self.mn_major else gemm.k) % 64 != 0


def sides(gemm: Gemm, swap: int) -> tuple[Side, Side]:
    """X and Y."""
    a = Side("a", gemm.m, "m", mn_major=False)
    b = Side("b", gemm.n, "n", mn_major=gemm.layout is Layout.NN)
    return (b, a) if swap else (a, b)


def accumulators(gemm: Gemm) -> tuple[int, ...]:
    """Bits of the sums that the task allows."""
    return (32, 16) if gemm.accumulate is Accumulate.FP16 else (32,)


def operand_map(name: str, side: Side, gemm: Gemm, rows: int, blocks: int, *, whole: bool, passes: bool) -> str:
    """The tensor map of an operand as sm90_operands.cuh describes it, in TOML.

    The box holds `rows` rows by `blocks` blocks of 64 elements of K if `whole`, else one block (K-major operands).
    passes: it streams past few rows of the other operand. Row-major B then comes up to 4 % faster if L2 asks device
    memory for 128 bytes, what a row of the box has, and not for 256 (docs/kernels.md, "What L2 fetches").
    """
    flat, size = side.flat(gemm), side.size
    dims: list[str | int]
    if side.mn_major:
        inner, dims = size, [size, "k", 1] if flat else [64, "k", f"{size} / 64"]
        box = [64, 64 * blocks, 1 if flat else rows // 64]
    else:
        inner, dims = "k", ["k", size, 1] if flat else [64, size, "k / 64"]
        box = [64, rows, blocks if whole and not flat else 1]
    strides = [f"2 * {inner}", f"2 * {inner}" if flat else 128]
    promotion = "128B" if passes and side.mn_major else "256B"
    return tensor_map(name, side.tensor, dims, strides, box, "128B", promotion)


def tensor_map(
    name: str,
    tensor: str,
    dims: Sequence[str | int],
    strides: Sequence[str | int],
    box: Sequence[int],
    swizzle: str,
    promotion: str = "256B",
) -> str:
    """A [[tensor_map]] entry."""
    values = [toml_list(dims), toml_list(strides), toml_list(box)]
    return (
        f'[[tensor_map]]\nname = "{name}"\ntensor = "{tensor}"\ndims = {values[0]}\nstrides = {values[1]}\n'
        f'box = {values[2]}\nswizzle = "{swizzle}"\nl2_promotion = "{promotion}"\n'
    )


def zero(*remainders: str) -> str:
    """An expression that refuses the shape (by a division by zero) unless all of these are 0."""
    return f"1 / (1 - min(1, {' + '.join(remainders) or '0'}))"


def inner_remainders(gemm: Gemm, swap: int) -> list[str]:
    """What must be 0 for the tensor maps of a task to fit another one's sizes."""
    found = [f"{side.size if side.mn_major else 'k'} % 64" for side in sides(gemm, swap) if not side.flat(gemm)]
    return sorted(set(found))


def wgmma(columns: int, acc: int, element: str, x_mn_major: bool, y_mn_major: bool) -> str:
    """`wgmma(sums, x, y, accumulate)`: m64nNk16 on operands in shared memory, for one N, type and kind of sums.

    It takes as many registers as it has operands, which macros cannot count.
    """
    registers = columns // (4 if acc == 16 else 2)
    kind, constraint, dtype = ("unsigned", "+r", "f16") if acc == 16 else ("float", "+f", "f32")
    operand = "bf16" if element == "bfloat16" else "f16"
    names = ", ".join(f"%{i}" for i in range(registers))
    operands = ", ".join(f'"{constraint}"(d[{i}])' for i in range(registers))
    return (
        f"static __device__ __forceinline__ void wgmma({kind} (&d)[{registers}], unsigned long long x,"
        " unsigned long long y, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{registers + 2}, 0;"\n'
        f'               " wgmma.mma_async.sync.aligned.m64n{columns}k16.{dtype}.{operand}.{operand} {{{names}}},"\n'
        f'               " %{registers}, %{registers + 1}, p, 1, 1, {int(x_mn_major)}, {int(y_mn_major)}; }}"\n'
        f"               : {operands}\n"
        '               : "l"(x), "l"(y), "r"(accumulate));\n}\n\n'
    )
