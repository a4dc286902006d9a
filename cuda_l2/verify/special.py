"""Special values come out as the reference has them, and touch nothing else.

For every task: NaN and infinities among the inputs come out where the exact result has them. Each kind stands in one
element, or several kinds in a few, of one tensor of real numbers; in an operand of a product NaN also stands at each
of the 16 places of a step of K, in lines far apart. Nothing is asked of elements in which PyTorch itself gives another
kind than the exact result has, nor where the reference refuses such inputs. For a matrix product also rows of A, and
columns of B, with NaN, infinities, overflow, zeros, subnormal numbers and nearly nothing, as its fp32 reference has
them, in every window of A, of B and of C that timed launches have: none of those has such values. NaN is any of its
words there. Where single elements are special, the other operand is all zeros beside NaN, zeros or the identity beside
infinity, and a triangle, a diagonal or half zeros beside minus infinity: none of these saves work, as zero times NaN
is NaN.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import Accumulate, VerdictStatus
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.tasks.products import ProductCase, ProductCases
from cuda_l2.verify._base import (
    Check,
    CheckFailed,
    Outputs,
    Session,
    Turn,
    first_difference,
    require_all_right,
    require_each,
)

SPARSE_EVERY = 4
"""One row of A in so many, and one column of B, has a single value left: zeros elsewhere must not be taken for all."""
KINDS = ("nan", "infinity", "overflow", "negative zero", "subnormal", "sparse")
LARGE_SHARE = 0.916
"""Share of the largest number: products of such values with normal ones overflow the type, and not fp32."""
SUBNORMAL_SHARE = {Accumulate.FP32: 2.0**-6, Accumulate.FP16: 2.0**-3}
"""Share of the least normal number: products of such values with normal ones are subnormal, or nearly. Sums in fp16
round each of them to a multiple of the least number, so they are larger there: those taken for zero must stand out."""
NAN_AT, NAN_EVERY = 1, 2
"""Which lines have one NaN each, counted from the first without a kind of its own."""
INFINITY_AT, INFINITY_EVERY = 2, 8
"""Which have one infinity each, all along K: whoever adds zero times an element of it has NaN there."""
SLICE = 64
"""Elements of K, a tile's width: so many are zero where the other operand has a NaN."""
INFINITY, IN_PLACE_OF_NAN = float("inf"), torch.finfo(torch.float32).max
"""The second is no number of fp16 or bf16: where NaN is right, it alone is."""
MAX_TENSORS = 3
"""Tensors of real numbers that have special values; drawn at random where a task has more."""


class SpecialValues(Check):
    name = "special values"
    order = 40

    def run(self, session: Session) -> None:
        cases = session.cases
        if isinstance(cases, ProductCases):
            _require_right_rows(session, cases)
            _require_right_elements(session, [None])
            require_all_right(session, _all_nan(cases))
        else:
            _require_right_elements(session, session.places())


def _require_right_elements(session: Session, places: Sequence[int | None]) -> None:
    """CheckFailed where special values in one element, or in a few, come out wrong."""
    require_all_right(session, _elements(session.cases, places))


def _elements(cases: Cases, places: Sequence[int | None]) -> Iterator[Turn[Case]]:
    names = cases.real_tensors
    for place in places:
        for index in cases.rng.permutation(len(names))[:MAX_TENSORS]:
            for kind in cases.special_kinds:
                case = cases.special(names[int(index)], kind)
                if case is not None:
                    yield Turn(case, f"with {kind} in {names[int(index)]}", place=place)


def _all_nan(cases: ProductCases) -> Iterator[Turn[ProductCase]]:
    for number, operand in enumerate("ab"):
        yield Turn(cases.get("all NaN", number, partial(_make_all_nan, operand)), f"where all of {operand} is NaN")


