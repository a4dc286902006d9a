"""The reward of a trial: equation 3 of the paper, with what it leaves open decided here. Pure functions.

    r = mean_i(t_ref_i / t_custom_i - alpha diff_i) - beta L

t_ref is the strongest baseline of the same run and the speedup its interleaved ratio; diff is the largest
|fp32 reference - output| seen in the timed outputs; L counts the source's tokens without comments. Kernels
that do not build or are not correct get fixed rewards below that of any correct one.

Before group normalisation rewards are smoothed as CUDA-L1 does: clip((r - mu) / sigma, -1.5, 1.5), mu and
sigma over the task's history.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cuda_l2.records import BuildStatus, Timing, TimingStatus, Verdict, VerdictStatus

_COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*(?:\*/)?|//[^\n]*")
_TOKEN = re.compile(
    r'[A-Za-z_]\w*|\d[\w.]*|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[-+*/%&|^=<>!]=|<<|>>|->|\+\+|--|&&|\|\||\S'
)


@dataclass(frozen=True, slots=True)
class RewardSettings:
    """Coefficients of equation 3 and the order of failures; ValueError where the order is not kept."""

    alpha: float = 0.1  # a unit of C's largest difference
    beta: float = 1e-6  # a token of source
    unbuildable: float = -1.0
    incorrect: float = -0.5
    lowest_correct: float = 0.0
    smoothing_clip: float = 1.5

    def __post_init__(self) -> None:
        if not self.unbuildable < self.incorrect < self.lowest_correct:
            raise ValueError("rewards must rise from unbuildable through incorrect to correct")
        if min(self.alpha, self.beta) < 0 or self.smoothing_clip <= 0:
            raise ValueError("alpha and beta must not be negative, the clip must be positive")


def reward(
    build: BuildStatus,
    verdict: Verdict | None,
    timing: Timing | None,
    source_tokens: int,
    settings: RewardSettings = RewardSettings(),
) -> float:
    """The reward of what happened to one candidate; NaN where it was correct but not timed."""
    if build is not BuildStatus.BUILT:
        return settings.unbuildable
    if verdict is None or verdict.status is not VerdictStatus.CORRECT:
        return settings.incorrect
    if timing is None or timing.status is TimingStatus.BUSY:
        return math.nan
    if timing.status is not TimingStatus.MEASURED or timing.speedup is None:
        return settings.incorrect
    value = timing.speedup.estimate - settings.alpha * timing.max_difference - settings.beta * source_tokens
    return max(value, settings.lowest_correct)


def count_tokens(source: str) -> int:
    """Tokens of C source, comments left out."""
    return len(_TOKEN.findall(_COMMENT.sub(" ", source)))


def smooth(rewards: Sequence[float], history: Sequence[float], clip: float = 1.5) -> list[float]:
    """Rewards standardised by the mean and deviation of `history`, clipped to +-clip.

    A history without spread leaves only the sign of the difference, at most the clip.
    """
    mu = statistics.fmean(history) if history else 0.0
    sigma = statistics.pstdev(history) if len(history) > 1 else 0.0
    if sigma == 0.0:
        return [max(-clip, min(clip, r - mu)) for r in rewards]
    return [max(-clip, min(clip, (r - mu) / sigma)) for r in rewards]


def group_advantages(rewards_G: Sequence[float]) -> list[float] | None:
    """GRPO's advantages of one group: rewards less their mean, over their deviation; None without variance."""
    mean, deviation = statistics.fmean(rewards_G), statistics.pstdev(rewards_G)
    if deviation < 1e-8:
        return None
    return [(r - mean) / deviation for r in rewards_G]
