"""Progress: what runs is shown every second, with how long it may, whether or not something ended."""

from pathlib import Path

import pytest
from clocks import ticking
from conftest import honest_source

from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.clock import Clock
from cuda_l2.records import Gemm
from cuda_l2.report import live
from cuda_l2.report.live import Line, LiveProgress, Stages
from cuda_l2.search import Scope, search
from cuda_l2.system import lock, steps
from cuda_l2.system.steps import step

GEMM = Gemm(48, 32, 40)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = ticking(0.0)
    monkeypatch.setattr(steps, "perf_counter", made.now)
    return made


def test_a_models_name_is_printed_as_it_is(clock: Clock, capsys) -> None:
    Stages("64x64x64", clock=clock).stage("waiting for openai:m: choosing")  # which rich takes for a picture
    assert capsys.readouterr().err == "64x64x64: 0 s, waiting for openai:m: choosing\n"


def test_a_line_ticks_while_a_step_runs_and_says_for_how_long_it_may(clock: Clock, capsys) -> None:
    stages = Stages("512x512x512", most_s=90.0, clock=clock)
    stages.stage("searching")
    with step("compiling 8 kernels"), step("waiting until other programs leave the cores alone", 20.0):
        for _ in range(12):
            clock.sleep(1.0)
            stages.tick()
    clock.sleep(5.0)
    stages.tick()
    assert capsys.readouterr().err.splitlines() == [
        "512x512x512: 0 s of at most 90 s, searching",
        "512x512x512: 5 s of at most 90 s, searching: waiting until other programs leave the cores alone, 5 s of at"
        " most 20 s",
        "512x512x512: 10 s of at most 90 s, searching: waiting until other programs leave the cores alone, 10 s of at"
        " most 20 s",
        "512x512x512: 17 s of at most 90 s, searching",
    ]


def test_a_line_that_says_nothing_new_is_not_printed_again(clock: Clock, capsys) -> None:
    line = Line(clock=clock)
    for said in ("1 of 9 shapes", "2 of 9 shapes"):
        line.show(said)
        for _ in range(12):
            clock.sleep(1.0)
            line.tick()
    assert capsys.readouterr().err.splitlines() == ["1 of 9 shapes", "2 of 9 shapes"]


def test_a_limit_beyond_the_runs_is_not_shown_and_a_passed_one_is_said(clock: Clock, capsys) -> None:
    stages = Stages("512x512x512", most_s=15.0, clock=clock)
    stages.stage("preparing")
    with step("loading PyTorch for the baselines", 120.0):
        for _ in range(3):
            clock.sleep(6.0)
            stages.tick()
    assert capsys.readouterr().err.splitlines()[1:] == [
        "512x512x512: 6 s of at most 15 s, preparing: loading PyTorch for the baselines, 6 s",
        "512x512x512: 12 s of at most 15 s, preparing: loading PyTorch for the baselines, 12 s",
        "512x512x512: 18 s, longer than the planned 15 s, preparing: loading PyTorch for the baselines, 18 s",
    ]


def test_a_terminal_is_written_every_second(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 1e9)  # the test ticks itself
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    shown: list[str] = []
    line = Stages("512x512x512", clock=clock)
    monkeypatch.setattr(line._live, "update", lambda text, refresh: shown.append(str(text)))
    line._live.start()
    line.stage("searching")
    for _ in range(3):
        clock.sleep(1.0)
        line.tick()
    line.close()
    assert shown == [f"512x512x512: {second} s, searching" for second in range(4)]


def test_what_is_quiet_prints_nothing(clock: Clock, capsys) -> None:
    with Stages("x", quiet=True, clock=clock) as stages:
        stages.stage("searching")
        clock.sleep(10.0)
        stages.tick()
    assert capsys.readouterr().err == ""


def test_a_line_without_text_does_not_tick(clock: Clock, capsys) -> None:
    line = Line(clock=clock)
    clock.sleep(10.0)
    line.tick()
    assert capsys.readouterr().err == ""


def test_steps_are_shown_innermost_first_and_end_with_their_context(clock: Clock) -> None:
    assert steps.current() is None
    with pytest.raises(ValueError), step("outer"):
        with step("inner"):
            assert steps.current().name == "inner"
        assert steps.current().name == "outer"
        raise ValueError
    assert steps.current() is None


def test_a_search_names_its_steps(rig, archive, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from test_search import Listed  # noqa: PLC0415

    seen: list[str] = []
    enter = steps.Step.__init__
    monkeypatch.setattr(
        steps.Step, "__init__", lambda self, name, *rest: (seen.append(name), enter(self, name, *rest))[1]
    )
    shown = LiveProgress(GEMM, clock=ticking(5.0))
    with Evaluator(GEMM, rig) as evaluator:
        search(
            evaluator,
            Listed([honest_source()]),
            archive,
            Scope(budget_s=3600, max_trials=1),
            on_progress=shown.progress,
        )
    assert "drawing inputs" in seen and "compiling 1 kernel" in seen and "timing a kernel" in seen
    assert "checking a kernel: special values" in seen and "choosing the next kernels" in seen
    said = capsys.readouterr().err
    assert "1 kernel tried, 1 correct and timed; best so far" in said and "as fast as the strongest library" in said


def test_waiting_for_another_search_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    waited: list[str] = []
    flock = lock.fcntl.flock

    def scripted(file: object, kind: int) -> None:
        """Another process holds the lock until it is waited for."""
        if kind & lock.fcntl.LOCK_NB:
            raise BlockingIOError
        waited.append(steps.current().name)
        flock(file, kind)

    monkeypatch.setattr(lock.fcntl, "flock", scripted)
    with lock.machine_lock():
        assert set(waited) == {"waiting for another cuda-l2 on this machine, on top of the budget"}
        assert steps.current() is None
