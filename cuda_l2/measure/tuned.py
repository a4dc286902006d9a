"""What autotuning cuBLASLt found, and how that is kept on disk."""

from dataclasses import dataclass
from pathlib import Path

from cuda_l2.measure.cublas import Algorithm
from cuda_l2.records import Accumulate, Gemm, Layout, from_json, to_json
from cuda_l2.system import scratch
from cuda_l2.system.errors import UserError

ADAPTIVE, PAPER_TUNING = "adaptive", "paper"
TUNINGS = (ADAPTIVE, PAPER_TUNING)
"""How cuBLASLt's algorithms are timed: as many rounds of back-to-back launches as it takes, or the paper's 50 + 100
rounds of single launches with fresh random operands (listing 8)."""


@dataclass(frozen=True, slots=True)
class TunedLayout:
    """The algorithms that the heuristic returned for one layout, in its order, and how they fared."""

    algorithms: tuple[Algorithm, ...]
    kernels: tuple[str, ...]  # what each launches
    times_us: tuple[float, ...]  # medians
    rounds: tuple[int, ...]
    chosen: int
    regret: float  # how much faster another one may be; see `selection`

    def __post_init__(self) -> None:
        count = len(self.algorithms)
        if not 0 <= self.chosen < count or {len(self.kernels), len(self.times_us), len(self.rounds)} != {count}:
            raise ValueError("a tuned layout has one time, round count and kernel for each algorithm, and a choice")


@dataclass(frozen=True, slots=True)
class Tuned:
    """cuBLASLt-AutoTuning of one product: a layout is None where the library computes nothing in it."""

    m: int
    n: int
    k: int
    accumulate: Accumulate
    method: str  # one of TUNINGS
    nn: TunedLayout | None
    tn: TunedLayout | None
    seconds: float
    created: str  # when the choice was made; it is kept until another is asked for
    dtype: str = "float16"

    def of(self, layout: Layout) -> TunedLayout | None:
        return self.nn if layout is Layout.NN else self.tn


def store(path: Path, tuned: Tuned) -> None:
    scratch.keep(path, to_json(tuned).encode())


def recall(path: Path, plain: Gemm, method: str) -> Tuned | None:
    """What `store` wrote for this product; None where the file is missing, damaged or another product's."""
    try:
        tuned = from_json(Tuned, path.read_text())
        product = Gemm(tuned.m, tuned.n, tuned.k, plain.layout, tuned.accumulate, tuned.dtype)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
        return None
    return tuned if (product, tuned.method) == (plain, method) else None
