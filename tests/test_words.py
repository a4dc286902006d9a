"""What commands print is for strangers: tables of 80 columns, no internal nouns, bounds that are explained."""

import re
from dataclasses import replace
from typing import Any

import pytest
from conftest import honest_source

from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.baselines._base import all_baselines
from cuda_l2.optimizer import Result
from cuda_l2.records import Arm, Candidate, Conditions, Gemm, Interval, Timing, TimingStatus, Trial
from cuda_l2.report.bench import markdown, print_shapes
from cuda_l2.report.live import describe
from cuda_l2.report.tables import print_known, print_result, print_trial
from cuda_l2.runs.results import Header, Measurement
from cuda_l2.search import Progress

GEMM = Gemm(48, 32, 40)
COLUMNS = 80
INTERNAL = ("variance", "loop overhead", "jump", "does nothing", "lowered", "known before", "the loop itself", "nan")
"""Words that --help does not explain."""


@pytest.fixture(scope="module")
def trial(rig: Any) -> Trial:
    """A trial whose baselines have the longest names."""
    with Evaluator(GEMM, rig) as evaluator:
        found = next(evaluator.evaluate([Candidate(honest_source())]))
    names = sorted(all_baselines(), key=len)[-3:]
    arms = [Arm(name, Interval(1234.5, 1200.0, 1300.0), 12, 100) for name in names]
    ratio = Interval(12.345, 11.111, 13.333)
    timing = replace(
        found.timing,
        protocol="offline",
        candidate=Arm("candidate", Interval(100.0, 99.0, 101.0), 12, 100),
        baselines=tuple(arms),
        reference=names[-1],
        speedup=ratio,
        speedups=tuple((name, ratio) for name in names),
        empty_call_us=29.0,
    )
    return replace(found, timing=timing, protocol="offline")


def progress_of(trial: Trial) -> Progress:
    progress = Progress(
        proposed=9, built=9, correct=7, timed=7, known=2, repeated=1, best=trial, last=trial, seconds=12.0
    )
    progress.rejected.update({"refused": 1, "incorrect": 1})
    progress.reviews.update({"lowered": 1, "unstable": 2})
    progress.trials, progress.unjudged, progress.queued_s = [trial], 3, 4.0
    return progress


def test_a_result_fits_80_columns_and_uses_no_internal_words(trial: Trial, rig: Any, capsys: Any) -> None:
    left_out = Conditions(left_out={"torch fp16": "one launch takes many seconds"})
    trial = replace(trial, timing=replace(trial.timing, conditions=left_out))
    server = replace(trial, protocol="server", timing=replace(trial.timing, protocol="server"))
    print_result(Result(GEMM, rig.target, progress_of(trial), {"offline": trial, "server": server}, None))
    said = capsys.readouterr().out
    tables = [line for line in said.splitlines() if line.startswith(("│", "┃", "┏", "└"))]
    assert tables and max(map(len, tables)) <= COLUMNS
    assert said.count("our speedup [95 % interval]") == 2 and "12.345x [11.111, 13.333]" in said
    assert "offline: calls back to back, caches warm" in said and "server: single calls after pauses" in said
    assert "starting a round of calls takes about 29 us, in our times and the baselines' alike" in said
    assert "9 kernels tried in 12 s, 7 correct and timed, 2 known from an earlier search, 1 proposed again" in said
    assert "rejected: 1 with wrong results, 1 against the rules of the launch contract" in said
    assert "the time was up before 3 more kernels could be tried" in said
    assert "4 s more went by waiting for another cuda-l2" in said
    assert "1 suspicious speedup measured again and corrected" in said
    assert said.count("torch fp16 is left out: one launch takes many seconds") == 1
    assert not [word for word in INTERNAL if re.search(rf"\b{word}\b", said)]


def test_progress_uses_no_internal_words(trial: Trial) -> None:
    said = describe(progress_of(trial))
    assert "best so far 12.35x as fast as the strongest library" in said
    assert not [word for word in INTERNAL if re.search(rf"\b{word}\b", said)]


def test_a_reason_in_the_progress_is_whole_or_says_that_it_was_cut(trial: Trial) -> None:
    progress = progress_of(trial)
    why = "threads together waited 7.0 ms for a core in a sample of 10.0 ms"
    whole = f"other work kept the cores busy ({why}), so no ratio would be true"
    for reason in (whole, "word " * 100):
        progress.last = replace(trial, timing=Timing(TimingStatus.BUSY, trial.protocol, reason=reason))
        line = describe(progress).splitlines()[-1]
        assert line.endswith("would be true" if reason == whole else "word ...") and len(line) < 250


def test_check_says_which_bound_on_the_error_counts(trial: Trial, capsys: Any) -> None:
    print_trial(replace(trial, verdict=replace(trial.verdict, max_error=0.03, max_allowed=0.06)))
    said = " ".join(capsys.readouterr().out.split())
    assert "largest 0.03 (0.06 is allowed, by the libraries' own errors)" in said
    assert "does not count" not in said
    assert trial.verdict.max_allowed > trial.verdict.max_error > 0


def test_what_was_not_timed_has_no_reward_in_words(trial: Trial, capsys: Any) -> None:
    busy = Timing(TimingStatus.BUSY, "offline", reason="other work kept the cores busy")
    print_trial(replace(trial, timing=busy, reward=float("nan")))
    said = capsys.readouterr().out
    assert "reward   none, for it was not timed" in said and "nan" not in said


def test_show_explains_its_protocols(trial: Trial, tmp_path: Any, capsys: Any) -> None:
    print_known(GEMM, [trial], tmp_path / "archive.db")
    said = capsys.readouterr().out
    assert "offline: calls back to back, caches warm" in said
    rows = [line for line in said.splitlines() if line.startswith("  ") and ("x [" in line or "speedup" in line)]
    assert rows and max(map(len, rows)) <= COLUMNS


def test_the_table_of_bench_uses_no_internal_words_and_is_printed_in_80_columns(
    trial: Trial, rig: Any, capsys: Any
) -> None:
    server = replace(trial.timing, protocol="server")
    found = [
        Measurement(GEMM, timing.protocol, "measured", timing=timing) for timing in (trial.timing, server) if timing
    ]
    said = markdown(Header("cpu", rig.environment(), {}), found)
    assert not [word for word in INTERNAL if re.search(rf"\b{word}\b", said)]
    assert "| 48x32x40 |" in said and "12.345 [11.111, 13.333]" in said and "geometric mean" in said
    print_shapes([replace(each, gemm=Gemm(16384, 16384, 16384)) for each in found])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= COLUMNS and "12.35 [11.11, 13.33]" in printed
    assert "offline speedup" in printed and "16384x16384x16384" in printed and "geometric mean" in printed


@pytest.mark.parametrize("command", ["optimize", "bench"])
def test_help_shows_ten_options_first(command: str, typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    _, said, _ = typed(command, "--help")
    panels = dict(re.findall(r"^╭─ ([\w ]+?) ─+╮\n(.*?)^╰", said, re.M | re.S))
    first = re.findall(r"^│ +(--[\w-]+)", panels["Parameters"], re.M)
    assert len(first) == 10 and "--budget" in first and "--target" in first
    assert "Language models" in panels and "Libraries on a GPU" in panels
    assert max(map(len, said.splitlines())) <= COLUMNS
