"""KernelBench's files as tasks under the launch contract: judged, asked for, collected, benched; what is none is said."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from llm_server import Say, serving
from made import CPU_CHECKS

from cuda_l2 import tasks
from cuda_l2.commands import collect as collect_command
from cuda_l2.commands.bench import BenchSettings
from cuda_l2.commands.bench import command as bench
from cuda_l2.commands.collect import CollectSettings
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.evaluator import Evaluator
from cuda_l2.kernelbench.cases import ForeignCases
from cuda_l2.kernelbench.checkout import foreign, read
from cuda_l2.kernelbench.examined import Effort
from cuda_l2.kernelbench.files import Entry
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.measure.baselines.torch_eager import EAGER
from cuda_l2.records import Candidate
from cuda_l2.runs.task_bench import read_tasks
from cuda_l2.system import process_tree, sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import describe
from cuda_l2.tasks.kinds import operation_kind

CHECKOUT = Path(__file__).with_name("kernelbench")
EFFORT = Effort(timeout_s=60, memory_bytes=2 << 30, budget_bytes=1 << 20, budget_flops=10**8)
QUARTIC, SWISH = "kernelbench/level1/1", "kernelbench/level2/1"

pytestmark = [
    pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine"),
]

CONTRACT = """\
/* cuda-l2
target = "cpu"
entry = "f"
threads = 2
{buffers}
*/
#include <stdint.h>
typedef void (*task_fn)(void *, int64_t);
{code}
"""
BUFFER = '[[buffer]]\nname = "{}"\nshape = {}\nkind = "{}"'


def source(code: str, *buffers: tuple[str, str, str]) -> str:
    return CONTRACT.format(buffers="\n".join(BUFFER.format(*buffer) for buffer in buffers), code=code)


POLYNOMIAL = source(
    """\
struct call { int64_t columns; const float *x; float *out; };
static void row(void *context, int64_t index) {
    const struct call *call = context;
    for (int64_t j = index * call->columns; j < (index + 1) * call->columns; ++j) {
        float square = call->x[j] * call->x[j];
        call->out[j] = square * square - 3 * square + 1;
    }
}
void f(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    struct call call = {sizes[1], buffers[0], buffers[1]};
    parallel_for(sizes[0], row, &call);
}
""",
    ("x", '["rows", "columns"]', "input"),
    ("out", '["rows", "columns"]', "output"),
)
LINEAR = source(
    """\
