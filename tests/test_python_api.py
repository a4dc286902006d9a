"""What the Python interface accepts, and the one clear error for everything else. Nothing here is measured."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import honest_source
from made import trial

import cuda_l2
from cuda_l2 import evaluator, machine, optimizer, sources, tasks
from cuda_l2.records import Candidate, Gemm, Operation
from cuda_l2.settings import Settings
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import seconds

CUDA = '/* cuda-l2\ntarget = "cuda"\n*/\n__global__ void f() {}\n'


@pytest.fixture
def judged(monkeypatch, rig) -> list[list[Candidate]]:
    """What would be judged: every candidate gets the same trial, and none is built."""
    seen: list[list[Candidate]] = []

    class Judge(evaluator.Evaluator):
        def __init__(self, task, rig, **named) -> None:
            self.task = task

        def evaluate(self, candidates, protocol=None, *, full=False):
            seen.append([self.task, *candidates])
            yield from (trial(each.source) for each in candidates)

        together = evaluate

        def close(self) -> None: ...

    monkeypatch.setattr(evaluator, "Evaluator", Judge)
    return seen


@pytest.fixture
def searched(monkeypatch) -> list[tuple[Settings, list]]:
    """What would be searched for, with which settings."""
    seen: list[tuple[Settings, list]] = []

    class Finished:
        class search:  # noqa: N801 - stands in for a Progress
            interrupted = False

    class Searcher:
        def __init__(self, settings) -> None:
            seen.append((settings, []))

        def __enter__(self):
            return self

        def __exit__(self, *_) -> None: ...

        def require_feasible(self, task) -> None: ...

        def optimize(self, task):
            seen[-1][1].append(task)
            return Finished()

    monkeypatch.setattr(optimizer, "Optimizer", Searcher)
    return seen


SHAPES = {
    "a text": "64x48x80",
    "space around it": " 64x48x80 ",
    "a record": Gemm(64, 48, 80),
    "a tuple": (64, 48, 80),
    "a list": [64, 48, 80],
    "NumPy's whole numbers": tuple(np.array([64, 48, 80])),
    "an array": np.array([64, 48, 80]),
    "a torch.Size": torch.Size([64, 48, 80]),
    "a tensor": torch.tensor([64, 48, 80]),
}
NO_SHAPES = {
    "None": None,
    "bytes": b"64x48x80",
    "a number": 64,
    "two sizes": (64, 48),
    "four sizes": (64, 48, 80, 2),
    "halves": (64.5, 48, 80),
    "a size of 0": (64, 0, 80),
    "a negative size": (64, -48, 80),
    "a dtype": torch.float16,
    "a path": Path("64x48x80"),
    "a dictionary": {"m": 64, "n": 48, "k": 80},
    "two in a text": "64x48",
    "an unknown word": "64x48x80:row",
    "an unknown task": "softmacks:rows=4",
    "no text": "",
    "a generator": (size for size in (64, 48, 80)),
    "an array of halves": np.array([64.5, 48, 80]),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_shape_is_a_text_a_record_or_three_sizes(shape, judged, searched) -> None:
    cuda_l2.evaluate("text", shape)
    cuda_l2.optimize(shape, target="cpu")
    assert judged[0][0] == Gemm(64, 48, 80) and searched[0][1] == [Gemm(64, 48, 80)]


@pytest.mark.parametrize("shape", NO_SHAPES.values(), ids=NO_SHAPES)
def test_what_is_no_shape_is_one_clear_error(shape, judged, searched) -> None:
    for call in (lambda: cuda_l2.evaluate("text", shape), lambda: cuda_l2.optimize(shape, target="cpu")):
        with pytest.raises(UserError) as error:
            call()
        assert re.search(r"as in|choose from|at least 1|no task", str(error.value)) and "\n" not in str(error.value)
    assert not judged and not any(tasks for _, tasks in searched)


@pytest.mark.parametrize("given", [(64, 48), [64, 48, 80, 2], (64.5, 48, 80)], ids=str)
def test_sizes_that_are_not_three_are_told_as_one_shape(given, searched) -> None:
    with pytest.raises(UserError, match=re.escape(f"M, N and K as in (512, 512, 512), not {given}")):
        cuda_l2.optimize(given, target="cpu")


def test_several_shapes_of_any_kind_give_a_list(searched) -> None:
    assert len(cuda_l2.optimize(["64x48x80", (64, 48, 80), Gemm(1, 2, 3)], target="cpu")) == 3
    assert len(cuda_l2.optimize(("64x48x80",), target="cpu")) == 1
    with pytest.raises(UserError, match="no task is given"):
        cuda_l2.optimize([], target="cpu")
    with pytest.raises(UserError, match=r"not None"):
        cuda_l2.optimize(["64x48x80", None], target="cpu")


def test_a_task_that_is_a_record_stays_what_it_is() -> None:
    task = tasks.parse("softmax:rows=4,columns=8")
    assert isinstance(task, Operation) and tasks.read(task) is task


def test_a_source_is_a_text_a_path_a_candidate_or_several(judged, tmp_path) -> None:
    text = honest_source()
    (tmp_path / "kernel.c").write_text("\ufeff" + text)
    given = ["\ufeff" + text, tmp_path / "kernel.c", Candidate(text), text]
    assert [each.candidate.source for each in cuda_l2.evaluate(given, "64x48x80")] == [text] * 4
    assert len(cuda_l2.evaluate(tuple(given), "64x48x80")) == 4
    assert cuda_l2.evaluate(tmp_path / "kernel.c", "64x48x80").candidate.source == text
    assert cuda_l2.evaluate([], "64x48x80") == []


@pytest.mark.parametrize("source", [None, b"int x;", 3, {"a": "b"}, [None], torch.float16, [["a"]]], ids=str)
def test_what_is_no_source_is_one_clear_error(source, judged) -> None:
    with pytest.raises(UserError, match="a source is a kernel's text, a Path to its file, or a list of them, not"):
        cuda_l2.evaluate(source, "64x48x80")
    assert not judged


def test_a_files_path_in_place_of_a_source_is_told(judged, tmp_path) -> None:
    (tmp_path / "my kernel").write_text("text")
    for path in ("kernel.c", "some/where/kernel.cu", str(tmp_path / "my kernel")):
        for source in (path, [honest_source(), path]):
            with pytest.raises(UserError, match=r"is a file's path and no source: give pathlib\.Path\("):
                cuda_l2.evaluate(source, "64x48x80")
    with pytest.raises(UserError, match=r"cannot read .*nowhere\.c: No such file"):
        cuda_l2.evaluate(Path("nowhere.c"), "64x48x80")
    assert not judged


def test_a_source_that_stands_where_the_task_belongs_is_told(judged) -> None:
    with pytest.raises(UserError, match="give the source first") as error:
        cuda_l2.evaluate("64x48x80", honest_source())
    assert len(str(error.value)) < 200


def test_a_cuda_source_without_a_gpu_is_told_and_has_no_reward(judged, monkeypatch) -> None:
    monkeypatch.setattr(sources, "gpu_present", lambda: False)
    for source in (CUDA, [CUDA, CUDA]):
        with pytest.raises(UserError, match=r'says target = "cuda", and there is no NVIDIA GPU here.*--compile-only'):
            cuda_l2.evaluate(source, "64x48x80")
    with pytest.raises(UserError, match="judge each kind by itself, or give target"):
        cuda_l2.evaluate([CUDA, honest_source()], "64x48x80")
    assert not judged


def test_a_trainer_that_names_the_target_gets_a_reward_for_every_text(judged, monkeypatch) -> None:
    assert len(cuda_l2.evaluate([CUDA, honest_source(), "", "no kernel"], "64x48x80", target="cpu")) == 4


@pytest.mark.parametrize("name", ["gpu", "", None, 0, ["cpu"], b"cpu"], ids=str)
def test_an_unknown_target_names_the_known_ones(name, judged, searched) -> None:
    for call in (
        lambda: cuda_l2.evaluate("text", "64x48x80", target=name),
        lambda: cuda_l2.optimize("64x48x80", target=name),
        lambda: cuda_l2.optimize("softmax", target=name),
        lambda: machine.detect(name),
    ):
        with pytest.raises(UserError, match=r"there is no target .*choose from auto, cpu, cuda|target must be a text"):
            call()


@pytest.mark.parametrize("protocol", ["fast", "", None, 3, ["offline"]], ids=str)
def test_an_unknown_protocol_names_the_known_ones(protocol, judged, searched) -> None:
    with pytest.raises(UserError, match=r"there is no protocol .*offline"):
        cuda_l2.evaluate("text", "64x48x80", protocol=protocol)
    with pytest.raises(UserError, match=r"there is no protocol .*offline|protocol must be a text"):
        cuda_l2.optimize("64x48x80", protocol=protocol)


BUDGETS = {"3s": 3, "2m": 120, 3: 3, 2.5: 2.5, np.int64(4): 4, np.float32(0.5): 0.5, "1.5h": 5400}


@pytest.mark.parametrize(("given", "wanted"), BUDGETS.items(), ids=map(repr, BUDGETS))
def test_a_budget_is_a_number_of_seconds_or_a_text_with_a_unit(given, wanted, searched) -> None:
    cuda_l2.optimize("64x48x80", budget=given, target="cpu")
    assert searched[0][0].budget_s == wanted


@pytest.mark.parametrize(
    "given", [-1, 0, "-3s", "3 parsecs", "", None, b"3s", True, [3], float("nan"), "nan", 1j], ids=repr
)
def test_what_is_no_budget_is_told_with_an_example(given, searched) -> None:
    with pytest.raises(UserError, match="the budget must be a positive time, as in 60s or 2m, not"):
        cuda_l2.optimize("64x48x80", budget=given, target="cpu")
    with pytest.raises(UserError, match="the budget must be a positive time"):
        seconds(given)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trials": "3"}, "the number of trials must be a whole number, not '3'"),
        ({"trials": 2.5}, "the number of trials must be a whole number, not 2.5"),
        ({"trials": 0}, "at least 1"),
        ({"seed": "x"}, "the seed must be a whole number"),
        ({"seed": -1}, "must not be negative"),
        ({"seed": None}, "the seed must be a whole number, not None"),
        ({"policy": None}, "policy must be a text"),
        ({"archive": 3}, "the archive must be a file's path"),
        ({"model": {"tokens": 3}}, "model must be cuda_l2"),
        ({"review": None}, "review must be cuda_l2"),
        ({"trails": 3}, r"there is no setting 'trails'; choose from budget, again, archive, .*trials"),
        ({"budget_s": 3}, "there is no setting 'budget_s'; choose from budget"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_is_told(settings, says, searched) -> None:
    with pytest.raises(UserError, match=says):
        cuda_l2.optimize("64x48x80", target="cpu", **settings)
    assert not searched


def test_numpys_numbers_are_settings(searched) -> None:
    cuda_l2.optimize("64x48x80", target="cpu", trials=np.int64(3), seed=np.int32(1), archive="some.db")
    assert searched[0][0].trials == 3


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"seed": "x"}, "the seed must be a whole number"),
        ({"seed": 1.5}, "the seed must be a whole number"),
        ({"seed": -1}, "must not be negative"),
        ({"rewards": None}, "rewards must be"),
    ],
    ids=str,
)
def test_an_argument_of_evaluate_that_cannot_be_is_told(named, says, judged) -> None:
    with pytest.raises(UserError, match=says):
        cuda_l2.evaluate("text", "64x48x80", **named)
    cuda_l2.evaluate("text", "64x48x80", seed=np.int64(3))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (None, "a saved kernel's path, or a shape as in '512x512x512', not None"),
        (b"64x48x80", "a saved kernel's path, or a shape"),
        (3, "a saved kernel's path, or a shape"),
        ("", "there is no file ''"),
        ("64x48", "cannot read the shape '64x48': write MxNxK in whole numbers, as in"),
        ("64x48:tn", "cannot read the shape '64x48:tn': write MxNxK"),
        ("64x48.json", r"there is no file '64x48\.json'; write a saved kernel's path, or a shape"),
        ("64x48x80.json", r"there is no file '64x48x80\.json'; write a saved kernel's path, or a shape"),
        ("64x48x80:row", "no layout"),
        ((64, 48), r"a task is a text .*not \(64, 48\)"),
        ("softmax", "there is no file 'softmax'"),
        (torch.float16, "a saved kernel's path, or a shape"),
        ("x" * 5000, "there is no file 'xxx"),
        ("\0", "there is no file"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_cannot_be_loaded_is_told(name, says, tmp_path) -> None:
    with pytest.raises(UserError, match=says) as error:
        cuda_l2.load(name, archive=tmp_path / "archive.db")
    assert len(str(error.value)) < 300


def test_an_archive_or_a_file_that_is_no_path_is_told(tmp_path) -> None:
    for archive in (3, b"x", ""):
        with pytest.raises(UserError, match=r"a path is a text or a pathlib\.Path, not"):
            cuda_l2.load("64x48x80", archive=archive)
    (tmp_path / "kernel.c").write_text(honest_source())
    with pytest.raises(UserError, match=r"kernel\.c is a kernel's source, which states no shape: give it, as in"):
        cuda_l2.load(tmp_path / "kernel.c")


@pytest.mark.parametrize(
    "shape", ["64x48x80", Gemm(64, 48, 80), (64, 48, 80), np.array([64, 48, 80]).tolist()], ids=str
)
def test_a_shape_is_loaded_in_every_form(shape, tmp_path) -> None:
    with pytest.raises(UserError, match=r"there is no archive .*run `cuda-l2 optimize 64x48x80` first"):
        cuda_l2.load(shape, archive=tmp_path / "archive.db")


def test_check_is_evaluate_in_python() -> None:
    with pytest.raises(AttributeError, match=r"cuda_l2\.evaluate\(source, shape\)"):
        _ = cuda_l2.check
