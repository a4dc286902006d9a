"""Operands of every magnitude count: each of A and B over its type's whole range, from subnormal to the largest.

Integers times powers of two, one a row of A and one a column of B, so that all terms of a sum have one power: sums in
fp32 are exact in any order, and C must be the exact result rounded to its type, bit for bit, infinity where it
overflows. In a second kind of case every row of one operand, or column of the other, has a single value left, and each
element of the other its own power: no sum at all, for classes whose sums are rounded too. What is narrowed, clamped,
flushed or taken for zero at some magnitude of either operand shows. The rest are for fp32 sums: all of one operand as
small as its type allows and all of the other above one, so that no part of it looks like more than nothing, once with
integers of few bits; positive numbers whose sum fp16 holds as one of its least, but no part of which it would; products
of one power whose two factors lie anywhere in the type's range, so that subnormal numbers stand beside large ones and
count as much; and sums around the largest number of C's type, where rounding turns to infinity.
"""

import math
from collections.abc import Callable
from functools import partial

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import Accumulate, Gemm, VerdictStatus
from cuda_l2.tasks.products import ProductCase, ProductCases, require_finite
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_expected
from cuda_l2.verify.special import leave_one

LARGEST, LARGEST_SUM = 31, 1 << 22
FEWEST_BITS = 4
"""Integers of an operand whose words have few bits: bits, at most."""
SMALL_PARTS = ((1, 1), (3, 16))
"""Largest integers of operands whose products count in sum alone, and the largest sums, in fp16's least numbers. Equal
products that sum to one least number are about the smallest that count: whoever takes less for nothing shows."""
AROUND_LARGEST = 32
"""Sums around C's largest number, a sixteenth of its last step apart: from one step below it to nearly one above."""
LEAST_OF_FP32 = -126
"""Sums of fewer powers of two would be subnormal in fp32."""
_LEAST = 2.0**-24
"""The least number of fp16."""
Range = tuple[int, int]