static float exponential(float x) {
    if (x > 88.7f || x != x) return x > 88.7f ? __builtin_inff() : x;
    if (x < -104.0f) return 0;
    double y = x * 1.4426950408889634, k = (double)(int64_t)(y + (y < 0 ? -0.5 : 0.5)), r = (y - k) * 0.6931471805599453;
    double p = 1 + r * (1 + r / 2 * (1 + r / 3 * (1 + r / 4 * (1 + r / 5 * (1 + r / 6 * (1 + r / 7))))));
    union { int64_t word; double value; } power = {((int64_t)k + 1023) << 52};
    return (float)(p * power.value);
}
void f(const int64_t *sizes, void *const *buffers, void *workspace, void (*parallel_for)(int64_t, task_fn, void *)) {
    int64_t rows = sizes[0], inner = sizes[1], outer = sizes[2];
    const float *x = buffers[0], *weight = buffers[1], *bias = buffers[2], *scale = buffers[3];
    float *out = buffers[4];
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < outer; ++j) {
            float part[8] = {0}, sum = bias[j];
            for (int64_t p = 0; p < inner; ++p) part[p % 8] += x[i * inner + p] * weight[j * inner + p];
            for (int k = 0; k < 8; ++k) sum += part[k];
            out[i * outer + j] = sum / (1 + exponential(-sum)) * SCALE;
        }
}
""",
    ("x", '["rows", "inner"]', "input"),
    ("linear_weight", '["outer", "inner"]', "weight"),
    ("linear_bias", '["outer"]', "weight"),
    ("scale", '["outer"]', "weight"),
    ("out", '["rows", "outer"]', "output"),
)
RIGHT = {QUARTIC: POLYNOMIAL, SWISH: LINEAR.replace("SCALE", "scale[j]")}
WRONG = {
    "nothing below zero": (
        QUARTIC,
        POLYNOMIAL.replace("call->x[j] * call->x[j]", "call->x[j] < 0 ? 0 : call->x[j] * call->x[j]"),
        "normal values",
    ),
    "these rows alone": (QUARTIC, POLYNOMIAL.replace("sizes[0], row", "sizes[0] < 50 ? sizes[0] : 50, row"), ""),
    "a weight by heart": (SWISH, LINEAR.replace("SCALE", "0.5f"), "scale"),
    "half of the sum": (SWISH, LINEAR.replace("SCALE", "scale[j]").replace("p < inner", "p < inner / 2"), "own inputs"),
}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-kernelbench-0123456789")


@pytest.fixture(scope="module")
def evaluators(rig):
    """The stages for each of two files."""
    with (
        Evaluator(read(QUARTIC, CHECKOUT, EFFORT), rig) as quartic,
        Evaluator(read(SWISH, CHECKOUT, EFFORT), rig) as swish,
    ):
        yield {QUARTIC: quartic, SWISH: swish}


def judged(evaluator, text: str):
    (trial,) = evaluator.evaluate([Candidate(text)])
    return trial


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.corpus(1)
def test_a_kernel_for_a_file_is_checked_and_timed_beside_its_own_model(name, evaluators, rig) -> None:
    trial = judged(evaluators[name], RIGHT[name])
    assert trial.status == "measured", trial.reason
    assert trial.verdict.passed == CPU_CHECKS
    assert [name for name, _ in trial.timing.speedups] == ["torch eager"], "no compiler takes a search's time"
    assert trial.timing.conditions.torch_threads in ("spin", "sleep") and trial.reward == trial.reward
    assert trial.task.revision and str(tasks.identity(str(trial.task))) == str(trial.task)
    found = process_tree.processes(rig.baselines_of(trial.task).arm(EAGER)._module.pid)
    assert {os.sched_getscheduler(pid) for pid in found} == {os.SCHED_BATCH}, "who wakes one keeps its core"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.corpus(1)
def test_a_wrong_kernel_for_a_file_is_rejected(what, evaluators) -> None:
    name, text, says = WRONG[what]
    trial = judged(evaluators[name], text)
    # which weights have special values is drawn; where this one has none, its changes go unnoticed
    allowed = ("incorrect", "unhygienic") if what == "a weight by heart" else ("incorrect",)
    assert trial.status in allowed and says in trial.reason, trial.reason


def test_what_is_timed_is_what_another_run_of_the_file_gives() -> None:
    task = read(SWISH, CHECKOUT, EFFORT)
    cases = ForeignCases(task, 5)
    case, again = cases.timed(3), cases.exactly(cases.timed(3))
    assert case.violation({"out": case.bounds[0].rounded}) == "" == again.violation({"out": case.bounds[0].rounded})
    assert torch.equal(case.bounds[0].exact, again.bounds[0].exact) and case.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(value, again.tensors[name]) for name, value in case.tensors.items())
    assert not torch.equal(cases.timed(2).tensors["linear_weight"], case.tensors["linear_weight"])
    assert cases.distributions and len(cases.others) == 2
    for each in (case, cases.drawn("seed 0"), cases.changed(case, "scale", wholly=True)):
        assert all(tensor.is_contiguous() for tensor in each.tensors.values())


@pytest.mark.full
def test_cases_of_numbers_integers_and_files_that_give_the_same_inputs(tmp_path) -> None:
    shifted = ForeignCases(read("kernelbench/level1/2", CHECKOUT, EFFORT), 1)
    assert shifted.changed(shifted.drawn("x"), "shift", wholly=False) is None and "shift" not in shifted.real_tensors
    changed = shifted.changed(shifted.drawn("x"), "a", wholly=False)
    assert int((changed.tensors["a"] != shifted.drawn("x").tensors["a"]).sum()) == 1
    special = shifted.special("a", "infinity")
    assert int(special.tensors["a"].isinf().sum()) == 1 and bool(special.bounds[0].exact.isinf().any())
    ranges = ForeignCases(read("kernelbench/level1/3", CHECKOUT, EFFORT), 1)
    assert ranges.timed(0).bounds[1].dtype == torch.int64
    text = (CHECKOUT / "KernelBench" / "level1" / "1_Quartic.py").read_text()
    draws = {"1_Twos": "2 * torch.ones(", "2_Ones": "torch.ones("}
    folder = checkout(tmp_path, {name: text.replace("torch.rand(", draw) for name, draw in draws.items()})
    same = ForeignCases(read(QUARTIC, folder, EFFORT), 1)
    assert same.usual == "normal values" and not torch.equal(same.timed(0).tensors["x"], same.timed(1).tensors["x"])
    with pytest.raises(UserError, match="by heart"):
        ForeignCases(read("kernelbench/level1/2", folder, EFFORT), 1)


NORM = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.LayerNorm(n)

    def forward(self, x):
        return self.norm(x)

rows, n = 6, 40

def get_inputs():
    return [torch.randn(rows, n)]

def get_init_inputs():
    return [n]
"""