def _make_all_nan(operand: str, cases: ProductCases, generator: torch.Generator) -> ProductCase:
    case = cases.operands(*cases.normal(generator))
    case.tensors[operand].fill_(float("nan"))
    return cases.with_rows(case)


def _require_right_rows(session: Session, cases: ProductCases) -> None:
    """CheckFailed where a row of A, or a column of B, with special values comes out wrong."""
    gemm, limits = cases.task, torch.finfo(dtype_of(cases.task))
    # sums in fp16 may pass through infinity on the way to a finite value, and so may fp32 sums of what overflows bf16
    overflows = gemm.accumulate is Accumulate.FP32 and limits.max < torch.finfo(torch.float32).max / gemm.k
    kinds = [kind for kind in KINDS if kind != "overflow" or overflows]
    for of_b, lines in ((False, gemm.m), (True, gemm.n)):
        for first in range(0, len(kinds), min(lines, len(kinds))):
            make = partial(_make, kinds=kinds, first=first, of_b=of_b)
            case = cases.get("special columns" if of_b else "special", first, make)
            mark, require = partial(_outside, case), partial(_require_inside, case, kinds, first, of_b)
            require_each(session, (Turn(case, place=place) for place in session.places()), mark, require)


def _outside(case: ProductCase, turn: Turn[ProductCase], found: Outputs) -> torch.Tensor:
    """Marks what lies beyond the case's bounds."""
    numbers = found["c"].float().nan_to_num(IN_PLACE_OF_NAN, INFINITY, -INFINITY)
    return (numbers < case.expected["low"]) | (numbers > case.expected["high"])


def _require_inside(
    case: ProductCase, kinds: Sequence[str], first: int, of_b: bool, turn: Turn[ProductCase], found: Outputs
) -> None:
    """CheckFailed for what is marked, with the kind of the first line that has any."""
    wrong = _outside(case, turn, found)
    element = first_difference("c", found["c"].float(), case.expected["c"], wrong)
    line = element.column if of_b else element.row
    kind = kinds[(first + line) % len(kinds)] if line < len(kinds) else "ordinary"
    for each, at, every in (("nan", NAN_AT, NAN_EVERY), ("infinity", INFINITY_AT, INFINITY_EVERY)):
        if line >= len(kinds) + at and (line - len(kinds) - at) % every == 0:
            kind = each
    reason = f"a {'column of B' if of_b else 'row'} with {kind} values comes out wrong: {element}"
    raise CheckFailed(VerdictStatus.INCORRECT, reason, element)


