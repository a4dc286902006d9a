"""Detects a jump in reward and compares its repeated measurements: most jumps are faults of measurement or cheats.

CUDA-L1's rule: a kernel over three times as fast as the reference, or over twice as fast as the best before it, is
tested again, and the two must agree within 10 %. Here the second test has fresh inputs, fresh processes and more
rounds; the slower measurement counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cuda_l2.records import Interval, Review, ReviewStatus, Timing, TimingStatus, Trial, Verdict
from cuda_l2.rigs._base import Elsewhere

JUMP = 3.0
"""A first speedup above this over the strongest library is a jump."""
OVER_BEST = 2.0
"""A speedup above this many times the best known one is a jump."""
AGREEMENT = 0.10
"""Two measurements agree where the larger is larger by at most this share."""

Again = Callable[[], tuple[Verdict, Timing | None]]
"""Verifies and times once more; a timing where the verdict is correct."""


def jump(speedup: float, best: float) -> str:
    """Why a speedup is a jump, in a few words; empty where it is none.

    best: the best speedup known before, 0 if there is none.
    """
    if best > 0 and speedup > OVER_BEST * best:
        return f"{speedup:.3g}x, over twice the best known, {best:.3g}x"
    if speedup > JUMP >= best:
        return f"{speedup:.3g}x, over {JUMP:g}x"
    return ""


def alike(first: Interval, second: Interval) -> bool:
    """Whether two speedups agree within 10 %."""
    low, high = sorted((first.estimate, second.estimate))
    return high <= (1 + AGREEMENT) * low


def apart(first: Interval, second: Interval) -> bool:
    """Whether two speedups disagree by more than noise: their intervals do not overlap."""
    return not alike(first, second) and (first.high < second.low or second.high < first.low)


def measure_again(why: str, timing: Timing, again: Again) -> tuple[Verdict, Timing | None, Review | None]:
    """Measure a jump again, a third time where the two disagree: the verdict and timing that count, and the review.

    The slowest timing counts: a jump that does not repeat lowers a figure, and leaves the verdict as it is. No timing
    counts, and there is no review, where other work kept the machine busy.
    """
    timings = [timing]
    while True:
        verdict, new = again()
        if new and new.status is TimingStatus.BUSY:
            return verdict, new, None
        if new is None or new.speedup is None:
            reason = f"on fresh inputs: {new.reason if new else verdict.reason}"
            return verdict, new, Review(ReviewStatus.WRONG, why, speedups(timings), reason=reason)
        timings.append(new)
        if alike(*speedups(timings[-2:])) or len(timings) > 2:
            break
    slowest = min(timings, key=lambda each: each.speedup.estimate if each.speedup else 0.0)
    status = ReviewStatus.CONFIRMED if len(timings) == 2 else ReviewStatus.LOWERED
    return verdict, slowest, Review(status, why, speedups(timings))


def repeated(first: Trial, second: Trial) -> Trial:
    """The trial that counts of two, the second on fresh inputs; reviewed where the first is a jump."""
    if second.timing and second.timing.status is TimingStatus.BUSY:
        return second
    why, timings = jump(first.speedup, 0.0), [each.timing for each in (first, second) if each.timing]
    status, counts, reason = ReviewStatus.CONFIRMED, second, ""
    if not second.speedup:
        status, reason = ReviewStatus.WRONG, f"on fresh inputs: {second.reason}"
    elif not alike(*speedups(timings)):
        status, counts = ReviewStatus.LOWERED, min(first, second, key=lambda trial: trial.speedup)
    return replace(counts, review=Review(status, why, speedups(timings), reason=reason)) if why else counts


def compare_elsewhere(timing: Timing, found: Elsewhere, machine: str, review: Review) -> tuple[Timing, Review]:
    """Timing and review after a second device: it must find the candidate right and, if of the same kind, as fast."""
    if not found.machine:  # nobody judged there: nothing about the candidate
        return timing, replace(review, elsewhere=f"{found.device}: {found.status}: {found.reason}")
    if found.speedup is None:
        reason = f"on {found.device}: {found.status}: {found.reason}"
        review = replace(review, status=ReviewStatus.WRONG, reason=reason, elsewhere=f"{found.device}: {found.status}")
        return withheld(timing, TimingStatus.UNSTABLE, reason), review
    review = replace(review, elsewhere=f"{found.device}: {found.speedup.estimate:.3g}x")
    if found.machine != machine:
        return timing, replace(review, elsewhere=f"{review.elsewhere}, another kind: not compared")
    assert timing.speedup is not None
    if not apart(timing.speedup, found.speedup):
        return timing, review
    reason = f"{timing.speedup.estimate:.3g}x here, {found.speedup.estimate:.3g}x on {found.device}"
    review = replace(review, status=ReviewStatus.UNSTABLE, reason=reason)
    return withheld(timing, TimingStatus.UNSTABLE, reason), review


def withheld(timing: Timing, status: TimingStatus, reason: str) -> Timing:
    """A timing without figures in place of one whose figures do not count."""
    return Timing(status, timing.protocol, reason=reason, seconds=timing.seconds, conditions=timing.conditions)


def speedups(timings: Sequence[Timing]) -> tuple[Interval, ...]:
    return tuple(timing.speedup for timing in timings if timing.speedup)
