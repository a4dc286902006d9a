"""A and B may be one tensor, where both have as many bytes: a kernel that is right beside two must be right then.

So M = N, and B may be A's transpose, or its negative. Two that differ in one element of each row, or in one element
alone, must not be taken for one.
"""

from dataclasses import replace
from functools import partial

import torch

from cuda_l2.machine.tensors import stored, view
from cuda_l2.tasks.products import ProductCase, ProductCases
from cuda_l2.verify._base import ProductCheck, Session, require_right
from cuda_l2.verify.structure import ODD


class SameOperand(ProductCheck):
    name = "same operand"
    order = 45

    def applies(self, session: Session) -> bool:
        return super().applies(session) and len({tensor.bytes for tensor in session.task.inputs}) == 1

    def run_on(self, session: Session, cases: ProductCases) -> None:
        case = cases.get("same operand", 0, _make)
        require_right(case, session.launch_on_one(case), "where A and B are one tensor")
        for number, rows in enumerate(("each row", "one row")):
            case = cases.get("same operand but one", number, partial(_make_but_one, number))
            require_right(case, session.launch(case), f"where B has A's bytes but for one element of {rows}")
        case = cases.get("same operand", 1, _make_transpose)
        require_right(case, session.launch(case), "where B is A's transpose")
        case = cases.get("same operand", 2, _make_negative)
        require_right(case, session.launch(case), "where B has A's bytes but for the sign")


LARGEST = 8192.0
"""C's diagonal where B is A's transpose, a sum of K squares: above it fp16 sums lose bits, and fp16 overflows."""


def _make(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """B's bytes are A's."""
    drawn, other = cases.normal(generator)
    drawn *= min(1.0, (LARGEST / cases.task.k) ** 0.5)
    case, (a, b) = cases.operands(drawn, other), cases.task.inputs
    return cases.with_rows(replace(case, tensors={"a": case.a, "b": view(stored(case.a, a), b)}))


def _make_transpose(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    a = _make(cases, generator).a
    return cases.with_rows(cases.operands(a, a.t()))


def _make_negative(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    case = _make(cases, generator)
    return cases.with_rows(replace(case, tensors={"a": case.a, "b": -case.b}))


def _make_but_one(one_row: int, cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """The same in memory of its own, with one element of each row of A, or of one alone, unlike B's."""
    case = _make(cases, generator)
    a = case.a.clone()
    at_M1 = torch.randint(cases.task.k, (cases.task.m, 1), generator=generator, device=cases.device)
    rows = at_M1.flatten()[:1] % cases.task.m if one_row else slice(None)
    a[rows] = a[rows].scatter(1, at_M1[rows], ODD * a[rows].gather(1, at_M1[rows]))
    return cases.with_rows(cases.operands(a, case.b))


CHECK = SameOperand()
