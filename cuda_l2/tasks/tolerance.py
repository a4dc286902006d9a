"""How far a result may lie from the exact one: as far as PyTorch's own result, and as rounding the inputs moves it.

The reference runs in fp64: the exact result. It runs in the task's type, as PyTorch does: eager's own error. It runs in
fp64 on inputs moved by half a unit in the last place of fp32: what no order of fp32 sums can be blamed for, times a
factor, since a sum of many terms rounds more than once. Inputs are moved each up or down at random, and all up: sums of
numbers of one sign may round the same way again and again, 128 times here. What random moves do counts 16 times, and
more where an element sums many inputs, since one chain's error grows faster. With inputs, sums on the way are moved:
what little is left where one is taken from another holds their rounding. Results may be moved as inputs are: where
inputs are small, what is computed from them rounds all the same, as exponentials near one do. Sums in less than fp32
move results thousands of times as far. Nothing is asked of elements that this takes across the border to infinity.

What PyTorch gives without any rounding, as copies and largest elements are, must be equal. Integers and booleans must
be equal wherever rounding does not decide between two, as inputs and sums moved farther
show. Not covered: an average over all elements as the only output, which hides the precision of its terms.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_l2.tasks.warm import warm_vector_math

EAGER_FACTOR = 1.25
"""As for matrix products: a candidate's error over that of the baseline."""
ROUNDING = 2.0**-24
ROUNDING_FACTOR = 16.0
SAME_WAY_FACTOR = 128.0
CHAIN, MOST_CHAINED = 64, 32.0
"""Terms of one chain for which the first factor is five times its error, which grows with their number, as what inputs
moved at random do grows with its root; and the most that this root counts."""
DRAWS = 3
SUMS = (torch.ops.aten.sum, torch.ops.aten.mean, torch.ops.aten.linalg_vector_norm, torch.ops.aten.cumsum)
LEAST = 2.0**-120
"""What any result may be off by: exponentials that vanish come out as 0, or as 2^-126 where arguments are bounded."""
UNROUNDED_LEAST = 64
"""Elements of an output that is taken for one without rounding."""
FREE_FACTOR = 4.0
"""Integers that rounding decides may be of any size up to this many times the reference's: an index far beyond a tensor
is no answer."""

