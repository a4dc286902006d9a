"""Jumps in reward: which they are, what a second look at them finds, and what a search makes of that."""

from dataclasses import replace
from functools import partial
from itertools import repeat

import made
import pytest
from conftest import CHEATS, honest_source
from made import CORRECT, timing
from test_search import Listed
from waiting import CLI

from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.records import (
    Candidate,
    Gemm,
    Interval,
    Review,
    ReviewStatus,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
    from_json,
    to_json,
)
from cuda_l2.review import jumps
from cuda_l2.review.jumps import compare_elsewhere, jump, measure_again
from cuda_l2.rigs import elsewhere
from cuda_l2.rigs._base import Elsewhere
from cuda_l2.search import Scope, search

GEMM = Gemm(48, 32, 64)
near = partial(made.near, share=0.01)


def timed(speedup: Interval) -> Timing:
    return timing(10.0, {"torch": 40.0}, speedup=speedup)


@pytest.mark.parametrize(
    ("speedup", "best", "found"),
    [
        (2.9, 0.0, ""),
        (3.1, 0.0, "over 3x"),
        (3.1, 2.9, "over 3x"),
        (3.5, 3.1, ""),  # 3.1 was one
        (6.3, 3.1, "twice the best known"),
        (0.41, 0.2, "twice the best known"),
        (0.39, 0.2, ""),
    ],
)
def test_a_jump_is_over_three_times_the_reference_or_twice_the_best(speedup, best, found) -> None:
    assert found in jump(speedup, best) and bool(jump(speedup, best)) == bool(found)


@pytest.mark.parametrize(
    ("again", "status", "counts"),
    [
        ([near(4.2)], "confirmed", 4.0),
        ([near(3.7)], "confirmed", 3.7),
        ([near(1.0), near(1.05)], "lowered", 1.0),
        ([near(3.0), near(3.9)], "lowered", 3.0),
        ([near(1.0), near(4.0)], "lowered", 1.0),
        ([made.near(1.0, 0.8), made.near(3.0, 0.8)], "lowered", 1.0),  # noise: the intervals meet
    ],
)
def test_what_is_measured_again_must_agree_and_the_slowest_counts(again, status, counts) -> None:
    later = iter(again)
    verdict, timing, review = measure_again("a jump", timed(near(4.0)), lambda: (CORRECT, timed(next(later))))
    assert (review.status, verdict) == (status, CORRECT) and next(later, None) is None
    assert review.speedups == (near(4.0), *again)
    assert timing.speedup.estimate == counts


def test_what_is_wrong_on_fresh_inputs_does_not_count() -> None:
    wrong = Verdict(VerdictStatus.INCORRECT, check="exact match", reason="C[0, 0] is 1")
    verdict, timing, review = measure_again("a jump", timed(near(4.0)), lambda: (wrong, None))
    assert (verdict, timing, review.status) == (wrong, None, "wrong") and "C[0, 0]" in review.reason


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (Elsewhere("GPU 1", "same", "measured", speedup=near(4.3)), "confirmed"),
        (Elsewhere("GPU 1", "same", "measured", speedup=near(2.0)), "unstable"),
        (Elsewhere("GPU 1", "another", "measured", speedup=near(2.0)), "confirmed"),
        (Elsewhere("GPU 1", "another", "incorrect", "C[0, 0] is 1"), "wrong"),
        (Elsewhere("GPU 1", "", "timed-out", "no answer within 600 s"), "confirmed"),
        (Elsewhere("GPU 1", "", "failed", "out of memory"), "confirmed"),
    ],
)
def test_a_second_device_must_agree(found, status) -> None:
    review = Review(ReviewStatus.CONFIRMED, "a jump", (near(4.0),))
    timing, review = compare_elsewhere(timed(near(4.0)), found, "same", review)
    assert review.status == status and "GPU 1" in review.elsewhere
    assert (timing.status is TimingStatus.MEASURED) == review.counts


@pytest.mark.full
def test_a_process_of_its_own_judges_elsewhere(target, monkeypatch) -> None:
    monkeypatch.setattr(elsewhere, "CLI", CLI)
    right = elsewhere.judge_on("1", GEMM, Candidate(honest_source()), "finalists", "cpu")
    assert right.machine == target.machine and right.status == "measured" and right.speedup.estimate > 0
    source = (CHEATS / "short_k.c").read_text()
    wrong = elsewhere.judge_on("1", GEMM, Candidate(source), "finalists", "cpu")
    assert wrong.speedup is None and wrong.status != "measured" and wrong.reason
    broken = elsewhere.judge_on("1", GEMM, Candidate(honest_source()), "finalists", "abacus")
    assert broken.status == "failed" and "abacus" in broken.reason