class Magnitudes(ProductCheck):
    name = "magnitudes"
    order = 34

    def run_on(self, session: Session, cases: ProductCases) -> None:
        in_fp32 = cases.task.accumulate is Accumulate.FP32
        kinds: list[tuple[str, int, Callable[[ProductCases, torch.Generator], ProductCase]]] = [
            (f"magnitudes {left}", index, partial(_make, powers=powers, left=left))
            for left in (*([""] if in_fp32 else []), "a", "b")
            for index, powers in enumerate(_ranges(cases.task))
        ]
        if in_fp32:
            low, high = _whole(cases.task)
            if session.device == "cuda":
                kinds.append(("magnitudes balanced", 0, partial(_make_balanced, powers=(low, high))))
            else:
                low = max(low, LEAST_OF_FP32)  # bf16 instructions of CPUs take subnormal numbers for zero
            for index, powers in enumerate([(low, high), (high, low)]):
                kinds.append(("magnitudes apart", index, partial(_make_balanced, powers=powers, drawn=False)))
                kinds.append(("magnitudes apart", 2 + index, partial(_make_apart, powers=powers)))
                kinds.append(("magnitudes of few bits", index, partial(_make_of_few_bits, powers=powers)))
            if cases.task.dtype == "float16":
                for index, (largest, most) in enumerate(SMALL_PARTS):
                    make = partial(_make_of_small_parts, largest=largest, most=most)
                    kinds.append(("magnitudes of small parts", index, make))
        if in_fp32 and cases.task.k >= 3:
            kinds.append(("magnitudes at the largest", 0, _make_at_the_largest))

        def wrong(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            if in_fp32:
                return found != expected
            step = torch.finfo(found.dtype).eps * expected.abs().float() + _LEAST  # a product may be rounded otherwise
            return (found != expected) & ~((found.float() - expected.float()).abs() <= step)

        reason = "{share} of C is wrong where operands are very large or small: {element}"
        turns = (Turn(cases.get(*kind)) for kind in kinds)
        require_expected(session, turns, wrong, VerdictStatus.INCORRECT, reason)


def _ranges(gemm: Gemm) -> list[tuple[Range, Range]]:
    """Powers of two for A and for B, whose sums fp32 holds; together each operand's whole range."""
    lowest, highest = _whole(gemm)
    room = 127 - (LARGEST_SUM.bit_length() - 1)
    if 2 * highest <= room and 2 * lowest >= LEAST_OF_FP32:
        return [((lowest, highest), (lowest, highest))]
    large, small = (0, highest), (LEAST_OF_FP32 + 2, room - highest)
    return [(large, small), (small, large)]


def _whole(gemm: Gemm) -> Range:
    """The least power of two of A's and B's type, and the greatest whose product with the largest integer it holds."""
    limits = torch.finfo(dtype_of(gemm))
    least = math.ceil(math.log2(limits.smallest_normal * limits.eps))
    return least, math.floor(math.log2(limits.max / LARGEST))


def _integers(cases: ProductCases, generator: torch.Generator, bound: int, shape: tuple[int, int]) -> torch.Tensor:
    """Random integers in fp32 of both signs, none of them zero, at most `bound` in magnitude."""
    drawn = torch.randint(1, bound + 1, shape, generator=generator, device=cases.device).float()
    return drawn * (torch.randint(0, 2, shape, generator=generator, device=cases.device) * 2 - 1)


def _bound(gemm: Gemm) -> int:
    """The largest integer of which sums of K products stay exact in fp32."""
    return max(1, int(min(LARGEST, math.sqrt(LARGEST_SUM / gemm.k))))


def _make(cases: ProductCases, generator: torch.Generator, powers: tuple[Range, Range], left: str) -> ProductCase:
    """left: the operand of whose rows, or columns, one value is left; empty for neither."""
    gemm, device = cases.task, cases.device
    bound = LARGEST if left else _bound(gemm)

    def drawn(shape: tuple[int, int], scaled: tuple[int, int], power: Range) -> torch.Tensor:
        low, high = power
        numbers = _integers(cases, generator, bound, shape)
        return numbers * 2.0 ** torch.randint(low, high + 1, scaled, generator=generator, device=device)

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


def _make_balanced(
    cases: ProductCases, generator: torch.Generator, powers: Range, drawn: bool = True, largest: int = LARGEST
) -> ProductCase:
    """Each column of A has a power of its own, and B's row the one that makes all products' powers alike.

    drawn: between these two powers; otherwise all of A has the first, and all of B the second. largest: of integers.
    """
    gemm, total = cases.task, sum(powers)
    bound, shapes = min(largest, _bound(gemm)), ((gemm.m, gemm.k), (gemm.k, gemm.n))
    a, b = (_integers(cases, generator, bound, shape) for shape in shapes)
    low, high = powers if drawn else (powers[0], powers[0])
    power_K = torch.randint(low, high + 1, (gemm.k,), generator=generator, device=cases.device)
    # in fp64: fp32 may hold a subnormal number of bf16, but flush it in a product
    scaled_a, scaled_b = (
        a.double() * 2.0 ** power_K.double(),
        b.double() * 2.0 ** (total - power_K.double())[:, None],
    )
    case = cases.operands(scaled_a, scaled_b)
    product = cases.product_fp32(cases.operands(a, b))
    case.expected["c"] = (product * 2.0**total).to(dtype_of(gemm))
    return case


def _make_apart(cases: ProductCases, generator: torch.Generator, powers: Range) -> ProductCase:
    """One operand has the smaller power, the other a random one far below the larger: one operand alone is extreme."""
    small, large = min(powers), max(powers)
    large = int(torch.randint(large // 2, large - 1, (), generator=generator, device=cases.device))
    return _make_balanced(cases, generator, (small, large) if powers[0] < powers[1] else (large, small), drawn=False)


def _make_of_few_bits(cases: ProductCases, generator: torch.Generator, powers: Range) -> ProductCase:
    """No word of the smaller operand has more than a few bits set, at the end."""
    bits = int(torch.randint(1, FEWEST_BITS + 1, (), generator=generator, device=cases.device))
    return _make_balanced(cases, generator, powers, drawn=False, largest=(1 << bits) - 1)


def _make_of_small_parts(cases: ProductCases, generator: torch.Generator, largest: int, most: int) -> ProductCase:
    """Positive integers up to `largest` times powers of two so small that only the sum of all products counts.

    Sums are about 1 to `most` of fp16's least numbers.
    """
    gemm = cases.task
    share = float(torch.rand((), generator=generator, device=cases.device))
    mean = gemm.k * ((1 + largest) / 2) ** 2
    total = max(-48, round(math.log2(_LEAST * most**share / mean)))
    drawn = [
        torch.randint(1, largest + 1, shape, generator=generator, device=cases.device).float() * 2.0**power
        for shape, power in (((gemm.m, gemm.k), total // 2), ((gemm.k, gemm.n), total - total // 2))
    ]
    case = cases.operands(*drawn)
    case.expected["c"] = cases.product_fp32(case).to(dtype_of(gemm))
    return case


def _make_at_the_largest(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """Three terms a sum: half of C's largest number, the rest to one step below it, and a few sixteenths of a step."""
    gemm, limits = cases.task, torch.finfo(dtype_of(cases.task))
    half = 2.0 ** math.floor(math.log2(limits.max))
    last = half * limits.eps
    a, b = (
        torch.zeros(shape, device=cases.device, dtype=torch.float64) for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n))
    )
    at = torch.randperm(gemm.k, generator=generator, device=cases.device)[:3]
    sixteenths = torch.randint(0, AROUND_LARGEST, (gemm.m,), generator=generator, device=cases.device)
    a[:, at[0]], a[:, at[1]], a[:, at[2]] = half, limits.max - last - half, sixteenths * (last / 16)
    signs = torch.randint(0, 2, (gemm.n,), generator=generator, device=cases.device) * 2.0 - 1
    b[at] = signs.double()
    case = cases.operands(a, b)
    case.expected["c"] = (a.sum(1)[:, None] * signs).to(dtype_of(gemm))
    return case


CHECK = Magnitudes()
