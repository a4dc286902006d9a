"""Searches whose candidates, or shapes, several processes share; two of the CPU's stand in for those of GPUs."""

import contextlib
import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pool_servants import FOLDER
from waiting import interrupt_when, require_gone

from cuda_l2.archive import Archive
from cuda_l2.commands import optimize as command
from cuda_l2.commands import throughput
from cuda_l2.commands.optimize import OptimizeSettings
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine import detect
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.optimizer import Optimizer
from cuda_l2.propose._base import FamilySpace, draw
from cuda_l2.propose._policy import default_candidates
from cuda_l2.records import Candidate, Gemm, Operation, Trial
from cuda_l2.rigs.cpu import CpuRig
from cuda_l2.runs import on_ray, pool, workers
from cuda_l2.runs.judging import Evaluators, JudgePool, _judged, require_known
from cuda_l2.search import Order, begin, judge_group, taken
from cuda_l2.settings import Settings
from cuda_l2.store.opening import open_database
from cuda_l2.system.errors import UserError
from cuda_l2.system.turns import ALONE
from cuda_l2.tasks import parse
from cuda_l2.verify import often

GEMM = Gemm(64, 48, 80)
SHAPES = ["16x16x16", "16x16x32"]
GPUS = ["0", "1"]


@pytest.fixture
def dies(tmp_path, monkeypatch) -> Path:
    """Where this file is there, a process is killed while it judges, once. Processes have scripted times."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    monkeypatch.setenv("POOL_DIES", str(tmp_path / "dies"))
    monkeypatch.setattr(pool, "MAIN", "scripted_pool")
    return tmp_path / "dies"


def outcome(trial: Trial) -> tuple:
    """What does not depend on who judged, nor on inputs: times are scripted."""
    return trial.candidate.id, trial.status, trial.speedup, trial.verdict.passed if trial.verdict else ()


def candidates(rig, count: int) -> list[Candidate]:
    space, rng = FamilySpace(families_for(GEMM, rig.target)[0], GEMM, rig.target), np.random.default_rng(0)
    return [space.render(draw(space, rng), "test") for _ in range(count)]


def test_candidates_that_two_processes_judge_have_the_trials_of_one_though_one_is_killed(dies, tmp_path) -> None:
    said: list[str] = []
    settings = Settings(3600, 6, "random", target="cpu", protocol="offline", archive=tmp_path / "one.db")
    with Optimizer(settings) as optimizer:
        alone = optimizer.find(GEMM)[0].trials
    dies.touch()
    with (
        Optimizer(replace(settings, archive=tmp_path / "two.db")) as optimizer,
        JudgePool(GPUS, "cpu", said.append) as judges,
    ):
        optimizer.judges = judges
        result = optimizer.optimize(GEMM)
        stored = optimizer.archive.trials(GEMM, optimizer.target.machine, SEARCH.name)
    assert not dies.exists() and sum("given out again" in line for line in said) == 1
    assert [*map(outcome, stored)] == [*map(outcome, result.search.trials)] == [*map(outcome, alone)]
    assert len(stored) == 6 and result.best is not None
    assert all(result.search.stage_seconds[stage] > 0 for stage in ("build", "verify", "measure"))


def test_a_candidate_that_another_search_judges_is_left_to_it(dies, tmp_path, rig) -> None:
    first, second = candidates(rig, 2)
    with (
        Archive(tmp_path / "archive.db") as archive,
        Archive(tmp_path / "archive.db") as other,
        Evaluator(GEMM, rig) as evaluator,
        JudgePool(GPUS, "cpu", print) as judges,
    ):
        other.claim(GEMM, first, rig.target.machine, SEARCH.name)
        with judge_group(evaluator, archive, [second, first], judges=judges) as group:
            assert next(group)[0].candidate == second
            (trial,) = evaluator.evaluate([first])
            other.append(trial)
            assert next(group) == (trial, True)
        assert len(archive.trials(GEMM)) == 2


def test_a_candidate_that_all_processes_die_of_is_rejected_and_the_others_are_judged(dies, tmp_path, rig) -> None:
    good, bad = candidates(rig, 2)
    bad = replace(bad, source=f"{bad.source}// deadly\n")
    dies.write_text("// deadly")
    with (
        Archive(tmp_path / "archive.db") as archive,
        Evaluator(GEMM, rig) as evaluator,
        JudgePool(GPUS, "cpu", print) as judges,
        judge_group(evaluator, archive, [bad, good], judges=judges) as group,
    ):
        (rejected, _), (other, _) = group
        assert (rejected.candidate, rejected.status, other.status) == (bad, "failed", "measured")
        assert rejected.reason == "3 processes died of it, one after the other; the last was killed by signal 9"
        assert rejected.reward == evaluator.rewards.unbuildable and archive.trials(GEMM) == [rejected, other]


@pytest.mark.full
def test_where_processes_die_of_every_candidate_none_is_rejected(dies, tmp_path, rig) -> None:
    dies.write_text(str(GEMM))
    with (
        Archive(tmp_path / "archive.db") as archive,
        Evaluator(GEMM, rig) as evaluator,
        JudgePool(GPUS[:1], "cpu", print) as judges,
        judge_group(evaluator, archive, candidates(rig, 1), judges=judges) as group,
    ):
        with pytest.raises(UserError, match="no process judges a kernel and lives: 3 processes died of it"):
            next(group)
        assert archive.trials(GEMM) == []


@pytest.mark.full
def test_a_candidate_that_ends_the_search_of_a_shape_is_rejected_in_the_end(
    dies, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(workers, "gpus", lambda *asked: GPUS)
    bad = default_candidates(parse(SHAPES[0]), detect("cpu"))[0]
    dies.write_text(f"{SHAPES[0]} {bad.source}")
    archive = tmp_path / "archive.db"
    settings = OptimizeSettings(
        3600, 2, "random", target="cpu", protocol="offline", archive=archive, workers="2", json=True
    )
    command.command(SHAPES, settings=settings)
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["gemm"] for result in results] == SHAPES[::-1] and all(result["best"] for result in results)
    with Archive(archive, reading=True) as read:
        rejected = [trial for trial in read.trials() if trial.status == "failed"]
    assert [(str(trial.task), trial.candidate.id) for trial in rejected] == [(SHAPES[0], bad.id)]


def test_what_nobody_awaited_is_given_back(dies, tmp_path, rig) -> None:
    group = candidates(rig, 3)
    with (
        Archive(tmp_path / "archive.db") as archive,
        Archive(tmp_path / "archive.db") as other,
        Evaluator(GEMM, rig) as evaluator,
        JudgePool(GPUS, "cpu", print) as judges,
    ):
        with judge_group(evaluator, archive, group, judges=judges) as judged:
            assert not other.claim(GEMM, group[2], rig.target.machine, SEARCH.name)
            next(judged)
        assert all(other.claim(GEMM, each, rig.target.machine, SEARCH.name) for each in group)


def test_one_candidate_in_two_groups_is_judged_once(dies, tmp_path, rig) -> None:
    (one,) = candidates(rig, 1)
    with (
        Archive(tmp_path / "archive.db") as archive,
        Evaluator(GEMM, rig) as evaluator,
        JudgePool(GPUS, "cpu", print) as judges,
        judge_group(evaluator, archive, [one], judges=judges) as first,
        judge_group(evaluator, archive, [one], judges=judges) as second,
    ):
        ((trial, known),), ((same, again),) = first, second
        assert same == trial and (known, again) == (False, True) and archive.trials(GEMM) == [trial]


def test_a_gpu_of_another_kind_is_one_line(rig) -> None:
    (one,) = candidates(rig, 1)
    with Evaluator(GEMM, rig) as evaluator:
        (trial,) = evaluator.evaluate([one])
        with pytest.raises(UserError, match="one GPU is other, the first cpu"):
            evaluator.take(replace(trial, machine="other"), {}, 0.0)


def test_several_shapes_are_searched_by_two_processes_though_one_is_killed(dies, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(workers, "gpus", lambda *asked: GPUS)
    dies.touch()
    archive = tmp_path / "archive.db"
    settings = OptimizeSettings(
        3600, 3, "random", target="cpu", protocol="offline", archive=archive, workers="2", json=True
    )
    command.command(SHAPES, settings=settings)
    said = capsys.readouterr()
    results = [json.loads(line) for line in said.out.splitlines()]
    assert [result["gemm"] for result in results] == SHAPES and all(result["best"] for result in results)
    assert not dies.exists() and said.err.count("its process was killed by signal 9; what it had in flight") == 1
    with Archive(archive) as read:
        tried = Counter((str(t.task), t.candidate.id) for t in read.trials() if t.protocol == SEARCH.name)
    assert set(tried.values()) == {1} and {task for task, _ in tried} == set(SHAPES)


def test_a_shape_that_cannot_be_searched_ends_the_command_before_any_search(dies, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(workers, "gpus", lambda *asked: GPUS[: int(asked[0])])
    archive = tmp_path / "archive.db"
    settings = OptimizeSettings(3600, 2, "random", target="cpu", archive=archive, workers="2")
    with pytest.raises(UserError, match="memory"):
        command.command([SHAPES[0], "99999x99999x99999"], settings=settings)
    with Archive(archive) as read:
        assert not read.trials()


def test_ctrl_c_of_several_shapes_leaves_no_claim(dies, tmp_path) -> None:
    """Each process hangs when it has judged a candidate, which nobody else may judge then."""
    dies.write_text("hangs")
    archive = tmp_path / "archive.db"
    words = [sys.executable, Path(FOLDER) / "pooled_cli.py", "optimize", *SHAPES, "--target", "cpu", "--workers", "2"]
    words += ["--policy", "random", "--archive", archive, "--budget", "1h"]

    def claims() -> int:
        with contextlib.suppress(UserError), open_database(archive, "read") as read:  # not there yet
            return read.read("held")[0][0]
        return 0

    interrupt_when(lambda: claims() == 2, words)
    assert claims() == 0


def test_two_processes_judge_the_candidates_of_a_shape_on_one_gpu(dies, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("POOL_PIDS", str(tmp_path / "pids"))
    (tmp_path / "pids").mkdir()
    monkeypatch.setattr(workers, "gpus", lambda *asked: GPUS[: int(asked[0])])
    monkeypatch.setattr(CpuRig, "together", lambda rig, task, asked: min(asked, 2))
    settings = OptimizeSettings(
        3600, 4, "random", target="cpu", protocol="offline", archive=tmp_path / "archive.db", judges=3, json=True
    )
    command.command(SHAPES[:1], settings=settings)
    said = capsys.readouterr()
    assert json.loads(said.out)["best"] and "2 processes of 3 on each GPU" in said.err
    assert len([*(tmp_path / "pids").iterdir()]) == 2


def test_throughput_of_several_judges_counts_all(dies, monkeypatch, capsys) -> None:
    monkeypatch.setattr(throughput, "WARM_UP", 2)
    monkeypatch.setattr(workers, "gpus", lambda *asked: GPUS[: int(asked[0])])
    monkeypatch.setattr(CpuRig, "together", lambda rig, task, asked: min(asked, 2))
    throughput.command(SHAPES[0], target="cpu", candidates=3, judges=5)
    said = capsys.readouterr().out
    assert f"3 of {SHAPES[0]} on" in said and ", 2 judges" in said and "3 measured" in said


def test_a_process_judges_what_was_built_for_it(dies, rig) -> None:
    (one,) = candidates(rig, 1)
    with Evaluator(GEMM, rig) as evaluator, JudgePool(GPUS, "cpu", print) as judges:
        (build,) = evaluator.build([one])
        build = replace(build, log="of who asks")
        trial = taken(judges, evaluator, begin(judges, evaluator, one, lambda: build))
    assert trial.build == build and trial.timing


def test_an_order_in_full_runs_the_slow_checks_too(rig, monkeypatch) -> None:
    monkeypatch.setattr(often.CHECK, "full_only", True)
    (candidate,) = candidates(rig, 1)
    with Evaluator(GEMM, rig) as evaluator, Evaluators(rig) as evaluators:
        (build,) = evaluator.build([candidate])
        for full in (False, True):
            order = Order(GEMM, candidate, evaluator.rewards, 0.0, 60.0, build, full=full)
            verdict = _judged(evaluators, ALONE, order).trial.verdict
            assert verdict is not None and ("often" in verdict.passed) == full


def test_a_process_on_another_machine_builds_by_itself(dies, rig) -> None:
    """What was built here lies in files that it does not see."""
    (one,) = candidates(rig, 1)
    elsewhere = partial(pool.on_this_machine)  # another start than this machine's
    with Evaluator(GEMM, rig) as evaluator, JudgePool(GPUS, "cpu", print, start=elsewhere) as judges:
        (build,) = evaluator.build([one])
        trial = taken(judges, evaluator, begin(judges, evaluator, one, lambda: replace(build, log="of who asks")))
    assert trial.build.log != "of who asks" and trial.timing


def test_judges_and_workers_share_one_shape_alone() -> None:
    with pytest.raises(UserError, match="--judges goes with GPUs: on a CPU each verification"):
        command.command(SHAPES[:1], settings=OptimizeSettings(1, target="cpu", judges=2))
    with pytest.raises(UserError, match="--judges goes with GPUs of this machine, and with --workers for one shape"):
        command.command(SHAPES, settings=OptimizeSettings(1, target="cpu", judges=2, workers="2"))
    with pytest.raises(UserError, match="at least 1, not 0"):
        command.command(SHAPES, settings=OptimizeSettings(1, target="cpu", judges=0))


@pytest.mark.full
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1]], ids=["shapes", "candidates"])
def test_ctrl_c_ends_all_processes_and_the_same_command_goes_on(dies, tmp_path, monkeypatch, shapes) -> None:
    monkeypatch.setenv("POOL_PIDS", str(tmp_path))
    archive = tmp_path / "archive.db"
    words = [sys.executable, Path(FOLDER) / "pooled_cli.py", "optimize", *shapes, "--target", "cpu", "--workers", "2"]
    words += ["--policy", "random", "--archive", archive, "--budget", "1h"]

    def tried() -> set[tuple[str, str]]:
        with contextlib.suppress(UserError), Archive(archive, reading=True) as read:  # not there yet
            return {(str(trial.task), trial.candidate.id) for trial in read.trials()}
        return set()

    interrupt_when(lambda: len(tried()) > 3, words)
    began = [path.name for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(began) == 2
    for pid in began:
        require_gone(pid)
    before = tried()
    interrupt_when(lambda: len(tried()) > len(before), words)
    with Archive(archive) as read:
        searched = [(str(t.task), t.candidate.id) for t in read.trials() if t.protocol == SEARCH.name]
    assert before < set(searched) and len(set(searched)) == len(searched)


def test_what_cannot_be_shared_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="on a CPU each verification and timing has the whole machine"):
        workers.gpus("2", "cpu")
    with pytest.raises(UserError, match="on a CPU each verification and timing has the whole machine"):
        on_ray.require_gpus("ray", "cpu")
    with pytest.raises(UserError, match="limit --trials instead"):
        asked = OptimizeSettings(policy="openai:m@http://127.0.0.1:9", model=ModelSettings(tokens=10**6))
        list(command._searched_apart(replace(asked, target="cpu"), [GEMM, GEMM], GPUS))
    with pytest.raises(UserError, match="leave --workers out"):
        require_known(Operation("kernelbench/level1/19_ReLU"))
