"""Collecting: who is asked how often, what is kept, resumed after a kill, several models, rounds, errors."""

import json
import subprocess
import threading
from pathlib import Path

import pytest
from conftest import CHEATS, KEY, honest_source
from llm_server import Say, serving
from waiting import CLI, kill_when

from cuda_l2.archive import Archive
from cuda_l2.commands import collect as command
from cuda_l2.commands.collect import CollectSettings
from cuda_l2.corpus import dataset
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.evaluator import Evaluator
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._function import FunctionProposer
from cuda_l2.records import Candidate, Gemm
from cuda_l2.runs.collect import PART, TRIES, Collection, Collector
from cuda_l2.settings import Limits
from cuda_l2.system.errors import UserError

GEMM = Gemm.parse("32x24x40")
TASK_CHEATS = Path(__file__).with_name("task_cheats")
ONE = ModelSettings(concurrency=1, retries=0, repairs=0, reference_tokens=0)


def block(source: str) -> str:
    return f"### Code\n```c\n{source}```\n"


def variant(number: int) -> str:
    """The honest kernel under another name of a variable: other content, the same result."""
    source = honest_source()
    return source + f"static const int unused_{number} __attribute__((unused)) = {number};\n"


def run(*policies: str, out: Path, model: ModelSettings = ONE, shapes=(str(GEMM),), **settings) -> None:
    command.command(
        list(shapes),
        settings=CollectSettings(
            policy=list(policies), out=out, target="cpu", archive=out.parent / "archive.db", model=model, **settings
        ),
    )


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / TRIES).read_text().splitlines()][1:]


def making(answers, name="mine"):
    """A maker for a function that answers from a list, and the counts it was asked for."""
    asked = []
    left = list(answers)

    def write(count):
        asked.append(count)
        return [left.pop(0) for _ in range(min(count, len(left)))]

    return (lambda evaluator, history: FunctionProposer(name, "Write it.", write)), asked


def test_enough_is_kept_with_how_it_was_asked_and_timed(tmp_path, capsys) -> None:
    """One endpoint: no code, a broken kernel, a right one twice, another right one; then nothing more is asked."""
    broken = (CHEATS / "broken.c").read_text()
    says = [Say("No."), Say(block(broken)), Say(block(variant(1))), Say(block("// again\n" + variant(1)))]
    says += [Say(block(variant(2))), Say(block(variant(3)))]
    with serving(says) as server:
        run(f"openai:stub@{server.address}", out=tmp_path / "data")
        assert len(server.requests) == 5
        run(f"openai:stub@{server.address}", out=tmp_path / "data")
        assert len(server.requests) == 5
    tries = lines(tmp_path / "data")
    assert [line["status"] for line in tries] == ["no-code", "failed", "measured", "measured", "measured"]
    assert [line["kept"] for line in tries] == [False, False, True, False, True]
    rows = dataset.read(tmp_path / "data", PART)
    assert [row["code"] for row in rows] == [variant(1), variant(2)]
    for row in rows:
        assert row["sha"] == Candidate(row["code"]).id and row["verdict"] == "correct" and row["speedup"] > 0
        assert row["latency_us"] > 0 and row["reward"] >= 0 and row["passed"] and row["source"] == "openai:stub"
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert row["messages"][1]["content"] == row["context"] and "launch contract" in row["context"]
        assert row["code"].strip() in row["messages"][2]["content"] and "M = 32, N = 24" in row["instruction"]
        assert "Score " not in row["context"]  # no exemplars
    text = (tmp_path / "data" / TRIES).read_text() + capsys.readouterr().out
    assert KEY not in text and str(tmp_path) not in json.dumps(rows)


def test_a_failing_kernel_that_was_mended_is_kept_with_its_turns(tmp_path) -> None:
    right = variant(4)
    says = [Say(block(right.replace("#include", "#error wrong\n#include", 1))), Say(block(right))]
    with serving(says) as server:
        model = ModelSettings(concurrency=1, retries=0, repairs=1, reference_tokens=0)
        run(f"openai:stub@{server.address}", out=tmp_path / "data", model=model, keep=1)
    (row,) = dataset.read(tmp_path / "data", PART)
    assert (row["turn"], row["try"], len(row["messages"])) == (1, 2, 5)
    assert "#error" in row["messages"][2]["content"] and "M = 32" in row["context"]


