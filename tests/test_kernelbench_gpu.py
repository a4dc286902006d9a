"""CUDA kernels for KernelBench's files: judged and timed beside the file's own Model, asked for, searched.

Without a GPU this machine's memory stands in for a device's, kernels are compiled for this CPU, and the file's
processes run on it; what is marked runs on a GPU.
"""

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llm_server import serving

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from cuda_on_cpu import Compiled
from fake_gpu import Rig, fake_gpu  # noqa: F401 - a fixture
from test_kernelbench_search import CHECKOUT, EFFORT, QUARTIC, SWISH, answers, key  # noqa: F401 - a fixture

from cuda_l2 import tasks
from cuda_l2.commands.bench import BenchSettings
from cuda_l2.commands.bench import command as bench
from cuda_l2.commands.check import CheckSettings
from cuda_l2.commands.check import command as check
from cuda_l2.commands.optimize import OptimizeSettings
from cuda_l2.commands.optimize import command as optimize
from cuda_l2.contract.text import contract_text
from cuda_l2.evaluator import Evaluator
from cuda_l2.kernelbench import runner
from cuda_l2.kernelbench.arms import COMPILED, EAGER
from cuda_l2.kernelbench.cases import ForeignCases, other_sizes
from cuda_l2.kernelbench.checkout import effort_for, read
from cuda_l2.kernelbench.examined import Effort, Examined, Readiness, Refused
from cuda_l2.kernelbench.file import raise_if_memory
from cuda_l2.kernelbench.files import Entry
from cuda_l2.kernelbench.opened import Call
from cuda_l2.kernelbench.process import Module, Resources
from cuda_l2.kernelbench.sandboxed import SandboxedPython
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.baselines import torch_compile, torch_eager
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.records import Build, BuildStatus, Candidate, Operation, Tensor, TimingStatus
from cuda_l2.rigs.cuda import CudaBench, CudaRig, require_feasible
from cuda_l2.runs.task_bench import read_tasks
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import describe
from cuda_l2.tasks.warm import in_full_precision

EAGER_GRAPH, COMPILED_GRAPH = torch_eager.EAGER_GRAPH.name, torch_compile.COMPILED_GRAPH.name
RUNS = pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine")

OFFLINE = replace(CUDA_PROTOCOLS["offline"], min_rounds=6, max_rounds=6, heat_s=0.0)
"""With few rounds and few launches in each: threads of this CPU stand in for a GPU's."""
MODELS = ModelSettings(concurrency=1, retries=0, repairs=0, reference_tokens=0, tokens=10**6)

CONTRACT = """\
/* cuda-l2
target = "cuda"
arch = "sm_80"
{buffers}

[[launch]]
kernel = "f"
grid = ["cdiv({count}, 64)"]
block = [64]
args = [{args}]
*/
{code}
"""
BUFFER = '\n[[buffer]]\nname = "{}"\nshape = {}\nkind = "{}"'


def source(code: str, count: str, args: list[str], *buffers: tuple[str, str, str]) -> str:
    named = ", ".join(f'"{name}"' for name in [*(buffer[0] for buffer in buffers), *args])
    return CONTRACT.format(
        buffers="\n".join(BUFFER.format(*buffer) for buffer in buffers), count=count, args=named, code=code
    )


