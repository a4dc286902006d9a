"""cuda-l2 bench over a grid: its shapes, its results file, its tables, and runs that are killed, stopped and resumed."""

import collections
import csv
import fcntl
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import run
from waiting import CLI, interrupt_when, kill_when

from cuda_l2 import optimizer
from cuda_l2.commands.bench import _baselines as named_baselines
from cuda_l2.measure.baselines._base import named, product_baselines
from cuda_l2.measure.protocols import CPU_PROTOCOLS
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import (
    Accumulate,
    Arm,
    Conditions,
    Gemm,
    Interval,
    Layout,
    Timing,
    TimingStatus,
    Verdict,
    VerdictStatus,
    to_json,
)
from cuda_l2.report.grid import rows, write_tables
from cuda_l2.report.grid_summary import cases, ratios, summary
from cuda_l2.report.live import duration
from cuda_l2.rigs._base import Request
from cuda_l2.runs.grid import LEAST_OF_BUCKET, bucket, bucket_name, log2_mnk, read_grid, sample, shuffled
from cuda_l2.runs.results import CSV, PARQUET, RESULTS, SUMMARY, Header, Measurement, ResultsFile, set_aside
from cuda_l2.runs.settings import SweepSettings
from cuda_l2.runs.sweep import Sweep
from cuda_l2.search import search
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

SCHEDULES = Path(__file__).parent.parent / "results" / "h200" / "schedules.csv"
BUCKETS_OF_THE_PAPER = {18: 10, 21: 46, 24: 118, 27: 205, 30: 241, 33: 214, 36: 118, 39: 48}


# the grid


def test_the_papers_grid_has_the_papers_bucket_sizes() -> None:
    paper = read_grid("paper")
    assert len(set(paper)) == 1000
    assert dict(collections.Counter(bucket(gemm) for gemm in paper)) == BUCKETS_OF_THE_PAPER
    assert log2_mnk(Gemm(64, 64, 64)) == 18 and log2_mnk(Gemm(63, 64, 64)) == 17
    assert [bucket_name(first) for first in (15, 39)] == ["15-17", "39+"]
    both = read_grid("paper", list(Layout), Accumulate.FP16)
    assert len(both) == 2000 and {gemm.accumulate for gemm in both} == {Accumulate.FP16}


def test_a_list_of_shapes_keeps_what_each_says_and_takes_the_rest_from_the_options() -> None:
    found = read_grid("64x64x64, 8x8x8:tn,64x64x64,9x9x9:fp16", list(Layout), Accumulate.FP32)
    assert [str(gemm) for gemm in found] == ["64x64x64", "64x64x64:tn", "8x8x8:tn", "9x9x9:fp16", "9x9x9:tn:fp16"]
    assert str(read_grid("5x6x7:fp32", [Layout.TN], Accumulate.FP16)[0]) == "5x6x7:tn"


@pytest.mark.parametrize(
    "text",
    [
        "# shapes of a model\n64x128x256\n\n  512x512x512:tn  # the second\n",
        "64,128,256\n512x512x512:tn\n",
        "64 128 256\n512x512x512:tn",
        "m,n,k,layout,time\n64,128,256,,1.5\n512,512,512,tn,2\n",
        "K, M, N, Layout, Accumulate\n256, 64, 128, nn, fp32\n512, 512, 512, TN, fp32\n",
    ],
    ids=["lines", "commas", "blanks", "columns", "columns in another order"],
)
def test_a_file_of_shapes_is_read(tmp_path, text) -> None:
    path = tmp_path / "shapes.csv"
    path.write_text(text)
    assert read_grid(str(path)) == [Gemm(64, 128, 256), Gemm(512, 512, 512, Layout.TN)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64x64x64\n64x64\n", "line 2"),
        ("64x64x64\n\n# nothing\nbanana\n", "line 4"),
        ("m,n,k\n1,2,3\n1,2\n", "line 3"),
        ("m,n,k,layout\n1,2,3,nt\n", "line 2: .*A is row-major"),
        ("0x1x2\n", "at least 1"),
        ("# none\n", "holds no shape"),
    ],
)
def test_a_bad_file_of_shapes_is_refused_by_its_line(tmp_path, text, says) -> None:
    path = tmp_path / "shapes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_grid(str(path))


def test_a_grid_that_is_nothing_is_refused() -> None:
    for text in ("missing.csv", "papers", ""):
        with pytest.raises(UserError, match="no such file"):
            read_grid(text)
    with pytest.raises(UserError, match="A is row-major"):
        read_grid("64x64x64:nt")


@pytest.mark.parametrize("count", [80, 200, 600, 999])
def test_a_sample_is_stratified(count) -> None:
    found = sample(read_grid("paper"), count, seed=3)
    assert len(set(found)) == count
    for first, present in collections.Counter(bucket(gemm) for gemm in found).items():
        size = BUCKETS_OF_THE_PAPER[first]
        assert present >= min(LEAST_OF_BUCKET, size)
        if count == 200:  # what is left after the least, in proportion
            assert present == pytest.approx(LEAST_OF_BUCKET + (size - LEAST_OF_BUCKET) * 120 / 920, abs=1)
    assert sample(read_grid("paper"), 5000, seed=3) == read_grid("paper")


