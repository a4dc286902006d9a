"""The public call beside torch.matmul and autotuned cuBLASLt on this GPU, shape by shape: whether it is ever slower.

All in CUDA graphs of back-to-back launches, by turns in random order. What comes out below 1 is measured again.
cuBLASLt: each algorithm that its heuristic proposes is timed, and the fastest one then timed beside the call.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Protocol

import numpy as np
import torch

from cuda_l2.library.deploy import choices, dispatch, vendor
from cuda_l2.library.deploy.calls import matmul
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.tuning import Arm, GraphTimer
from cuda_l2.measure.sampler import Sampler
from cuda_l2.measure.selection import Effort, select
from cuda_l2.records import Gemm, Interval
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import csv_text

ROUNDS = 15
OURS, TORCHS, ALONE = "cuda_l2.matmul", "torch.matmul", "the kernel alone"
SLOWER = 0.99
"""A shape whose ratio is below this in both measurements is slower."""
COLUMNS = (
    *("shape", "kernel", "us", "torch_us", "ratio", "low", "high", "again", "again_low", "again_high"),
    *("cublaslt_us", "over_cublaslt", "over_cublaslt_low", "over_cublaslt_high", "over_cublaslt_again"),
    "alone_us",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians in microseconds, and median ratios of the others' times to the call's."""

    us: float
    torch_us: float
    ratio: Interval  # of torch's time
    cublaslt_us: float = 0.0
    over_cublaslt: Interval | None = None  # None where cuBLASLt computes no such product
    alone_us: float = 0.0  # of bare launches of what serves the shape; 0 where torch does, or it has a workspace

    @property
    def below(self) -> bool:
        return any(each.estimate < 1 for each in (self.ratio, self.over_cublaslt) if each)


@dataclass(frozen=True, slots=True)
class Compared:
    """One shape."""

    shape: str
    kernel: str  # the id of the kernel that serves, or of the larger tuned shape's; empty where torch's own serves
    first: Measured
    again: Measured | None = None  # measured once more, where a ratio was below 1

    @property
    def slower(self) -> bool:
        """Whether torch was faster both times."""
        return self.again is not None and max(self.first.ratio.estimate, self.again.ratio.estimate) < SLOWER

    @property
    def slower_than_cublaslt(self) -> bool:
        """Whether its best algorithm was faster both times."""
        both = [each.over_cublaslt for each in (self.first, self.again) if each and each.over_cublaslt]
        return len(both) > 1 and max(each.estimate for each in both) < SLOWER


