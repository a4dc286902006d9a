"""Searchers compared on a made world: each searches, counts as it should, knows no held-out task; table, CSV, figure."""

import csv as reader
import io
import math
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from statistics import median

import made_world
import numpy as np
import pytest
from llm_server import Say, serving
from made_world import TARGET

from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Family
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.propose._cost_model import features
from cuda_l2.propose._recorded import RecordedSpace, recorded_space
from cuda_l2.propose._transfer import NearestProposer, fitted_on, slowness
from cuda_l2.propose.boosted import BoostedProposer
from cuda_l2.propose.ranked import RankedProposer
from cuda_l2.records import Candidate, Trial
from cuda_l2.report.comparison import csv, figure, table
from cuda_l2.rigs.recorded import RecordedRig
from cuda_l2.runs.comparison import Curve, compare, over_tasks
from cuda_l2.runs.replay import Replay
from cuda_l2.runs.searchers import Known, names, searcher
from cuda_l2.system.errors import UserError
from cuda_l2.worlds.split import split
from cuda_l2.worlds.world import World, write

ALL = (
    *("schedule", "frozen", "random", "tpe", "ranked", "nearest", "boosted", "transfer"),
    *("kernel-tuner:genetic_algorithm", "kernel-tuner:hybrid_vndx"),
)
MOST = 24


@pytest.fixture(scope="module")
def world() -> World:
    return made_world.made_world(schedules=120)


@pytest.fixture(scope="module")
def tasks(world):
    return split(world.tasks, "2")


@pytest.fixture(scope="module")
def space(world, tasks) -> RecordedSpace:
    return recorded_space(world, tasks[1][0])


def searched(name: str, world: World, tasks, space: RecordedSpace, seed: int = 0, most: int = MOST) -> Replay:
    known = Known([recorded_space(world, task) for task in tasks[0]])
    with RecordedRig(world) as rig, Evaluator(space.task, rig, seed=0) as evaluator:

        def judge(candidate: Candidate) -> Trial:
            return next(evaluator.evaluate([candidate]))

        replay = Replay(space, judge, most)
        searcher(name, known, tasks[1])(replay, np.random.default_rng(seed))
    return replay


@pytest.mark.parametrize("name", ALL)
def test_a_searcher_measures_different_recorded_schedules_and_repeats_by_seed(name, world, tasks, space) -> None:
    state = random.getstate(), np.random.get_state()[1].tolist()
    found = searched(name, world, tasks, space)
    assert len(found.order) == MOST or name == "tpe"  # which proposes what it knows, again and again
    assert set(found.order) <= set(space.by_values)
    assert list(searched(name, world, tasks, space).order) == list(found.order)
    assert all(
        trial.speedup == space.by_values[values].speedup for values, trial in found.order.items() if trial.speedup
    )
    assert state == (random.getstate(), np.random.get_state()[1].tolist())


def test_searchers_choose_among_several_families_which_do_not_serve_every_task() -> None:
    hopper = made_world.made_world(
        ("1024x1024x1024", "512x512x512", "33x65x31", "64x64x64:tn"), 60, compile_only("sm_90a")
    )
    assert len(hopper.families) == 4
    ragged = recorded_space(hopper, next(task for task in hopper.tasks if str(task) == "33x65x31"))
    assert {row.family for row in ragged.rows} == {"sm80_gemm", "sm90_ragged"}
    learnt, held_out = split(hopper.tasks, "1024x1024x1024,33x65x31")
    chosen = [name for name in ALL if name not in ("tpe", "frozen")]
    curves = compare(hopper, learnt, held_out, chosen, 1, 9)
    assert len(curves) == 2 * len(chosen)
    for curve in curves:
        space = recorded_space(hopper, next(task for task in held_out if str(task) == curve.task))
        least = 6 if curve.searcher.startswith("kernel-tuner") else len(space.by_values)  # which may end before
        assert len(curve.regrets) >= min(9, least), curve.searcher


def test_a_language_model_is_asked_once_and_its_answer_is_tried_first(world, tasks, space) -> None:
    with serving([Say("Schedule 9 spills.\n```\n3, 1, 3, 9999, 2\n```\nThese 4.")]) as server:
        found = searched(f"openai:picks@{server.address}", world, tasks, space, most=12)
    assert len(server.requests) == 1
    asked = server.prompts[0]
    assert str(space.task) in asked
    assert space.choices[0].help in asked
    listed = {int(line.partition(":")[0]): line.partition(": ")[2] for line in asked.splitlines() if line[0].isdigit()}
    tried = [" ".join(f"{c.name}={v}" for c, v in zip(space.choices, values, strict=True)) for values in found.order]
    assert tried[:3] == [listed[3], listed[1], listed[2]]
    assert len(found.order) == 12