def test_a_sample_is_the_same_for_the_same_seed_whatever_the_order_of_the_shapes() -> None:
    paper = read_grid("paper")
    mixed = random.Random(1).sample(paper, len(paper))
    assert set(sample(paper, 100, seed=7)) == set(sample(mixed, 100, seed=7))
    assert set(sample(paper, 100, seed=7)) != set(sample(paper, 100, seed=8))
    few = collections.Counter(bucket(gemm) for gemm in sample(paper, 5, seed=0))
    assert sum(few.values()) == 5 and max(few.values()) == 1
    with pytest.raises(UserError, match="at least 1"):
        sample(paper, 0, seed=0)


def test_a_sample_takes_a_size_in_both_layouts_and_the_order_keeps_them_together() -> None:
    both = shuffled(sample(read_grid("paper", list(Layout)), 50, seed=0), seed=0)
    assert len(both) == 100
    assert all((x.m, x.n, x.k) == (y.m, y.n, y.k) and x != y for x, y in zip(both[::2], both[1::2], strict=True))
    assert both[::2] == [gemm for gemm in shuffled(both[::-1], seed=0) if gemm.layout is both[0].layout]
    assert both != sorted(both)
    assert shuffled(both, seed=1) != both


# the results file

HEADER = Header("gpu:a", {"driver": "580.1", "sizes": [1, 2], "peak_tflops": 790.1}, {"shapes": "2 of hash ab"})


def near(value: float, share: float = 0.01) -> Interval:
    return Interval(value, value * (1 - share), value * (1 + share))


def measured(shape: str, ours_us: float, baselines: dict[str, float], protocol: str = "offline") -> Measurement:
    """As a run would give it; with ours_us 0 the first baseline stands in the candidate's place."""
    gemm = Gemm.parse(shape)
    other = "TN" if gemm.layout is Layout.NN else "NN"
    arms = {name: Arm(name, near(us), 15, 1500) for name, us in baselines.items()}
    subject = Arm(CANDIDATE, near(ours_us), 15, 1500) if ours_us else arms.pop(next(iter(arms)))
    ratio = {name: near(arm.latency_us.estimate / subject.latency_us.estimate) for name, arm in arms.items()}
    reference = min((n for n in arms if not n.endswith(f" {other}")), key=lambda n: arms[n].latency_us.estimate)
    timing = Timing(
        TimingStatus.MEASURED, protocol, candidate=subject, baselines=tuple(arms.values()), reference=reference,
        speedup=ratio[reference], speedups=tuple(ratio.items()), empty_call_us=0.51,
        conditions=Conditions(sm_mhz=1755, sm_mhz_range=(1740, 1770), power_w=412.5, limited_by=("power cap",),
                              host_call_to_done_us={CANDIDATE: 9.5, "cuBLAS NN": 9.0}),
    )  # fmt: skip
    algorithm = {"id": 66, "tile": 20, "stages": 35, "split_k": 2, "reduction": "compute type", "workspace_bytes": 4096}
    arms_told = {name: {"arm": name, "kernels": ["gemm 4x4x1", "reduce 8x1x1"], **algorithm} for name in baselines}
    return Measurement(
        gemm, protocol, "measured", timing=timing, kernel="0123456789abcdef" if ours_us else "", family="sm90_wave",
        schedule=(("BM", 64), ("BN", 128)) if ours_us else (), verdict=Verdict(VerdictStatus.CORRECT, passed=("exact",)),
        arms=arms_told, created="2025-01-01T00:00:00+00:00", seconds=1.5,
    )  # fmt: skip


CUBLAS = {"torch.matmul": 6.0, "cuBLAS NN": 5.0, "cuBLAS TN": 5.5, "cuBLASLt-heuristic NN": 4.8}
CUBLAS |= {"cuBLASLt-heuristic TN": 4.4, "cuBLASLt-AutoTuning NN": 4.0, "cuBLASLt-AutoTuning TN": 4.2}
RUN = [
    measured("64x64x64", 2.0, CUBLAS),
    measured("128x128x128", 8.0, CUBLAS),
    Measurement(Gemm(9, 9, 9), "offline", "skipped", "too large, with a , and a\n line"),
]


def texts(measurements: list[Measurement]) -> list[str]:
    """For comparing: NaN is not equal to itself."""
    return [to_json(measurement) for measurement in measurements]


def kept(path: Path, measurements=RUN, header: Header = HEADER) -> bytes:
    with ResultsFile(path, header) as file:
        for measurement in measurements:
            file.append(measurement)
    return path.read_bytes()


def test_what_was_stored_is_read_again_and_the_last_of_a_shape_counts(tmp_path) -> None:
    path = tmp_path / RESULTS
    before = kept(path)
    with ResultsFile(path, HEADER) as file:
        assert texts(file.records) == texts(RUN)
        again = measured("64x64x64", 1.9, CUBLAS)
        file.append(again)
        file.append(measured("64x64x64", 3.0, CUBLAS, "server"))
    assert path.read_bytes().startswith(before)  # only ever appended to
    with ResultsFile(path, HEADER) as file:
        assert texts([file.find(Gemm(64, 64, 64), "offline")]) == texts([again])
        assert len(file.records) == 4


def test_lines_of_before_with_a_field_that_is_gone_are_read(tmp_path) -> None:
    path = tmp_path / RESULTS
    path.write_bytes(kept(path).replace(b'"seconds":1.5', b'"falls_back":[false,false],"seconds":1.5'))
    assert b"falls_back" in path.read_bytes()
    with ResultsFile(path, HEADER) as file:
        assert texts(file.records) == texts(RUN)


