"""evaluate: rewards of equal kernels lie within their intervals of one another, or there are none."""

import itertools
from typing import Any

import numpy as np
import pytest
import scripted_times
from conftest import CHEATS, honest_source

from cuda_l2.evaluator import Evaluator, evaluate
from cuda_l2.measure import cpu_rounds
from cuda_l2.measure.cpu_rounds import _CpuRounds
from cuda_l2.measure.quiet import Busy
from cuda_l2.records import Candidate, Gemm, Trial
from cuda_l2.verify import ahead, often, overlap, statics

GEMM = Gemm(48, 32, 40)
EIGHT = [honest_source() + f"\n/* {'as before, ' * number}*/\n" for number in range(8)]


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> Any:
    """alike(share): all of EIGHT take this share of a baseline's time, but each process has a bias of its own."""
    rng, biases, scripted = np.random.default_rng(0), {}, _CpuRounds.sample

    def sample(rounds: _CpuRounds, name: str, count: int, warm: bool = True) -> float:
        seconds = scripted(rounds, name, count, warm)
        if name not in rounds.kernels:
            return seconds
        return seconds * biases.setdefault(rounds._workers[name], float(rng.uniform(0.94, 1.06)))

    def script(share: float) -> None:
        for source in EIGHT:
            scripted_times.seconds_by_source[source.strip()] = share * scripted_times.BASELINE_S

    monkeypatch.setattr(_CpuRounds, "sample", sample)
    yield script
    scripted_times.seconds_by_source.clear()


def agree(trials: list[Trial]) -> bool:
    """Whether the intervals of all rewards overlap."""
    return all(
        one.reward_interval.low <= other.reward_interval.high for one, other in itertools.permutations(trials, 2)
    )


@pytest.mark.parametrize("share", [0.8, pytest.param(0.2, marks=pytest.mark.full)], ids=["no jump", "a jump"])
def test_eight_equal_kernels_have_equal_rewards(share: float, alike: Any) -> None:
    alike(share)
    trials = evaluate(EIGHT, GEMM, target="cpu")
    assert [trial.status for trial in trials] == ["measured"] * 8 and agree(trials)
    assert len({trial.timing.candidate.rounds for trial in trials}) == 1, "of one run"
    reviewed = {str(trial.review.status) for trial in trials if trial.review}
    assert reviewed == (set() if share == 0.8 else {"confirmed"})


def test_one_by_one_they_would_not_have(alike: Any, rig: Any) -> None:
    alike(0.8)
    with Evaluator(GEMM, rig) as evaluator:
        assert not agree(list(evaluator.evaluate([Candidate(source) for source in EIGHT])))


def test_on_a_busy_machine_all_of_them_say_so_after_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    class Watch(scripted_times.AlwaysQuiet):
        def disturbed(self) -> str:
            return "threads waited for a core"

        def wait(self, why: str) -> None:
            waits.append(why)
            raise Busy(why)

    monkeypatch.setattr(cpu_rounds, "Quiet", Watch)
    trials = evaluate(EIGHT, GEMM, target="cpu")
    assert [trial.status for trial in trials] == ["busy"] * 8 and len(waits) == 1
    assert all(np.isnan(trial.reward) and "no ratio would be true" in trial.reason for trial in trials)


def test_what_fails_in_a_batch_leaves_the_others_side_by_side(
    alike: Any, many_launches: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alike(0.8)
    monkeypatch.setattr(often, "LEAST", 1)  # else it is found out before anything is timed
    monkeypatch.setattr(often, "MOST", 1)
    for check in (ahead.Ahead, statics.Statics, overlap.Overlap):
        monkeypatch.setattr(check, "applies", lambda *_: False)
    tired = (CHEATS / "tired.c").read_text().replace("launches > 60", "launches > 260")  # more than checks make
    trials = evaluate([EIGHT[0], "nonsense", tired, EIGHT[1]], GEMM, target="cpu")
    assert [trial.status for trial in trials] == ["measured", "refused", "wrong-output", "measured"]
    assert agree([trials[0], trials[3]])
    assert trials[1].reward < trials[2].reward < trials[0].reward and trials[1].reward_interval is None