@pytest.mark.full
def test_a_module_whose_random_numbers_no_kernel_is_given_is_no_task(tmp_path) -> None:
    drawn = NORM.replace("self.norm = nn.LayerNorm(n)", "self.shift = torch.randn(n)")
    drawn = drawn.replace("self.norm(x)", "x + self.shift")
    folder = checkout(tmp_path, {"5_Drawn": drawn, "6_Fixed": drawn.replace("torch.randn(n)\n", "torch.arange(n)\n")})
    with pytest.raises(UserError, match="neither parameters nor buffers"):
        read("kernelbench/level1/5", folder, EFFORT)
    assert read("kernelbench/level1/6", folder, EFFORT).weights == ()


@pytest.mark.full
def test_a_weight_that_begins_as_zeros_counts(tmp_path) -> None:
    cases = ForeignCases(read("kernelbench/level1/5", checkout(tmp_path, {"5_Norm": NORM}), EFFORT), 2)
    case = cases.drawn("state 0")
    assert not case.tensors["norm_bias"].any() and bool((case.tensors["norm_weight"] == 1).all())
    for wholly, count in ((False, 1), (True, 40)):
        changed = cases.changed(case, "norm_bias", wholly=wholly)
        assert int((changed.tensors["norm_bias"] != 0).sum()) == count
        without = torch.layer_norm(case.tensors["x"], (40,))
        assert changed.bounds[0].violation(without) and not case.bounds[0].violation(without)


def checkout(folder: Path, files: dict[str, str]) -> Path:
    (folder / "level1").mkdir(parents=True)
    for name, text in files.items():
        (folder / "level1" / f"{name}.py").write_text(text)
    return folder


def test_a_model_is_shown_the_file_and_how_its_tensors_are_called() -> None:
    text = describe(read(QUARTIC, CHECKOUT, EFFORT))
    for part in ("square * square - 3 * square + 1", "class Model", "- input `x`: float32 [", "but here rows = "):
        assert part in text, part
    swish = read(SWISH, CHECKOUT, EFFORT)
    text = describe(swish)
    for part in ("the module's `linear.weight`", "nn.Linear(features_in, features_out)", "own inputs: `out` RMS error"):
        assert part in text, part
    assert operation_kind(swish).code_words(swish).split()[:4] == ["linear", "swish", "scale", "Module"]
    assert "`shift`: float32 [], always 0.5" in describe(read("kernelbench/level1/2", CHECKOUT, EFFORT))


def test_what_is_no_task_here_is_one_clear_line(tmp_path) -> None:
    known = read(QUARTIC, CHECKOUT, EFFORT)
    bad = checkout(tmp_path, {"1_Bad": "import nobody_has_this"})
    for text, folder, says in (
        (QUARTIC, None, "give its folder with --kernelbench"),
        ("kernelbench/level1/99", CHECKOUT, "there is no file"),
        (f"{known.name}@0123456789ab", CHECKOUT, "no longer the file"),
        (f"{QUARTIC}:float16", CHECKOUT, "the types that their files give"),
        (f"{QUARTIC}:depth=3", CHECKOUT, "no size depth"),
        (QUARTIC, bad, "needs-package: needs the package nobody_has_this"),
    ):
        with pytest.raises(UserError, match=says) as error:
            tasks.parse(text, checkout=folder)
        assert "\n" not in str(error.value)
    assert read(f"{QUARTIC}:rows=6,columns=5", CHECKOUT, EFFORT).outputs[0].shape == (6, 5)
    assert foreign(known).file.text.startswith("import torch")


@pytest.mark.corpus(1)
@pytest.mark.parametrize("entry", ["kernelbench/level1/1_Quartic", QUARTIC, "kernelbench/level1", "kernelbench"])
def test_a_file_is_held_out_by_name_number_or_level(entry, tmp_path) -> None:
    (tmp_path / "held.txt").write_text(f"{entry}  # not to be seen\n")
    held = HoldOut.read(tmp_path / "held.txt")
    assert held.task(read(QUARTIC, CHECKOUT, EFFORT)) and not held.task(tasks.parse("relu"))
    assert held.task(read(SWISH, CHECKOUT, EFFORT)) == (entry == "kernelbench")
    (tmp_path / "held.txt").write_text("kernelbench/level1/1_Quartic/2\n")
    with pytest.raises(UserError, match="line 1: write kernelbench/level1"):
        HoldOut.read(tmp_path / "held.txt")


def answers(request, number: int, kernels: Mapping[str, str] = RIGHT, language: str = "c") -> Say:
    """The kernel for the file that the question shows, if there is one."""
    prompt = request["messages"][-1]["content"]
    kernel = next((kernels[name] for name, part in ((QUARTIC, "x^4"), (SWISH, "nn.Linear")) if part in prompt), "")
    return Say(f"### Code\n```{language}\n{kernel}```\n" if kernel else "I do not know.")


