"""Every number of the operands' type counts, whichever of A and B holds it.

One operand has a single 1 or -1 in each row, or column, so that C repeats the other one's words, bit for bit: no sum,
no rounding. The largest, the smallest and those beside powers of two always come up, others are drawn, all of them
where C is large: of fp16 the subnormal ones too. What is read as another number at some of them alone shows. The first
kind comes once more, each number at as many places as there are: where C is 256 x 256 at each of the places that a tile
of 16 x 16 has, so that what is read as another number at one place of such a tile shows.
"""

from collections.abc import Iterator
from functools import partial

import torch

from cuda_l2.machine.tensors import dtype_of
from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.products import ProductCase, ProductCases
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_expected

MOST_LAUNCHES, MOST_BYTES = 3, 64 << 20
"""For one operand, and of their tensors together: where they do not suffice, numbers are drawn."""
TILE = 16
"""Rows and columns between places that are taken for the same place of a tile."""


class Words(ProductCheck):
    name = "words"
    order = 35

    def run_on(self, session: Session, cases: ProductCases) -> None:
        reason = "reads some numbers of {what} as others: times 1 or -1, {element}"
        require_expected(session, _turns(cases), torch.ne, VerdictStatus.INCORRECT, reason)


def _turns(cases: ProductCases) -> Iterator[Turn[ProductCase]]:
    gemm = cases.task
    for operand, shown in (("a", gemm.m * min(gemm.k, gemm.n)), ("b", gemm.n * min(gemm.k, gemm.m))):
        wanted = -(-(1 << 16) // shown)
        count = min(wanted, MOST_LAUNCHES, max(1, MOST_BYTES // gemm.bytes))
        for index in range(count):
            first = index * shown if count == wanted else None
            case = cases.get(f"words {operand}", index, partial(_make, operand=operand, first=first))
            yield Turn(case, operand.upper())
        case = cases.get(f"words {operand} at places", 0, partial(_make, operand=operand, first=None, at_places=True))
        yield Turn(case, operand.upper())


def _numbers(cases: ProductCases) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite numbers of the type: those at the edges of a power of two, and the others.

    Those whose sums in fp32 may be flushed to zero are left out.
    """
    dtype = dtype_of(cases.task)
    every = torch.arange(1 << 16, dtype=torch.int32, device=cases.device).to(torch.int16).view(dtype)
    least = torch.finfo(torch.float32).smallest_normal
    every = every[every.isfinite() & ((every == 0) | (every.float().abs() >= least))]
    mantissa = every.view(torch.int16) & (round(1 / torch.finfo(dtype).eps) - 1)
    edge = (mantissa <= 1) | (mantissa == mantissa.max())
    return every[edge], every[~edge]


def _make(
    cases: ProductCases, generator: torch.Generator, operand: str, first: int | None, *, at_places: bool = False
) -> ProductCase:
    """first: number of words that launches before this one showed; None where they are drawn.

    at_places: those at the edges of powers of two alone, all of them in turn at each place of a tile.
    """
    gemm, device = cases.task, cases.device
    edges, others = _numbers(cases)
    if first is None:
        others, first = others[torch.randperm(len(others), generator=generator, device=device)], 0
    numbers = torch.cat((edges, others))
    lines, across = (gemm.m, gemm.n) if operand == "a" else (gemm.n, gemm.m)
    # the rows of K that the lines across show, each at least once where there are lines enough
    at_X = torch.randperm(gemm.k, generator=generator, device=device).repeat(-(-across // gemm.k))[:across]
    shown = at_X[: min(gemm.k, across)]
    words_LK = numbers[torch.randint(len(numbers), (lines, gemm.k), generator=generator, device=device)]
    at_L = torch.randperm(lines, generator=generator, device=device)
    turns_LX = first + at_L[:, None] * len(shown) + torch.arange(len(shown), device=device)
    if at_places:
        numbers, at_L = edges, torch.arange(lines, device=device)
        begins = torch.randint(len(edges), (TILE, TILE), generator=generator, device=device)
        tiles_LX = at_L[:, None] // TILE * -(-gemm.k // TILE) + shown // TILE
        turns_LX = begins[at_L[:, None] % TILE, shown % TILE] + tiles_LX
    words_LK[:, shown] = numbers[turns_LX % len(numbers)]
    ones_XK = torch.zeros(across, gemm.k, dtype=words_LK.dtype, device=device)
    signs_X = (torch.randint(0, 2, (across,), generator=generator, device=device) * 2 - 1).to(words_LK.dtype)
    ones_XK.scatter_(1, at_X[:, None], signs_X[:, None])
    product_LX = words_LK[:, at_X] * signs_X
    case = cases.operands(*((words_LK, ones_XK.t()) if operand == "a" else (ones_XK, words_LK.t())))
    case.expected["c"] = product_LX if operand == "a" else product_LX.t().contiguous()
    return case


CHECK = Words()