def test_a_language_model_without_an_answer_ends_the_comparison(world, tasks, space) -> None:
    with serving([Say("no such key", status=401)]) as server, pytest.raises(UserError, match="gave no answer"):
        searched(f"openai:picks@{server.address}", world, tasks, space)
    with serving([Say("Number 3 is the fastest.")]) as server, pytest.raises(UserError, match="schedules alone"):
        searched(f"openai:picks@{server.address}", world, tasks, space)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("kernel-tuner")])
def test_a_strategy_ends_where_the_space_is_small(name, world, tasks, space) -> None:
    """Kernel Tuner's genetic algorithm looks for a second parent for ever where one is left."""
    few = replace(space, rows=space.rows[:5])
    others = [row for row in world.rows if row.task != str(space.task)]
    fewer = World(world.head, (*others, *few.rows))
    assert 0 < len(searched(name, fewer, tasks, few, most=100).order) <= 5


def test_a_search_ends_where_the_space_does(world, tasks, space) -> None:
    assert len(searched("random", world, tasks, space, most=10_000).order) > 0.8 * len(space.by_values)
    assert set(searched("boosted", world, tasks, space, most=10_000).order) == set(space.by_values)


def first(name: str, world: World, tasks, space: RecordedSpace) -> float:
    return space.regret(next(iter(searched(name, world, tasks, space, most=1).order)))


def test_who_knows_other_tasks_guesses_better_than_who_does_not(world, tasks) -> None:
    spaces = [recorded_space(world, task) for task in tasks[1]]
    guesses = {name: [first(name, world, tasks, each) for each in spaces] for name in ("transfer", "random")}
    assert sum(guesses["transfer"]) < sum(guesses["random"])


def test_nearest_begins_with_what_was_best_on_the_same_task(world, tasks, space) -> None:
    twin = recorded_space(world, space.task)
    (candidate,) = NearestProposer(space, list, np.random.default_rng(0), [twin]).propose(1)
    values = space.inner.whole(candidate.family, tuple(value for _, value in candidate.schedule))
    assert values == min(space.by_values, key=slowness(space).__getitem__)


def test_the_boosted_model_sorts_what_it_was_fitted_on(world, tasks, space) -> None:
    model = fitted_on([recorded_space(world, task) for task in tasks[0]], 0)
    known = recorded_space(world, tasks[0][0])
    scores = model.predict(features(known, list(known.by_values)))
    slow = np.array(list(slowness(known).values()))
    assert np.corrcoef(scores, -slow)[0, 1] > 0.8


def test_what_boosted_proposes_after_its_first_group_is_faster_than_random(world, tasks) -> None:
    spaces = [recorded_space(world, task) for task in tasks[1]]

    def late(name: str) -> float:
        """Mean slowness of what is measured after the first group."""
        orders = [(each, [*searched(name, world, tasks, each).order][8:]) for each in spaces]
        return float(np.mean([slowness(each)[values] for each, order in orders for values in order]))

    assert late("boosted") < 0.8 * late("random")


def test_ranked_goes_by_the_familys_own_model(space, monkeypatch) -> None:
    monkeypatch.setattr(
        type(space.families[0]), "estimate_us", lambda self, task, target, chosen: float(chosen["KC"] + chosen["MR"])
    )
    anew = RecordedSpace(space.task, TARGET, space.families, space.rows)
    proposer = RankedProposer(anew, list, np.random.default_rng(0))
    estimates = [dict(candidate.schedule)["KC"] + dict(candidate.schedule)["MR"] for candidate in proposer.propose(20)]
    assert estimates == sorted(estimates) and estimates[0] == min(map(anew.estimate_us, anew.by_values))
    monkeypatch.setattr(type(space.families[0]), "estimate_us", Family.estimate_us)
    plain = RecordedSpace(space.task, TARGET, space.families, space.rows)
    assert plain.ranked(5) == plain.defaults()[:5]


def test_boosted_without_scikit_learn_says_how_to_get_it(space, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"pip install 'cuda-l2\[worlds\]'"):
        BoostedProposer(space, list, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nobody", "kernel-tuner:NAME"),
        ("kernel-tuner:nobody", "genetic_algorithm"),
        ("random:x", "no searcher"),
        ("schedule:nowhere", "no weights"),
    ],
)
def test_an_unknown_searcher_names_the_known_ones(name, says, tasks) -> None:
    with pytest.raises(UserError, match=says):
        searcher(name, Known([]), tasks[1])
    assert set(names()) >= {"schedule", "ranked", "boosted", "nearest"}


