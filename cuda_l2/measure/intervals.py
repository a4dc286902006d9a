"""Intervals without assumptions on the noise: medians bounded by order statistics."""

import math
import statistics
from collections.abc import Sequence

from cuda_l2.records import Interval

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959964


def median_interval(samples: Sequence[float]) -> Interval:
    """The median and its distribution-free 95 % interval; infinite bounds below six samples.

    The interval between the r-th smallest and r-th largest sample covers the median with probability
    1 - 2 P(Binomial(n, 1/2) < r).
    """
    ordered = sorted(samples)
    n = len(ordered)
    middle = statistics.median(ordered)
    tail = 0.0
    rank = 0
    for i in range(n // 2):
        tail += math.comb(n, i) / 2.0**n
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = i + 1
    if rank == 0:
        return Interval(middle, -math.inf, math.inf)
    return Interval(middle, ordered[rank - 1], ordered[n - rank])


def mean_interval(samples: Sequence[float]) -> Interval:
    """The mean and its normal 95 % interval, as the paper averages; infinite bounds below two samples."""
    mean = statistics.fmean(samples)
    if len(samples) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = NORMAL_QUANTILE * statistics.stdev(samples) / math.sqrt(len(samples))
    return Interval(mean, mean - half, mean + half)
