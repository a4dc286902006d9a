"""Counters of the GPU: reading the profiler's output, one set of figures, the text for a prompt, the archive."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_cheats import all_cheats

from cuda_l2.archive import Archive
from cuda_l2.build.cuda import build_all
from cuda_l2.contract import parse_cuda
from cuda_l2.families._base import Schedule
from cuda_l2.families.sm90_persistent import FAMILY
from cuda_l2.machine.cuda.target import detect
from cuda_l2.measure import profile
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Trial, from_json, to_json
from cuda_l2.rigs._base import Bench
from cuda_l2.system.errors import UserError

RECORDED = Path(__file__).with_name("data") / "ncu"
DURATION, TENSOR = "gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"


def stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def csv_of(*launches: dict[str, str]) -> str:
    """The profiler's words around a table of these counters, named with their units as in `x [ns]`."""
    columns = [name.removesuffix("]").split(" [") for name in launches[0]]
    rows = [["ID", "Kernel Name", *(name for name, *_ in columns)], ["", "", *("".join(unit) for _, *unit in columns)]]
    rows += [[str(i), "gemm", *launch.values()] for i, launch in enumerate(launches)]
    table = "\n".join(",".join(f'"{value}"' for value in row) for row in rows)
    return f'==PROF== Connected to process 7\n==PROF== Profiling "gemm" - 0: 0%....100% - 9 passes\n{table}\n'


def test_numbers_are_read_with_their_units_and_separators() -> None:
    launches = profile.parse(
        csv_of({f"{DURATION} [ns]": "1,234.5", "dram__bytes_read.sum [Mbyte]": "2.5", "x [%]": "n/a"})
    )
    assert launches == [{DURATION: 1234.5, "dram__bytes_read.sum": 2.5e6}]


def test_an_output_without_a_table_gives_nothing() -> None:
    assert profile.parse("==PROF== Connected\n==ERROR== nothing\n") == []


def test_what_the_profiler_said_on_one_h200_is_read() -> None:
    split = profile.figures(profile.parse((RECORDED / "split.csv").read_text()))  # two launches of 8.7 and 2.2 us
    assert (split["duration_us"], split["registers"], split["waves"]) == (10.912, 32.0, 0.97)
    assert split["l2_to_sm_mb"] == pytest.approx(4.2544 + 0.992, abs=1e-3)
    assert list(split)[-3:] == ["stall_long_scoreboard_pct", "stall_lg_throttle_pct", "stall_not_selected_pct"]
    assert split["l2_hit_pct"] == 100.0  # 101.00 and 105.74 were read
    wave = profile.figures(profile.parse((RECORDED / "wave.csv").read_text()))
    assert {metric.name for metric in profile.METRICS} <= set(wave)
    assert wave["tensor_pct"] == 6.62
    assert profile.summary(wave).splitlines()[0] == "4.16 us under the profiler, L2 warm"


def test_figures_of_several_launches_are_summed_weighted_or_the_longest_ones() -> None:
    one = {DURATION: 3000.0, TENSOR: 90.0, "launch__registers_per_thread": 168.0, stall("gmma"): 3.0}
    two = {DURATION: 1000.0, TENSOR: 10.0, "launch__registers_per_thread": 32.0, stall("gmma"): 1.0, stall("wait"): 2.0}
    found = profile.figures([one, two])
    assert (found["duration_us"], found["tensor_pct"], found["registers"]) == (4.0, 70.0, 168.0)
    assert found["stall_gmma_pct"] == pytest.approx(100 * 2.5 / 3.0, abs=0.1)
    assert list(found)[-3:][0] == "stall_gmma_pct"
    assert "dram_read_mb" not in found  # no counter, no figure


def test_a_warp_that_issues_waits_for_nothing() -> None:
    found = profile.figures([{DURATION: 1.0, stall("selected"): 3.0, stall("barrier"): 1.0}])
    assert found["stall_barrier_pct"] == 25.0
    assert "stall_selected_pct" not in found


