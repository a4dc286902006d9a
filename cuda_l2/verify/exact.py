"""Exact match on {0, 1} inputs (paper section 2.3): small integers are exact in the task's type, so none may differ.

Integers are exact below 2048 in fp16.
"""

from collections.abc import Sequence

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_expected

INPUTS = 3
TYPICAL_SHARE = 0.586
"""Ones are drawn so that a typical element of C is at most this share of the largest exact one: well above zero and
rarely at it."""


class ExactMatch(ProductCheck):
    name = "exact match"
    order = 10

    def run_on(self, session: Session, cases: ProductCases) -> None:
        require_exact(session, cases, range(INPUTS))


def require_exact(session: Session, cases: ProductCases, indices: Sequence[int]) -> None:
    """CheckFailed where C is not exact on some of the drawn inputs."""
    largest = largest_exact(dtype_of(cases.task))

    def wrong(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return (found.float() != expected) & (expected < largest)

    turns = (Turn(cases.get("exact", index, _make)) for index in indices)
    reason = "{share} of C is wrong on 0/1 inputs: {element}"
    require_expected(session, turns, wrong, VerdictStatus.INCORRECT, reason)


def largest_exact(dtype: torch.dtype) -> float:
    """The first integer above which not all are numbers of a type: 2048 in fp16."""
    return 2 / torch.finfo(dtype).eps


def _make(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    gemm = cases.task
    one = min(0.5, (TYPICAL_SHARE * largest_exact(dtype_of(gemm)) / gemm.k) ** 0.5)
    a = torch.rand(gemm.m, gemm.k, generator=generator, device=cases.device) < one
    b = torch.rand(gemm.k, gemm.n, generator=generator, device=cases.device) < one
    case = cases.operands(a, b)
    case.expected["c"] = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=case.expected["c"])
    return case


CHECK = ExactMatch()
