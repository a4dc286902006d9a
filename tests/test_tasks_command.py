"""cuda-l2 tasks, and the baselines it times: what is listed, shown, tried and refused."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from cuda_l2.kernelbench.arms import COMPILED, EAGER
from cuda_l2.kernelbench.examined import Examined, Readiness
from cuda_l2.measure.protocols import SEARCH
from cuda_l2.measure.torch_baselines import TorchBaselines
from cuda_l2.records import Arm, Conditions, Interval, Operation, Timing, TimingStatus, from_json
from cuda_l2.report.tasks import _time
from cuda_l2.rigs import cpu
from cuda_l2.rigs.cpu import CpuRig
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import definition, definitions

CHECKOUT = Path(__file__).with_name("kernelbench")


@pytest.fixture
def run(typed):
    """run(*arguments) of `cuda-l2 tasks`: exit status, standard output and error."""
    return partial(typed, "tasks")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "no task"),
        (["softmax:lines=3"], "no size lines"),
        (["64x64x64"], "cuda-l2 optimize 64x64x64"),
        (["--kernelbench", "."], "level1"),
        (["softmax", "--kernelbench", "."], "not both"),
        (["--baselines"], "needs the tasks"),
        (["softmax", "--seed", "-1"], "seed"),
        (["softmax", "--baselines", "--protocol", "quick"], "protocol"),
        (["--kernelbench", str(CHECKOUT), "--level", "4"], "no files of level 4"),
        (["--kernelbench", str(CHECKOUT), "--target", "gpu"], "no target 'gpu'"),
        (["--target", "cuda"], "--target goes with --kernelbench"),
        (["--kernelbench", str(CHECKOUT), "--timeout", "soon"], "time"),
        (["--kernelbench", str(CHECKOUT), "--memory", "0"], "memory"),
        (["--kernelbench", str(CHECKOUT), "--out", "/proc/nowhere/out.jsonl"], "cannot write"),
    ],
)
def test_bad_input_is_one_clear_line_and_status_2(arguments, says, run, tmp_path) -> None:
    status, out, error = run(*arguments)
    assert status == 2 and out == "" and says in error
    assert len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_every_task_is_listed(run) -> None:
    listed = [from_json(Operation, line) for line in run("--json")[1].splitlines()]
    assert [task.name for task in listed] == list(definitions())
    _, table, _ = run()
    assert f"{len(listed)} tasks" in table and "group_norm" in table


def test_a_task_is_shown_with_its_tensors_and_tolerances(run) -> None:
    status, out, _ = run("max_rows:rows=7,columns=9")
    assert status == 0 and "x float32[7, 9]" in out and "indices int64[7]" in out
    assert "rounding decides" in out and "sparse" in out


@pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine")
def test_a_checkout_is_tried_and_counted(run, tmp_path) -> None:
    level = tmp_path / "KernelBench" / "level2"
    level.mkdir(parents=True)
    (level / "1_Good.py").write_text((CHECKOUT / "KernelBench/level2/1_Linear_Swish_Scale.py").read_text())
    (level / "2_Bad.py").write_text("import nobody_has_this")
    out = tmp_path / "out.jsonl"
    status, said, error = run("--kernelbench", str(tmp_path), "--out", str(out), "--timeout", "10min")
    assert status == 0, error
    assert "needs-package    kernelbench/level2/2_Bad: needs the package nobody_has_this" in said
    assert "tasks: 1 of 2 files" in said
    found = [from_json(Examined, line) for line in out.read_text().splitlines()]
    assert [each.status for each in found] == [Readiness.READY, Readiness.NEEDS_PACKAGE]


def test_what_was_found_is_kept_where_a_later_file_ends_the_command(run, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out.jsonl"

    def examine(entry, *_, **__):
        if out.read_text():
            raise UserError("no more")
        return Examined(entry.name, Readiness.MALFORMED, "a reason")

    monkeypatch.setattr("cuda_l2.kernelbench.opened.examine", examine)
    assert run("--kernelbench", str(CHECKOUT), "--out", str(out))[0]
    assert from_json(Examined, out.read_text()).reason == "a reason"


@pytest.mark.full
def test_eager_and_compiled_are_timed_in_the_same_rounds(run, compiling) -> None:
    status, out, error = run("bias_gelu_residual:rows=64,columns=256", "--baselines", "--protocol", "search", "--json")
    assert status == 0, error
    timing = from_json(Timing, json.dumps(json.loads(out)["timing"]))
    assert timing.status is TimingStatus.MEASURED and timing.protocol == "search"
    assert timing.candidate.name == COMPILED and [arm.name for arm in timing.baselines] == [EAGER]
    assert timing.candidate.rounds >= 6
    assert timing.baselines[0].rounds in (1, timing.candidate.rounds)  # 1 where it was far slower
    assert timing.speedup.low <= timing.speedup.estimate and timing.reference == EAGER
    assert timing.speedup.low > 0 or timing.baselines[0].rounds == 1
    assert timing.conditions == Conditions()


@pytest.mark.full
def test_a_compiler_that_fails_is_left_out_with_its_reason(compiling, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("CUDA_L2_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "TorchBaselines", TorchBaselines)  # the process that tests share has compiled before
    task = definition("softplus").task({"rows": 8, "columns": 33})
    with CpuRig() as rig, rig.open(task, 1) as bench:
        timing = bench.time_baselines(SEARCH)
    assert timing.candidate.name == EAGER and not timing.baselines
    assert timing.conditions.left_out[COMPILED]


def test_a_time_without_an_interval_shows_none() -> None:
    known, unknown = Interval(3.0, 2.0, 4.0), Interval(3.0, -math.inf, math.inf)
    shown = [_time(Arm("eager", each, rounds=1, launches=1)) for each in (known, unknown)]
    assert shown == ["3.0 us [2.0, 4.0]", "3.0 us"]
