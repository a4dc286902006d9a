"""Several processes that train together: two on the CPU stand in for two GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import test_train_tasks as stages
import torch
import transformers
from safetensors.torch import load_file
from test_train import SMALL, logged
from waiting import CLI

from cuda_l2.commands import train as command
from cuda_l2.commands.train import TrainSettings
from cuda_l2.corpus import dataset
from cuda_l2.learn import ranks, tune
from cuda_l2.runs import workers
from cuda_l2.system.errors import UserError

LOGS = "run.jsonl", "run-rank-1.jsonl"


def launched(folder: Path, out: Path, program: Sequence[str] = CLI) -> "subprocess.CompletedProcess[str]":
    """Eight steps of the stage `pretrain` with --gpus 2, as from a shell."""
    words = ["train", "--stage", "pretrain", "--model", "scratch", "--data", folder / "corpus", "--out", out]
    return started([*words, "--config", folder / "small.toml", "--set", "tuning.steps=8", "--gpus", "2"], program)


def started(words: Sequence[object], program: Sequence[str] = CLI) -> "subprocess.CompletedProcess[str]":
    code = f"from cuda_l2.learn import ranks\nranks.launch(['0', '1'], {program!r})"
    return subprocess.run([sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    (made / "small.toml").write_text(SMALL)
    texts = [{"text": f"void f{i}(void) {{\n    int a = {i};\n    return;\n}}\n"} for i in range(600)]
    dataset.write(made / "corpus", {"text": texts}, "test")
    return made


def test_two_processes_make_the_model_that_one_makes(folder, tmp_path) -> None:
    asked = TrainSettings("scratch", [folder / "corpus"], tmp_path / "one", folder / "small.toml", ["tuning.steps=8"])
    command.command(stage="pretrain", settings=asked)
    done = launched(folder, tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 8 of 8") == 1 and done.stdout.count("the model is in") == 1
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)
    losses = [[line["loss"] for line in logged(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3) and len(losses[0]) == 8
    other = [json.loads(line) for line in (tmp_path / "two" / "run-rank-1.jsonl").read_text().splitlines()]
    assert sum("loss" in line for line in other) == 8


@pytest.mark.full
def test_where_one_process_is_killed_all_go_on_from_the_checkpoint_to_the_same_model(folder, tmp_path) -> None:
    program = (sys.executable, str(Path(__file__).with_name("rank_dies.py")))
    done = launched(folder, tmp_path / "killed", program)
    assert "the process on GPU 1 ended with status -9, and the others with it" in done.stderr
    assert not (tmp_path / "killed" / "model").exists()
    done = launched(folder, tmp_path / "killed", program)
    assert done.returncode == 0 and "goes on from checkpoint-5" in done.stderr, done.stderr
    launched(folder, tmp_path / "whole")
    killed, whole = ((tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("killed", "whole"))
    assert killed == whole


@pytest.mark.full
def test_each_process_judges_its_own_answers(tmp_path) -> None:
    folder, out = stages.taught(tmp_path / "taught", stages.QUESTION, (stages.RIGHT, stages.WRONG)), tmp_path / "rl"
    words = ["train", stages.GEMM, "--stage", "hgemm-rl", "--model", folder / "tuned" / "model", "--out", out]
    words += ["--target", "cpu", "--config", folder / "tasks.toml", "--prompts", folder / "prompts"]
    words += ["--archive", tmp_path / "archive.db", "--set", "tuning.steps=2", "--set", "sampling.exemplars=0"]
    done = started([*words, "--gpus", "2"])
    assert done.returncode == 0, done.stderr
    lines = [[json.loads(line) for line in (out / name).read_text().splitlines()] for name in LOGS]
    first, second = ([line["statuses"] for line in each if "statuses" in line] for each in lines)
    assert len(first) == len(second) == 2 and "measured" in {status for group in first + second for status in group}
    first, second = ([line["loss"] for line in each if "loss" in line] for each in lines)
    assert first == second and len(first) == 2  # of all answers


def test_where_one_process_fails_all_end(tmp_path, monkeypatch) -> None:
    begun = tmp_path / "begun"
    program = f"""
import os, pathlib, time
begun = pathlib.Path({str(begun)!r})
if os.environ["RANK"] == "1":
    while not begun.exists():
        time.sleep(0.01)
    raise SystemExit(3)
begun.with_name("partial").write_text(str(os.getpid()))
begun.with_name("partial").rename(begun)
time.sleep(1e6)
"""
    monkeypatch.setattr(sys, "argv", ["cuda-l2"])
    with pytest.raises(UserError, match="the process on GPU 5 ended with status 3, and the others with it"):
        ranks.launch(["4", "5"], (sys.executable, "-c", program))
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


def test_one_process_trains_on_one_gpu_though_it_sees_two(tmp_path) -> None:
    config = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    config._n_gpu = 2
    assert config.train_batch_size == 16
    assert tune.on_one_gpu(config).train_batch_size == 8


def test_ranks_that_a_clusters_shell_names_are_none_of_ours(monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (ranks.rank(), ranks.count()) == (0, 1)


def test_what_two_cannot_share_is_one_line(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "count", lambda: 3)
    asked = TrainSettings("scratch", [folder / "corpus"], tmp_path / "out", folder / "small.toml")
    with pytest.raises(UserError, match="3 GPUs cannot share"):
        command.command(stage="pretrain", settings=asked)


def test_gpus_that_train_take_no_workers(monkeypatch) -> None:
    monkeypatch.setattr(workers, "gpus", lambda *_, **named: ["0", "1"])
    for stage, asked in (("hgemm-rl", {"workers": "2"}), ("self-supervised", {})):
        with pytest.raises(
            UserError, match="--gpus goes neither with --workers, --judges nor with the stage self-supervised"
        ):
            command.command(["8x8x8"], stage=stage, settings=TrainSettings("x", out=Path("y"), gpus="2", **asked))
