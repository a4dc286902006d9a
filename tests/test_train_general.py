"""The stage general-rl: GRPO on tasks other than matrix products, on the CPU with a tiny model; killed, resumed."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import test_train_tasks as stages
from test_train_tasks import SMALL, TASKS, answer, groups, taught
from waiting import CLI, kill_when

from cuda_l2 import tasks
from cuda_l2.archive import Archive
from cuda_l2.learn import rl
from cuda_l2.learn.rl import Judge
from cuda_l2.learn.settings import read
from cuda_l2.learn.writer import Writer
from cuda_l2.records import Gemm, TimingStatus
from cuda_l2.reward import RewardSettings
from cuda_l2.rigs.cpu import CpuRig
from cuda_l2.runs import judging
from cuda_l2.system import sandbox
from cuda_l2.system.errors import UserError
from cuda_l2.tasks import describe
from cuda_l2.tasks._base import definitions

RELU, SQUARE = "relu:rows=4,columns=8", "relu_squared:rows=4,columns=8"
CONTRACT = """\
/* cuda-l2
target = "cpu"
entry = "f"
[[buffer]]
name = "x"
shape = ["rows", "columns"]
[[buffer]]
name = "out"
shape = ["rows", "columns"]
kind = "output"
*/
void f(const long *sizes, float **buffers) {
    for (long i = 0; i < sizes[0] * sizes[1]; i += STEP) {
        float x = buffers[0][i] < 0 ? 0 : buffers[0][i];
        buffers[1][i] = VALUE;
    }
}
"""
RIGHT = CONTRACT.replace("STEP", "1").replace("VALUE", "x")
WRONG = CONTRACT.replace("STEP", "2").replace("VALUE", "x")
RIGHT_SQUARE = CONTRACT.replace("STEP", "1").replace("VALUE", "x * x")


def made(folder: Path, steps: int = 1) -> Path:
    """A folder with a model that has had this many steps; after one it writes no kernel."""
    small = SMALL.replace("_tokens = 256", "_tokens = 640").replace("steps = 130", f"steps = {steps}")
    stage = TASKS.replace("answer_tokens = 100", "answer_tokens = 160")
    question = f"Write a kernel.\n\n{describe(tasks.parse(RELU))}"
    return taught(folder, question, (RIGHT, WRONG), small, stage)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return made(tmp_path_factory.mktemp("general"))


def run(folder: Path, out: Path, *changes: str, on=(RELU, SQUARE), **settings) -> None:
    stages.run("general-rl", folder, out, "sampling.prompt_tokens=2000", *changes, shapes=on, **settings)


@pytest.mark.full
def test_a_step_on_two_tasks_rewards_what_is_right_for_each(folder, tmp_path, monkeypatch) -> None:
    """Answers are given: half of them right for one task and half for the other."""
    questions: list[str] = []

    def write(self, prompts):
        questions.extend(self.tokenizer.decode(ids) for ids in prompts[::8])
        ids = [self.tokenizer(answer(code))["input_ids"] for code in (RIGHT, RIGHT_SQUARE)]
        return [[*ids[i % 2], self.tokenizer.eos_token_id] for i in range(len(prompts))]

    monkeypatch.setattr(Writer, "write", write)
    run(folder, tmp_path / "rl", "tuning.steps=2", "rl.incorrect=-0.25")
    found = groups(tmp_path / "rl")
    assert len(found) == 4 and {group["task"] for group in found} == {RELU, SQUARE}
    for group in found:
        right = ["measured", "incorrect"] * 4
        assert group["statuses"] == (right if group["task"] == RELU else right[::-1])
        rewards = dict(zip(group["statuses"], group["rewards"], strict=True))
        assert rewards["measured"] >= 0 > rewards["incorrect"] == -0.25  # before smoothing
    assert any("return F.relu(x)" in text for text in questions)
    assert any("Score " in text for text in questions[2:])  # what was found a step ago is an exemplar now
    with Archive(tmp_path / "archive.db") as archive:
        assert len(archive.trials(tasks.parse(RELU))) == len(archive.trials(tasks.parse(SQUARE))) == 2
        assert {trial.candidate.proposer for trial in archive.trials()} == {"general-rl"}


@pytest.mark.full
def test_a_killed_run_goes_on_from_its_checkpoint_and_judges_nothing_twice(tmp_path) -> None:
    folder = made(tmp_path / "taught", 130)
    out = tmp_path / "rl"
    options = {"--model": folder / "tuned" / "model", "--out": out, "--target": "cpu"}
    options |= {"--config": folder / "tasks.toml"}
    options |= {"--archive": tmp_path / "archive.db", "--prompts": folder / "prompts"}
    arguments = ["train", RELU, "--stage", "general-rl", *(str(word) for pair in options.items() for word in pair)]
    for change in ("tuning.steps=4", "tuning.save_every=1", "sampling.prompt_tokens=2000"):
        arguments += ["--set", change]
    kill_when((out / "checkpoints" / "checkpoint-1" / "trainer_state.json").exists, [*CLI, *arguments])
    before = groups(out)
    assert before and not (out / "model").exists()
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and "goes on from checkpoint-" in done.stderr, done.stderr
    assert (out / "model").is_dir() and groups(out)[: len(before)] == before
    assert "measured" in {status for group in groups(out) for status in group["statuses"]}  # it writes right ones
    with Archive(tmp_path / "archive.db") as archive:
        ids = [trial.candidate.id for trial in archive.trials() if trial.status != TimingStatus.TIMED_OUT]
    assert len(ids) == len(set(ids))


@pytest.mark.full
def test_other_prompts_or_another_hold_out_are_noticed_on_going_on(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(rl.GRPOTrainer, "train", lambda self, **_: (_ for _ in ()).throw(KeyboardInterrupt))
    held = tmp_path / "held.txt"
    held.write_text("gelu  # a remark\nadd\n")
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "rl", "tuning.steps=2", hold_out=held)
    held.write_text("add\ngelu\n")  # the same
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "rl", "tuning.steps=2", hold_out=held)
    with pytest.raises(UserError, match=r"began with other contents of --hold-out; choose another folder"):
        run(folder, tmp_path / "rl", "tuning.steps=2")
    mine = tmp_path / "prompts"
    mine.mkdir()
    for name in ("system.md", "ask.md"):
        (mine / name).write_text((folder / "prompts" / name).read_text())
    (mine / "check.md").write_text("of no account here: {code}")
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "rl", "tuning.steps=2", hold_out=held, prompts=mine)
    (mine / "ask.md").write_text("{task}")
    with pytest.raises(UserError, match=r"began with other contents of --prompts; choose another folder"):
        run(folder, tmp_path / "rl", "tuning.steps=2", hold_out=held, prompts=mine)


def test_without_tasks_named_it_takes_all_of_our_own_but_those_held_out(folder, tmp_path, monkeypatch) -> None:
    taken = []
    monkeypatch.setattr(rl, "contrastive_rl", lambda model, wanted, *_: taken.extend(wanted))
    held = tmp_path / "held.txt"
    held.write_text("softmax\n")
    run(folder, tmp_path / "rl", on=(), hold_out=held)
    assert [task.name for task in taken] == [name for name in definitions() if name != "softmax"]
    assert all(dict(task.sizes) == definitions()[task.name].cpu for task in taken)
    monkeypatch.setattr(CpuRig, "require_feasible", _too_large)
    taken.clear()
    with pytest.raises(UserError, match="relu"):
        run(folder, tmp_path / "named", on=(RELU,))
    run(folder, tmp_path / "all", on=())
    assert "relu" not in [task.name for task in taken] and len(taken) == len(definitions()) - 1


def _too_large(self, task) -> None:
    if task.name == "relu":
        raise UserError("relu is too large")


def test_matrix_products_are_tasks_of_this_stage_too(folder, tmp_path, monkeypatch) -> None:
    taken = []
    monkeypatch.setattr(rl, "contrastive_rl", lambda model, wanted, *_: taken.extend(wanted))
    run(folder, tmp_path / "rl", on=("32x24x40", RELU))
    assert taken == [Gemm.parse("32x24x40"), tasks.parse(RELU)]


FILE = """\
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)

