"""A pattern in a part of an operand must not be taken for one in all of it.

Equal rows, rows or halves of zeros, constants, triangles and diagonals may be looked for, in the first row or in a
sample, and save work; normal numbers stand everywhere else. Rows that are equal but for one element of each, which few
samples meet, come every time, and so do, but for one element, rows that are the negatives of others, rows whose parts
add up to zero, equal diagonals, and equal halves of K in A and B at once; rows that hold the same numbers, two of them
at other places; and operands whose memory begins with zeros.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from cuda_l2.tasks.products import ProductCase, ProductCases
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_all_right

DRAWN = 3
"""Patterns drawn for each operand, beside those that always come."""
ODD = 8.0
"""What an element that is unlike the others is multiplied by: it shows in sums of up to some 10,000 products."""
LEAST_BEGINNING = 64
"""Elements of an operand's memory that are zero at its beginning, in either layout; half of them where it is small."""


def signs(count: int, like: torch.Tensor) -> torch.Tensor:
    """1 and -1, so that two places a power of two apart have different signs, and aligned blocks the sum zero."""
    signs = like.new_ones(1)
    while len(signs) < count:
        signs = torch.cat([signs, -signs])
    return signs[:count]


def _first_rows_equal(rows: torch.Tensor, at: int) -> None:
    rows[1:2] = rows[:1]


