"""Operands as models have them, in all of their rows: no kernel may be right for random numbers alone.

Activations behind a norm, a softmax or a ReLU, images, masks, padding, a batch twice, weights as layers begin with
them, outliers in one channel, and the matrices of textbooks, in one operand or in both; and a number beside which the
rest of its row is small, where it meets zeros.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from cuda_l2.records import Accumulate
from cuda_l2.tasks.products import ALLOWED_NOISE, ALLOWED_SHARE, ProductCase, ProductCases
from cuda_l2.verify._base import ProductCheck, Session, Turn, require_all_right
from cuda_l2.verify.structure import signs, toeplitz

SMALL_FLOPS, LARGE_FLOPS = 1 << 23, 1 << 33
"""Up to the first a product has all patterns in each operand, above the second the fewest."""
DRAWN, FEWEST = 5, 2
USUAL_SCALE = 0.02
OUTLIER = 30.0
DOMINATES, DOMINATED = 25000.0, 0.2
STEP, SLIGHT = 2.0**-11, 0.0025
"""A step of an element from row to row, about one of fp16; what noise is beside a signal. bf16 rounds most of both."""
COUNTED = 2048
"""Integers from 0 to below this are numbers of fp16."""
LARGEST, LARGEST_OF_ALL = 8192.0, 32768.0
"""What a sum of products of typical size and one sign comes to at most, where both operands have a pattern, and any."""
Pattern = Callable[[torch.Tensor, int], torch.Tensor]


def _uniform(rows: torch.Tensor) -> torch.Tensor:
    """Normal numbers as uniform ones between -1 and 1."""
    return torch.erf(rows * 0.5**0.5)


def _one_hot(rows: torch.Tensor, at: int) -> torch.Tensor:
    places_R = (at + 7 * torch.arange(len(rows), device=rows.device)) % rows.shape[1]
    return torch.zeros_like(rows).scatter(1, places_R[:, None], 1.0)


def _padded(rows: torch.Tensor, at: int) -> torch.Tensor:
    found = rows.clone()
    found[math.ceil(0.75 * len(rows)) :] = 0
    return found


def _twice(rows: torch.Tensor, at: int) -> torch.Tensor:
    half = len(rows) // 2
    return torch.cat([rows[:half], rows[:half], rows[2 * half :]])


def _two_of_four_zero(rows: torch.Tensor, at: int) -> torch.Tensor:
    places_K = torch.arange(rows.shape[1], device=rows.device)
    return rows.where((places_K + at) % 4 < 2, 0.0)  # a product with a mask would hold -0


def _outlier_channel(rows: torch.Tensor, at: int) -> torch.Tensor:
    scales_K = torch.ones_like(rows[0])
    scales_K[at % len(scales_K)] = OUTLIER
    return rows * scales_K


def _symmetric(rows: torch.Tensor, at: int) -> torch.Tensor:
    size, found = min(rows.shape), rows.clone()
    found[:size, :size] = rows[:size, :size].tril() + rows[:size, :size].tril(-1).t()
    return found


def _dominant_diagonal(rows: torch.Tensor, at: int) -> torch.Tensor:
    found = rows / rows.abs().sum(1, keepdim=True).clamp(min=1e-3)
    found.diagonal().fill_(1.5)  # the others of a row add up to at most 1
    return found


def _normalized(rows: torch.Tensor, at: int) -> torch.Tensor:
    return (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True, correction=0).clamp(min=1e-3)


def _counted(rows: torch.Tensor, at: int) -> torch.Tensor:
    return (torch.arange(rows.numel(), device=rows.device) % COUNTED).reshape(rows.shape).to(rows.dtype)


def _rising(rows: torch.Tensor, at: int) -> torch.Tensor:
    places_K = torch.arange(rows.shape[1], device=rows.device)
    return (places_K + 0.5 + 0.2 * _uniform(rows)) * (2 / rows.shape[1])  # by less, fp16 has few steps between two


def _hadamard(rows: torch.Tensor, at: int) -> torch.Tensor:
    row_R, column_K = (torch.arange(size, device=rows.device) for size in rows.shape)
    return signs(max(rows.shape), rows)[row_R[:, None] & column_K]


def _cosines(rows: torch.Tensor, at: int) -> torch.Tensor:
    row_R, column_K = (torch.arange(size, device=rows.device).double() for size in rows.shape)
    return torch.cos(row_R[:, None] * (column_K + 0.5) * (math.pi / rows.shape[1])).to(rows.dtype)


def _ones_at_both_ends(rows: torch.Tensor, at: int) -> torch.Tensor:
    found = rows.clone()
    found[:, [0, -1]] = 1
    return found


def _first_constant(rows: torch.Tensor, at: int) -> torch.Tensor:
    return torch.cat([rows[:1, :1].expand_as(rows[:1]), rows[1:]])


def _two_largest_of_four(rows: torch.Tensor, at: int) -> torch.Tensor:
    k = rows.shape[1]
    fours = torch.nn.functional.pad(rows, (0, -k % 4)).reshape(len(rows), -1, 4)
    places = fours.abs().topk(2).indices
    return torch.zeros_like(fours).scatter(2, places, fours.gather(2, places)).reshape(len(rows), -1)[:, :k]


def _diagonal_blocks(rows: torch.Tensor, at: int) -> torch.Tensor:
    row_R, column_K = (torch.arange(size, device=rows.device) * 4 // size for size in rows.shape)
    return rows.where(row_R[:, None] == column_K, 0.0)


def _drifting(rows: torch.Tensor, at: int) -> torch.Tensor:
    return rows[:1] * (1 + STEP * rows.sign().cumsum(0))


def _gains(rows: torch.Tensor, at: int) -> torch.Tensor:
    return (0.5 + rows[:, :1].abs()) * rows[:1] * (1 + SLIGHT * _uniform(rows.roll(1, 1)))


def _about_an_offset(rows: torch.Tensor, at: int) -> torch.Tensor:
    return (1 + rows[:, :1].abs()) * (1 + SLIGHT * rows.roll(1, 1))


def _last_constant(rows: torch.Tensor, at: int) -> torch.Tensor:
    return torch.cat([rows[:, :-1], rows[:1, -1:].expand(len(rows), 1)], 1)


def _nearly_symmetric(rows: torch.Tensor, at: int) -> torch.Tensor:
    return _symmetric(rows, at) * (1 + 4 * SLIGHT * _uniform(rows))


def _unit_rows(rows: torch.Tensor, at: int) -> torch.Tensor:
    return _normalized(rows, at) / math.sqrt(rows.shape[1])


def _complex_blocks(rows: torch.Tensor, at: int) -> torch.Tensor:
    r, k = (size // 2 for size in rows.shape)
    real, imaginary, found = rows[:r, :k], rows[r : 2 * r, :k], rows.clone()
    found[: 2 * r, : 2 * k] = torch.cat([torch.cat([real, -imaginary], 1), torch.cat([imaginary, real], 1)])
    return found


def _nearly_a_triangle(rows: torch.Tensor, at: int) -> torch.Tensor:
    found = rows.triu()
    found.diagonal().copy_(rows.diagonal().sign() + rows.diagonal())
    return found + SLIGHT / 2 * rows.tril(-1).triu(-1)


def _circulant(rows: torch.Tensor, at: int) -> torch.Tensor:
    row_R, k = torch.arange(len(rows), device=rows.device), rows.shape[1]
    found: torch.Tensor = rows[0].repeat(2).unfold(0, k, 1)[-row_R % k]
    found[-1] = rows[-1]
    return found


PATTERNS: dict[str, Pattern] = {
    "weights of a usual scale": lambda rows, at: rows * USUAL_SCALE,
    "weights within a root of K": lambda rows, at: _uniform(rows) * rows.shape[1] ** -0.5,
    "a softmax of each row": lambda rows, at: rows.softmax(1),
    "normalized rows": _normalized,
    "a ReLU": lambda rows, at: rows.clamp(min=0),
    "numbers between 0 and 1": lambda rows, at: (_uniform(rows) + 1) / 2,
    "bytes over 255": lambda rows, at: ((_uniform(rows) + 1) * 127.5).round() / 255,
    "one channel of outliers": _outlier_channel,
    "a causal mask": lambda rows, at: rows.tril(),
    "rows of padding": _padded,
    "columns of padding": lambda rows, at: _padded(rows.t(), at).t(),
    "a batch twice": _twice,
    "columns twice": lambda rows, at: _twice(rows.t(), at).t(),
    "pairs of equal columns": lambda rows, at: rows[:, torch.arange(rows.shape[1], device=rows.device) // 2 * 2],
    "ones": lambda rows, at: torch.ones_like(rows),
    "1 and -1": lambda rows, at: rows.sign(),
    "an identity": lambda rows, at: torch.eye(*rows.shape, device=rows.device, dtype=rows.dtype),
    "a diagonal": lambda rows, at: rows.tril().triu(),
    "one-hot rows": _one_hot,
    "a band": lambda rows, at: rows.triu(-4).tril(4),
    "a symmetric matrix": _symmetric,
    "equal diagonals": lambda rows, at: toeplitz(rows),
    "a dominant diagonal": _dominant_diagonal,
    "two of four zero": _two_of_four_zero,
    "two of each four zero": _two_largest_of_four,
    "rising rows": _rising,
    "0, 1, 2 and so on": _counted,
    "0 and 1, mostly 1": lambda rows, at: (rows < 1.3).to(rows.dtype),
    "16 different numbers": lambda rows, at: (3 * rows).round().clamp(-8, 7).int() * 0.3,  # without -0
    "a Hadamard matrix": _hadamard,
    "a cosine transform": _cosines,
    "columns of ones at both ends": _ones_at_both_ends,
    "constant in its first row": _first_constant,
    "diagonal blocks": _diagonal_blocks,
    "rows that drift": _drifting,
    "one row at other gains": _gains,
    "numbers about an offset": _about_an_offset,
    "four equal columns each": lambda rows, at: rows[:, torch.arange(rows.shape[1], device=rows.device) // 4 * 4],
    "constant in its last column": _last_constant,
    "a nearly symmetric matrix": _nearly_symmetric,
    "rows of length 1": _unit_rows,
    "complex numbers as blocks": _complex_blocks,
    "a circulant but for one row": _circulant,
    "nearly a triangle": _nearly_a_triangle,
}
"""What each makes of an operand of normal numbers, rows x K."""
NAMES = tuple(PATTERNS)
ALWAYS_IN_B = "weights of a usual scale"
IN_BOTH = [
    name
    for name in NAMES
    if name not in {"an identity", "a diagonal", "one-hot rows", "a Hadamard matrix", "a cosine transform"}
]
"""Not those of which two have a product of nearly all zeros."""
ROWS_OF_ALL_SIZES = {"one row at other gains", "numbers about an offset"}
"""What fp16 sums of these lose grows with a row's size."""


