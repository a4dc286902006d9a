"""Stages that judge what the model writes: self-supervised rounds and contrastive RL, on the CPU with a tiny model."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pool_servants import FOLDER

from cuda_l2.archive import Archive
from cuda_l2.commands import train as command
from cuda_l2.commands.train import TrainSettings
from cuda_l2.corpus import dataset
from cuda_l2.corpus.holdout import HoldOut
from cuda_l2.learn import models, selftaught
from cuda_l2.learn.rl import Judge
from cuda_l2.learn.settings import Sampling
from cuda_l2.learn.writer import Questions, Writer
from cuda_l2.propose._prompt import Templates
from cuda_l2.records import Candidate, Gemm
from cuda_l2.reward import RewardSettings
from cuda_l2.rigs.cpu import CpuRig
from cuda_l2.runs import pool, workers
from cuda_l2.runs.judging import JudgePool
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import describe

GEMM = Gemm.parse("32x24x40")
KERNEL = """\
/* cuda-l2
target = "cpu"
*/
#include <stdint.h>

void gemm(int64_t m, int64_t n, int64_t k, const _Float16 *a, const _Float16 *b, _Float16 *c) {
    for (int64_t i = 0; i < m; i += STEP)
        for (int64_t j = 0; j < n; ++j) {
            float sum = 0;
            for (int64_t p = 0; p < k; ++p) sum += (float)a[i * k + p] * (float)b[p * n + j];
            c[i * n + j] = (_Float16)sum;
        }
}
"""


def answer(code: str) -> str:
    return f"```c\n{code}```\n"


def turns(question: str, code: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer(code)}]


QUESTION = f"Write a kernel.\n\n{describe(GEMM)}"
RIGHT, WRONG = KERNEL.replace("STEP", "1"), KERNEL.replace("STEP", "2")
SMALL = """
[tuning]
steps = 130
batch = 8
micro_batch = 8
learning_rate = 5e-3
sequence_tokens = 256
activation_checkpointing = false
save_every = 4
[scratch]
layers = 2
width = 64
heads = 2
vocabulary = 600
"""
TASKS = """
[tuning]
batch = 16
micro_batch = 16
learning_rate = 4e-4
warmup = 0.0
weight_decay = 0.0
activation_checkpointing = false
save_every = 2
[sampling]
prompt_tokens = 400
answer_tokens = 100
at_once = 16
"""


def taught(folder: Path, question: str, codes: Sequence[str], small: str = SMALL, tasks: str = TASKS) -> Path:
    """The folder, with a model that writes these kernels about equally often, and what its stages are told."""
    folder.mkdir(exist_ok=True)
    (folder / "small.toml").write_text(small)
    (folder / "tasks.toml").write_text(tasks)
    (folder / "prompts").mkdir()
    (folder / "prompts" / "system.md").write_text("Write a kernel.")
    (folder / "prompts" / "ask.md").write_text("{task}\n\n## Exemplars\n\n{exemplars}\n")
    rows = [{"messages": turns(question, code)} for code in codes]
    dataset.write(folder / "collected", {"sft": rows * 4}, "test")
    asked = TrainSettings("scratch", [folder / "collected"], folder / "tuned", folder / "small.toml")
    command.command(stage="sft", settings=asked)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return taught(tmp_path_factory.mktemp("stages"), QUESTION, (RIGHT, WRONG))


def run(stage: str, folder: Path, out: Path, *changes: str, shapes=(str(GEMM),), **settings) -> None:
    usual = {"model": str(folder / "tuned" / "model"), "archive": out.parent / "archive.db", "target": "cpu"}
    usual["prompts"] = folder / "prompts"
    asked = TrainSettings(**usual | settings, out=out, config=folder / "tasks.toml", set=list(changes))
    command.command(list(shapes), stage=stage, settings=asked)


def groups(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if "candidates" in line]


def margin(folder: Path) -> float:
    """How much likelier a model writes the right kernel than the wrong one, in nats."""
    pupil = models.load(str(folder), "float32")
    values = []
    for code in (RIGHT, WRONG):
        asked = turns(QUESTION, code)
        ids = torch.tensor([pupil.tokenizer.apply_chat_template(asked, return_dict=True)["input_ids"]])
        with torch.no_grad():
            values.append(-pupil.model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1))
    return values[0] - values[1]


@pytest.mark.full
def test_rewards_move_the_model_towards_right_kernels(folder, tmp_path, monkeypatch) -> None:
    """Its answers are given, half of them right, so that chance decides nothing."""

    def write(self, prompts):
        ids = [self.tokenizer(answer(code))["input_ids"] + [self.tokenizer.eos_token_id] for code in (RIGHT, WRONG)]
        return [ids[i % 2] for i in range(len(prompts))]

    monkeypatch.setattr(Writer, "write", write)
    run("hgemm-rl", folder, tmp_path / "rl", "tuning.steps=4", "sampling.exemplars=0")
    found = groups(tmp_path / "rl")
    assert len(found) == 8 and {group["task"] for group in found} == {str(GEMM)}
    for group in found:
        assert group["statuses"] == ["measured", "incorrect"] * 4
        assert group["rewards"][0] >= 0 > group["rewards"][1] == -0.5  # before smoothing
    assert margin(tmp_path / "rl" / "model") > margin(folder / "tuned" / "model") + 0.3
    with Archive(tmp_path / "archive.db") as archive:
        assert sorted(trial.status for trial in archive.trials(GEMM)) == ["incorrect", "measured"]


@pytest.mark.full
def test_a_step_without_a_correct_answer_after_better_ones_is_said_with_what_to_do(
    folder, tmp_path, monkeypatch, capsys
) -> None:
    written = iter([(RIGHT, WRONG), (WRONG, WRONG)])

    def write(self, prompts):
        codes = next(written)
        ids = [self.tokenizer(answer(code))["input_ids"] + [self.tokenizer.eos_token_id] for code in codes]
        return [ids[i % 2] for i in range(len(prompts))]

    monkeypatch.setattr(Writer, "write", write)
    run("hgemm-rl", folder, tmp_path / "rl", "tuning.steps=2", "sampling.exemplars=0")
    said = capsys.readouterr().err
    assert re.search(r"8 of 16 answers correct; written in [\d.]+ s, then judged in [\d.]+: [\d.]+ a second\n", said)
    assert said.index("8 of 16 answers correct") < said.index("0 of 16 answers correct")
    assert "up to 8 were correct before" in said and "lower tuning.learning_rate" in said


@pytest.mark.full
def test_a_stopped_run_goes_on_from_its_checkpoint_and_judges_nothing_twice(
    folder, tmp_path, monkeypatch, capsys
) -> None:
    judge, calls = Judge.judge, []

    def stopping(self, gemm, answers):
        calls.append(gemm)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return judge(self, gemm, answers)

    monkeypatch.setattr(Judge, "judge", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("hgemm-rl", folder, tmp_path / "rl", "tuning.steps=4")
    assert not (tmp_path / "rl" / "model").exists() and len(groups(tmp_path / "rl")) == 5
    run("hgemm-rl", folder, tmp_path / "rl", "tuning.steps=4")
    assert "goes on from checkpoint-2" in capsys.readouterr().err
    assert len(calls) == 6 + 4 and (tmp_path / "rl" / "model").is_dir()
    with Archive(tmp_path / "archive.db") as archive:
        ids = [trial.candidate.id for trial in archive.trials(GEMM)]
    assert len(ids) == len(set(ids))


@pytest.mark.full
@pytest.mark.parametrize("asked", [{"workers": "2"}, {"judges": 2}], ids=["of two GPUs", "on one GPU"])
def test_rewards_by_two_processes_make_the_model_that_one_makes_though_one_is_killed(
    asked, folder, tmp_path, monkeypatch, capsys
) -> None:
    """Answers are given, a third of them wrong; their inputs' differences, which vary, do not count."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    monkeypatch.setenv("POOL_DIES", str(tmp_path / "dies"))
    monkeypatch.setattr(pool, "MAIN", "scripted_pool")
    monkeypatch.setattr(workers, "gpus", lambda asked, *_: ["0", "1"][: int(asked)])
    monkeypatch.setattr(CpuRig, "together", lambda rig, task, wanted: wanted)
    counts, made = list[int](), JudgePool.__init__
    monkeypatch.setattr(JudgePool, "__init__", lambda pool, *given: made(pool, *given) or counts.append(pool.count))
    events, begin = list[str](), JudgePool.begin
    monkeypatch.setattr(JudgePool, "begin", lambda *given: events.append("begun") or begin(*given))

    def write(self, prompts):
        events.append("written")
        number = events.count("written")
        codes = [f"{WRONG if i % 3 == 1 else RIGHT}/* {number} {i % 3} */\n" for i in range(len(prompts))]
        return [self.tokenizer(answer(code))["input_ids"] + [self.tokenizer.eos_token_id] for code in codes]

    monkeypatch.setattr(Writer, "write", write)
    changes = "tuning.steps=2", "sampling.exemplars=0", "sampling.at_once=8", "rl.alpha=0.0"
    run("hgemm-rl", folder, tmp_path / "one" / "rl", *changes)
    events.clear()
    (tmp_path / "dies").touch()
    run("hgemm-rl", folder, tmp_path / "two" / "rl", *changes, **asked)
    assert counts == [2]
    assert events == ["written", *["begun"] * 3] * 4
    assert not (tmp_path / "dies").exists() and capsys.readouterr().err.count("given out again") == 1
    assert groups(tmp_path / "two" / "rl") == groups(tmp_path / "one" / "rl")
    one, two = ((tmp_path / name / "rl" / "model" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    with Archive(tmp_path / "two" / "archive.db") as archive:
        ids = [trial.candidate.id for trial in archive.trials(GEMM)]
    assert len(ids) == len(set(ids)) == 12


def test_workers_and_judges_go_with_measured_rewards_alone(folder, tmp_path) -> None:
    with pytest.raises(UserError, match="--workers goes with measured rewards"):
        run("self-supervised", folder, tmp_path / "own", workers="2")
    with pytest.raises(UserError, match="on a CPU each verification and timing has the whole machine"):
        run("hgemm-rl", folder, tmp_path / "rl", workers="2")
    with pytest.raises(UserError, match="--judges goes with measured rewards"):
        run("self-supervised", folder, tmp_path / "own", judges=2)
    with pytest.raises(UserError, match="on a CPU each verification and timing has the whole machine"):
        run("hgemm-rl", folder, tmp_path / "rl", judges=2)
    with pytest.raises(UserError, match="at least 1, not 0"):
        run("hgemm-rl", folder, tmp_path / "rl", judges=0)
    with pytest.raises(UserError, match="leave it out with --workers ray"):
        run("hgemm-rl", folder, tmp_path / "rl", judges=2, workers="ray")
    with pytest.raises(UserError, match="--gpus goes neither with --workers, --judges"):
        run("hgemm-rl", folder, tmp_path / "rl", judges=2, gpus="2")
    assert not (tmp_path / "rl").exists()


def test_rewards_are_ordered_smoothed_and_clipped(rig, archive) -> None:
    answers = [answer(RIGHT), answer(WRONG), answer(RIGHT + "oops"), "I would rather not."]
    with Judge(rig, archive, RewardSettings(), "hgemm-rl") as judge:
        first, trials = judge.judge(GEMM, answers)
        assert [trial and trial.status for trial in trials] == ["measured", "incorrect", "failed", None]
        assert first[0] > first[1] > first[2] == first[3] and max(map(abs, first)) <= 1.5
        again, _ = judge.judge(GEMM, answers)  # now by a history of three
        assert again[0] > again[1] > again[2] and again != first
        assert len(judge.history(GEMM)) == 3 == len(archive.trials(GEMM))
        measured = judge.history(GEMM)[0]
        dear = Judge(rig, archive, RewardSettings(beta=1e-3), "hgemm-rl")
        assert dear.reward(measured) < judge.reward(measured)  # the run's own coefficients, not the archive's


def test_questions_show_what_was_just_found_and_nothing_held_out(rig, archive, folder) -> None:
    sampling = Sampling(temperature=1.0, prompt_tokens=4000, answer_tokens=100, exemplars=2, at_once=4)
    templates, rng = Templates(folder / "prompts"), np.random.default_rng(0)
    questions = Questions(rig.target, templates, sampling, HoldOut(), rng)

    def tokens(text, **_):
        return {"input_ids": text.split()}

    with Judge(rig, archive, RewardSettings(), "hgemm-rl") as judge:
        assert questions.ask(GEMM, judge.history(GEMM), tokens) == QUESTION
        judge.judge(GEMM, [answer(RIGHT), answer(WRONG)])
        shown = questions.ask(GEMM, judge.history(GEMM), tokens)
        assert RIGHT in shown and "Score " in shown and WRONG not in shown
        held = replace(questions, hold_out=HoldOut(ids=frozenset({Candidate(RIGHT).id})))
        assert held.ask(GEMM, judge.history(GEMM), tokens) == QUESTION
        slower = RIGHT.replace("float sum", "volatile float sum")
        judge.judge(GEMM, [answer(slower)])
        both = questions.ask(GEMM, judge.history(GEMM), tokens)
        assert RIGHT in both and slower in both
        few = replace(questions, sampling=replace(sampling, exemplar_lines=3)).ask(GEMM, judge.history(GEMM), tokens)
        assert "\n".join(RIGHT.splitlines()[:3]) in few and RIGHT.splitlines()[3] not in few


def test_the_model_learns_its_own_right_kernels_and_goes_on_where_it_was(folder, tmp_path, monkeypatch, capsys) -> None:
    changes = ["collecting.tries=16", "collecting.keep=1", "tuning.steps=4", "sampling.at_once=4"]
    fit, stopped = selftaught.fine_tune, []

    def stopping(*arguments):
        if not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        fit(*arguments)

    monkeypatch.setattr(selftaught, "fine_tune", stopping)
    with pytest.raises(KeyboardInterrupt):
        run("self-supervised", folder, tmp_path / "own", *changes)
    tries = (tmp_path / "own" / "round-1" / "collected" / "tries.jsonl").read_text()
    run("self-supervised", folder, tmp_path / "own", *changes)
    assert (tmp_path / "own" / "round-1" / "collected" / "tries.jsonl").read_text() == tries
    rows = [row for i in (1, 2) for row in dataset.read(tmp_path / "own" / f"round-{i}" / "collected", "sft")]
    assert [(row["code"], row["round"]) for row in rows] == [(RIGHT, 1), (RIGHT, 2)]
    assert rows[0]["messages"][0]["content"] == QUESTION
    assert "round 2: 1 kernel of its own" in capsys.readouterr().err
    assert margin(tmp_path / "own" / "model") > margin(folder / "tuned" / "model") + 0.3
    with pytest.raises(UserError, match=r"collecting.keep = 1, not 2"):
        run("self-supervised", folder, tmp_path / "own", *changes, "collecting.keep=2")


def test_a_round_without_a_kernel_is_an_error_that_says_what_to_do(folder, tmp_path) -> None:
    (tmp_path / "held.txt").write_text(Candidate(RIGHT).id)
    with pytest.raises(UserError, match=r"round 1 kept no kernel.*--stage sft"):
        run("self-supervised", folder, tmp_path / "own", "collecting.tries=4", hold_out=tmp_path / "held.txt")


@pytest.mark.parametrize(
    ("stage", "shapes", "changes", "says"),
    [
        ("hgemm-rl", (), [], "shapes are missing"),
        ("hgemm-rl", ("64x64x64",), ["rl.group=3"], "multiple of rl.group"),
        ("hgemm-rl", ("64x64x64",), ["rl.group=1"], "at least 2"),
        ("hgemm-rl", ("64x64x64",), ["rl.incorrect=-2"], "unbuildable must be below rl.incorrect"),
        ("hgemm-rl", ("64x64x64",), ["tuning.steps=0"], "above 0"),
        ("hgemm-rl", ("64x64",), [], "64x64"),
        ("self-supervised", ("16x16x16",), [], "every task is held out"),
        ("hgemm-rl", ("softmax",), [], "take general-rl for other tasks"),
        ("general-rl", ("softmux",), [], "no task 'softmux'"),
    ],
)
def test_bad_requests_are_one_clear_line(folder, tmp_path, stage, shapes, changes, says) -> None:
    (tmp_path / "held.txt").write_text("16x16x16")
    with pytest.raises(UserError, match=says):
        run(stage, folder, tmp_path / "out", *changes, shapes=shapes, hold_out=tmp_path / "held.txt")


def test_without_a_sandbox_the_user_must_say_so(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "kind", lambda: sandbox.Kind.LIMITS)
    with pytest.raises(UserError, match="without-sandbox"):
        run("hgemm-rl", folder, tmp_path / "out")