def test_an_interrupt_that_another_thread_takes_waits_until_a_line_is_stored(tmp_path, monkeypatch) -> None:
    with ResultsFile(tmp_path / RESULTS, HEADER) as results:
        write = results._file.append

        def interrupted(text: str) -> None:
            write(text)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(results._file, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            results.append(RUN[0])
        assert texts(results.records) == texts([RUN[0]]) and len(stored(tmp_path)) == 1


def test_what_another_run_measured_is_stored_at_once(tmp_path, monkeypatch) -> None:
    """A disk takes milliseconds to keep a line, and a run has thousands."""
    other, syncs = tmp_path / "other" / RESULTS, list[int]()
    kept(other, [*RUN, measured("64x64x64", 3.0, CUBLAS, "server")])
    with ResultsFile(tmp_path / RESULTS, HEADER) as results:
        results.append(RUN[0])
        monkeypatch.setattr(os, "fsync", syncs.append)
        results.take_over(other)
        assert len(results.records) == 4 and len(syncs) == 1
    assert len(stored(tmp_path)) == 4


@pytest.mark.parametrize("cut", [1, 2, 40, -1])
def test_a_damaged_last_line_is_dropped_with_a_warning(tmp_path, cut) -> None:
    path = tmp_path / RESULTS
    whole = kept(path)
    lines = whole.splitlines(keepends=True)
    tail = lines[-1][:-1] + b"\0\xff" if cut < 0 else lines[-1][: len(lines[-1]) - cut]
    path.write_bytes(b"".join(lines[:-1]) + tail)
    warnings: list[str] = []
    with ResultsFile(path, HEADER, warnings.append) as file:
        intact = cut == 1  # the newline alone was missing: nothing is lost
        assert texts(file.records) == texts(RUN if intact else RUN[:-1])
        assert len(warnings) == (not intact) and all("last line" in text for text in warnings)
        file.append(RUN[-1])
    with ResultsFile(path, HEADER, warnings.append) as file:
        assert {m.gemm for m in file.records} == {m.gemm for m in RUN}
    assert len(warnings) == (not intact)  # what came after is sound


def test_a_damaged_line_in_between_is_told_and_what_it_held_is_missing(tmp_path) -> None:
    path = tmp_path / RESULTS
    lines = kept(path).splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:30] + b"#" * 40 + lines[1][70:] + b"".join(lines[2:]))
    damaged = path.read_bytes()
    warnings: list[str] = []
    with ResultsFile(path, HEADER, warnings.append) as file:
        assert texts(file.records) == texts(RUN[1:])
    assert len(warnings) == 1 and "line 2" in warnings[0]
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (Header("gpu:b", HEADER.environment, HEADER.settings), "machine gpu:a, not gpu:b"),
        (Header("gpu:a", HEADER.environment | {"driver": "570.2"}, HEADER.settings), "driver 580.1, not 570.2"),
        (Header("gpu:a", HEADER.environment | {"torch": "2.11"}, HEADER.settings), "torch None, not 2.11"),
        (Header("gpu:a", HEADER.environment, {"shapes": "3 of hash cd"}), "shapes 2 of hash ab"),
    ],
)
def test_results_of_another_machine_or_other_settings_are_refused_and_left_alone(tmp_path, header, says) -> None:
    path = tmp_path / RESULTS
    before = kept(path)
    with pytest.raises(UserError, match=says) as refusal:
        ResultsFile(path, header)
    assert "--out" in str(refusal.value) and "--fresh" in str(refusal.value)
    assert path.read_bytes() == before
    for changed in ({"peak_tflops": 788.0}, {"peak_in_quiet": True}):  # a measured ceiling is never the same twice
        ResultsFile(path, Header("gpu:a", HEADER.environment | changed, HEADER.settings)).close()


@pytest.mark.parametrize(
    "text", ["m,n,k\n1,2,3\n", "mine, no end", '{"kind": "other"}\n', '{"kind": "cuda-l2 results", "version": 9}\n']
)
def test_a_file_that_is_no_results_file_is_refused_and_left_alone(tmp_path, text) -> None:
    path = tmp_path / RESULTS
    path.write_text(text)
    with pytest.raises(UserError, match="--fresh"):
        ResultsFile(path, HEADER)
    assert path.read_text() == text


def test_two_runs_do_not_write_one_file(tmp_path) -> None:
    with ResultsFile(tmp_path / RESULTS, HEADER):
        with pytest.raises(UserError, match="another run"):
            ResultsFile(tmp_path / RESULTS, HEADER)
        with pytest.raises(UserError, match="another run"):
            set_aside(tmp_path)
    ResultsFile(tmp_path / RESULTS, HEADER).close()


def test_setting_results_aside_loses_nothing(tmp_path) -> None:
    first = kept(tmp_path / RESULTS)
    write_tables(tmp_path, HEADER, RUN)
    table = (tmp_path / CSV).read_bytes()
    set_aside(tmp_path)
    assert not (tmp_path / RESULTS).exists() and not (tmp_path / CSV).exists()
    second = kept(tmp_path / RESULTS, RUN[:1])
    set_aside(tmp_path)
    set_aside(tmp_path)  # nothing there: nothing to do
    assert (tmp_path / "results-1.jsonl").read_bytes() == first
    assert (tmp_path / "table-1.csv").read_bytes() == table
    assert (tmp_path / "results-2.jsonl").read_bytes() == second


