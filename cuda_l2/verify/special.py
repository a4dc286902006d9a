"""NaN, infinities, overflow and zeros come out as the fp32 reference has them."""

import torch

from cuda_l2.records import Gemm, VerdictStatus
from cuda_l2.verify._base import Case, Check, CheckFailed, Session, first_difference, operands, product_fp32

KINDS = ("nan", "infinity", "overflow", "negative zero", "subnormal")
FP16_OVERFLOW = 65520.0  # from here on, rounding to nearest gives infinity


class SpecialValues(Check):
    name = "special values"
    order = 40

    def run(self, session: Session) -> None:
        for first in range(0, len(KINDS), min(session.gemm.m, len(KINDS))):
            case = session.cases.get("special", first, lambda gemm, generator: _make(gemm, generator, first))  # noqa: B023
            expected, slack = case.expected["c"], case.expected["slack"]
            found = session.launch(case).float()
            near_overflow = (expected.abs() - FP16_OVERFLOW).abs() <= slack + 0.01 * FP16_OVERFLOW
            rounded = expected.half().float()
            same = (found == rounded) | (found.isnan() & expected.isnan())
            close = rounded.isfinite() & ((found - expected).abs() <= slack + expected.abs() * 2.0**-10)
            wrong = ~(same | close | near_overflow)
            if wrong.any():
                element = first_difference(found, rounded, wrong)
                kind = KINDS[(first + element.row) % len(KINDS)] if element.row < len(KINDS) else "ordinary"
                raise CheckFailed(
                    VerdictStatus.INCORRECT, f"a row with {kind} values comes out wrong: {element}", element
                )


def _make(gemm: Gemm, generator: torch.Generator, first: int) -> Case:
    a = torch.randn(gemm.m, gemm.k, generator=generator)
    b = torch.randn(gemm.k, gemm.n, generator=generator)
    for row in range(min(gemm.m, len(KINDS))):
        at = int(torch.randint(gemm.k, (1,), generator=generator))
        match KINDS[(first + row) % len(KINDS)]:
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
    case = operands(gemm, a, b)
    finite = case.a.float().nan_to_num(0.0, 0.0, 0.0).abs()
    # fp32 sums in any order differ by about K 2^-24 times the sum of magnitudes
    slack = finite.sum(1, keepdim=True) * case.b.float().abs().max() * gemm.k**0.5 * 2.0**-23
    case.expected.update(c=product_fp32(gemm, case), slack=slack)
    return case


CHECK = SpecialValues()
