"""Batch-invariant products on a GPU: whether rows have the same bits in every batch, and what that costs."""

import functools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from cuda_l2.library.deploy import invariant
from cuda_l2.library.deploy.calls import matmul
from cuda_l2.library.deploy.entries import INVARIANT
from cuda_l2.library.deploy.native import native
from cuda_l2.library.deploy.tuning import CAPTURES, ROUNDS, Graphs, Product, device_for_timing
from cuda_l2.measure.sampler import Sampler
from cuda_l2.records import Gemm, Layout

TORCH, DEFAULT, SAME_BITS = "torch.mm", "cuda_l2.matmul", "batch_invariant=True"
COLUMNS = (TORCH, DEFAULT, SAME_BITS)


def check(gemm: Gemm) -> list[str]:
    """Batches of up to invariant.ROWS[-1] rows in which a row's bits differ, for a shape's N, K, layout and type.

    UserError where there is no GPU that runs the kernels, or none of them serves N and K for every M.
    """
    place = torch.device("cuda", device_for_timing())
    generator, dtype = torch.Generator(place).manual_seed(0), getattr(torch, gemm.dtype)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=place, dtype=dtype)

    b = drawn(gemm.n, gemm.k).t() if gemm.layout is Layout.TN else drawn(gemm.k, gemm.n)
    same_bits = functools.partial(matmul, batch_invariant=True)
    return list(invariant.differing(same_bits, drawn(invariant.ROWS[-1], gemm.k), b))


def times_us(gemms: Iterable[Gemm]) -> Iterator[tuple[Gemm, dict[str, float]]]:
    """Microseconds of a product on the GPU, shape by shape, by the names of COLUMNS: medians of interleaved replays.

    B comes from memory. Graphs are captured several times, as in tuning. UserError as from `check`.
    """
    device, by_rule = device_for_timing(), torch.ops.cuda_l2.product_by.default
    calls: dict[str, Product] = {
        TORCH: torch.mm,
        DEFAULT: torch.ops.cuda_l2.product.default,
        SAME_BITS: lambda a, b: by_rule(a, b, INVARIANT),
    }
    for gemm in gemms:
        mark, timer = native().mark(), Graphs(gemm, device, cold=True)
        sampler = Sampler(timer.sample, np.random.default_rng(0))
        for _ in range(CAPTURES):
            for name, call in calls.items():
                timer.capture(name, call)
            sampler.round(COLUMNS, kept=False)  # brings memory and clocks up
            for _ in range(ROUNDS):
                sampler.round(COLUMNS)
        medians = {name: sampler.samples.median(name) for name in COLUMNS}
        del sampler, timer  # its graphs end before what they work on
        native().release(mark)
        yield gemm, medians
