"""examples/tune_from_scratch.py: which kernels it builds, and that no launch is timed twice. Its times need a GPU."""

import contextlib
import csv
import math
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from conftest import example
from test_examples import Servers

from cuda_l2.library.table import PLAIN, read_table
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.quick import Sampled
from cuda_l2.records import Gemm, Layout

EXAMPLES = Path(__file__).parents[1] / "examples"
TABLE = EXAMPLES.parent / "results" / "h200" / "schedules.csv"
SHAPES = (Gemm(64, 64, 128), Gemm(128, 128, 256))


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Importable by the processes that guess."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return __import__("tune_from_scratch")


def test_few_kernels_serve_many_shapes(tool) -> None:
    one, two = SHAPES
    both, first, second, late = (tool.Guess("sm90_wave", (("BM", i),), f"kernel {i}") for i in range(4))
    guesses = {one: [first, both, late], two: [second, both]}
    assert list(tool.choose(guesses, 1)) == ["kernel 0"], "two shapes' second guess is worth more than one's first"
    assert tool.choose(guesses, 1)["kernel 0"] == (one, both)
    assert set(tool.choose(guesses, 9, held=("kernel 0",))) == {"kernel 1", "kernel 2", "kernel 3"}
    assert set(tool.choose(guesses, 3)) == {"kernel 0", "kernel 1", "kernel 2"}, "then the earlier ones"


def test_second_guesses_are_new_and_follow_what_was_measured(tool) -> None:
    gemm, target = SHAPES[1], compile_only("sm_90a")
    first = tool.Guesser(target, {}).guesses(gemm)
    assert len(first) == len(set(first)) == tool.VIEW
    assert all(dict(guess.schedule).get("EDGE", 0) == 0 for guess in first)
    families = {guess.family for guess in first}
    assert len(families) > 1, "or nothing is told by the next lines"
    for liked in sorted(families):
        times = {guess: 1.0 if guess.family == liked else 3.0 for guess in first[:12] + _each(first)}
        second = tool.Guesser(target, {gemm: times}).guesses(gemm)
        assert not {(guess.family, guess.schedule) for guess in second} & {(g.family, g.schedule) for g in times}
        assert Counter(guess.family for guess in second[:8]).most_common(1)[0][0] == liked


def _each(guesses):
    """One guess of each family."""
    return list({guess.family: guess for guess in guesses}.values())


class Timer:
    """A timer whose kernels take the longer the later they are asked for. Keeps what it was asked."""

    asked: ClassVar[list[tuple[Gemm, Layout, bytes]]] = []

    def __init__(self, *_, **__) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def time(self, gemm, items):
        Timer.asked += [(gemm, item.layout, item.plan) for item in items]
        return [Sampled([2.0 + i, math.nan], [2.0 + i, math.nan]) for i in range(len(items))]


def test_two_rounds_write_a_table_and_its_share_of_anothers_speed(tool, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(Timer, "asked", [])
    monkeypatch.setattr(tool, "BuildServers", Servers)
    monkeypatch.setattr(tool, "QuickTimer", Timer)
    monkeypatch.setattr(tool, "machine_lock", contextlib.nullcontext)
    monkeypatch.setattr(tool, "bus_id", str)
    monkeypatch.setattr(tool.cuda, "detect", lambda: compile_only("sm_90a"))
    grid = ",".join(map(str, SHAPES))
    words = ["tune_from_scratch", "--grid", grid, "--kernels", "6", "--tries", "2", "--beside", str(TABLE)]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path)])
    assert tool.main() == 0
    said = capsys.readouterr()
    rounds, beside = Timer.asked[:-8], Timer.asked[-8:]
    assert len(rounds) == len(set(rounds)) == 16, "two of each layout, shape and round, none twice"
    rows = read_table(tmp_path / "schedules.csv")
    assert {row.gemm for row in rows} == {Gemm(g.m, g.n, g.k, layout) for g in SHAPES for layout in Layout}
    assert all(row.edge == PLAIN and row.us == 2.0 for row in rows if row.gemm.layout is Layout.NN)
    with (tmp_path / "times.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 16
    assert len(beside) == 8 and "2 shapes: 1.5000 of the table's speed, least 1.500" in said.out


def test_without_a_gpu_it_says_what_is_missing(monkeypatch, tmp_path, capsys) -> None:
    program = example("tune_from_scratch")
    monkeypatch.setattr("sys.argv", ["tune_from_scratch", "--grid", "64x64x64", "--out", str(tmp_path)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert program.main() == 2
    assert "GPU" in capsys.readouterr().err