# tables


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_both_tables_say_the_same_and_hold_the_environment(tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tuned_alone = measured("64x64x128", 0, {"cuBLASLt-AutoTuning NN": 2.0, "torch.matmul": 3.0})
    assert write_tables(tmp_path, HEADER, [*RUN, tuned_alone]) == ""
    table = parquet.read_table(tmp_path / PARQUET)
    read = read_csv(tmp_path / CSV)
    assert list(read[0]) == table.column_names and len(read) == 4
    for row, typed in zip(read, table.to_pylist(), strict=True):
        for name, value in typed.items():
            expected = "" if value is None else value
            assert (float(row[name]) if isinstance(value, int | float) else row[name]) == expected, name
    assert {str(table.schema.field(name).type) for name in ("m", "ours_us", "layout")} == {"int64", "double", "string"}
    assert json.loads(table.schema.metadata[b"cuda_l2"])["environment"] == HEADER.environment
    assert json.loads((tmp_path / "environment.json").read_text())["machine"] == "gpu:a"
    assert {row["env_driver"] for row in read} == {"580.1"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_row_tells_times_ratios_algorithms_and_conditions(tmp_path) -> None:
    write_tables(tmp_path, HEADER, RUN)
    skipped, row, _ = read_csv(tmp_path / CSV)
    expected = {
        "m": "64", "layout": "nn", "accumulate": "fp32", "log2_mnk": "18", "protocol": "offline", "status": "measured",
        "ours_us": "2.0", "ours_us_low": "1.98", "ours_rounds": "15", "ours_host_us": "9.5",
        "strongest": "cuBLASLt-AutoTuning NN", "speedup": "2.0", "speedup_low": "1.98", "ratio_to": "ours",
        "cublaslt_autotuning_nn_us": "4.0", "cublaslt_autotuning_tn_ratio": "2.1", "torch_matmul_ratio": "3.0",
        "cublaslt_heuristic_tn_split_k": "2", "cublaslt_autotuning_nn_reduction": "compute type",
        "cublaslt_autotuning_nn_workspace_bytes": "4096", "cublaslt_autotuning_nn_kernels": "gemm 4x4x1 + reduce 8x1x1",
        "family": "sm90_wave", "schedule": "BM=64 BN=128", "kernel": "0123456789abcdef", "verdict": "correct",
        "checks_passed": "exact", "sm_mhz": "1755", "sm_mhz_low": "1740", "limited_by": "power-cap",
        "empty_call_us": "0.51", "machine": "gpu:a", "env_peak_tflops": "790.1",
    }  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert skipped["status"] == "skipped" and skipped["reason"] == RUN[2].reason and skipped["ours_us"] == ""
    assert read_grid(str(tmp_path / CSV)) == [Gemm(9, 9, 9), Gemm(64, 64, 64), Gemm(128, 128, 128)]


def test_what_is_not_a_number_is_an_empty_cell() -> None:
    slow = measured("64x64x64", 2.0, CUBLAS)
    speedups = tuple((name, Interval(9.0, -math.inf, math.inf)) for name, _ in slow.timing.speedups)
    timing = Timing(
        TimingStatus.MEASURED, "offline", candidate=slow.timing.candidate, baselines=slow.timing.baselines,
        reference=slow.timing.reference, speedup=slow.timing.speedup, speedups=speedups,
    )  # fmt: skip
    (row,) = rows(HEADER, [Measurement(slow.gemm, "offline", "measured", timing=timing)])
    assert row["cublas_nn_ratio"] == 9.0 and row["cublas_nn_ratio_low"] is None and row["empty_call_us"] is None


def test_without_pyarrow_the_csv_is_written_and_the_way_to_the_other_is_named(tmp_path, monkeypatch) -> None:
    find = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "pyarrow" else find(name))
    assert "pip install pyarrow" in write_tables(tmp_path, HEADER, RUN)
    assert len(read_csv(tmp_path / CSV)) == 3 and not (tmp_path / PARQUET).exists()


# the summary


def test_ratios_by_layout_and_over_the_better_layouts() -> None:
    nn = measured("64x64x64", 2.0, CUBLAS)
    tn = measured("64x64x64:tn", 1.6, CUBLAS | {"torch.matmul": 1.5, "cuBLASLt-AutoTuning NN": 4.1})
    alone = measured("256x256x256", 10.0, CUBLAS)
    found = cases([nn, tn, alone])
    against_tuned = ratios(found, "cuBLASLt-AutoTuning")
    assert [(first, ratio.estimate) for first, ratio in against_tuned["NN"]] == [(18, 2.0), (24, 0.4)]
    assert [ratio.estimate for _, ratio in against_tuned["TN"]] == [pytest.approx(4.2 / 1.6)]
    # our faster layout is TN; the baselines' faster one in that same run is NN
    assert [ratio.estimate for _, ratio in against_tuned["max"]] == [pytest.approx(4.1 / 1.6)]
    # torch reads B as the task lays it out: its faster layout is the one of the same run here ...
    assert [ratio.estimate for _, ratio in ratios(found, "torch.matmul")["max"]] == [pytest.approx(1.5 / 1.6)]
    # ... and of the other run here, which makes no pairs and so a wider interval
    slow_torch = measured("64x64x64:tn", 1.6, CUBLAS | {"torch.matmul": 9.0})
    ((_, ratio),) = ratios(cases([nn, slow_torch]), "torch.matmul")["max"]
    assert ratio.estimate == pytest.approx(6.0 / 1.6) and ratio.high / ratio.low > 1.03
    # against all: the strongest that reads B alike, and over the layouts the strongest of all
    assert [ratio.estimate for _, ratio in ratios(found)["TN"]] == [pytest.approx(1.5 / 1.6)]
    assert ratios(cases([alone])).keys() == {"NN"}


def test_the_summary_counts_wins_and_losses_by_bucket() -> None:
    text = summary(HEADER, [*RUN, measured("64x64x128", 4.0, CUBLAS), measured("64x64x64", 3.0, CUBLAS, "server")])
    # 2.0 and 1.0 with 1 % either way in the first bucket, 0.5 in the next
    assert "| 18-20 | 2 | +50.0% | 1.414 | 50% | 0% |" in text
    assert "| 21-23 | 1 | -50.0% | 0.500 | 0% | 100% |" in text
    assert "| all | 3 | +16.7% | 1.000 | 33% | 33% |" in text
    assert "| torch.matmul | NN | 3 | +75.0% | 1.500 | 67% | 33% |" in text
    # heuristic, cuBLAS and torch over autotuned, all NN; then the better layouts, 4.4 / 4.0
    assert "| all | 3 | 1.200 | 1.250 | 1.500 | 1.100 |" in text
    assert "## server, NN" in text and "without figures 1 of 4 shapes: 1 skipped" in text and "driver 580.1" in text


def test_baselines_alone_are_compared_with_the_autotuned_one() -> None:
    order = ["cuBLASLt-AutoTuning NN", *(name for name in CUBLAS if name != "cuBLASLt-AutoTuning NN")]
    text = summary(HEADER, [measured("1024x1024x1024", 0, {name: CUBLAS[name] for name in order})])
    assert "ours" not in text
    tflops = 2 * 1024**3 / 4.0 * 1e-6
    assert f"| 30-32 | 1 | 1.200 | 1.250 | 1.500 | 1.100 | {tflops:.3g} |" in text
    assert "cuBLASLt-AutoTuning NN 1" in text
    (row,) = rows(HEADER, [measured("64x64x64", 0, {name: CUBLAS[name] for name in order})])
    assert row["ratio_to"] == row["strongest"] == "cuBLASLt-AutoTuning NN"
    assert row["cublas_nn_ratio"] == 1.25 and row["speedup"] is None and "ours_us" not in row


def test_durations_are_short() -> None:
    assert [duration(s) for s in (5, 600, 7200)] == ["5 s", "10 min", "2.0 h"]


# the real path on this CPU

QUICK = ("--target", "cpu", "--baselines-only", "--arms", "torch fp16")


def bench(folder: Path, grid: str, *arguments: str) -> list[str]:
    return ["bench", "--grid", grid, "--out", str(folder), *arguments]


def stored(folder: Path) -> list[bytes]:
    path = folder / RESULTS
    return path.read_bytes().splitlines(keepends=True)[1:] if path.exists() else []


MANY = ",".join(f"{8 + i}x9x{7 + i}" for i in range(24))


@pytest.mark.full
def test_a_run_killed_in_the_middle_goes_on_and_measures_nothing_twice(tmp_path) -> None:
    kill_when(lambda: len(stored(tmp_path)) >= 3, [*CLI, *bench(tmp_path, MANY, *QUICK)])
    before = (tmp_path / RESULTS).read_bytes()
    done = run(*bench(tmp_path, MANY, *QUICK))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / RESULTS).read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    shapes = [tuple(json.loads(line)["gemm"][name] for name in "mnk") for line in stored(tmp_path)]
    assert len(shapes) == len(set(shapes)) == 24
    assert len(read_csv(tmp_path / CSV)) == 24 and "24 of 24 shapes measured" in done.stdout
    everything = (tmp_path / RESULTS).read_bytes()
    whole = before.count(b"\n") - 1
    assert f"baselines alone on 24 shapes, {whole} of them done before" in done.stderr
    again = run(*bench(tmp_path, MANY, *QUICK))
    assert "24 of them done before" in again.stderr
    assert again.returncode == 0 and (tmp_path / RESULTS).read_bytes() == everything


