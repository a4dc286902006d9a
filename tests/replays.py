"""Proposers on a recorded task without an evaluator: every proposal counts, also one that comes again."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cuda_l2.propose._base import Maker
from cuda_l2.propose._recorded import RecordedSpace, recorded_reward
from cuda_l2.records import Candidate, Interval, Trial

LATE = 0.5
"""The last half of a search: what the policy has come to propose."""
T_QUANTILE = 2.262
"""97.5 % quantile of Student's t with nine degrees of freedom: ten seeds."""
GROUP = 8

Curve = list[float]  # rewards in the order proposed


def trial_of(space: RecordedSpace, candidate: Candidate) -> Trial:
    row = space.by_values[space.inner.whole(candidate.family, tuple(value for _, value in candidate.schedule))]
    build = replace(row.build, candidate_id=candidate.id)
    reward = recorded_reward(row)
    return Trial(space.task, candidate, "recorded", "search", build, row.verdict, row.timing("search"), reward)


def replay(space: RecordedSpace, maker: Maker, trials: int, seed: int) -> Curve:
    """The rewards of one search."""
    history: list[Trial] = []
    proposer = maker(space, lambda: list(history), np.random.default_rng(seed))
    while len(history) < trials:
        group = [trial_of(space, candidate) for candidate in proposer.propose(min(GROUP, trials - len(history)))]
        history.extend(group)
        proposer.observe(group)
    return [trial.reward for trial in history]


def late_mean(curve: Curve) -> float:
    """Mean reward of the last half."""
    return statistics.fmean(curve[int(len(curve) * LATE) :])


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean difference over ten seeds with its 95 % interval (Student's t)."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert len(differences) == 10
    mean, half = statistics.fmean(differences), T_QUANTILE * statistics.stdev(differences) / math.sqrt(10)
    return Interval(mean, mean - half, mean + half)