def _rows_equal_but_one(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows[:] = rows[(at + 1) % len(rows)].clone()
    rows[at] = kept


def _rows_equal_but_in_one_element_each(rows: torch.Tensor, at: int) -> None:
    odd = rows.diagonal().clone()
    rows[:] = rows[at].clone()
    rows.diagonal().copy_(ODD * odd)


def _rows_negated_but_in_one_element(rows: torch.Tensor, at: int) -> None:
    rows[:] = signs(len(rows), rows)[:, None] * rows[at]
    rows[at, at % rows.shape[1]] = ODD


def _sums_zero_but_in_one_element(rows: torch.Tensor, at: int) -> None:
    rows[:] = signs(rows.shape[1], rows) * rows[:, :1]
    rows[at, at % rows.shape[1]] = ODD


def toeplitz(rows: torch.Tensor) -> torch.Tensor:
    """The matrix of equal diagonals that has the first row and column of another."""
    edge = torch.cat([rows[1:, 0].flip(0), rows[0]])  # up the first column, then along the first row
    return edge.unfold(0, rows.shape[1], 1).flip(0)


def _diagonals_equal_but_in_one_element(rows: torch.Tensor, at: int) -> None:
    rows[:] = toeplitz(rows)
    rows[at, at % rows.shape[1]] = ODD


def _halves_of_k_equal_but_in_one_element(rows: torch.Tensor, at: int) -> None:
    half = rows.shape[1] // 2
    rows[:, rows.shape[1] - half :] = rows[:, :half].clone()
    rows[at, at % rows.shape[1]] = ODD


def _rows_equal_but_for_two_swapped(rows: torch.Tensor, at: int) -> None:
    kept, one = rows[at].clone(), at % rows.shape[1]
    kept[one] = ODD
    others_R = (at + torch.arange(len(rows), device=rows.device)) % rows.shape[1]
    rows[:] = kept
    rows[:, one] = kept[others_R]
    rows.scatter_(1, others_R[:, None], ODD)


def _identity_but_for_few(rows: torch.Tensor, at: int) -> None:
    rows.zero_().fill_diagonal_(1)
    rows[at, (at + 1) % rows.shape[1]] = rows[0, -1] = ODD


def _signs_but_one_row(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows.sign_()
    rows[at] = kept


def _first_row_half_zero(rows: torch.Tensor, at: int) -> None:
    rows[0, rows.shape[1] // 2 :] = 0


def _halves_zero_but_in_one_row(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows[:, rows.shape[1] // 2 :] = 0
    rows[at] = kept


def _first_column_zero(rows: torch.Tensor, at: int) -> None:
    rows[:, 0] = 0


def _every_other_zero(rows: torch.Tensor, at: int) -> None:
    rows[::2] = 0


def _corners_zero(rows: torch.Tensor, at: int) -> None:
    for end in (0, -1):
        rows[end, 0] = rows[end, -1] = 0


def _constant_but_one_row(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows.fill_(float(kept[0]))
    rows[at] = kept


def _integers_but_one_row(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows.round_().clamp_(0, 1)
    rows[at] = kept


def _triangle(rows: torch.Tensor, at: int) -> None:
    rows.triu_()


def _lower_triangle(rows: torch.Tensor, at: int) -> None:
    rows.tril_()


def _diagonal_but_one_row(rows: torch.Tensor, at: int) -> None:
    kept = rows[at].clone()
    rows.tril_().triu_()
    rows[at] = kept


PATTERNS: tuple[Callable[[torch.Tensor, int], None], ...] = (
    *(_rows_equal_but_in_one_element_each, _rows_negated_but_in_one_element, _sums_zero_but_in_one_element),
    *(_diagonals_equal_but_in_one_element, _halves_of_k_equal_but_in_one_element, _rows_equal_but_for_two_swapped),
    *(_first_rows_equal, _rows_equal_but_one, _first_row_half_zero, _halves_zero_but_in_one_row, _first_column_zero),
    *(_every_other_zero, _corners_zero, _constant_but_one_row, _integers_but_one_row, _triangle),
    *(_lower_triangle, _diagonal_but_one_row, _signs_but_one_row, _identity_but_for_few),
)
"""What each does to an operand, rows x K, whose row `at` it may leave as it is."""
ALWAYS = {"A": (0, 1, 2, 3, 5), "B": (0, 1, 2, 3, 5), "AB": (4,)}
"""Which of them always come, by the operands that have them."""


class Structure(ProductCheck):
    name = "structure"
    order = 42

    def run_on(self, session: Session, cases: ProductCases) -> None:
        require_all_right(session, _turns(cases))


def _turns(cases: ProductCases) -> Iterator[Turn[ProductCase]]:
    for first in "AB":
        case = cases.get("begins with zeros", "AB".index(first), partial(_make_beginning, first))
        yield Turn(case, f"where A and B begin with zeros, {first} behind one other element")
    for operands, always in ALWAYS.items():
        others = [index for index in range(len(PATTERNS)) if index not in always]
        drawn = cases.rng.permutation(others)[:DRAWN] if len(operands) == 1 else ()
        for index in {*always, *map(int, drawn)}:
            case = cases.get(f"structure {operands}", index, partial(_make, PATTERNS[index], operands))
            what = PATTERNS[index].__name__.strip("_").replace("_", " ")
            yield Turn(case, f"where in {' and '.join(operands)} is {what}")


def _make_beginning(first: str, cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """The first rows and columns of A and of B are zero, but for the first element of one of them."""
    operands = cases.normal(generator)
    for name, operand in zip("AB", operands, strict=True):
        kept = float(operand[0, 0])
        for rows in (operand, operand.t()):
            most = len(rows) // 2
            least = min(most, -(-LEAST_BEGINNING // rows.shape[1]))
            rows[: int(least * (max(1, most) / max(1, least)) ** cases.rng.random())] = 0
        operand[0, 0] = ODD * kept if name == first else 0
    return cases.closely(cases.with_rows(cases.operands(*operands)))


def _make(
    pattern: Callable[[torch.Tensor, int], None], operands: str, cases: ProductCases, generator: torch.Generator
) -> ProductCase:
    a, b = cases.normal(generator)
    for rows in ([a] if "A" in operands else []) + ([b.t()] if "B" in operands else []):
        pattern(rows, int(torch.randint(len(rows), (), generator=generator, device=cases.device)))
    return cases.closely(cases.with_rows(cases.operands(a, b)))


CHECK = Structure()