def test_a_run_over_a_grid_says_at_once_what_it_will_do(tmp_path) -> None:
    command = [*CLI, *bench(tmp_path, MANY, "--target", "cpu", "--protocols", "offline,server")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr
    first, second = process.stderr.readline(), process.stderr.readline()
    process.kill()
    process.communicate()
    assert "the best kernels known, or default ones, on 24 shapes, 0 of them done before" in first
    assert "under offline, server; 4 baselines (" in first and "torch fp16" in first and str(tmp_path) in first
    assert re.search(r"; this takes at least \d+ s$", first)
    assert second.startswith("0 of 24 shapes; ")


@pytest.mark.parametrize(("protocols", "heuristics"), [(["offline", "rotating"], 2), (["rotating"], 0)])
def test_the_baselines_that_a_grid_names_are_those_that_its_protocols_time(protocols, heuristics) -> None:
    rig: Any = SimpleNamespace(request=Request(in_full=("offline",)), target=SimpleNamespace(name="cuda"))
    said = named_baselines(rig, protocols)
    assert said.count("cuBLASLt-heuristic") == heuristics and said.count("; cuBLASLt-AutoTuning TN") == 1


def test_the_least_time_of_a_grid_counts_launches_at_the_peak_and_leaves_out_what_does_not_fit(tmp_path) -> None:
    small, large, huge = map(Gemm.parse, ("64x64x64", "4096x4096x4096", "99999x99999x99999"))
    with (
        Sweep(SweepSettings(target="cpu", baselines_only=True)) as sweep,
        ResultsFile(tmp_path / RESULTS, sweep.header([small])) as results,
    ):
        (short_s, one), (long_s, _), (none_s, none) = (sweep.least_s([g], results) for g in (small, large, huge))
        launch_s = sweep.rig.target.bound_us(large) * 1e-6
    assert (one, none, none_s) == (1, 0, 0) and 1 < short_s < 2
    assert long_s == pytest.approx(1 + CPU_PROTOCOLS["offline"].min_rounds * 2 * launch_s)


def test_two_runs_do_not_disturb_each_other(tmp_path, monkeypatch) -> None:
    """From the question whether its memory is free to its last time a shape has the machine."""
    with (
        Sweep(SweepSettings(target="cpu", baselines_only=True)) as sweep,
        ResultsFile(tmp_path / RESULTS, sweep.header([Gemm(8, 8, 8)])) as results,
    ):
        met = []

        def noted(step):
            def noting(*arguments, **named_):
                met.append((step.__name__, _machine_is_held()))
                return step(*arguments, **named_)

            return noting

        for name in ("require_feasible", "open"):
            monkeypatch.setattr(sweep.rig, name, noted(getattr(sweep.rig, name)))
        assert sweep.run([Gemm(8, 8, 8)], results)
        assert not _machine_is_held()
    assert set(met) == {("require_feasible", True), ("open", True)}


def _machine_is_held() -> bool:
    with (paths.cache_dir() / "machine.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_parts_measured_apart_make_one_table(tmp_path) -> None:
    grid_ = "16x16x16,16x16x32,16x32x16"
    for part in ("1/2", "2/2"):
        done = run(*bench(tmp_path / part[0], grid_, "--part", part))
        assert done.returncode == 0, done.stderr
    first, second = (stored(tmp_path / name) for name in "12")
    assert sorted((len(first), len(second))) == [1, 2]
    done = run(*bench(tmp_path / "1", grid_, "--also", str(tmp_path / "2")))
    assert done.returncode == 0, done.stderr
    assert "3 of 3 shapes measured" in done.stdout
    assert stored(tmp_path / "1") == first + second
    assert len(read_csv(tmp_path / "1" / CSV)) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--part", "3/2"], "no part of a grid"),
        (["--part", "half"], "no part of a grid"),
        (["--also", "nowhere"], "is not there"),
    ],
)
def test_bad_parts_are_one_clear_line(arguments, says, tmp_path) -> None:
    done = run(*bench(tmp_path, "16x16x16", *arguments))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