POLYNOMIAL = source(
    """\
extern "C" __global__ void f(const float *x, float *out, int rows, int columns) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i >= rows * columns) return;
  const float square = x[i] * x[i];
  out[i] = square * square - 3 * square + 1;
}
""",
    "rows * columns",
    ["rows", "columns"],
    ("x", '["rows", "columns"]', "input"),
    ("out", '["rows", "columns"]', "output"),
)
LINEAR = source(
    """\
extern "C" __global__ void f(const float *x, const float *weight, const float *bias, const float *scale, float *out,
                             int rows, int inner, int outer) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i >= rows * outer) return;
  const int row = i / outer, column = i % outer;
  float part[8] = {0}, sum = bias[column];
  for (int p = 0; p < inner; ++p) part[p % 8] += x[row * inner + p] * weight[column * inner + p];
  for (int k = 0; k < 8; ++k) sum += part[k];
  out[i] = sum / (1 + expf(-sum)) * SCALE;
}
""",
    "rows * outer",
    ["rows", "inner", "outer"],
    ("x", '["rows", "inner"]', "input"),
    ("linear_weight", '["outer", "inner"]', "weight"),
    ("linear_bias", '["outer"]', "weight"),
    ("scale", '["outer"]', "weight"),
    ("out", '["rows", "outer"]', "output"),
)
RIGHT = {QUARTIC: POLYNOMIAL, SWISH: LINEAR.replace("SCALE", "scale[column]")}
WRONG = {
    "nothing below zero": (QUARTIC, POLYNOMIAL.replace("x[i] * x[i]", "x[i] < 0 ? 0 : x[i] * x[i]"), "values"),
    "these rows alone": (QUARTIC, POLYNOMIAL.replace("i >= rows * columns", "i >= ROWS * columns"), ""),
    "zeros": (QUARTIC, POLYNOMIAL.replace("square * square - 3 * square + 1", "0"), "own inputs"),
    "a weight by heart": (SWISH, LINEAR.replace("SCALE", "0.5f"), "scale"),
    "half of the sum": (SWISH, RIGHT[SWISH].replace("p < inner", "p < inner / 2"), "own inputs"),
}


def operation(name: str) -> Operation:
    """At sizes for this CPU."""
    return read(name, CHECKOUT, EFFORT)


def shown_rows_alone(text: str, task: Operation) -> str:
    return text.replace("ROWS", str(task.inputs[0].shape[0]))


# -- without a GPU


