"""verify/models.py: what its patterns make of an operand, at sizes that divide nothing too."""

import pytest
import torch

from cuda_l2.records import Gemm
from cuda_l2.tasks.products import CpuReferences, ProductCases
from cuda_l2.verify.models import PATTERNS, _judged_by_size

SHAPES = [(1, 1), (1, 5), (5, 1), (8, 8), (7, 12), (13, 6)]
HELD = {
    "a softmax of each row": lambda x: torch.allclose(x.sum(1), torch.ones(len(x))),
    "normalized rows": lambda x: x.shape[1] == 1 or torch.allclose(x.square().mean(1), torch.ones(len(x)), atol=1e-3),
    "a ReLU": lambda x: bool((x >= 0).all()),
    "bytes over 255": lambda x: torch.allclose((x * 255).round(), x * 255, atol=1e-3) and 0 <= x.min() <= x.max() <= 1,
    "rows of padding": lambda x: not x[-(len(x) // 4) or len(x) :].any(),
    "columns twice": lambda x: torch.equal(x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 : x.shape[1] // 2 * 2]),
    "one-hot rows": lambda x: bool(((x != 0).sum(1) == 1).all()),
    "an identity": lambda x: bool(x.sum() == min(x.shape)),
    "a symmetric matrix": lambda x: torch.equal(
        x[: min(x.shape), : min(x.shape)], x[: min(x.shape), : min(x.shape)].t()
    ),
    "a dominant diagonal": lambda x: bool((2 * x.diagonal() > x[: min(x.shape)].abs().sum(1)).all()),
    "equal diagonals": lambda x: torch.equal(x[1:, 1:], x[:-1, :-1]),
    "rising rows": lambda x: bool((x[:, 1:] > x[:, :-1]).all()),
}


def test_what_is_asked_of_patterns_is_asked_of_some() -> None:
    assert HELD.keys() < PATTERNS.keys()


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_what_its_name_says_at_any_size(name) -> None:
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES:
        rows = torch.randn(shape, generator=generator)
        given, found = rows.clone(), PATTERNS[name](rows, 3)
        assert found.shape == shape and found.dtype is torch.float32 and found.isfinite().all()
        assert torch.equal(rows, given), "what was drawn stays"
        assert HELD.get(name, lambda x: True)(found)
    four = PATTERNS["two of four zero"](torch.randn(3, 8, generator=generator), 5)
    assert ((four.reshape(3, 2, 4) == 0).sum(2) == 2).all()


def test_rounding_of_a_subnormal_product_is_allowed() -> None:
    cases = ProductCases(Gemm(1, 1, 1), 5, CpuReferences())
    for number in range(20):
        a, b = (torch.full((1, 1), (1 + number / 7) * scale) for scale in (1e-4, 1e-3))
        case = _judged_by_size(cases, a, b)
        right = case.expected["fp32"]
        assert bool(((right.half().float() - right).abs() <= case.expected["allowed"]).all()), number
