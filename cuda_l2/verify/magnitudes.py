"""Operands of every magnitude count: each of A and B over its type's whole range, from subnormal to the largest.

Integers times powers of two, one a row of A and one a column of B, so that all terms of a sum have one power: sums in
fp32 are exact in any order, and C must be the exact result rounded to its type, bit for bit, infinity where it
overflows. In a second kind of case every row of one operand, or column of the other, has a single value left, and each
element of the other its own power: no sum at all, for classes whose sums are rounded too. What is narrowed, clamped,
flushed or taken for zero at some magnitude of either operand shows.
"""

import math
from functools import partial

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import Accumulate, Gemm, VerdictStatus
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_none
from cuda_l2.verify.special import leave_one

LARGEST, LARGEST_SUM = 31, 1 << 22
LEAST_OF_FP32 = -126
"""Sums of fewer powers of two would be subnormal in fp32."""
_LEAST = 2.0**-24
"""The least number of fp16."""
Range = tuple[int, int]


class Magnitudes(ProductCheck):
    name = "magnitudes"
    order = 34

    def run_on(self, session: Session, cases: ProductCases) -> None:
        summed = [""] if cases.task.accumulate is Accumulate.FP32 else []
        turns = (
            Turn(cases.get(f"magnitudes {left}", index, partial(_make, powers=powers, left=left)))
            for left in (*summed, "a", "b")
            for index, powers in enumerate(_ranges(cases.task))
        )
        for turn, outputs in session.launch_each(turns):
            expected, found = turn.case.expected["c"], outputs["c"]
            wrong = found != expected
            if cases.task.accumulate is Accumulate.FP16:  # may round a product in another way
                step = torch.finfo(found.dtype).eps * expected.abs().float() + _LEAST
                wrong &= ~((found.float() - expected.float()).abs() <= step)
            reason = "{share} of C is wrong where operands are very large or small: {element}"
            require_none(wrong, found, expected, VerdictStatus.INCORRECT, reason)


def _ranges(gemm: Gemm) -> list[tuple[Range, Range]]:
    """Powers of two for A and for B, whose sums fp32 holds; together each operand's whole range."""
    limits = torch.finfo(dtype_of(gemm))
    highest = math.floor(math.log2(limits.max / LARGEST))
    lowest = math.ceil(math.log2(limits.smallest_normal * limits.eps))
    room = 127 - (LARGEST_SUM.bit_length() - 1)
    if 2 * highest <= room and 2 * lowest >= LEAST_OF_FP32:
        return [((lowest, highest), (lowest, highest))]
    large, small = (0, highest), (LEAST_OF_FP32 + 2, room - highest)
    return [(large, small), (small, large)]


def _make(cases: ProductCases, generator: torch.Generator, powers: tuple[Range, Range], left: str) -> ProductCase:
    """left: the operand of whose rows, or columns, one value is left; empty for neither."""
    gemm, device = cases.task, cases.device
    bound = LARGEST if left else max(1, int(min(LARGEST, math.sqrt(LARGEST_SUM / gemm.k))))

    def drawn(shape: tuple[int, int], scaled: tuple[int, int], power: Range) -> torch.Tensor:
        low, high = power
        integers = torch.randint(1, bound + 1, shape, generator=generator, device=device).float()
        signs = torch.randint(0, 2, shape, generator=generator, device=device) * 2 - 1
        return integers * signs * 2.0 ** torch.randint(low, high + 1, scaled, generator=generator, device=device)

    shape_a, shape_b = (gemm.m, gemm.k), (gemm.k, gemm.n)
    a = drawn(shape_a, shape_a if left == "b" else (gemm.m, 1), powers[0])
    b = drawn(shape_b, shape_b if left == "a" else (1, gemm.n), powers[1])
    if left:
        leave_one(a if left == "a" else b.t(), generator)
    case = cases.operands(a, b)
    product = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=product)
    case.expected["c"] = product.to(dtype_of(gemm))
    return case


CHECK = Magnitudes()
