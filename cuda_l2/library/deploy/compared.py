"""The public call beside torch.matmul on this GPU, shape by shape: whether it is ever slower.

Both in CUDA graphs of back-to-back launches, by turns in random order. What comes out below 1 is measured again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Protocol

import numpy as np
import torch

from cuda_l2.library.deploy import choices, dispatch
from cuda_l2.library.deploy.calls import matmul
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.tuning import Graphs
from cuda_l2.measure.sampler import Sampler, Samples
from cuda_l2.records import Gemm, Interval
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import csv_text

ROUNDS = 15
OURS, TORCHS = "cuda_l2.matmul", "torch.matmul"
SLOWER = 0.99
"""A shape whose ratio is below this in both measurements is slower."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One shape: medians in microseconds, and the median ratio of torch's time to the call's."""

    shape: str
    kernel: str  # the id of the kernel that serves, or of the larger tuned shape's; empty where torch's own serves
    us: float
    torch_us: float
    ratio: Interval
    again: Interval | None = None  # measured once more, where the ratio was below 1

    @property
    def slower(self) -> bool:
        return self.again is not None and max(self.ratio.estimate, self.again.estimate) < SLOWER


class Timer(Protocol):
    """Times both calls on one shape."""

    def capture(self, name: str, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None: ...

    def sample(self, name: str) -> float:
        """Microseconds of one launch."""


def compare(
    gemms: Iterable[Gemm], device: int, open_timer: Callable[[Gemm], Timer], seed: int = 0
) -> Iterator[Compared]:
    """Every shape as soon as it is measured, then those below 1 again, with `again`; none that memory is short for.

    open_timer: what times the calls on a shape.
    """
    rng, below = np.random.default_rng(seed), list[Compared]()
    known = dispatch.known(device)
    for gemm in gemms:
        choice = known.get(gemm, choices.between(known, gemm))
        measured = _measured(gemm, open_timer, rng)
        if measured is None:
            dispatch.warn(f"{gemm} is not measured: the GPU has too little memory left for it")
            continue
        ratio, us, torch_us = measured
        found = Compared(str(gemm), choice.kernel if choice and choice.served else "", us, torch_us, ratio)
        if ratio.estimate < 1:
            below.append(found)
        yield found
    for found in below:
        measured = _measured(Gemm.parse(found.shape), open_timer, rng)
        if measured:
            yield replace(found, again=measured[0])


def table(found: Iterable[Compared]) -> str:
    """As CSV: times in microseconds, ratios with their 95 % intervals."""
    header = ("shape", "kernel", "us", "torch_us", "ratio", "low", "high", "again", "again_low", "again_high")
    lines = []
    for each in found:
        ratio, again = each.ratio, each.again
        first = f"{ratio.estimate:.4f}", f"{ratio.low:.4f}", f"{ratio.high:.4f}"
        second = (f"{again.estimate:.4f}", f"{again.low:.4f}", f"{again.high:.4f}") if again else ("", "", "")
        lines.append((each.shape, each.kernel, each.us, each.torch_us, *first, *second))
    return csv_text(header, lines)


def summary(found: Collection[Compared]) -> list[str]:
    """What a person wants to know of all shapes, in lines; UserError where none was measured."""
    if not found:
        raise UserError("no shape was measured: the GPU has too little memory left")
    parts = {"": [each.ratio.estimate for each in found]}
    parts[" that kernels serve"] = [each.ratio.estimate for each in found if each.kernel]
    lines = [
        f"{len(ratios)} shapes{which}: geometric mean {geometric_mean(ratios):.3f}x, worst {min(ratios):.3f}x"
        for which, ratios in parts.items()
        if ratios
    ]
    slower = [each.shape for each in found if each.slower]
    return [*lines, f"below {SLOWER} both times: {', '.join(slower) or 'none'}"]


def graphs(device: int, *, cold: bool) -> Callable[[Gemm], Graphs]:
    """Times calls on a CUDA device. cold: B comes from memory in each launch."""
    return lambda gemm: Graphs(gemm, device, cold=cold)


def _measured(
    gemm: Gemm, open_timer: Callable[[Gemm], Timer], rng: np.random.Generator
) -> tuple[Interval, float, float] | None:
    """The ratio, and both medians in microseconds; None where memory does not suffice."""
    mark, timer = native().mark(), None
    try:
        timer = open_timer(gemm)
        samples = _samples(timer, rng)
    except torch.OutOfMemoryError:
        return None
    finally:
        del timer  # its graphs end before what they work on
        native().release(mark)
    return samples.ratio(TORCHS, OURS), round(samples.median(OURS), 3), round(samples.median(TORCHS), 3)


def _samples(timer: Timer, rng: np.random.Generator) -> Samples[str]:
    sampler = Sampler(timer.sample, rng)
    for name, call in ((TORCHS, torch.matmul), (OURS, matmul)):
        timer.capture(name, call)
    sampler.round((TORCHS, OURS), kept=False)  # brings memory and clocks up
    for _ in range(ROUNDS):
        sampler.round((TORCHS, OURS))
    return sampler.samples