def test_a_trial_keeps_its_review(evaluator, monkeypatch) -> None:
    monkeypatch.setattr(jumps, "JUMP", 1e-9)
    trial = judged(evaluator, honest_source())
    assert trial.review.speedups and from_json(Trial, to_json(trial)) == trial
    with pytest.raises(ValueError, match="reason"):
        replace(trial.review, reason="", status=ReviewStatus.SUSPECT)


@pytest.fixture
def evaluator(rig):
    with Evaluator(GEMM, rig) as made:
        yield made


def judged(evaluator, source: str) -> Trial:
    return next(evaluator.evaluate([Candidate(source)], evaluator.rig.protocols[SEARCH.name]))


def faked(monkeypatch, evaluator, speedups) -> list[str]:
    """Let the timings say these speedups, one after the other, the last for ever; the seeds of other inputs."""
    bench, script, seeds = evaluator._bench, iter(speedups), []
    real_time, real_redraw, last = bench.time, bench.redraw, [1.0]

    def time(candidate, build, protocol, *terms):
        timing = real_time(candidate, build, protocol, *terms)
        last[0] = next(script, last[0])
        return replace(timing, speedup=near(last[0]))

    def redraw(seed):
        seeds.append(seed)
        real_redraw(seed)

    monkeypatch.setattr(bench, "time", time)
    monkeypatch.setattr(bench, "redraw", redraw)
    return seeds


def test_a_jump_that_does_not_repeat_lowers_the_figure_and_leaves_the_verdict(evaluator, archive, monkeypatch) -> None:
    seeds = faked(monkeypatch, evaluator, [1.0, 1.0, 9.0, 1.0, 9.0])  # the first kernel's, confirmed, then the second's
    sources = [honest_source(), honest_source() + "/* another */\n"]
    progress = search(evaluator, Listed(sources), archive, Scope(budget_s=3600, max_trials=2))
    honest, jumped = progress.trials
    assert progress.best is honest and honest.review is None
    assert (jumped.status, jumped.speedup) == ("measured", 1.0) and jumped.review.jump.startswith("9x, over twice")
    assert len(set(seeds)) == 2 and progress.reviews == {"lowered": 1} and not progress.rejected
    assert archive.find(GEMM, jumped.candidate, evaluator.target.machine, SEARCH.name) is not None


def test_a_jump_is_measured_by_what_earlier_searches_found(rig, evaluator, archive, monkeypatch) -> None:
    faked(monkeypatch, evaluator, repeat(5.0))
    first = search(evaluator, Listed([honest_source()]), archive, Scope(budget_s=3600, max_trials=1))
    assert first.best.review.status == "confirmed" and evaluator.best_speedup == 5.0
    with Evaluator(GEMM, rig) as later:
        faked(monkeypatch, later, [5.5])
        other = [honest_source() + "/* a little faster */\n"]
        progress = search(later, Listed(other), archive, Scope(budget_s=3600, max_trials=1))
    assert progress.best.review is None and progress.best.speedup == 5.5


def test_a_second_device_that_disagrees_rejects(evaluator, monkeypatch) -> None:
    faked(monkeypatch, evaluator, repeat(5.0))
    found = Elsewhere("GPU 1", evaluator.target.machine, "measured", speedup=near(2.0))
    monkeypatch.setattr(evaluator.rig, "elsewhere", lambda gemm, candidate: found)
    trial = judged(evaluator, honest_source())
    assert trial.status == "unstable" and trial.reason == "5x here, 2x on GPU 1" and evaluator.best_speedup == 0.0


def test_an_honest_kernel_passes_a_real_review(evaluator, monkeypatch) -> None:
    monkeypatch.setattr(jumps, "JUMP", 1e-9)
    cases = evaluator._bench._cases
    trial = judged(evaluator, honest_source())
    assert len(trial.review.speedups) >= 2 and evaluator._bench._cases is not cases
    assert trial.review.status is not ReviewStatus.WRONG and trial.verdict.status is VerdictStatus.CORRECT