Function = Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Bounds:
    """What one output may be. exact: fp64, or the integers themselves; free: elements that nothing is asked of.

    least, most: between them lie free integers. among: integers that index this tensor's last dimension; any other
    index of an equal element is as right, once a row.
    """

    exact: torch.Tensor
    dtype: torch.dtype
    free: torch.Tensor
    rms_allowed: float = 0.0
    max_allowed: float = 0.0
    eager_rms: float = 0.0
    eager_max: float = 0.0
    least: float = 0.0
    most: float = 0.0
    among: torch.Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> "Bounds":
        """The same on a device."""
        among = None if self.among is None else self.among.to(device)
        return replace(self, exact=self.exact.to(device), free=self.free.to(device), among=among)

    def violation(self, found: torch.Tensor) -> str:
        """Why a result is not right, in one line; empty where it is."""
        if found.shape != self.exact.shape or found.dtype != self.dtype:
            return f"is {found.dtype}{list(found.shape)}, not {self.dtype}{list(self.exact.shape)}"
        if not self.dtype.is_floating_point:
            outside = (found < self.least) | (found > self.most)
            wrong = (outside | ~self.free) & self._unlike(found)
            return self._first(wrong, found, "differs")
        if self._surely_right(found):
            return ""
        rounded = self.rounded
        finite = rounded.isfinite()
        same = (found == rounded) | (found.isnan() & rounded.isnan())
        wrong = torch.where(finite, ~found.isfinite(), ~same) & ~self.free
        if wrong.any():
            return self._first(wrong, found, "is of another kind")
        rms, largest, error = _errors(found, self.exact, finite & ~self.free)
        if largest > self.max_allowed:
            return self._first(
                error > self.max_allowed, found, f"is off by {largest:.3g}, allowed {self.max_allowed:.3g}"
            )
        if rms > self.rms_allowed:
            return f"has RMS error {rms:.3g} against fp64, allowed {self.rms_allowed:.3g}"
        return ""

    def _unlike(self, found: torch.Tensor) -> torch.Tensor:
        """Marks integers that are not the exact ones, nor as good as these."""
        differs = found != self.exact
        if self.among is None or not differs.any():
            return differs
        count = self.among.shape[-1]
        picked, right = (self.among.gather(-1, index.clamp(0, count - 1)) for index in (found, self.exact))
        equal = (picked == right) | (picked.isnan() & right.isnan())
        ordered = found.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1, keepdim=True)
        return (found < 0) | (found >= count) | ~equal | (twice & differs)

    @cached_property
    def rounded(self) -> torch.Tensor:
        """The exact result in the output's type."""
        return self.exact.to(self.dtype)

    @cached_property
    def _rounding(self) -> tuple[float, float]:
        """RMS and largest error of the exact result rounded; NaN where something is free or not finite."""
        error = self.rounded.double() - self.exact
        if self.free.any() or not error.numel():
            return float("nan"), float("nan")
        return float(error.square().mean().sqrt()), float(error.abs().max())

    def _surely_right(self, found: torch.Tensor) -> bool:
        """Whether a result is right by its distance from the rounded one alone: cheap, and mostly true."""
        rounding_rms, rounding_max = self._rounding
        if not found.numel():
            return False
        if found.is_cuda:
            apart = found.float().flatten() - self.rounded.float().flatten()
            largest = float(apart.abs().max())
            rms = float(torch.linalg.vector_norm(apart)) / apart.numel() ** 0.5
        else:  # numpy takes less time for small ones
            with np.errstate(all="ignore"):  # infinities
                difference = found.float().numpy() - self.rounded.float().numpy()
                largest = max(float(difference.max()), -float(difference.min()))
                rms = float(np.vdot(difference, difference) / difference.size) ** 0.5
        # not so for NaN
        return largest + rounding_max <= self.max_allowed and 1.001 * rms + rounding_rms <= self.rms_allowed

    def errors(self, found: torch.Tensor) -> tuple[float, float]:
        """RMS and largest |found - exact| where both are finite and something is asked; 0 for integers."""
        if not self.dtype.is_floating_point:
            return 0.0, 0.0
        where = self.exact.isfinite() & found.isfinite() & ~self.free
        rms, largest, _ = _errors(found, self.exact, where)
        return rms, largest

    def _first(self, wrong: torch.Tensor, found: torch.Tensor, what: str) -> str:
        if not wrong.any():
            return ""
        index = tuple(int(i) for i in wrong.nonzero()[0])
        return (
            f"{what} in {int(wrong.sum())} of {wrong.numel()} elements, the first at {list(index)}:"
            f" {found[index].item():g}, exact {self.exact[index].item():g}"
        )


