"""Checks what timed launches wrote: every launch by a random projection, one launch a round element by element.

The projection is Freivalds' check ("Probabilistic machines can use less running time", 1977): C x = A (B x)
for a random x of signs, which costs M N + N K + M K instead of M N K. Rounding C to fp16 moves (C x)_i by
about 2^-11 of the row's norm, so stale, missing and narrowed results all stand out.
"""

from collections.abc import Sequence

import numpy as np
import torch

from cuda_l2.machine.cpu.arena import Arena, Words
from cuda_l2.records import Accumulate, Layout
from cuda_l2.tasks.tolerances import SUMMATION_NOISE

ROUNDING_STEP = 2.0**-10 / 12**0.5
"""Standard deviation of rounding to fp16 relative to the value, at most."""
SIGN_PATTERNS = 4096
LARGEST_DEVIATION = 8.0  # of one row's projection, in standard deviations
_LARGEST_RMS = {Accumulate.FP32: 1.6, Accumulate.FP16: 24.0}
_RMS_OVER_ROUNDING = {Accumulate.FP32: 1.3, Accumulate.FP16: 20.0}
LONG_K = 8192
"""Above this errors of fp16 sums are allowed more: they grow with K, the rounding of the result with sqrt(K).

Measured with cuBLASLt on one H200: 21.8 times the rounding at K = 16384.
"""


def largest_rms(accumulate: Accumulate, k: int) -> float:
    """What a row's projections may deviate by, in standard deviations of rounding to fp16."""
    return _LARGEST_RMS[accumulate] * _of_long_sums(accumulate, k)


def rms_over_rounding(accumulate: Accumulate, k: int) -> float:
    """What the RMS error against fp32 may be, over that of rounding to fp16."""
    return _RMS_OVER_ROUNDING[accumulate] * _of_long_sums(accumulate, k)


def _of_long_sums(accumulate: Accumulate, k: int) -> float:
    return max(1.0, (k / LONG_K) ** 0.5) if accumulate is Accumulate.FP16 else 1.0


class WrongOutput(Exception):
    """A timed launch did not produce its own result."""


class Operands:
    """What the arena's A and B hold, with private copies where candidates cannot reach."""

    def __init__(self, arena: Arena, rng: np.random.Generator) -> None:
        self.arena, self.rng = arena, rng
        self._words: dict[str, Words] = {}
        for name, rows in arena.operands.items():
            self._words[name] = rng.standard_normal(rows.shape, dtype=np.float32).astype(np.float16).view(np.uint16)
        largest = max(words.shape[1] for words in self._words.values())
        self._signs = rng.integers(0, 2, largest + SIGN_PATTERNS, dtype=np.uint16) << 15

    @property
    def slots(self) -> int:
        return self.arena.slots

    def begin_warm_up(self) -> None:
        """Whatever a warm-up meets, `refresh` changes."""

    def refresh(self, count: int) -> None:
        """New operands in the first slots: random signs flip, so that nothing kept from before is of use.

        Outputs are poisoned.
        """
        self.arena.poison_outputs(count)
        for name, rows in self.arena.operands.items():
            words = self._words[name]
            for slot in range(count):
                start = int(self.rng.integers(SIGN_PATTERNS))
                np.bitwise_xor(words[slot], self._signs[start : start + words.shape[1]], out=words[slot])
            rows[:count] = words[:count]

    def a(self, count: int) -> torch.Tensor:
        """A of the first slots, fp32 count x M x K."""
        gemm = self.arena.gemm
        return self._matrices("a", count, (gemm.m, gemm.k))

    def b(self, count: int) -> torch.Tensor:
        """B of the first slots, fp32 count x K x N."""
        gemm = self.arena.gemm
        if gemm.layout is Layout.NN:
            return self._matrices("b", count, (gemm.k, gemm.n))
        return self._matrices("b", count, (gemm.n, gemm.k)).transpose(1, 2)

    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        """`check_outputs` of launches on the first slots, all of them, in whichever order they ran."""
        return check_outputs(self, len(slots), element_wise)

    def require_untouched(self, count: int) -> None:
        """WrongOutput where a launch changed operands or wrote outside outputs and workspace."""
        for name, rows in self.arena.operands.items():
            if not np.array_equal(rows[:count], self._words[name][:count]):
                raise WrongOutput(f"changed its input {name.upper()} in a timed round")
        if not self.arena.guards_intact():
            raise WrongOutput("wrote outside C and its workspace in a timed round")

    def _matrices(self, name: str, count: int, shape: tuple[int, int]) -> torch.Tensor:
        words = self._words[name][:count, : shape[0] * shape[1]].reshape(count, *shape)
        return torch.from_numpy(words.view(np.float16)).float()


def check_outputs(operands: Operands, count: int, element_wise: bool = True) -> float:
    """Check the first slots' launches; the largest |fp32 reference - C| of one compared element by element, or NaN."""
    arena, gemm = operands.arena, operands.arena.gemm
    if not arena.gaps_intact(count):
        raise WrongOutput("wrote outside C in a timed round")
    signs_N = torch.from_numpy(operands.rng.integers(0, 2, gemm.n).astype(np.float32) * 2 - 1)
    c_LMN = torch.from_numpy(arena.outputs(count).view(np.float16)).float()
    expected_LM = (operands.a(count) @ (operands.b(count) @ signs_N)[..., None])[..., 0]
    # rounding to fp16, and where C is near zero the order of fp32 sums
    noise_LM = ROUNDING_STEP * torch.linalg.vector_norm(c_LMN, dim=2) + SUMMATION_NOISE * (gemm.k * gemm.n) ** 0.5
    deviation_LM = (c_LMN @ signs_N - expected_LM) / noise_LM
    allowed = largest_rms(gemm.accumulate, gemm.k)
    rms_right_L = deviation_LM.square().mean(1).sqrt() <= allowed * (1 + 4 / gemm.m**0.5)
    right_L = rms_right_L & (deviation_LM.abs().amax(1) <= LARGEST_DEVIATION * allowed)  # False for NaN
    if not right_L.all():
        number = int((~right_L).nonzero()[0]) + 1
        raise WrongOutput(f"timed launch {number} of {count} did not produce its own result")
    return _compare(operands, c_LMN, int(operands.rng.integers(count))) if element_wise else float("nan")


def _compare(operands: Operands, c_LMN: torch.Tensor, slot: int) -> float:
    """The largest difference of one launch from the fp32 reference; WrongOutput where it is imprecise."""
    gemm = operands.arena.gemm
    reference = operands.a(slot + 1)[slot] @ operands.b(slot + 1)[slot]
    rounding = float((reference.half().float() - reference).square().mean().sqrt())
    difference = c_LMN[slot] - reference
    rms = float(difference.square().mean().sqrt())
    if not rms <= rms_over_rounding(gemm.accumulate, gemm.k) * rounding + SUMMATION_NOISE * gemm.k**0.5:
        raise WrongOutput(f"a timed launch is less precise than the checked ones: RMS {rms:.3g} against fp32")
    return float(difference.abs().max())
