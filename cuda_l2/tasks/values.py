"""How the tensors of a task are drawn: domains that a definition states, distributions that a judge chooses."""

import enum
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cuda_l2.contract.expressions import evaluate


class Domain(enum.StrEnum):
    """Which numbers make sense in a tensor."""

    REAL = "real"
    POSITIVE = "positive"
    SQUARES = "squares"
    UNIT = "unit"  # between 0 and 1
    PROBABILITIES = "probabilities"  # of the last dimension
    LOG_PROBABILITIES = "log-probabilities"
    DEFINITE = "definite"  # symmetric positive definite matrices
    TRIANGULAR = "triangular"  # lower triangular matrices that can be inverted
    INTEGERS = "integers"
    BOOLEANS = "booleans"


class Distribution(enum.StrEnum):
    """How real numbers are spread. A kernel that is right on one alone has learnt the test."""

    NORMAL = "normal"
    UNIFORM = "uniform"  # -1 to 0: sums grow, a largest that begins at 0 stays; a row in four has these 2^n apart
    OFFSET = "offset"  # mean 8, deviation 1: variances cancel; a row in four rises
    WIDE = "wide"  # deviation 8: exponentials spread; a row in four is nearly the one before, one has halves
    LARGE = "large"  # deviation 100: exponentials overflow where nothing is subtracted first; peaks stand alone
    FAR = "far"  # 100 to 200, a row in four -200 to -100: its exponentials vanish where a largest one began at 0
    DISTANT = "distant"  # about -4,000 to -1,000, one time in four positive, all near each other: variances cancel
    SMALL = "small"  # deviation 0.001 to 0.05, another for each tensor; a row in four 10^-7 of that, not in fp16
    HUGE = "huge"  # 30,000 to 60,000 of either sign, in fp16 alone: it does not hold sums of two
    SPARSE = "sparse"  # one in ten is not zero, in a row in four none, of a vector few; half of all integers are one
    CONSTANT = "constant"  # one number everywhere; integers collide

    @property
    def words(self) -> str:
        """The distribution in words, for the author of a kernel."""
        return _DISTRIBUTIONS[self]


_DISTRIBUTIONS = {
    Distribution.NORMAL: "of mean 0 and deviation 1",
    Distribution.UNIFORM: "from -1 to 0",
    Distribution.OFFSET: "of mean 8 and deviation 1",
    Distribution.WIDE: "of deviation 8, in one of four rows halves up to 127",
    Distribution.LARGE: "of deviation 100 with peaks above 1,000",
    Distribution.FAR: "from 100 to 200, and in one of four rows from -200 to -100",
    Distribution.DISTANT: "near 1,000 to 4,000 or -4,000 to -1,000",
    Distribution.SMALL: "of deviation 0.001 to 0.05, in one of four rows 10^-7 of that (not in float16)",
    Distribution.HUGE: "in float16 of 30,000 to 60,000, of either sign",
    Distribution.SPARSE: "nine in ten of them 0",
    Distribution.CONSTANT: "all the same",
}


def distributions(dtype: str) -> list[Distribution]:
    """What values of a type are drawn by."""
    return [each for each in Distribution if each is not Distribution.HUGE or dtype == "float16"]


PEAK = 1000.0
PEAK_PLACES = 4
"""Peaks come at all places modulo this in turn: where all were at random, a kernel that looks at every second element
passed once in some hundred judgements."""
STRIDE_POWERS = (3, 11)
"""Between these powers of two, the last one left out, the largest of a row stand apart: as one thread's elements do."""
TO_ZERO = 2.0**-12
TINY = 1e-7
"""So small are rows beside which what a kernel adds lest it divide by zero counts."""
FEW = 3
"""Elements of a vector that are not zero where values are sparse, at most: a sample of it sees none."""
LARGEST_OF_8_BITS = 127
NEARLY_PARALLEL = (Distribution.LARGE, Distribution.DISTANT)
"""Their rows are: matrices that are made of them have no factors in fp32."""


