"""The precision contract of the fp32 class, which {0, 1} inputs cannot see.

Random integers whose partial sums all stay below 2^22 are summed exactly in fp32 in any order and not in fp16 or bf16,
so C must be the exact result rounded to its type, bit for bit, also with K permuted. Rows of A and columns of B are
scaled by powers of two, so that no kernel can tell these inputs by their being whole. In further cases they are whole
and so small that each is exact in eleven bits, but no sum of two products; one operand has all digits of its type; and
one or both are as small as activations and weights are.
"""

import itertools
import math
from collections.abc import Iterable
from functools import partial

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import Accumulate, Gemm, VerdictStatus
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_expected

LARGEST_SUM = 1 << 22
LARGEST_POWER = 8
"""Sums stay exact, but for who adds elements of several rows, or columns, and takes them apart again."""
PAIRS = (3, 1)
"""Pairs of places in K whose products are as large as whole numbers make them; sums stay below 2^24. Where there is
one, a long part of K looks negligible beside the sum so far, which the second place takes away."""
PAIRS_SCALE = 2.0**-6
"""Brings most of their sums, which have up to 22 bits, into fp16's range."""
SMALL, USUAL = (-7, -3), (1, 3)
SCALES = ((SMALL, SMALL), (USUAL, SMALL), (SMALL, USUAL))
"""Powers of two that no element of A, and none of B, exceeds. Whoever looks at an operand's largest element must not
find a reason there to be less precise: real models' operands are often below one."""
MOST_OF_OTHER, MOST_POWER = 3, 2
"""Whole numbers beside those with all digits, and powers of two of a row: small, so that sums stay exact."""
WHOLE = ((33, 36), (36, 48), (33, 1024))
"""Between these the largest whole number is drawn where rows are not scaled: the sum of two products may be over 2048.
Whoever looks for whole numbers must not find a reason there to sum in eleven bits."""
LARGEST_OF_ROUNDED = 3e4
"""What a typical sum of whole numbers stays below, in fp16's range."""
NEAR_LARGEST, EVENLY = 3, 1
"""Whole numbers lie below their largest by a random share to one of these powers. Evenly spread ones of the first range
have hardly a pair of products whose sum is over 2048; but those near the largest may sum to more than fp16 holds."""
RANGES = ((31, 31), (127, 15))
"""Largest integers in A and B. The second range makes sums of two products need more than fp16's eleven bits."""


class PrecisionContract(ProductCheck):
    name = "precision contract"
    order = 33

    def applies(self, session: Session) -> bool:
        return isinstance(session.cases, ProductCases) and session.cases.task.accumulate is Accumulate.FP32

    def run_on(self, session: Session, cases: ProductCases) -> None:
        turns: Iterable[Turn[ProductCase]] = (
            Turn(cases.get(kind, index, partial(make, index=index)))
            for index in range(len(RANGES))
            for kind, make in (("integers", _make), ("integers permuted", _make_permuted))
        )
        scaled = (Turn(cases.get("integers scaled", i, partial(_make_scaled, scales=s))) for i, s in enumerate(SCALES))
        whole = (Turn(cases.get("integers whole", i, partial(_make_whole, between=b))) for i, b in enumerate(WHOLE))
        turns = itertools.chain(turns, scaled, whole)
        if cases.task.k >= 2 * max(PAIRS):
            counts = PAIRS if session.device == "cpu" else PAIRS[-1:]
            pairs = [Turn(cases.get("integers in pairs", count, partial(_make_pairs, count=count))) for count in counts]
            turns = itertools.chain(turns, pairs)

        def wrong(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            return (found != expected) & ~(found.isnan() & expected.isnan())

        right = f"the exact sum rounded to {cases.task.dtype}"
        reason = f"{{share}} of C is not {right}: {{element}}; sums must be kept in fp32"
        require_expected(session, turns, wrong, VerdictStatus.IMPRECISE, reason)


def _make(cases: ProductCases, generator: torch.Generator, index: int) -> ProductCase:
    gemm = cases.task
    largest_a, largest_b = RANGES[index]
    scale = min(1.0, math.sqrt(LARGEST_SUM / (gemm.k * largest_a * largest_b)))
    a, b = (
        torch.randint(-bound, bound + 1, shape, generator=generator, dtype=torch.int16, device=cases.device)
        for bound, shape in (
            (max(1, int(largest_a * scale)), (gemm.m, gemm.k)),
            (max(1, int(largest_b * scale)), (gemm.k, gemm.n)),
        )
    )
    case = cases.operands(a * _powers(gemm.m, generator)[:, None], b * _powers(gemm.n, generator))
    product = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=product)
    case.expected["c"] = product.to(dtype_of(gemm))
    return case


def _make_permuted(cases: ProductCases, generator: torch.Generator, index: int) -> ProductCase:
    """The same kind of case with a reference that summed K in another order."""
    plain = _make(cases, generator, index)
    order = torch.randperm(cases.task.k, generator=generator, device=cases.device)
    case = cases.operands(plain.a[:, order], plain.b[order])
    case.expected["c"] = plain.expected["c"]
    return case