def test_the_summary_is_short_and_leaves_out_what_is_missing() -> None:
    full = {metric.name: 123.456 for metric in profile.METRICS}
    full |= {"stall_long_scoreboard_pct": 40.0, "stall_gmma_pct": 20.0, "stall_barrier_pct": 10.0}
    text = profile.summary(full)
    assert len(text.splitlines()) <= 12
    assert len(text) < 4 * 300  # a token of such a text has about four characters
    assert text.index("(long_scoreboard) 40 %") < text.index("(gmma) 20 %") < text.index("(barrier) 10 %")
    assert "{" not in text
    assert profile.summary({"duration_us": 2.5}) == "2.50 us under the profiler, L2 warm"


def test_counters_that_a_gpu_lacks_are_told_from_the_profilers_words() -> None:
    wanted = profile.counters()
    some = [stall("gmma"), "gpu__time_duration.sum"]
    for words in (
        f"Failed to access the following 2 metrics: {', '.join(some)}",
        r"Failed to find metric regex:^smsp__average_warps_issue_stalled_gmma_per_issue_active(\.ratio)?$, gpu__time_duration",
    ):
        assert sorted(profile.unknown_counters(f"==PROF== x\n==ERROR== {words}\n", wanted)) == sorted(some)
    assert profile.unknown_counters("==ERROR== The application returned an error code (9).", wanted) == []


def test_what_keeps_the_profiler_from_reading_is_said_with_what_to_do() -> None:
    denied = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in profile.why_not(denied)
    virtual = (
        "==ERROR== An error was reported by the counter measurement library:\n"
        "==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.\n"
    )
    assert "LibraryNotLoaded" in profile.why_not(virtual)
    assert profile.why_not("==PROF== fine") == ""


def test_a_missing_profiler_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="cuda-pathfinder is not installed")
    monkeypatch.setattr(pathfinder, "find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="Nsight Compute"):
        profile.find()


def test_a_profile_is_kept_with_its_trial(archive: Archive) -> None:
    build = Build("x", BuildStatus.FAILED, "no")
    trial = Trial(Gemm(8, 8, 8), Candidate("source"), "a machine", "offline", build, reward=0.0)
    archive.append(replace(trial, profile={"tensor_pct": 91.5}))
    assert archive.trials()[0].profile == {"tensor_pct": 91.5}
    older = to_json(trial).replace(',"profile":{}', "")
    assert from_json(Trial, older).profile == {}


def test_only_a_gpu_has_counters() -> None:
    with pytest.raises(UserError, match="GPU"):
        Bench.profile(None, Candidate(""), Build("x", BuildStatus.FAILED, "no"))  # type: ignore[arg-type]


# -- on a GPU


def profiled(source: str, shape: str) -> dict[str, float]:
    target, gemm = detect(), Gemm.parse(shape)
    (build,) = build_all([Candidate(source)], target)
    plan = parse_cuda(source).plan(gemm, target.sms)
    try:
        return profile.collect(Path(build.artifact), plan, gemm)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
def test_the_counters_of_a_wgmma_kernel_are_plausible(gpu: Any) -> None:
    gemm = Gemm(4096, 4096, 4096)
    if not FAMILY.serves(gemm, gpu.target):
        pytest.skip("needs a Hopper GPU")
    schedule = Schedule(FAMILY, gemm, gpu.target, FAMILY.default(gemm, gpu.target))
    found = profiled(FAMILY.render(schedule).source, str(gemm))
    assert 120 < found["duration_us"] < 1000
    assert 50 < found["tensor_pct"] <= 100
    assert 0 < found["issue_pct"] < 60  # one instruction multiplies a lot
    assert found["registers"] >= 128
    assert 100 < found["shared_kib"] <= 228
    assert 0 < found["occupancy_pct"] <= found["occupancy_limit_pct"] + 1 <= 101
    # every tile's operands come from L2, and the product goes back
    assert found["l2_to_sm_mb"] > 2 * 2 * 4096**2 / 1e6
    assert 0.9 < found["sm_to_l2_mb"] / (2 * 4096**2 / 1e6) < 2
    assert len([name for name in found if name.startswith("stall_")]) == 3
    assert len(profile.summary(found).splitlines()) == 8


@pytest.mark.gpu
def test_a_kernel_without_tensor_instructions_uses_no_tensor_cores_and_two_launches_are_one_profile(gpu: Any) -> None:
    source = next(cheat.source for cheat in all_cheats() if cheat.name == "honest_split")
    found = profiled(source, "256x256x256")
    assert found["tensor_pct"] < 3  # some instructions on pairs of halves go through them too
    assert found["duration_us"] > 2