class Models(ProductCheck):
    name = "as in models"
    order = 43

    def run_on(self, session: Session, cases: ProductCases) -> None:
        require_all_right(session, _turns(cases))


def _turns(cases: ProductCases) -> Iterator[Turn[ProductCase]]:
    yield Turn(cases.get("models", 0, _make_dominated), "where a number of A dominates its row and meets zeros")
    task = cases.task
    count = len(NAMES) if task.flops <= SMALL_FLOPS else DRAWN if task.flops <= LARGE_FLOPS else FEWEST
    every = [i for i, name in enumerate(NAMES) if task.accumulate is Accumulate.FP32 or name not in ROWS_OF_ALL_SIZES]
    for name in "AB":
        drawn = set(map(int, cases.rng.permutation(every)[:count]))
        for index in drawn | ({NAMES.index(ALWAYS_IN_B)} if name == "B" else set()):
            case = cases.get(f"models {name}", index, partial(_make, name, NAMES[index]))
            yield Turn(case, f"where {'A is' if name == 'A' else 'the columns of B are'} {NAMES[index]}")
    if task.accumulate is not Accumulate.FP32:  # sums of one sign lose digits
        return
    yield Turn(cases.get("models of signs", 0, _make_of_signs), "where A is negative and B positive")
    if max(task.m, task.n) <= task.k and max(task.m, task.n) ** 2 * task.k <= SMALL_FLOPS:
        yield Turn(cases.get("models of inverses", 0, _make_inverse), "where A B is nearly an identity")
    for index in map(int, cases.rng.permutation(len(IN_BOTH))[:count]):
        case = cases.get("models AB", index, partial(_make, "AB", IN_BOTH[index]))
        yield Turn(case, f"where A and the columns of B are {IN_BOTH[index]}")


