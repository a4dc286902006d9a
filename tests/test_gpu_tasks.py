"""Tasks other than matrix products on a real GPU. Skipped where there is none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_l2 import tasks
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.measure.baselines._base import TorchTask, baselines_of
from cuda_l2.optimizer import Optimizer, Settings
from cuda_l2.records import Candidate, Operation
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import definition, definitions
from cuda_l2.tasks.cases import CLOSE, OwnCases
from cuda_l2.tasks.tolerance import widened
from cuda_l2.tasks.warm import in_full_precision

pytestmark = [pytest.mark.gpu]
CORPUS = Path(__file__).with_name("cuda_task_cheats")
SOFTMAX = "softmax:rows=250,columns=1000"
FLOAT_CONSTANTS = {"hardswish": 2e-8}
"""PyTorch's kernel for GPUs takes a float's 1/6 for fp64 values too."""


def source(name: str) -> str:
    return (CORPUS / f"{name}.cu").read_text()


def operation(text: str) -> Operation:
    task = tasks.parse(text, "cuda")
    assert isinstance(task, Operation)
    return task


@pytest.mark.parametrize("protocol", ["offline", "rotating", "server"])
def test_a_protocol_times_every_baseline(gpu: Any, protocol: str) -> None:
    arms = [each.name for each in baselines_of(TorchTask, "cuda")]
    with Evaluator(operation("rms_norm:rows=250,columns=1000"), gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate(source("honest_rms_norm"))], gpu.protocols[protocol])
    timing = trial.timing
    assert timing and timing.candidate and timing.speedup, trial.reason
    assert not timing.conditions.left_out, timing.conditions
    assert [arm.name for arm in timing.baselines] == arms
    assert timing.conditions.sm_mhz > 0 and 0.2 < timing.empty_call_us < 20
    if protocol == "server":
        assert set(timing.conditions.host_call_to_done_us) == {*arms, "candidate", "empty kernel"}


def test_one_source_serves_a_small_and_a_large_size(gpu: Any) -> None:
    """References run on the CPU for the one, on the GPU for the other."""
    for text in (SOFTMAX, "softmax"):
        with Evaluator(operation(text), gpu) as evaluator:
            (trial,) = evaluator.evaluate([Candidate(source("honest_softmax"))], gpu.protocols["search"])
        assert trial.timing and trial.timing.speedup, (text, trial.reason)


def test_a_fault_costs_its_candidate_only(gpu: Any) -> None:
    order = ("past_the_end", "honest_softmax", "before_the_start", "honest_softmax")
    with Evaluator(operation(SOFTMAX), gpu) as evaluator:
        trials = list(evaluator.evaluate([Candidate(source(name)) for name in order]))
    assert [trial.status for trial in trials] == ["crashed", "measured", "unhygienic", "measured"]


@pytest.mark.parametrize("name", sorted(definitions()))
def test_the_references_of_both_devices_agree(gpu: Any, name: str) -> None:
    task = definition(name).task()
    function = definition(name).bind(dict(task.sizes))
    given = widened(definition(name).draw(task, 1))
    with torch.no_grad(), in_full_precision():
        here = function(**given)
        there = function(**{each: tensor.cuda() for each, tensor in given.items()})
    for ours, theirs in zip(here, there, strict=True):
        largest = float(ours.double().nan_to_num(0, 0, 0).abs().max())
        close = FLOAT_CONSTANTS.get(name, CLOSE)
        assert torch.isclose(theirs.cpu().double(), ours.double(), close, close * largest, equal_nan=True).all()


def test_large_cases_lie_and_are_computed_on_the_gpu(gpu: Any) -> None:
    task = operation("softmax:rows=2048,columns=2048")
    cases = OwnCases(task, 1, "cuda")
    case, (limit,) = cases.drawn("seed 0"), cases.drawn("seed 0").bounds
    assert case.tensors["x"].is_cuda and limit.exact.is_cuda
    with torch.no_grad():
        right = torch.softmax(case.tensors["x"].double(), -1)
        assert not case.violation({"out": right.float()})
        assert case.violation({"out": right.half().float()})
    exact = torch.softmax(case.tensors["x"].cpu().double(), -1)
    assert torch.isclose(limit.exact.cpu(), exact, CLOSE, 0).all()


def test_a_task_that_does_not_fit_says_so(gpu: Any) -> None:
    with pytest.raises(UserError, match="of GPU memory to check and time"):
        gpu.require_feasible(operation("softmax:rows=1000000,columns=1000000"))


def test_optimize_finds_a_kernel_and_reports_it(gpu: Any, tmp_path: Path) -> None:
    task = operation("softmax:rows=1024,columns=1024")
    if not families_for(task, gpu.target):
        pytest.skip("no kernel family serves it")
    with Optimizer(
        Settings(budget_s=4, archive=tmp_path / "archive.db", target="cuda", protocol="offline")
    ) as optimizer:
        result = optimizer.optimize(task)
    assert set(result.reports) == {"offline"}
    assert result.source_path and result.source_path.suffix == ".cu"