@pytest.fixture
def opened(fake_gpu: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:  # noqa: F811 - the fixture
    """opened(name, source) is the rig, the stages, the candidate and its build on a stand-in for a GPU."""
    rigs: list[Rig] = []

    def make(name: str, text: str, timed: str = "") -> tuple[Rig, CudaBench, Candidate, Build]:
        task = operation(name)
        text = shown_rows_alone(text, task)
        found = {"kernel": Compiled(text, tmp_path)}
        found["timed"] = Compiled(timed, tmp_path) if timed else found["kernel"]
        kernels = {which: lambda places, plan, c=compiled: c.launch(plan, places) for which, compiled in found.items()}
        rigs.append(fake_gpu(kernels))
        path = tmp_path / "kernel.cubin"
        path.write_text("timed" if timed else "kernel")
        candidate = Candidate(text)
        build = Build(candidate.id, BuildStatus.BUILT, artifact=str(path))
        return rigs[-1], CudaBench(rigs[-1], task, 1), candidate, build  # type: ignore[arg-type]

    yield make
    for rig in rigs:
        rig.models.close()


@RUNS
@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_a_cuda_kernel_for_a_file_is_checked_and_timed_beside_its_own_model(name: str, opened: Any) -> None:
    _, stages, candidate, build = opened(name, RIGHT[name])
    verdict = stages.verify(candidate, build)
    assert verdict.status == "correct", (verdict.check, verdict.reason)
    passed = "five seeds, alignment, other values, other shapes, where timed, special values, hygiene, state, often"
    assert ", ".join(verdict.passed) == passed + ", memory, side by side, concurrency"
    timing = stages.time(candidate, build, CUDA_PROTOCOLS["search"])
    assert timing.status is TimingStatus.MEASURED, timing.reason
    assert [arm for arm, _ in timing.speedups] == [EAGER], "no compiler takes a search's time, no CPU has graphs"
    with pytest.raises(UserError, match="back to back alone"):
        stages.time(candidate, build, CUDA_PROTOCOLS["server"])


@RUNS
@pytest.mark.full
def test_a_report_names_every_arm_or_says_why_it_is_left_out(opened: Any) -> None:
    _, stages, candidate, build = opened(SWISH, RIGHT[SWISH])
    timing = stages.time(candidate, build, OFFLINE)
    assert timing.status is TimingStatus.MEASURED, timing.reason
    assert [arm.name for arm in timing.baselines] == [COMPILED, EAGER]
    assert set(timing.conditions.left_out) == {COMPILED_GRAPH, EAGER_GRAPH}
    assert all("cannot be captured" in reason for reason in timing.conditions.left_out.values())
    assert "the host's clock" in timing.conditions.clocks and timing.conditions.sm_mhz
    assert timing.conditions.conversation_us.keys() == {COMPILED, EAGER}
    assert all(arm.latency_us.estimate > 1 for arm in timing.baselines), "a launch on a CPU takes some us"
    alone = stages.time_baselines(OFFLINE)
    assert alone.candidate and alone.candidate.name == COMPILED


@RUNS
@pytest.mark.full
def test_windows_that_rotate_are_more_and_each_has_weights_of_its_own(opened: Any) -> None:
    rig, stages, candidate, build = opened(SWISH, RIGHT[SWISH])
    for rotates, count in ((False, 4), (True, 6), (False, 4)):
        timing = stages.time(candidate, build, replace(CUDA_PROTOCOLS["search"], rotates=rotates))
        assert timing.status is TimingStatus.MEASURED, timing.reason
        (process,) = rig.torch_of(stages._task)._processes.values()
        weights = [call.weights["linear.weight"] for call in process._calls]
        assert len(weights) == count and not any(torch.equal(weights[0], other) for other in weights[1:])


@RUNS
@pytest.mark.corpus(1)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_cuda_kernel_for_a_file_is_rejected(what: str, opened: Any) -> None:
    name, text, says = WRONG[what]
    _, stages, candidate, build = opened(name, text)
    verdict = stages.verify(candidate, build)
    assert verdict.status in ("incorrect", "imprecise", "unhygienic") and says in verdict.reason, verdict


@pytest.mark.full
@RUNS
def test_zeros_in_timed_rounds_are_rejected(opened: Any) -> None:
    _, stages, candidate, build = opened(QUARTIC, POLYNOMIAL, timed=WRONG["zeros"][1])
    timing = stages.time(candidate, build, CUDA_PROTOCOLS["search"])
    assert timing.status == "wrong-output" and "did not produce its own result" in timing.reason


@pytest.mark.full
@RUNS
def test_a_model_that_gives_something_else_is_no_baseline(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, stages, candidate, build = opened(QUARTIC, POLYNOMIAL)
    baselines = rig.torch_of(stages._task)
    other = baselines._known.file.text.replace("square + 1", "square + 2")
    monkeypatch.setattr(type(baselines._known.file), "text", other)
    with pytest.raises(UserError, match=r"PyTorch cannot compute .* cannot be captured|off by"):
        stages.time(candidate, build, CUDA_PROTOCOLS["search"])
    assert "off by" in baselines._reasons[EAGER] and not baselines._processes


class Graphs:
    """CUDA graphs for a runner on a CPU: what ran as one was captured runs when it is replayed."""

    captured = 0
    CUDAGraph = SimpleNamespace
    Stream = staticmethod(lambda: SimpleNamespace(wait_stream=lambda other: None))
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    current_stream = staticmethod(lambda: None)

    @contextlib.contextmanager
    def graph(self, graph: Any, stream: Any) -> Iterator[None]:
        self.captured += 1
        yield
        graph.replay = lambda: None


def test_a_runner_captures_an_order_once_and_keeps_arguments_where_they_are() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        settings = {"device": "cpu", "threads": 1, "arena_fd": file.fileno(), "arena_bytes": 1 << 16}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            player, graphs = runner.Runner(theirs, settings), Graphs()
            player._cuda = graphs
            ran: list[int] = []
            player._calls = [([index], [], [], "tensor") for index in range(3)]
            player._functions = [lambda index: ran.append(index) or torch.tensor(index)] * 3
            for sequence in ([0, 2, 0, 2], [0, 1], [0, 2, 0, 2]):
                player.play({"sequence": sequence, "graph": True})
                assert [int(found) for found in player._launch(5)] == sequence[-1:]
            assert graphs.captured == 2 and ran == [0, 2, 0, 2, 0, 2, 0, 2, 1, 0, 1, 0, 1]
    first, second = [torch.ones(2), 3], [torch.zeros(2), 3]
    assert player._kept(0, first) is first and player._kept(0, second) is first
    assert first[0].tolist() == [0, 0] and player._kept(1, second) is second


MODEL = b"""\
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.scale, torch.tensor(self.calls)
"""
SCALED = Operation(
    "kernelbench/level1/1_Scaled",
    inputs=(Tensor("x", "float32", (3,)),),
    weights=(Tensor("scale", "float32", (1,)),),
    outputs=(Tensor("out", "float32", (3,)), Tensor("calls", "int64", ())),
)


@RUNS
def test_a_module_plays_calls_in_an_order_and_gives_the_last_result() -> None:
    resources = Resources("cpu", threads=1, memory_bytes=2 << 30, arena_bytes=1 << 20, timeout_s=60)
    x = torch.arange(3, dtype=torch.float32)
    weights = ({"scale": torch.full((1,), factor)} for factor in (2.0, 5.0))
    calls = [Call(SCALED, {"x": x}, {}, scaled, "(tensor, tensor)") for scaled in weights]
    with Module(MODEL, "Model", resources) as module:
        module.load(60)
        module.make(0, [])
        module.prepare(calls, {}, static=True)
        module.play([0, 1, 0, 1, 1], graph=False)
        assert module.output(1)["out"].isnan().all(), "nothing is there before the clock runs"
        module.run(7)
        found = module.output(1)
        assert found["out"].tolist() == [0, 5, 10] and int(found["calls"]) == 1 + 7 * 3
        assert module.output(0)["out"].isnan().all()
        module.play([], graph=False)
        module.run()
        module.play([0], graph=False)
        module.run()
        assert module.output(0)["out"].tolist() == [0, 2, 4] and int(module.output(0)["calls"]) == 1 + 7 * 2 + 1
        with pytest.raises(Fault, match="cannot be captured"):
            module.play([0], graph=True)
        module.prepare(calls, {})
        module.run()
        assert [module.output(index)["out"].tolist() for index in (0, 1)] == [[0, 2, 4], [0, 5, 10]]


def test_other_sizes_on_a_gpu_are_multiples_too() -> None:
    known = Examined("x", Readiness.READY, "", SCALED, sizes=(("a", 64), ("b", 64), ("c", 7)), variable=("a", "b", "c"))
    for factor, found in ((1.2, 96), (0.8, 32)):
        sizes = other_sizes(known, lambda value: factor, 32)  # noqa: B023
        assert sizes["a"] == sizes["b"] == found and sizes["c"] % 2 == 1
    assert all(size % 2 == 1 for size in other_sizes(known, lambda value: 1.2, 1).values())


def test_files_are_tried_with_the_effort_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert effort_for(gpu=True).device == "cuda" and effort_for(gpu=False) == Effort()
    seen: list[Effort] = []

    def kept(entry: Entry, effort: Effort, sizes: Any = None) -> Operation:
        seen.append(effort)
        return SCALED

    monkeypatch.setattr("cuda_l2.kernelbench.checkout.admit", kept)
    for target in ("cuda", "cpu"):
        assert tasks.parse(QUARTIC, target, CHECKOUT) is SCALED
    assert seen == [effort_for(gpu=True), Effort()]
    target = compile_only("sm_90a")
    assert [isinstance(each, Entry) for each in read_tasks("kernelbench/level2", target, CHECKOUT)] == [True] * 2


def test_without_a_gpus_device_files_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "gpu_devices", list)
    with pytest.raises(UserError, match="no device file /dev/nvidia") as error:
        tasks.parse(QUARTIC, "cuda", CHECKOUT)
    assert "\n" not in str(error.value)


def test_a_sandbox_uses_the_gpu_that_is_used_here(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []

    def wrapped(command: list[str], *_: object, **__: object) -> None:
        commands.extend(command)
        raise UserError("not started")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(sandbox, "kind", lambda: sandbox.Kind.BUBBLEWRAP)
    monkeypatch.setattr(sandbox, "wrap", wrapped)
    with pytest.raises(UserError, match="not started"):
        SandboxedPython("program", {}, devices=[Path("/dev/nvidia1")])
    assert "CUDA_VISIBLE_DEVICES=1" in commands


def test_a_full_gpu_is_no_lack_of_one() -> None:
    with pytest.raises(Refused) as refused:
        raise_if_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB."))
    assert refused.value.status is Readiness.TOO_LARGE


def test_a_file_too_large_for_the_gpu_says_so() -> None:
    side = 60_000
    tensors = {"inputs": (Tensor("x", "float32", (side, side)),), "outputs": (Tensor("out", "float32", (side, side)),)}
    with pytest.raises(UserError, match=r"GiB of GPU memory .* choose smaller sizes"):
        require_feasible(Operation("kernelbench/level1/1_Large", **tensors), 50 << 20, 2, 80 << 30)


def test_winners_are_reported_back_to_back_alone() -> None:
    rig = object.__new__(CudaRig)
    rig.protocols = CUDA_PROTOCOLS
    assert rig.reports(SCALED, ["offline", "server"]) == ["offline"]
    assert rig.reports(tasks.parse("softmax"), ["offline", "server"]) == ["offline", "server"]
    with pytest.raises(UserError, match="single launches, as in paper"):
        rig.reports(SCALED, ["paper"])


def test_whoever_runs_references_on_a_gpu_can_turn_shortcuts_off() -> None:
    backends = torch.backends
    before = backends.cudnn.allow_tf32
    with in_full_precision():
        assert not backends.cudnn.allow_tf32 and not backends.cuda.matmul.allow_tf32
        assert not backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        assert not backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert backends.cudnn.allow_tf32 == before


@RUNS
def test_a_model_is_asked_for_the_contract_of_the_machine(target: CpuTarget) -> None:
    task = operation(SWISH)
    for machine, has, lacks in (
        (compile_only("sm_90a"), 'target = "cuda"', 'target = "cpu"'),
        (target, 'target = "cpu"', 'target = "cuda"'),
    ):
        contract = contract_text(machine.name, task)
        assert has in contract and lacks not in contract
    assert "nn.Linear(features_in, features_out)" in describe(task) and "linear_weight" in describe(task)


# -- on a GPU


@pytest.fixture(scope="module")
def evaluators(gpu: Any) -> Iterator[Callable[[str], Evaluator]]:
    """evaluators(name) has the stages for a file, one at a time."""
    kept: dict[str, Evaluator] = {}

    def found(name: str) -> Evaluator:
        if name not in kept:
            for evaluator in kept.values():
                evaluator.close()
            kept.clear()
            kept[name] = Evaluator(on_gpu(name), gpu)
        return kept[name]

    yield found
    for evaluator in kept.values():
        evaluator.close()


def on_gpu(name: str) -> Operation:
    """With references on the GPU; the element-wise file smaller than written, so that cases are made in seconds."""
    small = f"{name}:rows=1024,columns=1000" if name == QUARTIC else name
    task = tasks.parse(small, "cuda", CHECKOUT)
    assert isinstance(task, Operation)
    return task


@pytest.mark.gpu
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("protocol", ["search", "offline", "rotating"])
def test_a_kernel_for_a_file_is_measured(name: str, protocol: str, gpu: Any, evaluators: Any) -> None:
    (trial,) = evaluators(name).evaluate([Candidate(RIGHT[name])], gpu.protocols[protocol])
    assert trial.status == "measured", trial.reason
    timing, named = trial.timing, [arm for arm, _ in trial.timing.speedups]
    assert not timing.conditions.left_out, timing.conditions
    assert named == ([EAGER_GRAPH] if protocol == "search" else [COMPILED_GRAPH, EAGER_GRAPH, COMPILED, EAGER])
    if protocol != "search":
        times = {arm.name: arm.latency_us.estimate for arm in timing.baselines}
        assert set(times) == set(named)
        assert all(us > 0 for us in timing.conditions.conversation_us.values())


@pytest.mark.gpu
@pytest.mark.parametrize("what", sorted(WRONG, key=lambda what: WRONG[what][0]))
def test_a_wrong_kernel_for_a_file_is_rejected_on_a_gpu(what: str, evaluators: Any) -> None:
    name, text, says = WRONG[what]
    (trial,) = evaluators(name).evaluate([Candidate(shown_rows_alone(text, on_gpu(name)))])
    assert trial.status in ("incorrect", "imprecise", "unhygienic") and says in trial.reason, trial.reason


@pytest.mark.gpu
def test_references_on_a_gpu_give_no_room_for_tf32() -> None:
    """A convolution's own error in fp32 is some 1e-7 of its results; with TF32 it would be 1e-4 to 1e-3."""
    task = tasks.parse("kernelbench/level2/2", "cuda", CHECKOUT)
    assert isinstance(task, Operation)
    (limit,) = ForeignCases(task, 1, "cuda").drawn("seed 0").bounds
    assert limit.exact.is_cuda and limit.eager_max < 2e-5 * float(limit.exact.abs().max())


@pytest.mark.gpu
def test_baselines_of_a_file_are_timed_alone(gpu: Any) -> None:
    with gpu.open(on_gpu(SWISH), 1) as stages:
        timing = stages.time_baselines(gpu.protocols["offline"])
        assert timing.candidate and timing.candidate.name == COMPILED_GRAPH
        with pytest.raises(UserError, match="back to back alone"):
            stages.time_baselines(gpu.protocols["server"])


IN_CUDA = partial(answers, kernels=RIGHT, language="cuda")


@pytest.mark.gpu
def test_optimize_asks_for_a_kernel_and_reports_it_offline_alone(
    gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(IN_CUDA) as server:
        settings = OptimizeSettings(
            policy=f"openai:stub@{server.address}",
            kernelbench=CHECKOUT,
            target="cuda",
            archive=tmp_path / "archive.db",
            trials=1,
            json=True,
            model=MODELS,
        )
        optimize([SWISH], settings=settings)
    result = json.loads(capsys.readouterr().out)
    assert result["correct"] == 1 and set(result["reports"]) == {"offline"}


@pytest.mark.gpu
def test_check_judges_a_cuda_file(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "swish.cu"
    path.write_text(RIGHT[SWISH])
    with pytest.raises(SystemExit) as ended:
        check(path, SWISH, settings=CheckSettings(kernelbench=CHECKOUT))
    said = capsys.readouterr().out
    assert ended.value.code == 0 and EAGER_GRAPH in said, said


@pytest.mark.gpu
def test_a_bench_over_a_level_on_a_gpu(gpu: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(IN_CUDA) as server:
        settings = BenchSettings(
            tasks="kernelbench/level2",
            kernelbench=CHECKOUT,
            policy=f"openai:stub@{server.address}",
            trials=1,
            budget="20s",
            target="cuda",
            out=tmp_path,
            model=MODELS,
        )
        bench(settings=settings)
    said = capsys.readouterr().out
    assert "| level2 | 2 | 1 (50%) |" in said, said
