"""Checks what timed launches wrote: every launch by a random projection, one launch a round element by element.

The projection is Freivalds' check ("Probabilistic machines can use less running time", 1977): C x = A (B x)
for a random x of signs, which costs M N + N K + M K instead of M N K. Rounding C to fp16 moves (C x)_i by
about 2^-11 of the row's norm, so stale, missing and narrowed results all stand out.
"""

import numpy as np
import torch

from cuda_l2.execute.arena import WINDOW_ELEMENTS, Arena, Call, Words
from cuda_l2.records import Accumulate, Gemm, Layout

ROUNDING_STEP = 2.0**-10 / 12**0.5
"""Standard deviation of rounding to fp16 relative to the value, at most."""
SUMMATION_NOISE = 2.0**-20
LARGEST_DEVIATION = 8.0  # of one row's projection, in standard deviations
LARGEST_RMS = {Accumulate.FP32: 1.6, Accumulate.FP16: 24.0}
RMS_OVER_ROUNDING = {Accumulate.FP32: 1.3, Accumulate.FP16: 20.0}


class WrongOutput(Exception):
    """A timed launch did not produce its own result."""


class Operands:
    """What the arena's A and B hold during one round, in fp32, kept where candidates cannot reach."""

    def __init__(self, arena: Arena, rng: np.random.Generator) -> None:
        self.arena, self.rng, gemm = arena, rng, arena.gemm
        self._flat: dict[str, torch.Tensor] = {}
        self._words: dict[str, Words] = {}
        for name, words in (("a", arena.a), ("b", arena.b)):
            words[:] = rng.standard_normal(words.size, dtype=np.float32).astype(np.float16).view(np.uint16)
            self._words[name] = words.copy()
        self._signs = rng.integers(0, 2, max(arena.a.size, arena.b.size) + 4096, dtype=np.uint16) << 15
        self.gemm: Gemm = gemm
        self.refresh()

    def refresh(self) -> None:
        """New operands: random signs flip, so that nothing kept from an earlier round is of use."""
        for name, words in (("a", self.arena.a), ("b", self.arena.b)):
            start = int(self.rng.integers(4096))
            np.bitwise_xor(self._words[name], self._signs[start : start + words.size], out=self._words[name])
            words[:] = self._words[name]
            self._flat[name] = torch.from_numpy(self._words[name].view(np.float16)).float()

    def calls(self, count: int) -> list[Call]:
        """Launches with operands and outputs of their own."""
        windows = self.arena.windows
        a = self.rng.permutation(windows)[np.arange(count) % windows]
        b = self.rng.permutation(windows)[np.arange(count) % windows]
        return [Call(int(a[i]), int(b[i]), slot=i) for i in range(count)]

    def a(self, call: Call) -> torch.Tensor:
        """A of one launch, fp32 M x K."""
        gemm = self.gemm
        return self._flat["a"].as_strided((gemm.m, gemm.k), (gemm.k, 1), call.a_window * WINDOW_ELEMENTS)

    def b(self, call: Call) -> torch.Tensor:
        """B of one launch, fp32 K x N."""
        gemm = self.gemm
        strides = (gemm.n, 1) if gemm.layout is Layout.NN else (1, gemm.k)
        return self._flat["b"].as_strided((gemm.k, gemm.n), strides, call.b_window * WINDOW_ELEMENTS)

    def require_untouched(self) -> None:
        """WrongOutput where a launch changed operands or wrote outside outputs and workspace."""
        for name, words in (("a", self.arena.a), ("b", self.arena.b)):
            if not np.array_equal(words, self._words[name]):
                raise WrongOutput(f"changed its input {name.upper()} in a timed round")
        if not self.arena.guards_intact():
            raise WrongOutput("wrote outside C and its workspace in a timed round")


def check_outputs(operands: Operands, calls: list[Call], element_wise: bool = True) -> float:
    """Check every launch; the largest |fp32 reference - C| of the one compared element by element, else NaN."""
    arena, gemm = operands.arena, operands.gemm
    if not arena.gaps_intact(len(calls)):
        raise WrongOutput("wrote outside C in a timed round")
    signs_N = torch.from_numpy(operands.rng.integers(0, 2, gemm.n).astype(np.float32) * 2 - 1)
    c_LMN = torch.from_numpy(arena.outputs(len(calls)).view(np.float16)).float()
    expected_LM = torch.stack([operands.a(call) @ (operands.b(call) @ signs_N) for call in calls])
    # rounding to fp16, and where C is near zero the order of fp32 sums
    noise_LM = ROUNDING_STEP * torch.linalg.vector_norm(c_LMN, dim=2) + SUMMATION_NOISE * (gemm.k * gemm.n) ** 0.5
    deviation_LM = (c_LMN @ signs_N - expected_LM) / noise_LM
    allowed = LARGEST_RMS[gemm.accumulate]
    rms_right_L = deviation_LM.square().mean(1).sqrt() <= allowed * (1 + 4 / gemm.m**0.5)
    right_L = rms_right_L & (deviation_LM.abs().amax(1) <= LARGEST_DEVIATION * allowed)  # False for NaN
    if not right_L.all():
        number = int((~right_L).nonzero()[0]) + 1
        raise WrongOutput(f"timed launch {number} of {len(calls)} did not produce its own result")
    return _compare(operands, calls[int(operands.rng.integers(len(calls)))]) if element_wise else float("nan")


def _compare(operands: Operands, call: Call) -> float:
    c = torch.from_numpy(operands.arena.output(call.slot).view(np.float16)).float()
    reference = operands.a(call) @ operands.b(call)
    rounding = float((reference.half().float() - reference).square().mean().sqrt())
    difference = c - reference
    rms = float(difference.square().mean().sqrt())
    if not rms <= RMS_OVER_ROUNDING[operands.gemm.accumulate] * rounding + 1e-6 * float(reference.abs().max()):
        raise WrongOutput(
            f"a timed launch is less precise than the checked ones: RMS difference {rms:.3g} against fp32"
        )
    return float(difference.abs().max())
