"""A and B may be one tensor, where both have as many bytes: a kernel that is right beside two must be right then."""

from dataclasses import replace

import torch

from cuda_l2.machine.tensors import stored, view
from cuda_l2.tasks.products import ProductCase, ProductCases
from cuda_l2.verify._base import GpuSession, ProductCheck, Session, require_right


class SameOperand(ProductCheck):
    name = "same operand"
    order = 45
    device = "cuda"

    def applies(self, session: Session) -> bool:
        return super().applies(session) and len({tensor.bytes for tensor in session.task.inputs}) == 1

    def run_on(self, session: Session, cases: ProductCases) -> None:
        assert isinstance(session, GpuSession)
        case = cases.get("same operand", 0, _make)
        require_right(case, session.launch_on_one(case), "where A and B are one tensor")


LARGEST = 8192.0
"""C's diagonal where B is A's transpose, a sum of K squares: above it fp16 sums lose bits, and fp16 overflows."""


def _make(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """B's bytes are A's."""
    drawn, other = cases.normal(generator)
    drawn *= min(1.0, (LARGEST / cases.task.k) ** 0.5)
    case, (a, b) = cases.operands(drawn, other), cases.task.inputs
    return cases.with_rows(replace(case, tensors={"a": case.a, "b": view(stored(case.a, a), b)}))


CHECK = SameOperand()