@pytest.mark.full
def test_ctrl_c_ends_with_tables_of_what_is_there(tmp_path) -> None:
    output, errors = interrupt_when(lambda: len(stored(tmp_path)) >= 2, [*CLI, *bench(tmp_path, MANY, *QUICK)])
    assert "goes on from here" in errors
    table = read_csv(tmp_path / CSV)
    assert 2 <= len(table) == len(stored(tmp_path)) < 24
    assert f"{len(table)} of 24 shapes measured" in output and "torch fp16" in (tmp_path / SUMMARY).read_text()


def test_another_machines_results_are_refused_and_fresh_moves_them_aside(tmp_path) -> None:
    before = kept(tmp_path / RESULTS)
    refused = run(*bench(tmp_path, "8x9x10", *QUICK))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1 and "machine gpu:a" in refused.stderr
    assert (tmp_path / RESULTS).read_bytes() == before and refused.stdout == ""
    done = run(*bench(tmp_path, "8x9x10", *QUICK, "--fresh"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results-1.jsonl").read_bytes() == before and len(stored(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--baselines-only"], "goes with --grid"),
        (["64x64x64", "--protocols", "server"], "goes with --grid"),
        (["64x64x64", "--grid", "64x64x64"], "not beside"),
        (["--grid", "missing.csv"], "no such file"),
        (["--grid", "64x64"], "shape"),
        (["--sample", "0"], "at least 1"),
        (["--grid", "8x8x8", "--layout", "nt"], "layout"),
        (["--grid", "8x8x8", "--accumulate", "fp8"], "accumulator"),
        (["--grid", "8x8x8", "--budget", "-3"], "budget"),
        (["--grid", "8x8x8", "--seed", "-1"], "seed"),
        (["--grid", "8x8x8", "--target", "tpu"], "target"),
        (["--grid", "8x8x8", "--out", "/proc/nowhere"], "cannot write"),
        (["--grid", "8x8x8", "--library", "t.csv", "--budget", "5s"], "--budget"),
        (["--grid", "8x8x8", "--library", "missing.csv"], "cannot read"),
        (["--grid", "8x8x8", "--library", str(SCHEDULES), "--target", "cpu"], "needs an NVIDIA GPU"),
        (["--grid", "8x8x8", "--target", "cpu", "--protocols", "search"], "protocol"),
        (["--batch", "1"], "--batch goes with --model"),
        (["64x64x64", "--model", "llama-8b"], "shapes, --tasks or --model"),
        (["--model", "llama-8b", "--tasks", "all"], "shapes, --tasks or --model"),
        (["--model", "llama-8b", "--trials", "9"], "--trials goes with --tasks"),
        (["--model", "llama-8b", "--tokens", "9"], "language models goes with --tasks"),
        (["--model", "llama-8b", "--full"], "--full does not go with --model"),
        (["--model", "llama-8b", "--arms", "quick"], "no arm 'quick'"),
        (["--model", "llama-8b", "--batch", "0"], "--batch takes"),
        (["--model", "llama-8b", "--layers", "0"], "at least 1"),
        (["--model", "llama-8b", "--target", "cpu"], "on a GPU alone"),
        (["--model", "llama"], "llama-8b, qwen-1.5b"),
    ],
)
def test_bad_options_are_one_clear_line_and_status_2(arguments, says, typed, tmp_path) -> None:
    status, out, error = typed("bench", *arguments)
    assert status == 2 and out == "" and len(error.splitlines()) == 1 and says in error
    assert not (tmp_path / "bench-grid" / RESULTS).exists()