def test_tries_end_exactly_and_rounds_begin_anew(tmp_path) -> None:
    with serving([Say("I would rather not.")]) as server:
        model = ModelSettings(concurrency=4, retries=0, repairs=0, reference_tokens=0)
        policy = f"openai:stub@{server.address}"
        run(policy, out=tmp_path / "data", model=model, tries=6)
        assert len(server.requests) == 6 == len(lines(tmp_path / "data"))
        run(policy, out=tmp_path / "data", model=model, tries=9)  # more tries: new answers, none read again
        assert len(server.requests) == 9 == len(lines(tmp_path / "data"))
        run(policy, out=tmp_path / "data", model=model, tries=2, round=1)
        assert len(server.requests) == 11
    assert [line["round"] for line in lines(tmp_path / "data")] == [0] * 9 + [1] * 2
    assert not (tmp_path / "data" / "README.md").exists()  # nothing was kept


def test_several_models_count_apart_and_a_dead_one_does_not_stop_the_others(tmp_path, capsys) -> None:
    with serving([Say(block(variant(5)))]) as good, serving([Say("bad key", 401)]) as bad:
        run(f"openai:good@{good.address}", f"openai:bad@{bad.address}", "random", out=tmp_path / "data", tries=3)
        assert len(good.requests) == 3 and len(bad.requests) == 1
        with pytest.raises(UserError, match="two models are named openai:good"):
            run(f"openai:good@{good.address}", f"openai:good@{bad.address}", out=tmp_path / "data")
        with pytest.raises(UserError, match="key"):
            run(f"openai:bad@{bad.address}", out=tmp_path / "data")
    by_model = {
        model: [line for line in lines(tmp_path / "data") if line["model"] == model]
        for model in ("openai:good", "random")
    }
    assert [line["kept"] for line in by_model["openai:good"]] == [True, False, False]  # the same thrice
    assert sum(line["kept"] for line in by_model["random"]) == 2
    rendered = [row for row in dataset.read(tmp_path / "data", PART) if row["source"] == "random"]
    assert all("MR=" in row["schedule"] and row["messages"][1]["role"] == "assistant" for row in rendered)
    assert "openai:bad: " in capsys.readouterr().err


def test_a_function_collects_through_the_same_path(rig, archive, tmp_path) -> None:
    """As a model in training does."""
    maker, asked = making([block(variant(6)), "nothing", variant(7)])
    with Collection(tmp_path / "data") as collection:
        (pair,) = Collector(rig, archive, collection, Limits(tries=5, keep=2)).collect([GEMM], {"mine": maker})
        assert (pair.tries, pair.kept, pair.statuses) == (3, 2, {"no-code": 1, "measured": 2})
        assert asked == [5] and collection.export() == 2
        with pytest.raises(UserError, match="another run"):
            Collection(tmp_path / "data")
    rows = dataset.read(tmp_path / "data", PART)
    assert rows[0]["messages"] == [
        {"role": "user", "content": "Write it."},
        {"role": "assistant", "content": block(variant(6))},
    ]
    assert len(archive.trials(GEMM)) == 2


def test_kernels_for_other_tasks_are_collected_and_held_out_tasks_are_not(tmp_path, capsys) -> None:
    softmax = (TASK_CHEATS / "honest_softmax.c").read_text()
    shapes = ("softmax:rows=8,columns=64", "gelu:rows=4,columns=32", "softmax:rows=4,columns=8")
    (tmp_path / "held.txt").write_text("gelu\nsoftmax:rows=4,columns=8\n")
    with serving([Say(block(softmax))]) as server:
        held = tmp_path / "held.txt"
        run(f"openai:stub@{server.address}", out=tmp_path / "data", shapes=shapes, keep=1, hold_out=held)
        assert len(server.requests) == 1
        (tmp_path / "held.txt").write_text("softmax\ngelu")
        with pytest.raises(UserError, match="every task is held out"):
            run("random", out=tmp_path / "data", shapes=shapes, hold_out=tmp_path / "held.txt")
    (row,) = dataset.read(tmp_path / "data", PART)
    assert (row["task"], row["code"], row["verdict"]) == (shapes[0], softmax, "correct") and row["speedup"] > 0
    assert "return torch.softmax(x, -1)" in row["instruction"] and "[[buffer]]" in row["context"]
    assert f"held out: {shapes[1]}, {shapes[2]}" in capsys.readouterr().err


