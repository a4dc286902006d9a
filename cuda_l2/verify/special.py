"""NaN, infinities, overflow, zeros and nearly empty rows come out as the fp32 reference has them."""

from collections.abc import Sequence
from functools import partial

import torch

from cuda_l2.records import Accumulate, VerdictStatus
from cuda_l2.verify._base import Case, Cases, Check, CheckFailed, Session, first_difference, operands

SPARSE_EVERY = 4
"""One row of A in so many, and one column of B, has a single value left: zeros elsewhere must not be taken for all."""
KINDS = ("nan", "infinity", "overflow", "negative zero", "subnormal", "sparse")
SMALLEST_STEP = 2.0**-24  # between subnormal fp16 numbers
FP16_OVERFLOW = 65520.0  # from here on, rounding to nearest gives infinity


class SpecialValues(Check):
    name = "special values"
    order = 40

    def run(self, session: Session) -> None:
        # a sum in fp16 may pass through infinity on its way to a finite value
        kinds = [kind for kind in KINDS if kind != "overflow" or session.gemm.accumulate is Accumulate.FP32]
        for first in range(0, len(kinds), min(session.gemm.m, len(kinds))):
            case = session.cases.get("special", first, partial(_make, kinds=kinds, first=first))
            expected, slack = case.expected["c"], case.expected["slack"]
            found = session.launch(case).float()
            near_overflow = (expected.abs() - FP16_OVERFLOW).abs() <= slack + 0.01 * FP16_OVERFLOW
            rounded = expected.half().float()
            same = (found == rounded) | (found.isnan() & expected.isnan())
            step = (expected.abs() * 2.0**-10).clamp(min=SMALLEST_STEP)
            close = rounded.isfinite() & ((found - expected).abs() <= slack + step)
            wrong = ~(same | close | near_overflow)
            if wrong.any():
                element = first_difference(found, rounded, wrong)
                kind = kinds[(first + element.row) % len(kinds)] if element.row < len(kinds) else "ordinary"
                raise CheckFailed(
                    VerdictStatus.INCORRECT, f"a row with {kind} values comes out wrong: {element}", element
                )


def _make(cases: Cases, generator: torch.Generator, kinds: Sequence[str], first: int) -> Case:
    gemm = cases.gemm
    a, b = cases.normal(generator)
    for row in range(min(gemm.m, len(kinds))):
        at = int(torch.randint(gemm.k, (1,), generator=generator, device=cases.device))
        match kinds[(first + row) % len(kinds)]:
            case "nan":
                a[row, at] = float("nan")
            case "infinity":
                a[row, at] = float("-inf")
            case "overflow":
                a[row] = 60000.0
            case "negative zero":
                a[row] = -0.0
            case "subnormal":
                a[row] *= 2.0**-20
            case "sparse":  # zeros nearly everywhere must not be taken for zeros
                a[row], b[:, row % gemm.n] = _one_left(a[row], at), _one_left(b[:, row % gemm.n], at)
    _leave_one(a[len(kinds) :: SPARSE_EVERY], generator)
    _leave_one(b.t()[len(kinds) :: SPARSE_EVERY], generator)
    case = operands(gemm, a, b)
    finite = case.a.float().nan_to_num(0.0, 0.0, 0.0).abs()
    # sums in any order differ by a few roundings of the sum of magnitudes
    unit = 2.0**-23 if gemm.accumulate is Accumulate.FP32 else 2.0**-10
    slack = finite.sum(1, keepdim=True) * case.b.float().abs().max() * unit
    case.expected.update(c=cases.product_fp32(case), slack=slack)
    return case


def _one_left(values_K: torch.Tensor, at: int) -> torch.Tensor:
    """Zeros, but for one value."""
    left = torch.zeros_like(values_K)
    left[at] = values_K[at]
    return left


def _leave_one(rows_RK: torch.Tensor, generator: torch.Generator) -> None:
    """Zeros in each row, but for one value at a random place of its own."""
    rows, k = rows_RK.shape
    at_R1 = torch.randint(k, (rows, 1), generator=generator, device=rows_RK.device)
    left_R1 = rows_RK.gather(1, at_R1)
    rows_RK.zero_()
    rows_RK.scatter_(1, at_R1, left_R1)


CHECK = SpecialValues()
