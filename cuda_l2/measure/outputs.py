"""How far outputs of timed launches may lie from their reference.

A matrix product is checked by a random projection, Freivalds' check ("Probabilistic machines can use less running
time", 1977): C x = A (B x) for a random x of signs, which costs M N + N K + M K instead of M N K. Rounding C to fp16
moves (C x)_i by about 2^-11 of the row's norm, so stale, missing and narrowed results all stand out.
"""

from collections.abc import Iterable

import torch

from cuda_l2.records import Accumulate
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

LARGEST_DEVIATION = 8.0  # of one row's projection, in standard deviations
_LARGEST_RMS = {Accumulate.FP32: 1.6, Accumulate.FP16: 24.0}
_RMS_OVER_ROUNDING = {Accumulate.FP32: 1.3, Accumulate.FP16: 20.0}
LONG_K = 8192
"""Above this errors of fp16 sums are allowed more: they grow with K, the rounding of the result with sqrt(K).

Measured with cuBLASLt on one H200: 21.8 times the rounding at K = 16384.
"""


class WrongOutput(Exception):
    """A timed launch did not produce its own result."""


def rounding_step(dtype: torch.dtype) -> float:
    """Standard deviation of rounding to a type relative to the value, at most."""
    return float(torch.finfo(dtype).eps) / 12**0.5


def require_own(deviations: Iterable[tuple[float, float]], accumulate: Accumulate, m: int, k: int) -> None:
    """WrongOutput where a launch's M projections deviate too far.

    deviations: of each launch the RMS and the largest, in standard deviations of rounding to the output's type.
    """
    allowed = _LARGEST_RMS[accumulate] * _of_long_sums(accumulate, k)
    for number, (rms, largest) in enumerate(deviations, 1):
        if not (rms <= allowed * (1 + 4 / m**0.5) and largest <= LARGEST_DEVIATION * allowed):  # false for NaN
            raise WrongOutput(f"timed launch {number} of those looked at did not produce its own result")


def rms_over_rounding(accumulate: Accumulate, k: int) -> float:
    """What the RMS error against fp32 may be, over that of rounding to the output's type."""
    return _RMS_OVER_ROUNDING[accumulate] * _of_long_sums(accumulate, k)


def require_precise(accumulate: Accumulate, k: int, rms: float, rounding: float) -> None:
    """WrongOutput where the RMS error of a launch is too large. rounding: RMS of rounding the reference to C's type."""
    if not rms <= rms_over_rounding(accumulate, k) * rounding + SUMMATION_NOISE * k**0.5:  # false for NaN
        raise WrongOutput(f"a timed launch is less precise than the checked ones: RMS {rms:.3g} against fp32")


def _of_long_sums(accumulate: Accumulate, k: int) -> float:
    return max(1.0, (k / LONG_K) ** 0.5) if accumulate is Accumulate.FP16 else 1.0