def test_without_a_grid_the_table_of_searched_shapes_is_made(tmp_path) -> None:
    out = tmp_path / "out"
    command = ("bench", "24x20x36", "999999x999999x999999", "--budget", "0.01s", "--out", str(out), "--target", "cpu")
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "kernels of 0.01 s of search on 2 shapes" in done.stderr and str(out) in done.stderr
    assert "│ 24x20x36 " in done.stdout and "geometric mean" in done.stdout
    assert "| 24x20x36 |" in (out / "summary.md").read_text()
    assert "999999x999999x999999: " in done.stdout and "memory" in done.stdout
    assert {path.name for path in out.iterdir()} >= {"archive.db", RESULTS, "table.csv", "summary.md"}
    again = run(*command)
    assert again.returncode == 0 and "1 of them done before" in again.stderr
    alone = run("bench", command[2], *command[3:], "--fresh")
    assert alone.returncode == 2 and "memory" in alone.stdout and "none of 1 shape was measured" in alone.stderr


def test_a_word_is_no_shape(typed, tmp_path) -> None:
    status, _, error = typed("bench", "paper", "--out", str(tmp_path))
    assert status == 2 and "'paper'" in error and "--grid" not in error


@pytest.mark.parametrize(
    ("extensions", "most_s", "wanted", "timed"),
    [
        (("avx2",), 1e-6, (), False),
        (("avx2",), 1e-6, ("torch fp16",), True),  # asked for by its name
        (("avx2",), 4.5, (), True),
        (("avx2", "avx512_fp16"), 1e-6, (), True),
    ],
)
def test_a_baseline_that_takes_minutes_is_left_out_and_said_so(
    extensions, most_s, wanted, timed, rig, monkeypatch
) -> None:
    monkeypatch.setattr("cuda_l2.rigs.cpu.MOST_REPORTED_S", most_s)
    monkeypatch.setattr(rig, "target", replace(rig.target, extensions=extensions))
    monkeypatch.setattr(rig, "request", replace(rig.request, baselines=tuple(map(named, wanted))))
    with rig.open(Gemm(40, 30, 50), seed=1) as opened:
        timing = opened.time_baselines(rig.protocols["offline"])
    assert ("torch fp16" in {arm.name for arm in (timing.candidate, *timing.baselines)}) is timed
    assert ("torch fp16" in timing.conditions.left_out) is not timed


def test_baselines_are_timed_alone_against_the_usual_strongest(rig) -> None:
    with rig.open(Gemm(40, 30, 50), seed=1) as opened:
        timing = opened.time_baselines(rig.protocols["offline"])
    assert timing.candidate.name == "torch widened, preallocated"
    assert {arm.name for arm in timing.baselines} == {"torch fp16", "torch widened", "torch widened, one thread"}
    for name, ratio in timing.speedups:
        theirs = next(arm for arm in timing.baselines if arm.name == name)
        assert ratio.estimate == pytest.approx(theirs.latency_us.estimate / timing.candidate.latency_us.estimate)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    archive = tmp_path_factory.mktemp("sweep") / "archive.db"
    with Sweep(SweepSettings(target="cpu", archive=archive, arms="torch fp16")) as opened:
        yield opened


def test_kernels_are_reported_under_one_protocol_after_the_other(kernels, tmp_path, monkeypatch) -> None:
    gemms = read_grid("24x20x36,33x7x9:tn")
    too_large = Gemm(999999, 999999, 999999)
    with ResultsFile(tmp_path / RESULTS, kernels.header(gemms)) as results:
        assert kernels.run([too_large, *gemms], results)
        first = {m.gemm: m for m in results.records}
        assert first[too_large].status == "skipped" and "memory" in first[too_large].reason
        for gemm in gemms:
            m = first[gemm]
            assert m.status == "measured" and m.verdict.status is VerdictStatus.CORRECT, m.reason
            assert m.family == "cpu_gemm" and m.schedule and m.kernel and m.protocol == m.timing.protocol == "offline"
            assert [arm.name for arm in m.timing.baselines] == ["torch fp16"]
            trials = kernels._kernels.archive.trials(gemm)
            assert {"search", "offline"} == {trial.protocol for trial in trials}
        assert results.pending([too_large, *gemms], ["offline"]) == [too_large]  # what failed is tried again
        # another protocol later: the same kernel, taken from the archive
        monkeypatch.setattr(kernels, "settings", SweepSettings(target="cpu", protocols="offline,server"))
        searched = len(kernels._kernels.archive.trials(protocol="search"))
        assert results.pending(gemms, ["offline", "server"]) == gemms
        assert kernels.run(gemms, results)
        assert len(kernels._kernels.archive.trials(protocol="search")) == searched
        for gemm in gemms:
            assert results.find(gemm, "server").kernel == first[gemm].kernel
            assert results.find(gemm, "offline") == first[gemm]  # not measured again
    table = rows(kernels.header(gemms), results.records)
    assert [row["status"] for row in table].count("measured") == 4
    assert all(row["speedup"] > 0 and row["ours_us"] > 0 for row in table if row["status"] == "measured")