def bounds(function: Function, tensors: Mapping[str, torch.Tensor], noise: float = 1.0) -> tuple[Bounds, ...]:
    """What each output may be on these tensors. The function works in the type of its arguments; they are kept.

    noise: times 2^-24 that inputs are moved by. Not where a tensor without dimensions is all that comes out: such sums
    are asked to be made in parts, since one chain errs more there than inputs of less precision do.
    """
    warm_vector_math()
    with torch.no_grad():
        eager = function(**{name: tensor.clone() for name, tensor in tensors.items()})
        exact = function(**widened(tensors))
        for output, right in zip(eager, exact, strict=True):
            if output.dtype.is_floating_point != right.dtype.is_floating_point or output.shape != right.shape:
                raise ValueError(f"the reference gives {_kind(output)} but in fp64 {_kind(right)}")
        device = exact[0].device
        generator = torch.Generator(device).manual_seed(0)
        one, given = not any(output.dim() for output in exact), sum(tensor.numel() for tensor in tensors.values())
        move = ROUNDING if one else ROUNDING * noise
        terms = [given / max(1, right.numel()) for right in exact]
        chained = [1.0 if one else min(MOST_CHAINED, max(1.0, each / CHAIN) ** 0.5) for each in terms]
        sums = _SumsMoved(generator)

        def on_moved(factor: float, more: float = 1.0) -> tuple[torch.Tensor, ...]:
            with sums.by(factor * more * ROUNDING):
                return function(**_moved(tensors, factor * move, generator))

        moved = [on_moved(1.0) for _ in range(DRAWS)]
        moved_up = function(**_moved(tensors, move))
        choices, borders = list[Sequence[torch.Tensor]](), list[Sequence[torch.Tensor]]()
        if not all(output.dtype.is_floating_point and output.isfinite().all() for output in eager):
            for _ in range(DRAWS):
                state = generator.get_state()
                choices.append(on_moved(ROUNDING_FACTOR, max(chained)))
                generator.set_state(state)  # what stands at a border crosses it one way or the other
                borders.append(on_moved(-ROUNDING_FACTOR, max(chained)))
            borders += [function(**_moved(tensors, sign * SAME_WAY_FACTOR * move)) for sign in (1, -1)]
        unrounded = _unrounded(function, tensors, eager, exact, generator)
    found = []
    for i, right in enumerate(exact):
        share = move * (SAME_WAY_FACTOR if terms[i] <= CHAIN and not one else ROUNDING_FACTOR)
        own = ([results[i] for results in each] for each in ((*moved, moved_up), choices, borders))
        limit = _bounds(eager[i], right, chained[i], share, *own)
        found.append(replace(limit, rms_allowed=LEAST, max_allowed=LEAST) if unrounded[i] else limit)
    return tuple(found)


def _unrounded(
    function: Function,
    tensors: Mapping[str, torch.Tensor],
    eager: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    generator: torch.Generator,
) -> list[bool]:
    """Which outputs PyTorch gives as they are in fp64, on these inputs and on such of at most one."""

    def equal(output: torch.Tensor, right: torch.Tensor) -> bool:
        real = output.dtype.is_floating_point and output.numel() >= UNROUNDED_LEAST
        return real and bool(((output == right) | (output.isnan() & right.isnan())).all())

    found = [equal(*each) for each in zip(eager, exact, strict=True)]
    if any(found):  # sums of equal numbers may be so by chance, and functions of large ones that are 0, 1 or these
        near = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.dtype.is_floating_point and tensor.numel():
                largest = tensor.double().nan_to_num(0, 0, 0).abs().max().clamp_min(1)
                steps = torch.randint(-8, 9, tensor.shape, generator=generator, device=tensor.device).double()
                near[name] = (tensor.double() / largest * (1 + torch.finfo(tensor.dtype).eps * steps)).to(tensor.dtype)
        again = zip(function(**{n: t.clone() for n, t in near.items()}), function(**widened(near)), strict=True)
        found = [first and equal(*each) for first, each in zip(found, again, strict=True)]
    return found


def _bounds(
    eager: torch.Tensor,
    exact: torch.Tensor,
    chained: float,
    share: float,
    moved: Sequence[torch.Tensor],
    choices: Sequence[torch.Tensor],
    borders: Sequence[torch.Tensor],
) -> Bounds:
    """chained: times ROUNDING_FACTOR. share: what rounding may do to a result, of itself.

    borders: more results, in which other numbers may be infinities.
    """
    dtype = eager.dtype
    if not dtype.is_floating_point:
        free = eager != exact
        for other in (*moved, *choices):
            free |= other != exact
        ends = [float(end) for run in (eager, exact, *moved, *choices) if run.numel() for end in run.double().aminmax()]
        ends = [0.0, *(FREE_FACTOR * end for end in ends)]
        return Bounds(exact.to(dtype), dtype, free, least=min(ends), most=max(ends))
    rounded = exact.to(dtype)
    finite = rounded.isfinite()
    kind = _kinds(rounded)
    free = _kinds(eager) != kind  # PyTorch itself overflows there, or rounding decides
    for other in (*moved, *choices, *borders):
        free |= _kinds(other.to(dtype)) != kind
    measured = finite & ~free
    eager_rms, eager_max, _ = _errors(eager, exact, measured)
    factors = [*[ROUNDING_FACTOR * chained] * (len(moved) - 1), SAME_WAY_FACTOR]
    noises = []
    for factor, other in zip(factors, moved, strict=True):
        rms, most, _ = _errors(other, exact, measured)
        noises.append((factor * rms, factor * most))
    result_rms, result_max, _ = _errors(torch.zeros_like(exact), exact, measured)
    noises.append((share * result_rms, share * result_max))
    rms_noise, max_noise = (max(each) for each in zip(*noises, strict=True))
    rounding_rms, _, _ = _errors(rounded, exact, measured)
    max_allowed = EAGER_FACTOR * eager_max + max_noise + _step(result_max, dtype) + LEAST
    return Bounds(
        *(exact, dtype, free | _at_the_border(exact, dtype, zip(factors, moved, strict=True), max_allowed)),
        rms_allowed=EAGER_FACTOR * max(eager_rms, rounding_rms) + rms_noise + LEAST,
        max_allowed=max_allowed,
        eager_rms=eager_rms,
        eager_max=eager_max,
    )


