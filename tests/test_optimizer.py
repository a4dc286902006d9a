"""The Python interface: optimize, its kernel, evaluate."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cuda_l2
from cuda_l2.agents.workshop import Workshop
from cuda_l2.library import saved
from cuda_l2.library.kernel import Kernel, TorchKernel
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.optimizer import Optimizer, Result
from cuda_l2.records import FOUND_WRONG, Candidate, Timing, TimingStatus
from cuda_l2.report import tables
from cuda_l2.search import Progress, comparable
from cuda_l2.settings import Settings
from cuda_l2.system.errors import UserError


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    archive = tmp_path_factory.mktemp("optimizer") / "archive.db"
    return cuda_l2.optimize("70x50x90:tn", budget=3600, trials=3, archive=archive)


def test_the_winner_runs_as_a_callable(result) -> None:
    a, b = torch.randn(70, 90).half(), torch.randn(50, 90).half().t()
    out = torch.empty(70, 50, dtype=torch.float16)
    assert result.kernel(a, b, out) is out
    assert torch.allclose(out.float(), a.float() @ b.float(), atol=0.05)
    assert torch.equal(result.kernel(a, b), out)


def test_the_report_comes_from_runs_after_the_search(result) -> None:
    assert set(result.reports) == {"offline", "server"}
    assert result.best.protocol == "offline"
    assert result.best.verdict.passed[-3:] == ("ahead", "statics", "overlap")


def test_a_missing_report_is_an_error_that_says_why_and_what_to_do(result, tmp_path) -> None:
    def missing(found: Result, protocol: str) -> str:
        with pytest.raises(KeyError) as error:
            found.reports[protocol]
        assert isinstance(error.value, UserError) and protocol not in found.reports
        return str(error.value)

    again = pickle.loads(pickle.dumps(result))
    assert missing(again, "paper") == (
        "there is no report 'paper': there are offline, server; the setting protocol chooses"
    )
    busy = Timing(TimingStatus.BUSY, "search", "threads waited for a core")
    untimed = replace(result.best, protocol="search", timing=busy)
    with Optimizer(Settings(archive=tmp_path / "archive.db")) as optimizer:
        progress = Progress()
        progress.count(untimed, known=False)
        ended = optimizer.conclude(result.task, progress, None)
        assert missing(pickle.loads(pickle.dumps(ended)), "offline") == (
            "there is no report 'offline': 1 correct kernel, none timed: threads waited for a core; search again when the"
            " machine is quiet, or longer"
        )
        kernel = cuda_l2.load(ended.source_path)  # correct, and reached by its path alone
        assert isinstance(ended.kernel, TorchKernel) and isinstance(kernel, Kernel)
        assert kernel.candidate.id == untimed.candidate.id and kernel.gemm == result.task
        interrupted = optimizer.conclude(result.task, Progress(best=result.best, interrupted=True), None)
        assert missing(interrupted, "offline").endswith(
            "after the search; search again when the machine is quiet, or longer"
        )


def test_a_winner_that_turns_out_wrong_is_none_for_anybody_from_then_on(result, tmp_path) -> None:
    """As one that an earlier version of the checks let pass; what else is searched goes on."""
    wrong = Candidate((Path(__file__).parent / "cheats" / "tired.c").read_text(), schedule=(("MC", 8),))
    taken = replace(result.best, candidate=wrong, protocol="search")
    settings = Settings(archive=tmp_path / "archive.db", trials=1)
    with Optimizer(settings) as optimizer:
        task, machine = result.task, optimizer.target.machine
        optimizer.archive.append(taken)
        assert [trial.candidate.id for trial in optimizer.archive.best(task, machine, "search")] == [wrong.id]
        ended = optimizer.conclude(task, Progress(proposed=1, best=taken), taken)
        assert ended.best is None and not ended.wins and not ended.reports
        assert f"the winner {wrong.id} failed when it was checked again: " in ended.why_no_win
        assert ended.why_no_win in tables.ended(ended) and json.loads(tables.result_json(ended))["best"] is None
        assert isinstance(ended.kernel, TorchKernel)
        assert not optimizer.archive.best(task, machine, "search")
        known = optimizer.archive.find(task, wrong, machine, "search")
        assert known and known.status in FOUND_WRONG
        assert [trial.status for trial in comparable(optimizer.archive, task, machine)] == [known.status]
        with pytest.raises(UserError, match="no kernel for 70x50x90:tn has been timed"):
            saved.best(task, settings.archive)
        with Workshop(optimizer, [task]) as workshop, pytest.raises(UserError, match="no correct kernel"):
            workshop._trial(task, wrong.id)
        optimizer.archive.append(taken)
        assert optimizer.archive.best(task, machine, "search"), "measured anew, it counts again"
        assert saved.best(task, settings.archive)


def test_a_policy_is_shown_speedups_over_one_baseline(result, tmp_path, monkeypatch) -> None:
    """Not those of a search that compared with a weaker one."""
    timing = result.best.timing
    weak = replace(result.best, timing=replace(timing, reference="torch fp16"), candidate=Candidate("// weak"))
    with Optimizer(Settings(budget_s=3600, trials=1, archive=tmp_path / "archive.db")) as optimizer:
        for trial in (weak, result.best):
            optimizer.archive.append(replace(trial, protocol="search"))
        made, shown = optimizer._policy.proposer, list[str]()

        def proposer(task, target, trials, *rest):
            shown.extend(trial.candidate.id for trial in trials())
            return made(task, target, trials, *rest)

        monkeypatch.setattr(optimizer._policy, "proposer", proposer)
        optimizer.find(result.task)
    assert shown == [result.best.candidate.id]


def test_evaluate_takes_one_source_or_a_batch(result) -> None:
    good = result.best.candidate.source
    trial = cuda_l2.evaluate(good, "70x50x90:tn")
    assert trial.status == "measured" and trial.reward > 0
    trials = cuda_l2.evaluate([good, "nonsense"], cuda_l2.Gemm.parse("70x50x90:tn"))
    assert [t.status for t in trials] == ["measured", "refused"]
    assert trials[1].reward < trials[0].reward


def test_bad_settings_are_user_errors() -> None:
    for settings in ({"budget": -1}, {"trials": 0}, {"policy": "nobody"}, {"protocol": "x"}):
        with pytest.raises(UserError):
            cuda_l2.optimize("8x8x8", **settings)
    with pytest.raises(UserError):
        cuda_l2.evaluate("x", "8x8x8", protocol="x")


def test_what_only_a_language_model_uses_is_refused_without_one(tmp_path) -> None:
    model = ModelSettings(answer_tokens=5, without_sandbox=True)
    with pytest.raises(UserError, match="--answer-tokens: these are for a language model; name one with --policy"):
        Optimizer(Settings(archive=tmp_path / "archive.db", model=model))
    assert not list(tmp_path.iterdir())


def test_a_search_goes_on_with_the_policy_of_the_last_one(tmp_path) -> None:
    settings = Settings(budget_s=3600, trials=9, archive=tmp_path / "archive.db", protocol="offline")
    gemm = cuda_l2.Gemm(16, 16, 16)
    updates = []
    for _ in range(2):
        with Optimizer(settings) as optimizer:
            optimizer.optimize(gemm)
            with optimizer.evaluator(gemm) as evaluator:
                updates.append(optimizer._proposer(evaluator, list).updates)
    assert updates == [1, 2]