def get_inputs():
    return [torch.randn(4, 8)]

def get_init_inputs():
    return []
"""


@pytest.mark.skipif(sandbox.kind() is sandbox.Kind.LIMITS, reason="there is no sandbox on this machine")
@pytest.mark.full
def test_a_step_on_a_file_of_kernelbench_rewards_what_its_model_gives(folder, tmp_path, monkeypatch) -> None:
    questions: list[str] = []

    def write(self, prompts):
        questions.append(self.tokenizer.decode(prompts[0]))
        ids = [self.tokenizer(answer(code))["input_ids"] for code in (RIGHT, WRONG)]
        return [[*ids[i % 2], self.tokenizer.eos_token_id] for i in range(len(prompts))]

    monkeypatch.setattr(Writer, "write", write)
    (tmp_path / "level1").mkdir()
    (tmp_path / "level1" / "19_ReLU.py").write_text(FILE)
    on = ("kernelbench/level1/19",)
    run(folder, tmp_path / "rl", "tuning.steps=1", "sampling.prompt_tokens=4000", on=on, kernelbench=tmp_path)
    found = groups(tmp_path / "rl")
    assert found and {group["task"].partition("@")[0] for group in found} == {"kernelbench/level1/19_ReLU"}
    assert all(group["statuses"] == ["measured", "incorrect"] * 4 for group in found)
    assert "return torch.relu(x)" in questions[0]


def test_few_tasks_are_ready_at_once(rig, archive, monkeypatch) -> None:
    monkeypatch.setattr(judging, "OPEN", 1)
    with Judge(rig, archive, RewardSettings(), "general-rl") as judge:
        for text, code in ((RELU, RIGHT), (SQUARE, RIGHT_SQUARE), (RELU, RIGHT.replace("< 0", "<= 0"))):
            _, (trial,) = judge.judge(tasks.parse(text), [answer(code)])
            assert trial.status == "measured", trial.reason
            assert [task for task, _ in judge._evaluators._open] == [tasks.parse(text)]
        evaluator = judge._evaluators.of(tasks.parse(RELU), RewardSettings())
        assert evaluator.best_speedup >= judge.history(tasks.parse(RELU))[0].speedup
        assert len(judge.history(tasks.parse(RELU))) == 2


def test_a_jump_in_reward_is_reviewed_while_training(rig, archive, slow_and_fast) -> None:
    """By measuring again; no checker model is asked here."""
    with Judge(rig, archive, RewardSettings(), "general-rl") as judge:
        task = tasks.parse("relu:rows=64,columns=64")
        slow = RIGHT.replace("float x", "/* slow */ float x")
        slow_and_fast(slow, RIGHT)
        _, (first,) = judge.judge(task, [answer(slow)])
        _, (second,) = judge.judge(task, [answer(RIGHT)])
    assert second.speedup > 3 * first.speedup and second.review is not None and second.review.counts
    assert "jump" not in second.review.status and len(second.review.speedups) >= 2 and not second.review.checker


def test_its_settings_are_those_of_the_other_stage_of_rl_but_for_two() -> None:
    general, products = read("general-rl"), read("hgemm-rl")
    assert replace(general.rl, alpha=products.rl.alpha) == products.rl and general.rl.alpha == 0.0
    assert replace(general.tuning, steps=products.tuning.steps) == products.tuning
    assert (general.sampling, general.lora) == (products.sampling, products.lora)
