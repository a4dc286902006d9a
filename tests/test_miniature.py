"""The miniature of all training stages: its family, its data without what is held out, its table."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import settled
from schedules import completions, defaults_and_drawn

from cuda_l2 import contract
from cuda_l2.build.cuda import build_all
from cuda_l2.corpus import dataset
from cuda_l2.corpus.duplicates import digest
from cuda_l2.evaluator import Evaluator
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.propose._base import ABSENT, FamilySpace, space_for
from cuda_l2.records import BuildStatus, Candidate, Gemm
from cuda_l2.retrieve.sources import Source
from cuda_l2.tasks import parse

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "miniature"))

import examine
import general
import run
import teacher
from examine import tree
from family import families_for
from run import MINIATURES

FOLDER = Path(teacher.__file__).parent
GEMM = Gemm.parse("24x192x32")


def test_every_source_is_correct_and_they_differ_in_more_than_numbers(rig, target) -> None:
    sources = []
    with Evaluator(GEMM, rig) as evaluator:
        for family in families_for(GEMM, target):
            space = FamilySpace(family, GEMM, target)
            assert family.serves(GEMM, target) and not family.serves(Gemm.parse("25x192x32"), target)
            (trial,) = settled(evaluator).evaluate([space.render((1, 4, 2, 3), "test")])
            assert trial.status == "measured", trial.reason
            sources.append(trial.candidate.source)
            other = space.render((1, 4, 1, 3), "test").source
            assert tree(other) == tree(sources[-1]) and digest(other) != digest(sources[-1])
    assert len({tree(source) for source in sources}) == len(sources) == 4


@pytest.mark.corpus(1)
@pytest.mark.parametrize("name", ["sum_rows", "variance_rows", "relu_squared"])
def test_sources_of_other_tasks_are_correct_and_short(name, rig, target) -> None:
    task = parse(f"{name}:rows=5,columns=70")
    (family,) = families_for(task, target)
    with Evaluator(task, rig) as evaluator:
        (trial,) = settled(evaluator).evaluate([FamilySpace(family, task, target).render((4, 3, 64), "test")])
    assert trial.status == "measured", trial.reason
    assert len(trial.candidate.source.splitlines()) < 56


def test_the_best_schedules_of_several_tasks_are_held_out_of_all_of_them(rig, archive, monkeypatch) -> None:
    schedules = [(2, 1, 0), (16, 4, 0), (4, 3, 64)]
    left = iter(schedules)
    monkeypatch.setattr(teacher, "draw", lambda space, rng: next(left))
    monkeypatch.setattr(teacher, "HELD_SHARE", 0.34)
    tasks = [parse("sum_rows:rows=5,columns=70"), parse("relu_squared:rows=5,columns=70")]
    taught = teacher.measure(tasks, 3, rig, archive)
    (held,) = {candidate.schedule for candidate in taught.held_out}
    assert len(taught.held_out) == 2 and len({candidate.source for candidate in taught.held_out}) == 2
    shown = {task: {trial.candidate.schedule for trial in taught.trials[task]} for task in tasks}
    assert len(shown[tasks[0]]) == 2 and shown[tasks[0]] == shown[tasks[1]] and held not in shown[tasks[0]]


def test_no_training_text_holds_what_is_held_out(rig, archive, tmp_path, monkeypatch) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.h").write_text(
        "/* Adds two numbers, as the caller wants. */\nint add(int a, int b) {\n    int sum_of_both = a + b;  /* may overflow */\n    return sum_of_both;\n}\n"
    )
    monkeypatch.setattr(teacher, "installed_sources", lambda: [Source("aten", tmp_path / "code")])
    monkeypatch.setattr(teacher, "HELD_SHARE", 0.34)
    monkeypatch.setattr(teacher, "draw", _in_turn())
    taught = teacher.measure([GEMM], 3, rig, archive)
    assert len(taught.held_out) == 1 and len(taught.trials[GEMM]) == 2
    (held,) = taught.held_out
    assert archive.best(GEMM, rig.target.machine, "search")[0].candidate.id == held.id
    teacher.write_data(tmp_path / "data", taught, rig, teacher.Asking(FOLDER / "prompts"), 0)
    texts = [row["text"] for row in dataset.read(tmp_path / "data" / "corpus", "text")]
    assert len(texts) == 7 and any("int add" in text for text in texts)
    conversations = [row["messages"] for row in dataset.read(tmp_path / "data" / "collected", "sft")]
    assert len(conversations) == 6
    fast, slow = (trial.candidate.source for trial in taught.trials[GEMM])
    for asked, said in conversations:
        assert "M = 24" in asked["content"] and fast not in asked["content"]  # the best is shown to no one
        assert (slow in asked["content"]) <= (fast in said["content"])  # only slower ones are shown
    assert any(slow in asked["content"] for asked, _ in conversations)
    assert held.source not in "".join([*texts, *(turn["content"] for turns in conversations for turn in turns)])


def test_the_table_of_other_tasks_has_medians_by_task(tmp_path, capsys) -> None:
    answers = [
        examine.Answers(text, 4, 3, correct, speedups, new, 0, 0, "")
        for text, correct, speedups, new in zip(
            general.TASKS, (2, 1, 0), ([0.5, 0.7], [2.0], []), (1, 0, 0), strict=True
        )
    ]
    for name in general.NAMES:
        for shown in (0, 2):
            examine.save(tmp_path / f"{name}-{shown}.json", answers)
    general._print("Seed 0", [tmp_path])
    printed = capsys.readouterr().out
    assert printed.count("| SFT | 75% | 25% | 0.60 | 2.00 | nan | 33% |") == 2


def test_a_row_of_the_table_counts_over_its_shapes() -> None:
    one = examine.Answers("a", 4, 3, 2, [0.5, 0.25], 1, 0, 1, "int a;")
    two = examine.Answers("b", 4, 0, 0, [], 0, 0, 0, "")
    timed = {"a": {Candidate("int a;").id: 0.6, "taught": 0.5, "other": 0.2}, "b": {"taught": 0.5, "other": 0.6}}

    def cells(*seeds):
        return examine.row("x", [examine.figures([one, two], shapes, timed, ["taught", "other"]) for shapes in seeds])

    assert cells(["a"]) == "| x | 75% | 50% | 0.375 | 0.375 | 0.600 | 1.20 | 50% | 0% | 50% |"
    assert cells(["a", "b"]) == "| x | 38% | 25% | 0.375 | 0.375 | 0.300 | 0.60 | 50% | 0% | 50% |"
    assert cells(["b"]) == "| x | 0% | 0% | - | - | 0.000 | 0.00 | - | - | - |"
    assert cells(["a"], ["b"]).startswith(
        "| x | 38% (0% to 75%) | 25% (0% to 50%) | 0.375 (0.375 to 0.375) | 0.375 (0.375 to 0.375) | 0.300 "
    )
    assert all(line.count("|") == cells(["a"]).count("|") for line in examine.head().split("\n"))


def test_a_gain_is_of_medians_by_shape_with_an_interval() -> None:
    def answers(shape, speedups):
        return examine.Answers(shape, 4, 3, len(speedups), speedups, 0, 0, 0, "")

    before = [answers("a", [0.2] * 4), answers("b", [0.1, 0.5, 0.6]), answers("c", [])]
    after = [answers("a", [0.4] * 4), answers("b", [0.9, 1.0, 1.1]), answers("c", [0.9])]
    assert examine.gain(before, after, ["a"]) == pytest.approx((2, 2, 2))
    estimate, low, high = examine.gain(before, after, ["a", "b", "c"])
    assert estimate == pytest.approx(2) and low < 2 < high
    assert np.isnan(examine.gain(before, after, ["c"])[0])


def test_the_contest_times_every_kernel_once_a_round(rig, target, monkeypatch) -> None:
    space = FamilySpace(families_for(GEMM, target)[0], GEMM, target)
    first, other = (space.render(values, "test") for values in ((1, 8, 4, 6), (1, 4, 1, 1)))
    speedups, asked = iter([3.0, 0.5, 1.0, 0.25, 2.0, 0.75]), []

    def evaluate(self, candidates, protocol):
        asked.append([candidate.id for candidate in candidates])
        return (SimpleNamespace(speedup=next(speedups)) for _ in candidates)

    with monkeypatch.context() as patch:
        patch.setattr(examine.Evaluator, "evaluate", evaluate)
        timed = examine.contest(str(GEMM), [first, other, first], rig)
    assert timed == {first.id: 2.0, other.id: 0.5} and asked == [[first.id, other.id]] * examine.TIMINGS == asked[:3]
    monkeypatch.setattr(examine, "TIMINGS", 1)
    assert examine.contest(str(GEMM), [first], rig)[first.id] > 0


def test_a_contest_is_held_again_when_another_stage_has_been_examined(tmp_path) -> None:
    size = replace(MINIATURES["cpu"], stages=("tuned", "rl"))
    held = {"a": {Candidate("first").id: 1.0}}

    def examined(name: str, best: str) -> None:
        for shown in (0, 2):
            found = examine.Answers("a", 1, 1, 1, [1.0], 0, 0, 0, best, [])
            examine.save(tmp_path / f"{name}-{shown}.json", [found, examine.Answers("b", 1, 0, 0, [], 0, 0, 0, "", [])])

    examined("tuned", "first")
    examined("rl", "first")
    assert not run._contested(size, tmp_path)
    (tmp_path / run.CONTEST).write_text(json.dumps(held))
    assert run._contested(size, tmp_path)
    examined("rl", "second")
    assert not run._contested(size, tmp_path)


def test_the_four_sources_are_one_space(target) -> None:
    space = space_for(families_for(GEMM, target), GEMM, target)
    assert len({space.render(values, "test").id for values in space.defaults()}) == 4


@pytest.mark.corpus(1)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_gpus_sources_compile_and_plan_for_their_shapes(number) -> None:
    size, machine = MINIATURES["cuda"], compile_only("sm_90a")
    gemm = Gemm.parse((*size.shapes, *size.held_shapes)[number])
    candidates = defaults_and_drawn(families_for(gemm, machine), gemm, machine, 2)
    for candidate, build in zip(candidates, build_all(candidates, machine), strict=True):
        assert build.status is BuildStatus.BUILT, build.reason
        (kernel,) = build.kernels
        assert kernel.tensor_instructions == ("HMMA.16816.F32",)
        (launch,) = contract.plan_cuda(candidate.source, gemm, machine.sms).launches
        tiles = launch.grid[0] * launch.grid[1]
        outputs = gemm.m * gemm.n // tiles  # of a block
        chosen = dict(candidate.schedule)
        assert (
            outputs == 128 * chosen["MT"] * chosen["NT"] * chosen["WARPS"] and launch.block[0] == 32 * chosen["WARPS"]
        )


def test_every_gpu_schedule_can_be_completed() -> None:
    gemm, machine = Gemm.parse("768x768x512:tn"), compile_only("sm_90a")
    assert all(completions(family, gemm, machine) > 200 for family in families_for(gemm, machine))
    for other in ("768x768x512", "700x768x512:tn"):
        assert not families_for(Gemm.parse(other), machine)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_gpus_sources_are_right(gpu, number) -> None:
    size = MINIATURES["cuda"]
    gemm = Gemm.parse((*size.shapes, *size.held_shapes)[number])
    with Evaluator(gemm, gpu) as evaluator:
        candidates = defaults_and_drawn(families_for(gemm, gpu.target), gemm, gpu.target, 3)
        for trial in settled(evaluator).evaluate(candidates):
            assert trial.status == "measured", (trial.candidate.family, trial.candidate.schedule, trial.reason)


def _in_turn():
    """In place of a drawing at random: three schedules of the first source."""
    schedules = iter([(1, 4, 1, 1), (1, 4, 2, 3), (1, 8, 4, 6)])
    return lambda space, rng: (0, *next(schedules), *[ABSENT] * 12)