@pytest.mark.full
def test_the_command_line_optimises_a_file(tmp_path, typed) -> None:
    path = tmp_path / "archive.db"
    with serving(answers) as server:
        given = ["--policy", f"openai:stub@{server.address}", "--kernelbench", str(CHECKOUT), "--target", "cpu"]
        options = ("--archive", str(path), "--trials", "1", "--protocol", "offline", "--json")
        status, said, errors = typed("optimize", f"{QUARTIC}:rows=40,columns=30", *given, *options)
    assert status == 0, errors
    result = json.loads(said)
    assert result["correct"] == 1 and len(server.requests) == 1
    task = read(f"{QUARTIC}:rows=40,columns=30", CHECKOUT)
    status, said, errors = typed("show", str(task), "--archive", str(path))
    assert status == 0 and "openai:stub" in said, errors


@pytest.mark.full
def test_few_verified_kernels_for_a_file_are_collected_but_not_for_one_held_out(tmp_path, capsys) -> None:
    (tmp_path / "held.txt").write_text(f"{SWISH}\n")
    with serving(answers) as server:
        settings = CollectSettings(
            policy=[f"openai:stub@{server.address}"],
            out=tmp_path / "data",
            keep=1,
            target="cpu",
            archive=tmp_path / "archive.db",
            hold_out=tmp_path / "held.txt",
            kernelbench=CHECKOUT,
            model=ModelSettings(concurrency=1, retries=0, repairs=0, reference_tokens=0),
        )
        collect_command.command([f"{QUARTIC}:rows=40,columns=30", SWISH], settings=settings)
        assert len(server.requests) == 1
    said = capsys.readouterr()
    assert "held out: kernelbench/level2/1_Linear" in said.err and "1 of 1 pair of task and model done" in said.out


@pytest.mark.full
def test_a_bench_over_a_checkout_counts_what_works_and_says_what_is_no_task(tmp_path, capsys) -> None:
    text = (CHECKOUT / "KernelBench" / "level1" / "1_Quartic.py").read_text().replace("8192", "40")
    files = {"1_Quartic": text, "2_Unknown": text.replace("x^4", "y").replace("+ 1", "+ 2"), "3_Bad": "import nobody"}
    folder = checkout(tmp_path / "checkout", files)
    (folder / "level2").mkdir()
    swish = (CHECKOUT / "KernelBench" / "level2" / "1_Linear_Swish_Scale.py").read_text()
    (folder / "level2" / "1_Swish.py").write_text(swish)
    with serving(answers) as server:
        settings = BenchSettings(
            tasks="kernelbench",
            kernelbench=folder,
            policy=f"openai:stub@{server.address}",
            trials=1,
            budget="1h",
            target="cpu",
            out=tmp_path / "out",
            model=ModelSettings(concurrency=1, retries=0, repairs=0, reference_tokens=0, tokens=10**6),
        )
        bench(settings=settings)
        asked = len(server.requests)
        bench(settings=settings)  # what was reported is not searched again
        assert not [prompt for prompt in server.prompts[asked:] if "x^4" in prompt or "nn.Linear" in prompt]
    said = capsys.readouterr().out
    for level, count, working in (("level1", 3, "1 (33%)"), ("level2", 1, "1 (100%)"), ("all", 4, "2 (50%)")):
        assert f"| {level} | {count} | {working} |" in said, said
    assert "- kernelbench/level1/3_Bad@" in said and "needs-package" in said
    rows = list(csv.DictReader((tmp_path / "out" / "tasks.csv").read_text().splitlines()))
    assert [bool(row["kernel"]) for row in rows] == [True, False, False, True]
    assert {row["level"] for row in rows} == {"level1", "level2"}
    assert all(float(rows[0][f"{arm} speedup"]) > 0 for arm in ("torch eager", "torch.compile"))


def test_files_of_a_bench_are_tried_when_their_turn_comes(target) -> None:
    found = read_tasks("kernelbench/level1,softmax", target, CHECKOUT)
    assert [isinstance(each, Entry) for each in found] == [True] * 4 + [False]
    assert [each.level for each in read_tasks("kernelbench", target, CHECKOUT)] == [1] * 4 + [2] * 2 + [3] * 3
    with pytest.raises(UserError, match="--kernelbench"):
        read_tasks("kernelbench/level1/1", target)


@pytest.mark.full
def test_a_bench_asks_a_model_within_a_budget_alone(tmp_path) -> None:
    settings = BenchSettings(tasks="kernelbench", kernelbench=CHECKOUT, policy="openai:stub@http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match="needs a budget: --tokens"):
        bench(settings=settings)
    with pytest.raises(UserError, match="--kernelbench goes with --tasks"):
        bench(["64x64x64"], settings=BenchSettings(kernelbench=CHECKOUT))