def test_what_is_held_out_or_too_slow_is_not_kept(rig, archive, tmp_path) -> None:
    held = HoldOut(ids=frozenset({Candidate(variant(8)).id}), shapes=frozenset({(16, 16, 16)}))
    maker, _ = making([block(variant(8)), block(variant(9))])
    gemms = [GEMM, Gemm.parse("16x16x16:tn")]
    with Collection(tmp_path / "data") as collection:
        pairs = Collector(rig, archive, collection, Limits(tries=2), held).collect(gemms, {"mine": maker})
        assert [pair.task for pair in pairs] == [GEMM]
        assert [row["code"] for row in collection.rows()] == [variant(9)]
        maker, _ = making([block(variant(10))])
        fast = Limits(tries=2, round=1, least_speedup=1e6)
        (pair,) = Collector(rig, archive, collection, fast).collect([GEMM], {"mine": maker})
        assert (pair.tries, pair.kept) == (1, 0)


@pytest.mark.full
def test_a_killed_run_goes_on_and_pays_for_nothing_twice(tmp_path) -> None:
    out, archive = tmp_path / "data", tmp_path / "archive.db"
    broken = (CHEATS / "broken.c").read_text()

    killed = threading.Event()

    def script(request, number):
        wait = killed.wait if number == 8 and not killed.is_set() else lambda: None
        return Say(block(broken.replace("\n", f"\n/* {number} */\n", 2)), wait=wait)

    arguments = ["--out", str(out), "--archive", str(archive), "--target", "cpu"]
    arguments += ["--concurrency", "2", "--retries", "0"]
    arguments += ["--repairs", "0", "--reference-tokens", "0", "--tries", "12"]
    with serving(script) as server:
        policy = f"openai:stub@{server.address}"
        base = [*CLI, "collect", str(GEMM), "--policy", policy, *arguments]
        kill_when(lambda: (out / TRIES).exists() and len(lines(out)) >= 3, base)
        killed.set()
        before = lines(out)
        assert 3 <= len(before) < 12
        done = subprocess.run(base, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        after = lines(out)
        assert after[: len(before)] == before and len(after) == 12
        assert len({line["candidate"] for line in after}) == 12  # none judged twice
        assert len(server.requests) <= 12 + 2  # at most a round was in flight
    assert "0 kernels" in done.stdout


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tries": 0}, "at least 1"),
        ({"keep": 0}, "at least 1"),
        ({"round": -1}, "negative"),
        ({"budget_s": -1.0}, "budget"),
        ({"policy": ["nobody"]}, "no policy"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path, settings, says) -> None:
    policies = settings.pop("policy", ["random"])
    with pytest.raises(UserError, match=says):
        run(*policies, out=tmp_path / "data", **settings)


def test_a_folder_of_something_else_is_left_alone(tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / TRIES).write_text('{"format": "something else"}\n')
    with pytest.raises(UserError, match="no collection of this version"):
        Collection(other)
    assert (other / TRIES).read_text() == '{"format": "something else"}\n'


def test_history_is_of_the_pair_alone(rig, archive, tmp_path) -> None:
    with Evaluator(GEMM, rig) as evaluator:
        (foreign,) = evaluator.evaluate([Candidate(variant(11), "another")])
        archive.append(foreign)
    seen = []

    def make(evaluator, history):
        proposer = making([block(variant(12)), block(variant(13))])[0](evaluator, history)
        write = proposer._write

        def asking(count):
            seen.append([trial.candidate.source for trial in history()])
            return write(1)

        proposer._write = asking
        return proposer

    with Collection(tmp_path / "data") as collection, Archive(archive.path) as again:
        Collector(rig, again, collection, Limits(tries=2, keep=2)).collect([GEMM], {"mine": make})
    assert seen == [[], [variant(12)]]
