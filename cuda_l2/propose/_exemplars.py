"""Exemplar sampling as CUDA-L1 does it: few, from distinct score buckets, better buckets more often."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")
BUCKETS = 8


def sample_exemplars(
    scored: Sequence[tuple[float, T]], count: int, rng: np.random.Generator, temperature: float = 0.5
) -> list[tuple[float, T]]:
    """`count` items from distinct buckets of equal score width, better buckets more often, uniform inside one.

    P(bucket) is proportional to exp((mean score - mu) / temperature), with mu and the scale of scores taken over
    the bucket means. Fewer come back where there are fewer buckets.
    """
    if not scored:
        return []
    scores = np.array([score for score, _ in scored])
    low, high = float(scores.min()), float(scores.max())
    width = (high - low) / BUCKETS or 1.0
    members: dict[int, list[int]] = {}
    for i, score in enumerate(scores):
        members.setdefault(min(int((score - low) / width), BUCKETS - 1), []).append(i)
    means = {bucket: float(scores[indices].mean()) for bucket, indices in members.items()}
    chosen: list[tuple[float, T]] = []
    left = sorted(means)
    while left and len(chosen) < count:
        values = np.array([means[bucket] for bucket in left])
        spread = float(values.std()) or 1.0
        weights = np.exp((values - values.mean()) / (temperature * spread))
        index = int(rng.choice(len(left), p=weights / weights.sum()))
        chosen.append(scored[int(rng.choice(members[left.pop(index)]))])
    return chosen
