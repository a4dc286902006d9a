"""Compares proposers on a recording: their late samples, and their best so far over the search."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from cuda_l2.propose._base import Maker, proposer_maker
from cuda_l2.propose._recorded import RecordedSpace
from cuda_l2.propose.schedule import SchedulePolicy
from cuda_l2.records import Interval, Trial
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import markdown_table
from cuda_l2.system.text import counted

LATE = 0.5
"""The last half of a search: what the policy has come to propose."""
T_QUANTILE = {9: 2.262, 11: 2.201, 14: 2.145, 19: 2.093, 29: 2.045}
"""97.5 % quantiles of Student's t, by degrees of freedom."""

Curve = list[float]  # rewards in the order proposed
GROUP = 8  # candidates a search proposes at once


def replay(space: RecordedSpace, maker: Maker, trials: int, seed: int) -> Curve:
    """The rewards of one search over a recording."""
    history: list[Trial] = []
    proposer = maker(space, lambda: list(history), np.random.default_rng(seed))
    while len(history) < trials:
        group = [space.trial(candidate) for candidate in proposer.propose(min(GROUP, trials - len(history)))]
        history.extend(group)
        proposer.observe(group)
    return [trial.reward for trial in history]


def compare(space: RecordedSpace, policies: Sequence[str], seeds: int, trials: int) -> dict[str, list[Curve]]:
    """Searches of every proposer over the same seeds."""
    if seeds < 2 or trials < GROUP:
        raise UserError(f"a comparison needs at least 2 seeds and {GROUP} trials")
    return {name: [replay(space, maker_of(name), trials, seed) for seed in range(seeds)] for name in policies}


def maker_of(name: str) -> Maker:
    """A proposer's maker; `frozen` is the schedule policy without its updates."""
    return partial(SchedulePolicy, learns=False) if name == "frozen" else proposer_maker(name)


def late_mean(curve: Curve) -> float:
    """Mean reward of the last half."""
    return statistics.fmean(curve[int(len(curve) * LATE) :])


def best_area(curve: Curve) -> float:
    """Mean over the search of the best reward so far."""
    return statistics.fmean(np.maximum.accumulate(curve).tolist())


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Mean difference over seeds with its 95 % interval (Student's t)."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(differences)
    freedom = len(differences) - 1
    quantile = T_QUANTILE[max((f for f in T_QUANTILE if f <= freedom), default=9)] if freedom >= 9 else 12.7
    half = quantile * statistics.stdev(differences) / math.sqrt(len(differences))
    return Interval(mean, mean - half, mean + half)


def table(space: RecordedSpace, curves: dict[str, list[Curve]]) -> str:
    """A Markdown table of every proposer, differences of the first from each other."""
    best = max(space.rewards.values())
    names, rows = list(curves), []
    lines = [
        f"{space.task}: {counted(len(space.rewards), 'recorded schedule')}, best reward {best:.3f},"
        f" mean {statistics.fmean(space.rewards.values()):.3f}; {len(curves[names[0]])} seeds",
        "",
    ]
    head = (
        "policy",
        "late mean reward",
        "best so far, mean over the search",
        f"{names[0]} minus it, late",
        "best so far",
    )
    for name in names:
        late, area = [late_mean(c) for c in curves[name]], [best_area(c) for c in curves[name]]
        cells = [name, f"{statistics.fmean(late):.3f}", f"{statistics.fmean(area):.4f}"]
        for metric, values in ((late_mean, late), (best_area, area)):
            if name == names[0]:
                cells.append("")
                continue
            d = paired_difference([metric(c) for c in curves[names[0]]], values)
            cells.append(f"{d.estimate:+.4f} [{d.low:+.4f}, {d.high:+.4f}]")
        rows.append(cells)
    return "\n".join([*lines, *markdown_table(head, rows)])