def made_curve(name: str, seed: int, *regrets: float, task: str = "a") -> Curve:
    return Curve(name, task, seed, regrets)


def test_regret_is_that_of_the_best_so_far_and_a_failure_costs_a_measurement(world, tasks) -> None:
    (curve, *_) = compare(world, *tasks, ["random"], 1, MOST)
    assert list(curve.regrets) == sorted(curve.regrets, reverse=True) and len(curve.regrets) == MOST
    assert all(math.isfinite(regret) and regret >= 0 for regret in curve.regrets)
    failing = [replace(row, stage="verify", status="incorrect", reason="wrong") for row in world.rows]
    kept = [row for row in world.rows if row.task != str(tasks[1][0])]
    few = [row for row in failing if row.task == str(tasks[1][0])][1:]
    one = next(row for row in world.rows if row.task == str(tasks[1][0]) and row.measured and row.key != few[0].key)
    spoilt = World(world.head, (*kept, *(row for row in few if row.key != one.key), one))
    regrets = compare(spoilt, tasks[0], tasks[1][:1], ["random"], 1, 10)[0].regrets
    assert set(regrets) == {0.0}  # the slowest timed one is the only one


def test_a_curve_tells_when_it_arrived() -> None:
    curve = made_curve("x", 0, 0.5, 0.011, 0.01, 0.0)
    assert (curve.after(1), curve.after(2), curve.after(99), curve.arrived) == (0.5, 0.011, 0.0, 3)
    assert made_curve("x", 0, 0.5).arrived == math.inf


def test_the_interval_is_over_seeds_and_not_over_tasks() -> None:
    alike = [made_curve("x", seed, regret, task=str(regret)) for seed in range(4) for regret in (0.1, 0.5, 0.9)]
    same = over_tasks(alike, partial(Curve.after, count=1), median)
    assert (same.low, same.estimate, same.high) == pytest.approx((0.5, 0.5, 0.5))
    apart = [made_curve("x", seed, seed / 10) for seed in range(5)]
    wide = over_tasks(apart, partial(Curve.after, count=1), median)
    assert wide.estimate == pytest.approx(0.2) and 0 < wide.low < 0.15 and 0.25 < wide.high < 0.4


def test_table_csv_and_figure_say_the_same() -> None:
    curves = [made_curve("good", seed, 0.2, 0.005) for seed in range(3)]
    curves += [made_curve("bad", seed, 0.9, 0.6) for seed in range(3)]
    text = table(curves, "a world")
    good, bad = text.splitlines()[-2:]
    assert "20.0% (20.0% to 20.0%)" in good and good.endswith("2 (2 to 2) |")
    assert "60.0%" in bad and bad.endswith("not reached |")
    rows = list(reader.DictReader(io.StringIO(csv(curves))))
    assert len(rows) == 12 and rows[1] == {
        "searcher": "good",
        "task": "a",
        "seed": "0",
        "measurements": "2",
        "regret": "0.005",
    }
    drawn = figure(curves)
    assert drawn == figure(curves) and "<svg" in drawn and ">good<" in drawn and ">measurements<" in drawn


def test_the_command_writes_a_table_figures_and_a_plot(world, typed, tmp_path) -> None:
    write(world, tmp_path / "world.parquet")
    common = (
        "compare",
        "--world",
        "world.parquet",
        "--held-out",
        "64x64x64,128x512x128",
        "--seeds",
        "2",
        "--out",
        "found",
    )
    status, out, _ = typed(*common, "--measurements", "8", "--searchers", "random", "ranked")
    assert status == 0 and out == (tmp_path / "found" / "comparison.md").read_text()
    assert "2 tasks held out, 2 seeds" in out and out.count("\n| ") == 4 - 1
    assert {path.suffix for path in (tmp_path / "found").iterdir()} == {".md", ".csv", ".svg", ".json"}
    status, _, said = typed(*common, "--searchers", "nobody")
    assert status == 2 and "no searcher" in said


def test_a_comparison_without_held_out_tasks_is_refused(world) -> None:
    with pytest.raises(UserError, match="--held-out"):
        compare(world, list(world.tasks), [], ["random"], 1, 8)


def test_no_optional_package_is_loaded_by_help() -> None:
    heavy = ("kernel_tuner", "sklearn", "matplotlib", "pyarrow", "optuna", "torch", "safetensors")
    code = f"import sys, cuda_l2.commands._app; assert not set({heavy}) & set(sys.modules), set({heavy}) & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