def _at_the_border(
    exact: torch.Tensor, dtype: torch.dtype, moved: Iterable[tuple[float, torch.Tensor]], allowed: float
) -> torch.Tensor:
    """Elements that what is allowed, or their own noise, may take across the border between numbers and infinity.

    moved: results on moved inputs, each with what its distance from the exact one counts.
    """
    info = torch.finfo(dtype)
    border = info.max * (1 + info.eps / (4 - 2 * info.eps))  # half a step above the largest number, in fp64
    magnitude = exact.abs()
    near = torch.zeros_like(exact, dtype=torch.bool)
    if ((magnitude > border / 2) & exact.isfinite()).any():
        away = (magnitude - border).abs()
        near = away <= allowed
        for factor, other in moved:
            near |= away <= factor * (other - exact).abs() + allowed  # not so for NaN
    return near


def _kinds(tensor: torch.Tensor) -> torch.Tensor:
    """0 for numbers, 1 and -1 for infinities, 2 for NaN."""
    return torch.where(tensor.isfinite(), 0, torch.where(tensor.isnan(), 2, tensor.sign())).to(torch.int8)


def _errors(found: torch.Tensor, exact: torch.Tensor, where: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """RMS and largest |found - exact| over the elements marked, and all of them, 0 elsewhere."""
    error = torch.where(where, found.double() - exact, 0.0).abs()
    count = int(where.sum())
    if not count:
        return 0.0, 0.0, error
    return float((error.square().sum() / count).sqrt()), float(error.max()), error


def _step(magnitude: float, dtype: torch.dtype) -> float:
    """The distance between numbers of a type at a magnitude."""
    return float(torch.finfo(dtype).eps) * magnitude


def widened(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, floating-point ones in fp64."""
    return {
        name: tensor.double() if tensor.dtype.is_floating_point else tensor.clone() for name, tensor in tensors.items()
    }


def _moved(
    tensors: Mapping[str, torch.Tensor], relative: float, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """In fp64, each number moved by this share of itself: up or down at random, up without a generator."""
    wide = widened(tensors)
    for name, tensor in wide.items():
        if tensor.dtype.is_floating_point:
            wide[name] = tensor * (1 + relative * (_signs(tensor, generator) if generator else 1))
    return wide


def _signs(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """1 or -1 for each element, in fp64: integers times 2^-24 would be fp32, in which 1 + 2^-24 is 1."""
    drawn = torch.randint(2, tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
    return drawn.mul_(2).sub_(1)


class _SumsMoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves sums of fp64 numbers that PyTorch makes on the way, each by a share of itself, up or down at random."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = generator
        self._relative = 0.0
        self._met: bool | None = None

    def by(self, relative: float) -> AbstractContextManager[object]:
        """Moves them by this share; does nothing once a function had none, since a long loop is slower in it."""
        if self._met is False:
            return contextlib.nullcontext()
        self._relative, self._met = relative, False
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in SUMS and made.dtype == torch.float64:
            self._met = True
            moved = made * (1 + self._relative * _signs(made, self._generator))
            return torch.where(made == made.round(), made, moved)  # counts are exact
        return made


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