class Timer(Protocol):
    """Times calls and algorithms on one shape."""

    def capture(self, name: str, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None: ...

    def prepare(self, arm: Arm) -> bool:
        """Capture an algorithm; whether it runs here and computes the product."""

    def alone(self, name: str) -> bool:
        """Capture bare launches of what serves the shape; whether there is something that can be launched so."""

    def sample(self, name: str | Arm) -> float:
        """Microseconds of one launch."""


def compare(
    gemms: Iterable[Gemm],
    device: int,
    open_timer: Callable[[Gemm], Timer],
    algorithms_of: Callable[[Gemm], list[Arm]],
    seed: int = 0,
) -> Iterator[Compared]:
    """Every shape as soon as it is measured, then those below 1 again, with `again`; none that memory is short for.

    open_timer: what times the calls on a shape. algorithms_of: cuBLASLt's for a shape.
    """
    rng, below = np.random.default_rng(seed), list[Compared]()
    known = dispatch.known(device)

    def measured(gemm: Gemm) -> Measured | None:
        mark, timer = native().mark(), None
        try:
            timer = open_timer(gemm)
            return _measured(timer, algorithms_of(gemm), rng)
        except torch.OutOfMemoryError:
            return None
        finally:
            del timer  # its graphs end before what they work on
            native().release(mark)
            native().clear()  # algorithms stand in the table

    for gemm in gemms:
        choice = known.get(gemm, choices.between(known, gemm))
        first = measured(gemm)
        if first is None:
            dispatch.warn(f"{gemm} is not measured: the GPU has too little memory left for it")
            continue
        found = Compared(str(gemm), choice.kernel if choice and choice.served else "", first)
        if first.below:
            below.append(found)
        yield found
    for found in below:
        again = measured(Gemm.parse(found.shape))
        if again:
            yield replace(found, again=again)


def table(found: Iterable[Compared]) -> str:
    """As CSV: times in microseconds, ratios with their 95 % intervals."""
    lines = []
    for each in found:
        first, again = each.first, each.again
        over, twice = first.over_cublaslt, again.over_cublaslt if again else None
        lines.append(
            (
                *(each.shape, each.kernel, first.us, first.torch_us, *_cells(first.ratio)),
                *_cells(again.ratio if again else None),
                *(first.cublaslt_us if over else "", *_cells(over), _cells(twice)[0], first.alone_us or ""),
            )
        )
    return csv_text(COLUMNS, lines)


def summary(found: Collection[Compared]) -> list[str]:
    """What a person wants to know of all shapes, in lines; UserError where none was measured."""
    if not found:
        raise UserError("no shape was measured: the GPU has too little memory left")
    served = [each for each in found if each.kernel]
    library = [each.first.over_cublaslt.estimate for each in found if each.first.over_cublaslt]
    parts = {
        "over torch.matmul": [each.first.ratio.estimate for each in found],
        "that kernels serve, over torch.matmul": [each.first.ratio.estimate for each in served],
        "over autotuned cuBLASLt": library,
    }
    lines = [
        f"{len(ratios)} shapes {which}: geometric mean {geometric_mean(ratios):.3f}x, worst {min(ratios):.3f}x"
        for which, ratios in parts.items()
        if ratios
    ]
    own = [each.first.alone_us / each.first.us for each in found if each.first.alone_us]
    if own:
        lines.append(f"{len(own)} kernels launched alone: geometric mean {geometric_mean(own):.3f} of the call's time")
    slower = [each.shape for each in found if each.slower]
    lines.append(f"below {SLOWER} of torch.matmul both times: {', '.join(slower) or 'none'}")
    slower = [each.shape for each in found if each.slower_than_cublaslt]
    return [*lines, f"below {SLOWER} of autotuned cuBLASLt both times: {', '.join(slower) or 'none'}"]


def graphs(device: int, *, cold: bool) -> Callable[[Gemm], GraphTimer]:
    """Times calls on a CUDA device. cold: B comes from memory in each launch."""
    return lambda gemm: GraphTimer(gemm, device, dispatch.required_pack(), cold=cold)


def algorithms(device: int) -> Callable[[Gemm], list[Arm]]:
    """All of cuBLASLt's algorithms for a shape, those too that round parts of sums."""
    return lambda gemm: [Arm(vendor.FAMILY, made) for made in vendor.candidates(gemm, device, rounded=True)]


def _measured(timer: Timer, algorithms: list[Arm], rng: np.random.Generator) -> Measured:
    sampler, arms = Sampler(timer.sample, rng), list[str | Arm]((TORCHS, OURS))
    for name, call in ((TORCHS, torch.matmul), (OURS, matmul)):
        timer.capture(name, call)
    arms += [ALONE] if timer.alone(ALONE) else []
    runs = [arm for arm in algorithms if timer.prepare(arm)]
    if runs:
        one: Sampler[int] = Sampler(lambda number: timer.sample(runs[number]), rng)
        arms.append(runs[select(one, len(runs), Effort()).chosen])
    sampler.round(arms, kept=False)  # brings memory and clocks up
    for _ in range(ROUNDS):
        sampler.round(arms)
    samples = sampler.samples
    us, torch_us = (round(samples.median(arm), 3) for arm in (OURS, TORCHS))
    found = Measured(us, torch_us, samples.ratio(TORCHS, OURS))
    if ALONE in arms:
        found = replace(found, alone_us=round(samples.median(ALONE), 3))
    if not runs:
        return found
    return replace(found, cublaslt_us=round(samples.median(arms[-1]), 3), over_cublaslt=samples.ratio(arms[-1], OURS))


def _cells(ratio: Interval | None) -> tuple[str, str, str]:
    return (f"{ratio.estimate:.4f}", f"{ratio.low:.4f}", f"{ratio.high:.4f}") if ratio else ("", "", "")
