"""Finalists are timed side by side in one run, and only that decides between them."""

from dataclasses import replace

import pytest
from conftest import CHEATS, honest_source

from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import FINALS, SEARCH
from cuda_l2.optimizer import FINALISTS, Workbench
from cuda_l2.propose._policy import default_candidates
from cuda_l2.records import Candidate, Gemm, Interval
from cuda_l2.rigs.cpu import CpuBench
from cuda_l2.search import comparable

GEMM = Gemm(48, 32, 40)
SLOW, FAST = honest_source() + "/* slow */\n", honest_source() + "/* fast */\n"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of what each timing run has."""
    found: list[list[str]] = []
    time_kernels = CpuBench.time_kernels

    def remember(bench, kernels, *terms):
        found.append(list(kernels))
        return time_kernels(bench, kernels, *terms)

    monkeypatch.setattr(CpuBench, "time_kernels", remember)
    return found


def test_candidates_are_compared_in_one_run(rig, runs, slow_and_fast) -> None:
    slow_and_fast(SLOW, FAST)
    sources = [SLOW, FAST, (CHEATS / "zero_shortcut.c").read_text()]
    with Evaluator(GEMM, rig) as evaluator:
        slow, fast, wrong = evaluator.compare([Candidate(source) for source in sources], rig.protocols[FINALS.name])
    assert (slow.status, fast.status, wrong.status) == ("measured", "measured", "incorrect") and wrong.timing is None
    assert runs == [[slow.candidate.id, fast.candidate.id]]
    assert fast.speedup == pytest.approx(10 * slow.speedup) and fast.timing.reference == slow.timing.reference
    assert {arm.name for arm in fast.timing.baselines} == {arm.name for arm in slow.timing.baselines}
    assert slow.candidate.id not in {arm.name for arm in fast.timing.baselines}, "no kernel is another's baseline"


def test_a_figure_of_another_hour_makes_no_winner(rig, archive, runs, slow_and_fast) -> None:
    """The archive has the slow one at nine times the baseline's speed."""
    slow_and_fast(SLOW, FAST)
    with Evaluator(GEMM, rig) as evaluator:
        slow, fast = evaluator.evaluate([Candidate(SLOW), Candidate(FAST)], rig.protocols[SEARCH.name])
        lucky = replace(slow, timing=replace(slow.timing, speedup=Interval(9 * fast.speedup, 1.0, 99.0)))
        archive.append(lucky)
        archive.append(fast)
        runs.clear()
        chosen = Workbench(archive, rig).choose(evaluator)
    assert chosen.candidate.id == fast.candidate.id and len(runs) == 1
    assert default_candidates(GEMM, rig.target)[0].id in runs[0], "the default runs beside them"


def test_speedups_over_another_baseline_neither_cut_a_search_short_nor_push_its_best_out(rig, archive, runs) -> None:
    """As of an archive whose searches compared with one baseline alone, which was not the strongest."""
    with Evaluator(GEMM, rig) as evaluator:
        slow, fast = evaluator.evaluate([Candidate(SLOW), Candidate(FAST)], rig.protocols[SEARCH.name])
        weak = replace(slow.timing, reference="torch widened", speedup=Interval(99.0, 98.0, 100.0))
        for number in range(FINALISTS):
            archive.append(replace(slow, candidate=Candidate(f"{SLOW}/* {number} */"), timing=weak))
        archive.append(fast)
        machine = rig.target.machine
        assert [trial.candidate.id for trial in comparable(archive, GEMM, machine)] == [fast.candidate.id]
        runs.clear()
        Workbench(archive, rig).choose(evaluator, [fast])
    assert fast.candidate.id in runs[0]


def test_one_that_fails_while_it_is_timed_costs_the_others_nothing(rig, runs, monkeypatch) -> None:
    real = CpuBench.time_kernels

    def fails(bench, kernels, *terms):
        timings = real(bench, kernels, *terms)
        if len(kernels) < 2:
            return timings
        return {
            name: replace(t, status="crashed", reason="one", candidate=None, speedup=None)
            for name, t in timings.items()
        }

    monkeypatch.setattr(CpuBench, "time_kernels", fails)
    with Evaluator(GEMM, rig) as evaluator:
        trials = evaluator.compare([Candidate(SLOW), Candidate(FAST)], rig.protocols[FINALS.name])
    assert [trial.status for trial in trials] == ["measured", "measured"] and len(runs) > 2