def _make(operands: str, name: str, cases: ProductCases, generator: torch.Generator) -> ProductCase:
    """One operand holds normal numbers, so that each element of C tells what it came from, or both have the pattern."""
    a, b = cases.normal(generator)
    at = int(torch.randint(cases.task.k, (), generator=generator, device=cases.device))
    if "A" in operands:
        a = PATTERNS[name](a, at)
    if "B" in operands:
        b = PATTERNS[name](b.t(), at).t()
    if operands == "AB":
        return _judged_by_size(cases, a, b)
    other, size = (b, _size(a)) if operands == "A" else (a, _size(b))
    other /= max(1.0, size)
    return cases.closely(cases.with_rows(cases.operands(a, b)))


def _make_of_signs(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    a, b = cases.normal(generator)
    return _judged_by_size(cases, -a.abs(), b.abs())


def _make_inverse(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    gemm = cases.task
    drawn = torch.randn(gemm.k, max(gemm.m, gemm.n), generator=generator, device=cases.device)
    columns = torch.linalg.qr(drawn).Q
    return _judged_by_size(cases, 2 * columns[:, : gemm.m].t(), columns[:, : gemm.n] / 2)  # no transposes


def _size(operand: torch.Tensor) -> float:
    """The root of its mean square."""
    return float(operand.square().mean().sqrt())


def _judged_by_size(cases: ProductCases, a: torch.Tensor, b: torch.Tensor) -> ProductCase:
    """A case whose elements of C may be off by what those of normal numbers may at most, in proportion to these."""
    size = max(_size(a) * _size(b), 1e-12)
    scale, k = min(1.0, LARGEST / (size * cases.task.k)), cases.task.k
    case = cases.with_rows(cases.operands(a, b * scale))
    if (most := float(case.expected["fp32"].abs().max())) > LARGEST_OF_ALL:
        scale *= LARGEST_OF_ALL / most
        case = cases.with_rows(cases.operands(a, b * scale), case.expected["rows"].tolist())
    allowed = case.expected["fp32"].abs() * ALLOWED_SHARE + ALLOWED_NOISE * k**0.5 * size * scale
    limits = torch.finfo(getattr(torch, cases.task.dtype))
    allowed += limits.smallest_normal * limits.eps / 2  # rounding where C is subnormal, whatever its size
    return cases.closely(replace(case, expected={**case.expected, "allowed": allowed}))


def _make_dominated(cases: ProductCases, generator: torch.Generator) -> ProductCase:
    a, b = cases.normal(generator)
    at = int(torch.randint(cases.task.k, (), generator=generator, device=cases.device))
    a *= DOMINATED
    a[:, at], b[at] = DOMINATES, 0
    return cases.closely(cases.with_rows(cases.operands(a, b)))


CHECK = Models()
