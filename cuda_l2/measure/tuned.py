"""What autotuning cuBLASLt is told, what it found, and how that is kept on disk."""

from dataclasses import dataclass, field
from pathlib import Path

from cuda_l2.measure.cublas import Algorithm
from cuda_l2.measure.selection import Effort
from cuda_l2.records import Accumulate, Gemm, Layout, from_json, to_json
from cuda_l2.system import scratch
from cuda_l2.system.errors import UserError


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """How cuBLASLt's algorithms are timed: by replays of back-to-back launches, or by the paper's single launches."""

    paper: bool = False  # 50 + 100 rounds of single launches, fresh random operands each round (listing 8)
    replay_us: tuple[float, float] = (300.0, 1000.0)  # device time of one sample: eight launches within these
    max_launches: int = 200  # in one sample
    max_s: float = 1.5  # of finalists' rounds a layout
    effort: Effort = field(default_factory=Effort)

    @property
    def method(self) -> str:
        return "paper" if self.paper else "adaptive"


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
    method: str
    nn: TunedLayout | None
    tn: TunedLayout | None
    seconds: float
    created: str  # when the choice was made; it is kept until another is asked for
    dtype: str = "float16"

    def of(self, layout: Layout) -> TunedLayout | None:
        return self.nn if layout is Layout.NN else self.tn


def store(path: Path, tuned: Tuned) -> None:
    """Write through a name of its own, so that a reader sees all or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = scratch.make_folder()
        (folder / path.name).write_text(to_json(tuned))
        (folder / path.name).replace(path)
        folder.rmdir()
    except OSError as error:
        raise scratch.unwritable(error) from None


def recall(path: Path, plain: Gemm, method: str) -> Tuned | None:
    """What `store` wrote for this product; None where the file is missing, damaged or another product's."""
    try:
        tuned = from_json(Tuned, path.read_text())
        product = Gemm(tuned.m, tuned.n, tuned.k, plain.layout, tuned.accumulate, tuned.dtype)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, UserError):
        return None
    return tuned if (product, tuned.method) == (plain, method) else None
