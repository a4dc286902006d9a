"""search.py: the loop end to end, resumed, shared, killed and interrupted."""

import contextlib
import json
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from clocks import ticking
from conftest import honest_source
from waiting import CLI, interrupt_when, kill_when

from cuda_l2.archive import Archive
from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.propose._base import Proposer, proposer_maker
from cuda_l2.records import Candidate, Gemm, Trial
from cuda_l2.report.live import describe
from cuda_l2.search import Progress, Scope, search

GEMM = Gemm(64, 48, 80)


class Listed(Proposer):
    """Proposes what it was given."""

    name = "listed"

    def __init__(self, sources: list[str]) -> None:
        self.sources, self.observed = sources, []

    def propose(self, count: int) -> list[Candidate]:
        taken, self.sources = self.sources[:count], self.sources[count:]
        return [Candidate(source) for source in taken]

    def observe(self, trials) -> None:
        self.observed.extend(trials)


@pytest.fixture
def evaluator(rig):
    with Evaluator(GEMM, rig) as made:
        yield made


def test_the_loop_runs_and_every_result_is_kept(evaluator, archive, space) -> None:
    proposer = proposer_maker("schedule")(space, lambda: archive.trials(GEMM), np.random.default_rng(0))
    seen: list[int] = []
    progress = search(
        evaluator, proposer, archive, Scope(budget_s=3600, max_trials=10), on_progress=lambda p: seen.append(p.proposed)
    )
    assert progress.proposed == progress.built == 10
    assert seen == list(range(1, 11))
    assert progress.correct + sum(progress.rejected.values()) == 10
    assert progress.best.speedup == max(trial.speedup for trial in archive.trials(GEMM))
    assert proposer.updates >= 1
    assert 0 <= progress.overhead < 1


def test_a_known_candidate_is_not_measured_twice_unless_asked(evaluator, archive) -> None:
    source = honest_source()
    for again, known, kept in ((False, 0, 1), (False, 1, 1), (True, 0, 2)):
        progress = search(evaluator, Listed([source]), archive, Scope(budget_s=3600, max_trials=1, again=again))
        assert progress.known == known
        assert len(archive.trials(GEMM, protocol=SEARCH.name)) == kept


def test_a_candidate_twice_in_a_group_is_judged_once(evaluator, archive) -> None:
    progress = search(evaluator, Listed([honest_source()] * 3), archive, Scope(budget_s=3600, max_trials=3))
    assert (progress.proposed, progress.known, progress.repeated) == (3, 0, 2)
    assert len(archive.trials(GEMM)) == 1


def test_what_a_run_repeats_is_counted_apart_from_what_was_known_before_it(evaluator, archive) -> None:
    proposer = Listed([honest_source()] * 3)
    proposer.group = 1  # so that later ones are met in the archive, as those of an earlier run are
    first = search(evaluator, proposer, archive, Scope(budget_s=3600, max_trials=3))
    assert (first.proposed, first.known, first.repeated) == (3, 0, 2)
    second = search(evaluator, Listed([honest_source()] * 3), archive, Scope(budget_s=3600, max_trials=3))
    assert (second.proposed, second.known, second.repeated) == (3, 1, 2)
    assert "1 of them known from an earlier search, 2 proposed again" in describe(second)
    assert len(archive.trials(GEMM)) == 1


def test_failures_are_counted_by_kind_and_the_proposer_hears_of_them(evaluator, archive) -> None:
    contract = '/* cuda-l2\ntarget = "cpu"\n*/\n'
    proposer = Listed([contract + "int x = ;", contract + "#include <stdio.h>", honest_source()])
    progress = search(evaluator, proposer, archive, Scope(budget_s=3600, max_trials=3))
    assert dict(progress.rejected) == {"failed": 1, "refused": 1}
    assert [trial.status for trial in proposer.observed] == ["failed", "refused", "measured"]
    assert progress.best.candidate.source == honest_source()


def test_an_interrupt_ends_with_what_is_there(evaluator, archive) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    progress = search(evaluator, Listed([honest_source()] * 4), archive, Scope(budget_s=3600), on_progress=interrupt)
    assert progress.interrupted and progress.best is not None
    assert len(archive.trials(GEMM)) == 1


def test_the_budget_ends_a_search(rig, archive, space) -> None:
    """By a clock that goes on by a second whenever it is read."""
    proposer = proposer_maker("random")(space, list, np.random.default_rng(0))
    with Evaluator(GEMM, rig, clock=ticking(1.0)) as evaluator:
        progress = search(evaluator, proposer, archive, Scope(budget_s=100.0))
    usual_s = sum(progress.stage_seconds.values()) / progress.proposed
    assert progress.proposed > 1 and 100.0 - 2 * usual_s < progress.seconds <= 110.0


def test_waiting_for_others_on_the_machine_is_not_searching(rig, archive, monkeypatch) -> None:
    clock = ticking()

    @contextlib.contextmanager
    def queued(gpu: str = "", **_: object) -> Iterator[float]:
        clock.sleep(50.0)
        yield 50.0

    monkeypatch.setattr("cuda_l2.evaluator.machine_lock", queued)
    with Evaluator(GEMM, rig, clock=clock) as evaluator:
        progress = search(evaluator, Listed([honest_source()] * 2), archive, Scope(budget_s=10.0, max_trials=2))
    assert progress.queued_s >= 50.0 and progress.queued_s % 50.0 == 0
    assert 0 < progress.seconds < 10.0 and progress.proposed == 2


def test_a_proposer_that_the_time_did_not_reach_says_what_it_did(evaluator, archive) -> None:
    proposer = Listed([honest_source()])
    proposer.summary = lambda: "0 questions asked"
    first = [Candidate(honest_source())]
    progress = search(evaluator, proposer, archive, Scope(budget_s=0.0, first=first))
    assert (progress.proposed, progress.summary, proposer.observed) == (1, "0 questions asked", [])


def command(archive: Path, *arguments: str) -> list[str]:
    return [*CLI, "optimize", "64x48x80", "--archive", str(archive), *arguments]


def stored(path: Path) -> list[Trial]:
    if not path.exists():
        return []
    try:
        with Archive(path) as archive:
            return archive.trials(GEMM, protocol=SEARCH.name)
    except (sqlite3.Error, OSError):
        return []


@pytest.mark.full
def test_a_search_killed_with_sigkill_goes_on_and_measures_nothing_twice(tmp_path) -> None:
    path = tmp_path / "archive.db"
    offline = command(path, "--protocol", "offline")
    kill_when(lambda: len(stored(path)) >= 9, [*offline, "--budget", "1h"])  # in its second group
    before = stored(path)
    assert len(before) >= 9
    again = [*offline, "--trials", "12", "--budget", "1h", "--json"]
    done = subprocess.run(again, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["known"] >= 1  # at least the default schedule, which every search tries first
    after = stored(path)
    assert [t.candidate.id for t in after[: len(before)]] == [t.candidate.id for t in before]
    assert len({t.candidate.id for t in after}) == len(after)
    assert result["reports"].keys() == {"offline"}


@pytest.mark.full
def test_ctrl_c_ends_cleanly_with_the_table_so_far(tmp_path) -> None:
    path = tmp_path / "archive.db"
    output, _ = interrupt_when(lambda: len(stored(path)) >= 3, command(path, "--budget", "1h"))
    assert "best kernel" in output and "interrupted" in output
