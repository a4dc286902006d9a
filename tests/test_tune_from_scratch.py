"""examples/tune_from_scratch.py by a stand-in for the compiler and the timer: what it builds, times, keeps and says."""

import contextlib
import itertools
import math
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import example

from cuda_l2.library.table import PLAIN, read_table, read_times, write_table
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.quick import Sampled
from cuda_l2.records import Build, BuildStatus, Gemm, Layout
from cuda_l2.system.errors import MachineError

TABLE = Path(__file__).parents[1] / "results" / "h200" / "schedules.csv"
SHAPES = "64x4096x4096,128x128x256"


class Pool:
    """Guesses in this process."""

    def __init__(self, workers, context, prepare, arguments) -> None:
        prepare(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def map(self, function, items, chunksize):
        return map(function, items)


class Servers:
    """A third of the kernels does not build."""

    refused: ClassVar[set[str]] = set()

    def __init__(self, target) -> None: ...

    def build(self, candidates):
        for candidate in candidates:
            built = zlib.crc32(candidate.source.encode()) % 3 > 0
            if not built:
                self.refused.add(candidate.id)
            how = {"artifact": candidate.id} if built else {"reason": "too many registers"}
            yield Build(candidate.id, BuildStatus.BUILT if built else BuildStatus.FAILED, **how)

    def close(self) -> None: ...


class Timer:
    """A launch's time follows from its plan."""

    asked: ClassVar[list[tuple[Gemm, list[Any]]]] = []
    interrupted: ClassVar[set[int]] = set()  # at which questions Ctrl-C comes
    failing: ClassVar[set[bytes]] = set()  # plans
    finals: ClassVar[bool] = True  # whether there is a second pass
    rounds: ClassVar[list[int]] = []

    def __init__(self, seed, finalists, *, least_rounds) -> None:
        self.rounds.append(least_rounds)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def time(self, gemm, items):
        if len(self.asked) in self.interrupted:
            self.interrupted.remove(len(self.asked))
            raise KeyboardInterrupt
        self.asked.append((gemm, list(items)))
        return [
            Sampled(reason="wrong result")
            if item.plan in self.failing
            else Sampled(first=[time_us(item), math.nan], final=[time_us(item) if self.finals else math.nan, math.nan])
            for item in items
        ]


def time_us(item) -> float:
    return 10 + zlib.crc32(item.plan) % 1000 / 100


@pytest.fixture
def tool(monkeypatch):
    tool = example("tune_from_scratch")
    monkeypatch.setattr(Timer, "asked", [])
    monkeypatch.setattr(Timer, "rounds", [])
    monkeypatch.setattr(Timer, "interrupted", set())
    monkeypatch.setattr(Timer, "failing", set())
    monkeypatch.setattr(Timer, "finals", True)
    monkeypatch.setattr(tool.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(Servers, "refused", set())
    for name, stand_in in (("ProcessPoolExecutor", Pool), ("BuildServers", Servers), ("QuickTimer", Timer)):
        monkeypatch.setattr(tool, name, stand_in)
    monkeypatch.setattr(tool, "machine_lock", contextlib.nullcontext)
    monkeypatch.setattr(tool, "bus_id", str)
    monkeypatch.setattr(tool.cuda, "detect", lambda: compile_only("sm_90a"))
    return tool


@pytest.fixture
def run(tool, monkeypatch, tmp_path):
    def run(*words: str) -> int:
        fixed = ["--grid", SHAPES, "--out", str(tmp_path / "out"), "--kernels", "40", "--tries", "3"]
        monkeypatch.setattr("sys.argv", ["tune_from_scratch", *fixed, *words])
        return tool.main()

    return run


def test_kernels_are_chosen_that_hold_early_guesses_of_many_shapes(tool) -> None:
    one, two, three = (Gemm(64 * i, 64, 64) for i in (1, 2, 3))
    lists = {one: "abc", two: "bca", three: "dba"}
    guesses = {gemm: [tool.Guess("f", (("X", ord(name)),), name) for name in names] for gemm, names in lists.items()}
    assert list(tool.choose(guesses, 1)) == ["b"]  # second, first and second; a is first, third and third
    first_two = tool.choose(guesses, 2)
    assert list(first_two) == ["b", "a"]  # c has no first guess; all have one already
    assert first_two["b"][0] == one and first_two["b"][1] in guesses[one]
    assert list(tool.choose(guesses, 1, held=["b"])) == ["a"]
    assert len(tool.choose(guesses, 9)) == 4


def test_a_round_times_what_was_built_and_the_next_one_the_fastest_again_beside_new_ones(run, tmp_path) -> None:
    out = tmp_path / "out"
    assert run("--rounds", "1") == 0
    first = read_times(out / "times-1.csv")
    assert {row.gemm for row in first} == {
        Gemm(*sizes, layout=layout) for sizes, layout in itertools.product(((64, 4096, 4096), (128, 128, 256)), Layout)
    }
    assert len(first) == 12 and Servers.refused
    best = {gemm: min(row.us for row in first if row.gemm == gemm) for gemm in {row.gemm for row in first}}
    table = read_table(out / "schedules.csv")
    assert {row.gemm: row.us for row in table} == best and {row.edge for row in table} == {PLAIN}

    asked = len(Timer.asked)
    assert run() == 0  # goes on behind round 1
    assert read_times(out / "times-1.csv") == first and Timer.rounds == [7, 31]
    second = read_times(out / "times-2.csv")
    for gemm in best:
        before, after = ({(row.family, row.schedule) for row in rows if row.gemm == gemm} for rows in (first, second))
        assert before <= after and len(after) == 6
    again = [item.finalist for _, items in Timer.asked[asked:] for item in items]
    assert sum(again) == 12 and len(again) == 24
    winners = {row.gemm: row.us for row in read_table(out / "schedules.csv")}
    assert all(winners[gemm] == min(row.us for row in second if row.gemm == gemm) for gemm in best)


def test_a_round_that_was_stopped_goes_on_with_the_sizes_that_are_left(run, tmp_path) -> None:
    Timer.interrupted.update({1, 3})  # at the second of two sizes, in either round
    assert [run(), run(), run()] == [130, 130, 0]
    assert [gemm for gemm, _ in Timer.asked[:2]] == [gemm for gemm, _ in Timer.asked[2:]] and len(Timer.asked) == 4
    left = {"schedules.csv", "settings.json", "times-1.csv", "times-2.csv"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == left
    assert len({row.gemm for row in read_times(tmp_path / "out" / "times-2.csv")}) == 4


def test_times_are_kept_on_the_way_too(tool, run, monkeypatch, tmp_path) -> None:
    kept = []
    monkeypatch.setattr(tool, "KEPT_EVERY", 1)
    monkeypatch.setattr(tool, "write_table", lambda path, rows: kept.append(path.name) or write_table(path, rows))
    assert run("--rounds", "1") == 0
    assert kept == [*["times-1.part.csv"] * 3, "schedules.csv"]  # both sizes, the end


def test_what_fails_when_it_is_timed_again_does_not_win(run, tmp_path) -> None:
    assert run("--rounds", "1") == 0
    Timer.failing.update(item.plan for _, items in Timer.asked for item in items)
    before = {(row.gemm, row.family, row.schedule) for row in read_times(tmp_path / "out" / "times-1.csv")}
    assert run() == 0
    winners = read_table(tmp_path / "out" / "schedules.csv")
    assert len(winners) == 4 and not {(row.gemm, row.family, row.schedule) for row in winners} & before


def test_a_launch_without_a_second_pass_counts_as_slower(run, tmp_path) -> None:
    assert run("--rounds", "1") == 0
    sure = [row.us for row in read_times(tmp_path / "out" / "times-1.csv")]
    Timer.finals = False
    assert run("--rounds", "1", "--out", str(tmp_path / "other")) == 0
    unsure = [row.us for row in read_times(tmp_path / "other" / "times-1.csv")]
    assert unsure == pytest.approx([1.02 * us for us in sure], abs=2e-3)


def test_a_table_of_two_rounds_is_not_replaced_by_that_of_one(run, tmp_path) -> None:
    assert run() == 0
    table = (tmp_path / "out" / "schedules.csv").read_bytes()
    assert run("--rounds", "1") == 0
    assert (tmp_path / "out" / "schedules.csv").read_bytes() == table and len(Timer.asked) == 4


@pytest.mark.parametrize("words", [["--grid", "64x64x64"], ["--tries", "4"], ["--kernels", "41"]])
def test_a_folder_of_other_settings_is_left_alone(run, words, tmp_path, capsys) -> None:
    assert run("--rounds", "1") == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert run(*words) == 2
    name = {"--grid": "shapes"}.get(words[0], words[0].removeprefix("--"))
    assert f"begun with other {name}: give another --out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(("name", "says"), [("times-1.csv", "times-1.csv, line 3"), ("settings.json", "is damaged")])
def test_a_damaged_file_is_one_line(run, name, says, tmp_path, capsys) -> None:
    assert run("--rounds", "1") == 0
    file = tmp_path / "out" / name
    file.write_text(file.read_text()[: 300 if name == "times-1.csv" else 20])
    capsys.readouterr()
    assert run() == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_times_of_an_earlier_round_are_scaled_to_the_clock_of_the_next(tool) -> None:
    gemm = Gemm(64, 64, 64)
    a, b, c, d, e = (tool.Guess("f", (("X", i),), "k") for i in range(5))
    tuning = tool.Tuning([gemm], compile_only("sm_90a"), Path())
    tuning._take({gemm: {a: 10.0, b: 11.0, c: 12.0, e: 20.0}})
    tuning._take({gemm: {a: 5.0, b: 5.4, d: 7.0}})
    assert tuning.times[gemm] == pytest.approx({a: 5.0, b: 5.4, d: 7.0, e: 20 * (0.5 + 5.4 / 11) / 2})


def test_winners_are_timed_beside_a_tables_launches(run, tmp_path, capsys) -> None:
    """The table: the slowest launches of a first run."""
    assert run("--rounds", "1") == 0
    slowest = {row.gemm: row for row in sorted(read_times(tmp_path / "out" / "times-1.csv"), key=lambda row: row.us)}
    write_table(tmp_path / "table.csv", slowest.values())
    assert run("--beside", str(tmp_path / "table.csv")) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    lines = (tmp_path / "out" / "beside.csv").read_text().splitlines()[1:]
    best = {
        row.gemm.any_layout: row.us
        for row in sorted(read_table(tmp_path / "out" / "schedules.csv"), key=lambda r: -r.us)
    }
    theirs = {gemm.any_layout: row.us for gemm, row in sorted(slowest.items(), key=lambda pair: -pair[1].us)}
    shares = []
    for line in lines:
        m, n, k, us, table_us = map(float, line.split(","))
        size = Gemm(int(m), int(n), int(k)).any_layout
        assert us == pytest.approx(best[size], abs=1e-3) and table_us == pytest.approx(theirs[size], abs=1e-3)
        shares.append(table_us / us)
    assert said == f"2 shapes: {sum(shares) / 2:.4f} of the table's speed, least {min(shares):.3f}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kernels", "0"], "at least 1"),
        (["--weights", __file__], "holds no weights"),
        (["--grid", "64x64x64:bf16"], "fp16 elements with fp32 sums alone"),
        (["--grid", "64x64x65", "--beside", str(TABLE)], "a plain launch for none"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(run, words, says, capsys) -> None:
    assert run(*words) == 2
    assert says in capsys.readouterr().err and not Timer.asked


def test_without_a_gpu_there_is_one_line(tool, run, monkeypatch, capsys) -> None:
    def none():
        raise MachineError("no NVIDIA GPU")

    monkeypatch.setattr(tool.cuda, "detect", none)
    assert run() == 2 and capsys.readouterr().err == "no NVIDIA GPU\n"