def _make_whole(cases: ProductCases, generator: torch.Generator, between: tuple[int, int]) -> ProductCase:
    """Whole numbers of either sign up to one that is drawn, log-uniformly, as far as sums stay exact and in range."""
    gemm, (low, high) = cases.task, between
    power = NEAR_LARGEST if _typical(gemm.k, NEAR_LARGEST) >= low else EVENLY
    most = min(_typical(gemm.k, power), int(math.sqrt(4 * LARGEST_SUM / gemm.k)), _whole_numbers(gemm))
    high = max(1, min(high, most))
    low = min(low, high)
    share = float(torch.rand((), generator=generator, device=cases.device))
    bound = round(low * (high / low) ** share)
    shapes = (gemm.m, gemm.k), (gemm.k, gemm.n)
    case = cases.operands(*(_up_to(bound, power, shape, generator) for shape in shapes))
    product = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=product)
    case.expected["c"] = product.to(dtype_of(gemm))
    return case


def _typical(k: int, power: int) -> int:
    """The largest of whole numbers, by the power that spreads them, K products of which sum to what fp16 holds."""
    mean_square = 1 - 2 / (power + 1) + 1 / (2 * power + 1)  # in squares of the largest
    return int(math.sqrt(LARGEST_OF_ROUNDED / (mean_square * math.sqrt(k))))


def _up_to(bound: int, power: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    share = 1 - torch.rand(shape, generator=generator, device=generator.device) ** power
    sign = torch.randint(2, shape, generator=generator, device=generator.device) * 2 - 1
    return (bound * share).round() * sign


def _make_scaled(
    cases: ProductCases, generator: torch.Generator, scales: tuple[tuple[int, int], tuple[int, int]]
) -> ProductCase:
    """Whole numbers times powers of two: one operand, drawn, has all digits of its type, the other at most two."""
    gemm = cases.task
    largest = min(_whole_numbers(gemm), 4 * LARGEST_SUM // (gemm.k * MOST_OF_OTHER))
    bounds = [max(1, largest), MOST_OF_OTHER]
    if int(torch.randint(2, (), generator=generator, device=cases.device)):
        bounds.reverse()
    drawn = []
    for shape, lines, bound, scale in zip(
        *(((gemm.m, gemm.k), (gemm.k, gemm.n)), ((gemm.m, 1), (1, gemm.n)), bounds, scales), strict=True
    ):
        numbers = torch.randint(-bound, bound + 1, shape, generator=generator, device=cases.device).float()
        power = torch.randint(scale[0], scale[1] + 1, (), generator=generator, device=cases.device)
        power = (
            power
            - bound.bit_length()
            - torch.randint(0, MOST_POWER + 1, lines, generator=generator, device=cases.device)
        )
        drawn.append(numbers * 2.0**power)
    case = cases.operands(*drawn)
    product = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=product)
    case.expected["c"] = product.to(dtype_of(gemm))
    return case


def _whole_numbers(gemm: Gemm) -> int:
    """The largest odd whole number of the operands' type, below which it holds all."""
    return round(2 / torch.finfo(dtype_of(gemm)).eps) - 1


def _make_pairs(cases: ProductCases, generator: torch.Generator, count: int) -> ProductCase:
    """Small integers, but for `count` pairs of places in K, with products of the largest whole numbers and two signs.

    In every other row a pair cancels, or nearly; elsewhere its sum is of any size. What loses low bits of a product, of
    an operand or of a sum on the way is off by whole numbers then.
    """
    gemm = cases.task
    largest = _whole_numbers(gemm)

    def signed(low: int, high: int, *shape: int) -> torch.Tensor:
        numbers = torch.randint(low, high + 1, shape, generator=generator, device=cases.device).float()
        return numbers * (torch.randint(0, 2, shape, generator=generator, device=cases.device) * 2 - 1)

    a, b = signed(0, 1, gemm.m, gemm.k), signed(0, 1, gemm.k, gemm.n)
    half = gemm.k // 2  # a pair has a place in each, so that sums half way are large
    places = torch.arange(count, device=cases.device) * half // count
    one, two = places + torch.randint(half // count, (2, count), generator=generator, device=cases.device)
    two = half + two[torch.randperm(count, generator=generator, device=cases.device)]
    if count == 1:  # near the ends
        one, two = one // 2, gemm.k - 1 - (two - half) // 2
    a[:, one] = signed(largest // 2 + 1, largest - 1, gemm.m, count)
    a[::2, two] = signed(0, 1, *a[::2, two].shape) - a[::2, one]
    a[1::2, two] = -a[1::2, one].sign() * signed(largest // 2 + 1, largest, *a[1::2, two].shape).abs()
    b[one] = b[two] = signed(largest // 2, largest, count, gemm.n) * (LARGEST_SUM / (largest + 1) ** 2)
    if count > 1:  # one is to be far above all other products, not just in its row and column
        a, b = a * _powers(gemm.m, generator)[:, None], b * _powers(gemm.n, generator)
    case = cases.operands(PAIRS_SCALE * a, b)
    product = cases.product_fp32(case)
    require_finite(gemm, A=case.a, B=case.b, C=product)
    case.expected["c"] = product.to(dtype_of(gemm))
    return case


def _powers(count: int, generator: torch.Generator) -> torch.Tensor:
    """Random powers of two, one a row of A or column of B: sums stay exact, operands are no longer whole numbers."""
    return 2.0 ** -torch.randint(0, LARGEST_POWER + 1, (count,), generator=generator, device=generator.device)


CHECK = PrecisionContract()