@dataclass(frozen=True, slots=True)
class Values:
    """One tensor of a definition: expressions over its sizes for each dimension, and what may stand in it.

    dtype: empty for the task's own. fan_in: values are divided by this expression's square root, as a layer's weights
    are. least, below: of integers.
    """

    shape: str
    domain: Domain = Domain.REAL
    dtype: str = ""
    fan_in: str = "1"
    below: str = "2"
    least: int = 0

    def dims(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(evaluate(expression, sizes) for expression in self.shape.split())

    def dtype_in(self, task_dtype: str) -> str:
        """Torch's name for its type in a task of this type."""
        return self.dtype or task_dtype

    def draw(
        self,
        sizes: Mapping[str, int],
        task_dtype: str,
        generator: torch.Generator,
        distribution: Distribution = Distribution.NORMAL,
    ) -> torch.Tensor:
        """Fresh values on the generator's device."""
        dtype: torch.dtype = getattr(torch, self.dtype_in(task_dtype))
        shape, device = self.dims(sizes), generator.device
        if self.domain is Domain.INTEGERS:
            below = max(self.least + 1, evaluate(self.below, sizes))
            drawn = torch.randint(self.least, below, shape, generator=generator, device=device)
            if distribution is Distribution.CONSTANT:
                drawn = drawn.flatten()[:1].expand(shape)
            elif distribution is Distribution.SPARSE and drawn.numel():
                often = torch.rand(shape, generator=generator, device=device) < 0.5
                drawn = torch.where(often, drawn.flatten()[drawn.numel() // 2], drawn)
            return drawn.to(dtype)
        if self.domain is Domain.BOOLEANS:
            return torch.rand(shape, generator=generator, device=device) < 0.5
        if self.domain is Domain.UNIT:
            drawn = torch.rand(shape, generator=generator, device=device)
            if distribution is Distribution.SPARSE:
                drawn = _at_the_ends(drawn)
            return drawn.to(dtype)
        if self.domain in (Domain.DEFINITE, Domain.TRIANGULAR) and distribution in NEARLY_PARALLEL:
            distribution = Distribution.NORMAL
        drawn = real(shape, generator, distribution)
        if distribution is Distribution.SMALL and self.domain is Domain.REAL and dtype is not torch.float16:
            _tiny_rows(drawn)
        if self.domain is Domain.REAL and distribution is Distribution.SPARSE and drawn.dim() > 1:
            drawn[..., 2::4, :] *= 0  # of either sign
        return (_shaped(drawn, self.domain) / math.sqrt(evaluate(self.fan_in, sizes))).to(dtype).contiguous()


def normal(shape: str, fan_in: str = "1") -> Values:
    return Values(shape, fan_in=fan_in)


def integers(shape: str, below: str, dtype: str = "int64", least: int = 0) -> Values:
    return Values(shape, Domain.INTEGERS, dtype, below=below, least=least)


def booleans(shape: str) -> Values:
    return Values(shape, Domain.BOOLEANS, "bool")


def seeded(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one tensor: no tensor's values depend on which others are drawn."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


def real(shape: tuple[int, ...], generator: torch.Generator, distribution: Distribution) -> torch.Tensor:
    """Real numbers in fp32 on the generator's device."""
    device = generator.device
    if distribution is Distribution.UNIFORM:
        return _combed(-torch.rand(shape, generator=generator, device=device), generator)
    drawn = torch.randn(shape, generator=generator, device=device)
    match distribution:
        case Distribution.OFFSET:
            rows = drawn if drawn.dim() > 1 else drawn[..., None]
            rows[..., 3::4, :] = rows[..., 3::4, :].sort(-1).values
            return drawn + 8
        case Distribution.WIDE:
            return _in_halves(_nearly_equal(8 * drawn, generator))
        case Distribution.LARGE:
            return _peaked(100 * drawn, generator)
        case Distribution.FAR:
            drawn = 100 * (1 + torch.rand(shape, generator=generator, device=device))
            (drawn if drawn.dim() > 1 else drawn[..., None])[..., 1::4, :] *= -1
            return drawn
        case Distribution.DISTANT:
            mean = 1000 * 4 ** torch.rand((), generator=generator, device=device)
            sign = 1 - 2 * int(torch.randint(4, (), generator=generator, device=device) > 0)
            return sign * mean * (1 + drawn / 256)
        case Distribution.SMALL:
            return 1e-3 * 50 ** torch.rand((), generator=generator, device=device) * drawn
        case Distribution.HUGE:
            return drawn.sign() * 3e4 * (1 + torch.rand(shape, generator=generator, device=device))
        case Distribution.SPARSE:
            if drawn.dim() == 1 and drawn.numel() > FEW:
                at = torch.randint(len(drawn), (FEW,), generator=generator, device=device)
                return torch.zeros_like(drawn).index_copy_(0, at, drawn[at])
            return drawn * (torch.rand(shape, generator=generator, device=device) < 0.1)
        case Distribution.CONSTANT:
            return drawn.flatten()[:1].expand(shape)
    return drawn


def put(element: torch.Tensor, value: float) -> None:
    """Set one element, a view without dimensions; also the sign of NaN, which torch loses in bf16."""
    element.fill_(value)
    if math.isnan(value):
        element.copysign_(torch.full_like(element, math.copysign(1, value)))


def put_far_below(row: torch.Tensor, generator: torch.Generator) -> None:
    """Fill it with numbers near -10^9, as masks have them, or near -30,000 in fp16."""
    drawn = torch.randn(row.shape, generator=generator, device=row.device)
    row.copy_((-3e4 if row.dtype is torch.float16 else -1e9) * (1 + drawn / 256))


def _combed(drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """In every fourth row those at a stride, drawn, are nearer to zero than nearly all others."""
    if drawn.dim() and drawn.numel():
        device, columns_K = drawn.device, torch.arange(drawn.shape[-1], device=drawn.device)
        rows = drawn.view(-1, drawn.shape[-1])[1::4]
        powers = torch.randint(*STRIDE_POWERS, (len(rows), 1), generator=generator, device=device)
        first = torch.randint(1 << STRIDE_POWERS[1], (len(rows), 1), generator=generator, device=device)
        rows[(columns_K - first) % (1 << powers) == 0] *= TO_ZERO
    return drawn


def _peaked(drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """In every fourth row one number is far above all others, and in every fourth one the last two are, one apart."""
    if drawn.dim() and drawn.numel():
        rows = drawn.view(-1, drawn.shape[-1])
        single, columns = rows[3::4], rows.shape[1]
        at = torch.randint(columns, (len(single), 1), generator=generator, device=drawn.device)
        turn = torch.arange(len(single), device=drawn.device)[:, None]
        turn += torch.randint(PEAK_PLACES, (), generator=generator, device=drawn.device)
        at += turn % PEAK_PLACES - at % PEAK_PLACES
        at = torch.where(at < columns, at, at - PEAK_PLACES).clamp_min(0)
        single.scatter_(1, at, PEAK + single.gather(1, at).abs())
        rows[1::4, -1] = PEAK + rows[1::4, -1].abs()
        rows[1::4, -2:-1] = rows[1::4, -1:] - 1
    return drawn


def _nearly_equal(drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Every fourth row is the one before it but for one element."""
    if drawn.dim() > 1 and drawn.numel():
        rows = drawn.view(-1, drawn.shape[-1])
        copies = rows[2::4]
        at = torch.randint(rows.shape[1], (len(copies), 1), generator=generator, device=drawn.device)
        copies.copy_(rows[1::4][: len(copies)].scatter(1, at, copies.gather(1, at)))
    return drawn


def _in_halves(drawn: torch.Tensor) -> torch.Tensor:
    """Every fourth row has whole numbers and halves, the last of them the largest of 8 bits: what rounding ties on."""
    if drawn.dim() > 1 and drawn.numel():
        rows = drawn.view(-1, drawn.shape[-1])[3::4]
        rows.copy_((2 * rows).round() / 2)
        rows[:, -1] = LARGEST_OF_8_BITS
    return drawn


def _tiny_rows(drawn: torch.Tensor) -> None:
    """Every fourth row of a matrix becomes far smaller than the others."""
    if drawn.dim() > 1:
        drawn[..., 3::4, :] *= TINY


def _at_the_ends(drawn: torch.Tensor) -> torch.Tensor:
    """Every fourth row, or element, is near 0 (10^-7 to 10^-12), one near 1 and one 0."""
    rows = drawn if drawn.dim() > 1 else drawn[..., None]
    rows[..., 1::4, :] = 10 ** (-7 - 5 * rows[..., 1::4, :])
    rows[..., 2::4, :] = 1 - 10 ** (-4 - 3 * rows[..., 2::4, :])
    rows[..., 3::4, :] = 0
    return drawn


def _shaped(drawn: torch.Tensor, domain: Domain) -> torch.Tensor:
    """Real numbers moved into a domain."""
    match domain:
        case Domain.POSITIVE:
            return drawn.abs() + 0.01
        case Domain.SQUARES:
            return drawn.square()
        case Domain.PROBABILITIES:
            return torch.softmax(drawn, -1)
        case Domain.LOG_PROBABILITIES:
            return torch.log_softmax(drawn, -1)
        case Domain.DEFINITE:
            return drawn @ drawn.mT / drawn.shape[-1] + torch.eye(drawn.shape[-1], device=drawn.device)
        case Domain.TRIANGULAR:
            n = drawn.shape[-1]
            return drawn.tril(-1) / math.sqrt(n) + torch.diag_embed(1 + drawn.diagonal(dim1=-2, dim2=-1).abs())
    return drawn