def _make(cases: ProductCases, generator: torch.Generator, kinds: Sequence[str], first: int, of_b: bool) -> ProductCase:
    """of_b: columns of B have the special values, where else rows of A have them."""
    gemm, limits = cases.task, torch.finfo(dtype_of(cases.task))
    a, b = cases.normal(generator)
    own, other = (b.t(), a.t()) if of_b else (a, b)
    for line in range(min(len(own), len(kinds))):
        at = int(torch.randint(gemm.k, (1,), generator=generator, device=cases.device))
        match kinds[(first + line) % len(kinds)]:
            case "nan":  # beside zeros, which must not be skipped as if they added nothing
                own[line, at] = float("nan")
                slice_ = SLICE if gemm.k >= 2 * SLICE else 1
                other[at // slice_ * slice_ :][:slice_] = 0
            case "infinity":
                own[line, at] = float("-inf")
            case "overflow":
                own[line] = LARGE_SHARE * limits.max
            case "negative zero":
                own[line] = -0.0
            case "subnormal":
                own[line] *= SUBNORMAL_SHARE[gemm.accumulate] * limits.smallest_normal
            case "sparse":  # zeros nearly everywhere must not be taken for zeros
                across = other[:, line % other.shape[1]]
                own[line], across[:] = _one_left(own[line], at), _one_left(across, at)
    lines_L = torch.arange(len(own), device=cases.device)[len(kinds) + NAN_AT :: NAN_EVERY]
    at_L = torch.randint(gemm.k, lines_L.shape, generator=generator, device=cases.device)
    at_L[0::8], at_L[1::8] = 0, gemm.k - 1  # the ends too
    own[lines_L, at_L] = float("nan")
    lines_I = torch.arange(len(own), device=cases.device)[len(kinds) + INFINITY_AT :: INFINITY_EVERY]
    start = torch.randint(gemm.k, (), generator=generator, device=cases.device)
    at_I = (start + torch.arange(len(lines_I), device=cases.device) * gemm.k // max(1, len(lines_I))) % gemm.k
    own[lines_I, at_I] = INFINITY
    leave_one(own[len(kinds) :: SPARSE_EVERY], generator)
    leave_one(other.t()[len(kinds) :: SPARSE_EVERY], generator)
    case = cases.operands(a, b)
    _draw_nan_words(case.b if of_b else case.a, generator)
    finite, largest = (case.b.t(), case.a) if of_b else (case.a, case.b)
    # sums in any order differ by a few roundings of the sum of magnitudes
    unit = 2.0**-23 if gemm.accumulate is Accumulate.FP32 else 2.0**-10
    slack = finite.float().nan_to_num(0.0, 0.0, 0.0).abs().sum(1, keepdim=True) * largest.float().abs().max() * unit
    if gemm.accumulate is Accumulate.FP16:  # half the least number for each product, and for each sum
        slack += (finite != 0).sum(1, keepdim=True) * limits.smallest_normal * limits.eps
    exact, slack = cases.product_fp32(case), slack.t() if of_b else slack
    rounded = exact.to(dtype_of(gemm)).float()
    step = (exact.abs() * limits.eps).clamp(min=limits.smallest_normal * limits.eps)
    low, high = ((exact + off).where(rounded.isfinite(), rounded) for off in (-slack - step, slack + step))
    overflow = limits.max * (2 - limits.eps / 2) / (2 - limits.eps)  # from here on, rounding gives infinity
    near_overflow = (exact.abs() - overflow).abs() <= slack + 0.01 * overflow
    low[near_overflow], high[near_overflow] = -INFINITY, INFINITY
    for bound in (low, high):
        bound[exact.isnan()] = IN_PLACE_OF_NAN
    case.expected.update(c=rounded, low=low, high=high)
    return case


def _draw_nan_words(values: torch.Tensor, generator: torch.Generator) -> None:
    """Write other words in place of NaN: quiet and signalling ones, of both signs, those at the edges first."""
    words, infinity = values.view(torch.int16), int(torch.tensor(INFINITY, dtype=values.dtype).view(torch.int16))
    at = values.isnan()
    numbers = torch.arange(infinity + 1, 1 << 15, dtype=torch.int32, device=values.device)
    others = numbers[torch.randperm(len(numbers), generator=generator, device=values.device)]
    middle = len(numbers) // 2
    edges = torch.stack((numbers[0], numbers[middle - 1], numbers[middle], numbers[-1]))
    drawn = torch.cat((edges, edges - (1 << 15), others, others - (1 << 15)))
    drawn = drawn.repeat(-(-int(at.sum()) // len(drawn)))
    words[at] = drawn[: int(at.sum())].to(torch.int16)


def _one_left(values_K: torch.Tensor, at: int) -> torch.Tensor:
    """Zeros, but for one value."""
    left = torch.zeros_like(values_K)
    left[at] = values_K[at]
    return left


def leave_one(rows_RK: torch.Tensor, generator: torch.Generator) -> None:
    """Write zeros in each row, but for one value at a random place of its own."""
    rows, k = rows_RK.shape
    at_R1 = torch.randint(k, (rows, 1), generator=generator, device=rows_RK.device)
    left_R1 = rows_RK.gather(1, at_R1)
    rows_RK.zero_()
    rows_RK.scatter_(1, at_R1, left_R1)


CHECK = SpecialValues()