def test_a_long_list_of_shapes_is_read() -> None:
    shapes = [f"{64 * m}x128x64" for m in range(1, 60)]
    assert [str(gemm) for gemm in read_grid(",".join(shapes))] == shapes


def test_a_budget_searches(tmp_path, monkeypatch) -> None:
    def three_trials(evaluator, proposer, archive, scope, *others, **named):
        return search(evaluator, proposer, archive, replace(scope, max_trials=3), *others, **named)

    monkeypatch.setattr(optimizer, "search", three_trials)
    settings = SweepSettings(target="cpu", archive=tmp_path / "a.db", budget="1h", arms="torch fp16")
    gemm = Gemm(24, 20, 36)
    with Sweep(settings) as opened, ResultsFile(tmp_path / RESULTS, opened.header([gemm])) as results:
        assert opened.run([gemm], results)
        assert len(opened._kernels.archive.trials(gemm, protocol="search")) > 1  # more than the default
        reported = opened._kernels.archive.trials(gemm, protocol="offline")
    (found,) = results.records
    assert found.status == "measured", found.reason
    assert found.kernel in {trial.candidate.id for trial in reported}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"protocols": ""}, "name a protocol.*offline"),
        ({"protocols": "offline,search"}, "no protocol 'search'"),
        ({"arms": "torch fp16,cuBLAS"}, "begins with 'cuBLAS'.*torch fp16"),
        ({"tuning": "paper"}, "--tuning needs one"),
        ({"tuning": "brief"}, "choose from adaptive, paper"),
        ({"choices": Path("kept.gz")}, "--choices needs one"),
    ],
)
def test_what_no_machine_of_the_kind_has_ends_a_run_before_it_begins(settings, says) -> None:
    with pytest.raises(UserError, match=says):
        Sweep(SweepSettings(target="cpu", baselines_only=True, **settings))


def test_failures_are_recorded_and_many_in_a_row_end_the_run(tmp_path) -> None:
    gemms = read_grid(",".join(f"{i}x8x8" for i in range(2, 12)))
    with (
        Sweep(SweepSettings(target="cpu", baselines_only=True)) as opened,
        ResultsFile(tmp_path / RESULTS, opened.header(gemms)) as results,
    ):
        opened.rig.request = replace(opened.rig.request, baselines=(named("cuBLAS NN"),))
        with pytest.raises(UserError, match=r"5 shapes in a row failed.*no baseline is left"):
            opened.run(gemms, results)
        assert [m.status for m in results.records] == ["failed"] * 5
        assert all("torch fp16" in m.reason for m in results.records)


def test_a_library_meets_all_baselines_under_one_protocol_and_the_tuned_ones_under_the_others() -> None:
    request, known = SweepSettings(target="cuda", library=SCHEDULES).request(), product_baselines("cuda")
    offline, server = (request.reported(known, name) for name in ("offline", "server"))
    unasked = ["cuBLASLt-brute NN", "cuBLASLt-brute TN", "torch.compile max-autotune"]
    assert [each.name for each in known if each not in offline] == unasked
    assert server == [each for each in offline if each.name.startswith("cuBLASLt-AutoTuning")]
    chosen = SweepSettings(target="cuda", library=SCHEDULES, arms="cuBLAS NN,torch.matmul").request()
    names = [each.name for each in chosen.reported(known, "server")]
    assert names == ["torch.matmul", "torch.matmul, default switches", "cuBLAS NN"]
    with pytest.raises(UserError, match="no baseline is left to time"):
        SweepSettings(target="cuda", arms="torch.compile").request()


@pytest.mark.gpu
def test_baselines_over_a_grid_on_the_gpu(tmp_path) -> None:
    gemms = read_grid("64x64x64,256x512x128", list(Layout))
    settings = SweepSettings(target="cuda", baselines_only=True, protocols="offline,rotating,server")
    with Sweep(settings) as opened, ResultsFile(tmp_path / RESULTS, opened.header(gemms)) as results:
        assert opened.run(gemms, results)
    assert [m.status for m in results.records] == ["measured"] * 12, [m.reason for m in results.records]
    write_tables(tmp_path, results.header, results.records)
    for row in read_csv(tmp_path / CSV):
        assert row["ratio_to"] == f"cuBLASLt-AutoTuning {row['layout'].upper()}"
        for arm in ("cublas", "cublaslt_heuristic", "cublaslt_autotuning"):
            assert float(row[f"{arm}_nn_us"]) > 0 and float(row[f"{arm}_tn_us"]) > 0 and row[f"{arm}_nn_kernels"]
        assert row["cublaslt_autotuning_nn_id"] and float(row["sm_mhz"]) > 0 and row["env_gpu"]
        assert not any(name.startswith("torch_compile") for name in row)
    assert "strength of the baselines" in summary(results.header, results.records)
