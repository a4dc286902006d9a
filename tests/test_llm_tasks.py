"""Language models and tasks other than matrix products: what reaches them, and a search that one drives over a task."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import settled
from llm_server import Say, serving
from made import trial
from test_llm_prompts import TARGETS, asked
from test_llm_search import ONE, block, optimize, proposing, require_driven, run

from cuda_l2 import contract, tasks
from cuda_l2.build.cuda import build_all
from cuda_l2.commands.exchanges import command as list_exchanges
from cuda_l2.contract.text import contract_text
from cuda_l2.evaluator import Evaluator
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.propose._prompt import feedback
from cuda_l2.propose._references import query
from cuda_l2.records import Build, BuildStatus, Candidate, Operation, Verdict, VerdictStatus
from cuda_l2.tasks import describe
from cuda_l2.tasks._base import definitions
from cuda_l2.tasks.values import Distribution, distributions
from cuda_l2.tasks.words import reference_text, tolerance_words

SOFTMAX = "softmax:rows=8,columns=64"
HONEST = (Path(__file__).with_name("task_cheats") / "honest_softmax.c").read_text()
ONE_THREAD = HONEST.replace("threads = 2", "threads = 1")
CUMSUM = "cumsum:rows=4,columns=9"
SCAN = HONEST[: HONEST.index("*/") + 3].replace('"softmax"', '"scan"').replace("4 * columns * threads", "0")
SCAN += """\
void scan(const long *sizes, float **buffers) {
    for (long row = 0; row < sizes[0]; ++row) {
        float sum = 0;
        for (long j = row * sizes[1]; j < (row + 1) * sizes[1]; ++j) buffers[1][j] = sum += buffers[0][j];
    }
}
"""
SUM_AGAIN = """\
    for (int64_t j = 0; j < call->columns; ++j) {
        sum = 0;
        for (int64_t i = 0; i < call->columns; ++i) sum += exponential(x[i] - most);
        out[j] = exponential(x[j] - most) / sum;
    }
}"""
SLOW = re.sub(r"    for \(int64_t j = 0; j < call->columns; \+\+j\) sum .*?\n}", SUM_AGAIN, ONE_THREAD, flags=re.S)
"""Every element sums its row again."""
NOTHING_SUBTRACTED = ONE_THREAD.replace("x[j] - most", "x[j]")


@pytest.fixture(scope="module")
def evaluator(rig):
    with Evaluator(tasks.parse(SOFTMAX), rig) as made:
        yield settled(made)


def operation(text: str) -> Operation:
    task = tasks.parse(text)
    assert isinstance(task, Operation)
    return task


@pytest.mark.parametrize("name", definitions())
def test_the_reference_that_is_shown_is_the_one_that_judges(name) -> None:
    known = definitions()[name]
    task = known.task()
    space: dict = {}
    exec(reference_text(name), space)  # our own text
    wanted = inspect.signature(space["reference"]).parameters
    drawn, sizes = known.draw(task, 3), dict(task.sizes)
    found = space["reference"](**drawn, **{size: value for size, value in sizes.items() if size in wanted})
    found = (found,) if isinstance(found, torch.Tensor) else tuple(found)
    for mine, right in zip(found, known.bind(sizes)(**drawn), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)  # sums over threads may differ


@pytest.mark.parametrize("name", TARGETS)
def test_every_part_of_a_task_reaches_the_model(name, tmp_path) -> None:
    task, target = operation("group_norm:batch=2,groups=3,channels=4,height=5,width=6:float16"), TARGETS[name]
    named = {"task": task, "machine": target.machine}
    trials = [trial(source, speedup, **named) for source, speedup in (("/* slower */", 0.5), ("/* faster */", 1.25))]
    refused = Build("x", BuildStatus.FAILED, reason="error: no header norm.h")
    wrong = Verdict(VerdictStatus.INCORRECT, "other shapes", "out is off by 3 (rows=39)", passed=("seeds",))
    failures = [
        replace(trials[0], candidate=Candidate("a"), build=refused, verdict=None, timing=None, reward=-1.0),
        replace(trials[0], candidate=Candidate("b"), verdict=wrong, timing=None, reward=-0.5),
    ]
    system, user = asked(target, tmp_path, [*trials, *failures], task=task)
    assert "expert" in system["content"] and "two fp16" not in system["content"]
    text = user["content"]
    for part in (
        str(task),
        "return F.group_norm(x, groups, gain, shift)",
        "- input `x`: float16 [2, 12, 5, 6]",
        "- weight `gain`: float16 [12], real numbers, the same from call to call",
        "- output `out`: float16 [2, 12, 5, 6]",
        "groups = 3, channels = 4",
        f"{task.flops:,} floating-point operations, {task.bytes:,} bytes",
        tolerance_words(task),
        "[[buffer]]",
        {"cpu": "void sum_rows(const int64_t *sizes", "cuda": '"C" __global__ void sum_rows(const float *x'}[name],
        {"cpu": "`parallel_for(count, task, context)`", "cuda": "| `[[tensor_map]]` | `name`, `tensor`"}[name],
        {"cpu": "no `malloc`, no `expf`", "cuda": "Clocks, timers and counters"}[name],
        target.model,
        f"roofline bound of this task: {target.bound_us(task):.2f} us",
        "1.250 times as fast as the strongest library",
        "Score 1.250",
        "/* faster */",
        "Score 0.500",
        "/* slower */",
        "busy 61 % (1.25)",
        "no header norm.h",
        "out is off by 3 (rows=39)",
        "found for: group norm reduction group_norm",
        "Algorithm design",
    ):
        assert part in text, part
    for of_products in ("void gemm(", "M x K", "fp16 gemm", "An example"):
        assert of_products not in text, of_products


def test_the_tolerance_is_told_in_figures_and_of_integers_in_words() -> None:
    assert re.search(r"at these sizes: `out` RMS error \d\.\de-0\d, largest error", tolerance_words(operation(SOFTMAX)))
    assert "`indices` equal" in tolerance_words(operation("max_rows"))
    large = operation("softmax:rows=8192,columns=8192")
    assert "at rows = 64, columns = 500: " in tolerance_words(large) and "268,435,456 floating" not in describe(large)
    assert "whole numbers from 0 to 9" in describe(operation("cross_entropy:rows=4,classes=10"))


def test_all_values_that_are_checked_are_told() -> None:
    for dtype in ("float32", "float16"):
        said = describe(operation(f"{SOFTMAX}:{dtype}"))
        for distribution in Distribution:
            checked = distribution in distributions(dtype) and distribution is not Distribution.NORMAL
            assert (distribution.words in said) == checked


def test_what_is_looked_up_comes_from_the_instruction() -> None:
    for name, target in TARGETS.items():
        words = query(operation("residual_rms_norm:float16"), target, [])
        assert words == "residual rms norm reduction rms_norm" + (" kernel block threads" if name == "cuda" else "")


def examples(chapter: str) -> list[str]:
    """Sources in a chapter of what a model is told, unindented."""
    found = re.findall(r"^    /\* cuda-l2\n(?:    .*\n|\n)*    }$", chapter, re.M)
    return [re.sub("^    ", "", text, flags=re.M) + "\n" for text in found]


def test_the_example_of_the_cpus_contract_is_right(judge) -> None:
    task = operation("sum_rows:rows=5,columns=33")
    (source,) = examples(contract_text("cpu", task))
    trial = judge(source, str(task))
    assert trial.status == "measured", trial.reason


def test_feedback_says_which_values_a_kernel_is_wrong_on(judge) -> None:
    task = operation("sum_rows:rows=5,columns=33")
    (source,) = examples(contract_text("cpu", task))
    added = "call->x[index * call->columns + j]"
    assert added in source
    trial = judge(source.replace(added, f"({added} > 6 ? 6 : {added})"), str(task))
    assert "on offset values: of mean 8 and deviation 1" in feedback(trial)


def test_the_example_of_the_gpus_contract_builds_and_has_a_plan() -> None:
    task = operation("sum_rows:rows=5,columns=33")
    (source,) = examples(contract_text("cuda", task))
    (build,) = build_all([Candidate(source)], compile_only("sm_90a"))
    assert build.status is BuildStatus.BUILT, build.reason
    (launch,) = contract.parse_cuda(source).plan(task, 132).launches
    assert (launch.grid, launch.block) == ((5, 1, 1), (32, 1, 1))


def test_a_model_drives_the_search_over_a_task_to_a_measurably_better_kernel(evaluator, archive, slow_and_fast) -> None:
    require_driven(evaluator, archive, slow_and_fast, SLOW)


def test_a_wrong_kernel_for_a_task_is_mended_in_the_same_conversation(evaluator, archive) -> None:
    progress, server, exchanges = run(evaluator, archive, [Say(block(NOTHING_SUBTRACTED)), Say(block(ONE_THREAD))], 2)
    assert [trial.status for trial in progress.trials] == ["incorrect", "measured"]
    assert [len(request["messages"]) for request in server.requests] == [2, 4]
    for part in (
        "Status: incorrect",
        "Check that failed: ",
        "passed before: ",
        "on wide values",
        "whole corrected file",
    ):
        assert part in server.prompts[1], part
    assert exchanges[1].parent == exchanges[0].key


def test_a_question_asked_before_is_answered_from_the_archive(evaluator, archive) -> None:
    """The prompt is the same in every process: figures in it do not wobble."""
    with serving([Say("Hm."), Say(block(ONE_THREAD))]) as server:
        policy, settings = f"openai:stub@{server.address}", replace(ONE, repairs=0)
        with proposing(policy, evaluator, archive, settings) as proposer:
            asked = proposer._ask(proposer._questions(1))
        tolerance_words.cache_clear()
        with proposing(policy, evaluator, archive, settings) as proposer:
            again = proposer._ask(proposer._questions(1))
    assert [exchange.key for exchange in again] == [exchange.key for exchange in asked] and len(server.requests) == 1


def test_the_command_line_asks_for_a_task_and_lists_what_was_said(tmp_path, capsys) -> None:
    """One that no family serves: the model's kernel is all there is."""
    path = tmp_path / "archive.db"
    with serving([Say(block(SCAN))]) as server:
        policy = f"openai:stub@{server.address}"
        done = optimize(policy, path, "--trials", "1", "--budget", "1h", "--protocol", "offline", task=CUMSUM)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["correct"] == 1 and len(server.requests) == 1
    list_exchanges(CUMSUM, archive=path, json=True)
    (exchange,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert exchange["task"] == CUMSUM and "void scan" in exchange["reply"]["text"]
    list_exchanges(CUMSUM, archive=path)
    assert "measured" in capsys.readouterr().out
