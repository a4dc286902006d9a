"""Records made up for tests, as searches and runs leave them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import (
    Arm,
    Build,
    BuildStatus,
    Candidate,
    Gemm,
    Interval,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
)  # fmt: skip

CORRECT = Verdict(VerdictStatus.CORRECT)
CPU_CHECKS = (
    *("five seeds", "other values", "other shapes", "special values", "hygiene", "state", "often"),
    *("ahead", "statics", "overlap"),
)
"""What a correct kernel of a task of an unbounded kind has passed on the CPU, in order."""


def near(value: float, share: float = 0.0) -> Interval:
    """Exact, or with this share of it on either side."""
    return Interval(value, (1 - share) * value, (1 + share) * value)


def timing(
    us: float, baselines_us: Mapping[str, float], share: float = 0.0, reference: str = "", **named: Any
) -> Timing:
    """A candidate's, by times of its own and of baselines. reference: the fastest of these unless named."""
    arms = {name: Arm(name, near(each, share), 12, 120) for name, each in baselines_us.items()}
    ratios = {name: near(each / us, share) for name, each in baselines_us.items()}
    reference = reference or min(baselines_us, key=lambda name: baselines_us[name])
    return replace(
        Timing(
            TimingStatus.MEASURED,
            "offline",
            candidate=Arm(CANDIDATE, near(us, share), 12, 120),
            speedup=ratios[reference],
        ),
        **{"baselines": tuple(arms.values()), "reference": reference, "speedups": tuple(ratios.items()), **named},
    )


def trial(source: str, speedup: float = 1.0, protocol: str = "search", machine: str = "m", **named: Any) -> Trial:
    """A trial of a correct kernel that takes 1 us."""
    times = timing(1.0, {"torch": speedup}, protocol=protocol)
    build = Build("c", BuildStatus.BUILT, artifact="k")
    found = Trial(Gemm(64, 64, 64), Candidate(source), machine, protocol, build, CORRECT, times, speedup)
    return replace(found, **named)
