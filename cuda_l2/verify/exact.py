"""Exact match on {0, 1} inputs (paper section 2.3): integers below 2048 are exact in fp16, so nothing may differ."""

import torch

from cuda_l2.records import VerdictStatus
from cuda_l2.verify._base import Case, Cases, Check, CheckFailed, Session, first_difference, operands, require_finite

INPUTS = 3
LARGEST_EXACT = 2048
TYPICAL_SUM = 1200
"""Ones are drawn so that a typical element of C is at most this: well above zero and rarely at 2048."""


class ExactMatch(Check):
    name = "exact match"
    order = 10

    def run(self, session: Session) -> None:
        for index in range(INPUTS):
            case = session.cases.get("exact", index, _make)
            expected, found = case.expected["c"], session.launch(case).float()
            wrong = (found != expected) & (expected < LARGEST_EXACT)
            if wrong.any():
                element = first_difference(found, expected, wrong)
                share = float(wrong.float().mean())
                raise CheckFailed(
                    VerdictStatus.INCORRECT, f"{share:.1%} of C is wrong on 0/1 inputs: {element}", element
                )


def _make(cases: Cases, generator: torch.Generator) -> Case:
    gemm = cases.gemm
    one = min(0.5, (TYPICAL_SUM / gemm.k) ** 0.5)
    a = torch.rand(gemm.m, gemm.k, generator=generator, device=cases.device) < one
    b = torch.rand(gemm.k, gemm.n, generator=generator, device=cases.device) < one
    case = operands(gemm, a, b)
    case.expected["c"] = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=case.expected["c"])
    return case


CHECK = ExactMatch()
