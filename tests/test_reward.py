"""reward.py against values computed by hand."""

import math

import pytest
from made import CORRECT, timing

from cuda_l2.records import BuildStatus, Timing, TimingStatus, Verdict, VerdictStatus
from cuda_l2.reward import RewardSettings, count_tokens, group_advantages, reward, smooth


def timed(speedup: float, difference: float) -> Timing:
    return timing(1.0, {"torch": speedup}, max_difference=difference)


def test_equation_3() -> None:
    settings = RewardSettings(alpha=0.5, beta=0.001)
    # 1.4 - 0.5 * 0.2 - 0.001 * 300
    assert reward(BuildStatus.BUILT, CORRECT, timed(1.4, 0.2), 300, settings) == pytest.approx(1.0)


def test_failures_rank_below_any_correct_kernel() -> None:
    settings = RewardSettings(alpha=100.0)
    wrong = Verdict(VerdictStatus.IMPRECISE, reason="x")
    wrong_when_timed = Timing(TimingStatus.WRONG_OUTPUT, "search", reason="x")
    unbuildable = reward(BuildStatus.FAILED, None, None, 10, settings)
    incorrect = reward(BuildStatus.BUILT, wrong, None, 10, settings)
    stale = reward(BuildStatus.BUILT, CORRECT, wrong_when_timed, 10, settings)
    worst_correct = reward(BuildStatus.BUILT, CORRECT, timed(0.01, 50.0), 10**9, settings)
    assert unbuildable < incorrect == stale < worst_correct


def test_a_correct_kernel_without_a_timing_has_no_reward() -> None:
    assert math.isnan(reward(BuildStatus.BUILT, CORRECT, None, 10))


@pytest.mark.parametrize(
    "settings",
    [{"unbuildable": 0.0}, {"incorrect": 0.5}, {"alpha": -1.0}, {"smoothing_clip": 0.0}],
)
def test_settings_without_order_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        RewardSettings(**settings)


def test_length_counts_tokens_without_comments() -> None:
    # int main ( ) { return x += 1.5f ; } are eleven
    assert count_tokens("int main() { /* a comment */ return x += 1.5f; } // done") == 11


def test_smoothing_standardises_and_clips() -> None:
    history = [1.0, 2.0, 3.0]  # mean 2, population deviation sqrt(2/3)
    assert smooth([2.0, 3.0, 9.0, -9.0], history) == pytest.approx([0.0, math.sqrt(1.5), 1.5, -1.5])
    assert smooth([3.0], [3.0, 3.0]) == [0.0]


def test_advantages_are_the_groups_own_standard_scores() -> None:
    assert group_advantages([1.0, 3.0]) == pytest.approx([-1.0, 1.0])
    assert group_advantages([0.0, 0.0, 3.0]) == pytest.approx([-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)])


def test_a_group_without_variance_teaches_nothing() -> None:
    assert group_advantages([1.0, 1.0, 1.0]) is None
