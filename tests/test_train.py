"""Training stages: settings, data, models from scratch, what a killed run goes on with, errors."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import torch
from waiting import CLI, kill_when

from cuda_l2.commands import train as command
from cuda_l2.commands.train import TrainSettings
from cuda_l2.corpus import dataset
from cuda_l2.learn import models
from cuda_l2.learn import settings as stages
from cuda_l2.llm._base import Message, Outcome, Request
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system.errors import UserError

SMALL = """
[tuning]
steps = 40
batch = 4
micro_batch = 4
learning_rate = 1e-2
sequence_tokens = 48
activation_checkpointing = false
save_every = 5
[scratch]
layers = 1
width = 32
heads = 2
vocabulary = 300
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A folder with settings, a corpus and conversations, all tiny."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "small.toml").write_text(SMALL)
    texts = [{"text": f"void f{i}(void) {{\n    int a = {i};\n    return;\n}}\n"} for i in range(30)]
    dataset.write(folder / "corpus", {"text": texts}, "test")
    rows = [
        {"messages": [{"role": "user", "content": f"Write {i}."}, {"role": "assistant", "content": f"int a = {i};\n"}]}
        for i in range(10, 30)
    ]
    rows[3]["messages"][1]["content"] = "int a;\n" * 100  # too long
    dataset.write(folder / "collected", {"sft": rows}, "test")
    return folder


@pytest.fixture(scope="module")
def pretrained(small) -> Path:
    run("pretrain", small, "scratch", "corpus", small / "pretrained")
    return small / "pretrained" / "model"


def run(stage: str, small: Path, model: str | Path, data: str, out: Path, *changes: str) -> None:
    asked = TrainSettings(str(model), [small / data], out, small / "small.toml", list(changes))
    command.command(stage=stage, settings=asked)


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()][1:]


def test_a_model_from_scratch_learns_its_text_and_then_answers(small, pretrained, capsys) -> None:
    losses = [line["loss"] for line in logged(pretrained.parent) if "loss" in line]
    assert len(losses) == 40 and losses[-1] < 0.8 * losses[0]
    run("sft", small, pretrained, "collected", small / "tuned", "tuning.steps=120")
    said = capsys.readouterr()
    assert "19 conversations, 1 longer than 48 tokens left out" in said.err and "step 120 of 120" in said.err
    assert "hf:" in said.out
    from cuda_l2.llm.kinds.hf import LocalModel  # noqa: PLC0415 - loads transformers

    model = LocalModel(str(small / "tuned" / "model"), ModelSettings())
    replies = []
    model.ask([Request((Message("user", "Write 12."),), 20, 0.0)], lambda i, reply: replies.append(reply))
    (reply,) = replies
    assert reply.outcome is Outcome.ANSWERED and reply.finish == "stop" and reply.text.startswith("int a = ")


def test_what_is_done_is_not_done_again(small, pretrained, capsys) -> None:
    before = weights(pretrained.parent)
    run("pretrain", small, "scratch", "corpus", pretrained.parent)
    assert weights(pretrained.parent) == before and "step" not in capsys.readouterr().err


@pytest.mark.full
def test_a_killed_run_goes_on_to_the_very_same_weights(small, tmp_path, capsys) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = ["--model", "scratch", "--data", str(small / "corpus"), "--config", str(small / "small.toml")]
    arguments += ["--set", "tuning.steps=100"]
    command_line = [*CLI, "train", "--stage", "pretrain", *arguments, "--out", out]
    kill_when((out / "checkpoints" / "checkpoint-10").exists, command_line)
    assert not (out / "model").exists()
    found = sorted((out / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    broken = out / "checkpoints" / "checkpoint-95"  # as a kill while it was written leaves it
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    run("pretrain", small, "scratch", "corpus", out, "tuning.steps=100")
    said = capsys.readouterr().err
    assert "goes on from checkpoint-" in said and "checkpoint-95" not in said, found
    run("pretrain", small, "scratch", "corpus", whole, "tuning.steps=100")
    assert weights(out) == weights(whole)
    assert not (out / "checkpoints").exists()


def test_adapters_change_the_weights_and_become_part_of_them(small, pretrained, tmp_path) -> None:
    run("sft", small, pretrained, "collected", tmp_path / "lora", "lora.rank=4", "tuning.steps=3")
    assert weights(tmp_path / "lora") != weights(pretrained.parent)
    assert not list((tmp_path / "lora" / "model").glob("adapter*"))
    with pytest.raises(UserError, match="nothing to adapt"):
        run("sft", small, "scratch", "collected", tmp_path / "other", "lora.rank=4")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["tuning.learning_rate=0.5"], "tuning.learning_rate = 0.01, not 0.5"),
        (["scratch.width=64"], "scratch.width = 32, not 64"),
    ],
)
def test_a_run_does_not_go_on_with_other_settings(small, pretrained, changes, says) -> None:
    with pytest.raises(UserError, match=says):
        run("pretrain", small, "scratch", "corpus", pretrained.parent, *changes)


def test_a_gradient_that_is_not_finite_ends_the_run_and_nothing_is_saved(small, pretrained, tmp_path) -> None:
    broken = models.load(str(pretrained), "float32")
    with torch.no_grad():
        broken.model.model.norm.weight[0] = math.nan
    broken.save(tmp_path / "broken")
    with pytest.raises(UserError, match="gradient of step 1 is not finite"):
        run("sft", small, tmp_path / "broken", "collected", tmp_path / "tuned")
    assert not list(tmp_path.glob("tuned/checkpoints/*/*")) and not (tmp_path / "tuned" / "model").exists()


@pytest.mark.parametrize(
    ("contradiction", "says"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20}, "temperature = 0.6, top_p = 0.9, top_k"),
        ({"do_sample": False, "early_stopping": True, "length_penalty": 2.0}, "length_penalty = 2.0"),
        ({"pad_token_id": -1}, "all but its tokens"),
    ],
)
def test_a_contradictory_generation_config_is_mended_and_said(small, pretrained, tmp_path, capsys, contradiction, says):
    model = tmp_path / "greedy"
    shutil.copytree(pretrained, model)
    settings = json.loads((model / "generation_config.json").read_text())
    del settings["pad_token_id"]  # trainers set it, and what was changed is checked when it is saved
    (model / "generation_config.json").write_text(json.dumps(settings | contradiction))
    run("sft", small, model, "collected", tmp_path / "tuned", "tuning.steps=6")
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "generation_config" in line]
    assert says in said
    saved = json.loads((tmp_path / "tuned" / "model" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == settings["eos_token_id"]
    assert saved.get("do_sample", False) is contradiction.get("do_sample", saved.get("do_sample", False))
    assert not models.load(str(tmp_path / "tuned" / "model"), "float32").note


def turn(role: str | None, content: object) -> dict:
    return {"role": role, "content": content}


ASKED, ANSWERED = turn("user", "Write 10."), turn("assistant", "int a = 10;\n")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": [turn("user", None), ANSWERED]}, r"/sft, row 2: the content of message 1 is empty"),
        ({"messages": [turn("tool", "x"), ANSWERED]}, "row 2: the role of message 1 is 'tool'"),
        ({"messages": [turn(None, "x"), ANSWERED]}, "row 2: the role of message 1 is None"),
        ({"messages": [ANSWERED]}, "row 2: the answer has no question"),
        ({"messages": None}, "row 2: messages is empty"),
    ],
)
def test_a_conversation_that_cannot_be_read_is_one_clear_line_with_its_row(small, tmp_path, row, says) -> None:
    dataset.write(tmp_path / "data", {"sft": [{"messages": [ASKED, ANSWERED]}, row]}, "test")
    with pytest.raises(UserError, match=says) as caught:
        run("sft", small, "scratch", str(tmp_path / "data"), tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_other_columns_are_named(small, tmp_path) -> None:
    dataset.write(tmp_path / "data", {"sft": [{"instruction": "x", "output": "y"}], "text": [{"code": "x"}]}, "test")
    with pytest.raises(UserError, match="/sft has no column messages; it has instruction, output"):
        run("sft", small, "scratch", str(tmp_path / "data"), tmp_path / "out")
    with pytest.raises(UserError, match="/text has no column text; it has code"):
        run("pretrain", small, "scratch", str(tmp_path / "data"), tmp_path / "out")
    dataset.write(tmp_path / "gap", {"text": [{"text": "x"}, {"text": None}]}, "test")
    with pytest.raises(UserError, match="/text, row 2: text is empty"):
        run("pretrain", small, "scratch", str(tmp_path / "gap"), tmp_path / "out")


def test_files_as_people_have_them_are_read(tmp_path) -> None:
    rows = [{"id": 1, "messages": [ASKED, ANSWERED | {"name": "x"}]}, {"messages": [ASKED, ANSWERED], "score": [None]}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "bom.jsonl").write_text("\ufeff" + lines.replace("\n", "\r\n\r\n"))
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for i, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        dataset.write(tmp_path / str(i), {"sft": [{"messages": [ASKED, ANSWERED]}]}, "test")
        next((tmp_path / str(i) / "sft").glob("*.parquet")).rename(hub / f"{name}.parquet")
    wanted = [[ASKED, ANSWERED]] * 2
    for data in ("bom.jsonl", "list.json", "lines.json", "hub", "hub/data/train-00000-of-00002.parquet"):
        found = command._conversations([tmp_path / data])
        assert found == (wanted[:1] if data.endswith("parquet") else wanted), data


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"messages": []\n', r"cannot read .*a\.jsonl: line 1 is no JSON"),
        ("a.jsonl", json.dumps({"messages": [ASKED, ANSWERED]}) + "\n{}\n", r"a\.jsonl, row 2: messages is empty"),
        ("a.jsonl", '{"conversations": [], "id": 1}', r"a\.jsonl has no column messages; it has conversations, id"),
        ("a.json", '["x"]', r"a\.json, row 1 is no object with columns, but of type str"),
        ("a.json", "[" * 100_000, r"cannot read .*a\.json"),
        ("a.csv", "messages\n", r"a\.csv cannot be read as data; give a file that ends in \.parquet, \.jsonl, \.json"),
        ("a.parquet", "PAR1", r"cannot read .*a\.parquet"),
        ("a.jsonl", "\ud800", r"cannot read .*a\.jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path, name, text, says) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=says) as caught:
        command._conversations([tmp_path / name])
    assert "\n" not in str(caught.value)


def test_conversations_without_an_answer_are_skipped_and_counted(small, tmp_path, capsys) -> None:
    ends = [[ASKED], [ASKED, turn("assistant", " ")], [ASKED, turn("assistant", None)], [turn("system", "x")], []]
    unanswered = [{"messages": end} for end in ends]
    dataset.write(tmp_path / "data", {"sft": [{"messages": [ASKED, ANSWERED]}, *unanswered]}, "test")
    found = command._conversations([tmp_path / "data"])
    assert found == [[ASKED, ANSWERED]]
    assert f"5 conversations without an answer at the end skipped, the first in {tmp_path / 'data'}/sft, row 2" in (
        capsys.readouterr().err
    )
    dataset.write(tmp_path / "none", {"sft": unanswered}, "test")
    with pytest.raises(UserError, match="ends in an answer"):
        command._conversations([tmp_path / "none"])


USERS_FIRST = (
    "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("template", [USERS_FIRST, SILENT], ids=["refuses", "leaves out"])
def test_a_template_without_a_system_role_gets_it_with_the_question(small, pretrained, tmp_path, capsys, template):
    pupil = models.load(str(pretrained), "float32")
    pupil.tokenizer.chat_template = template
    pupil.save(tmp_path / "model")
    rows = [{"messages": [turn("system", "You"), ASKED, ANSWERED]}]
    dataset.write(tmp_path / "data", {"sft": rows}, "test")
    run("sft", small, tmp_path / "model", str(tmp_path / "data"), tmp_path / "out", "tuning.steps=2")
    assert "has no system role: system prompts go before the first question" in capsys.readouterr().err
    if template == USERS_FIRST:
        rows += [{"messages": [turn("system", "You"), ASKED, ASKED, ANSWERED]}]
        dataset.write(tmp_path / "data", {"sft": rows}, "test")
        with pytest.raises(
            UserError, match=r"does not take the conversation that begins 'You Write 10\.' \(user, user"
        ):
            run("sft", small, tmp_path / "model", str(tmp_path / "data"), tmp_path / "other", "tuning.steps=2")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [128, 192])  # 192: where cuDNN's gradients are NaN
@pytest.mark.parametrize("padding", [slice(70), slice(70, None)], ids=["left", "right"])
def test_gradients_beside_padding_are_those_of_plain_attention(pretrained, device, tokens, padding) -> None:
    model = models.load(str(pretrained), "float32").model.to(device)
    assert model.config._attn_implementation == models.ATTENTION
    ids = torch.arange(2 * tokens, device=device).view(2, tokens) % 256
    mask = torch.ones_like(ids)
    mask[0, padding] = 0

    def gradients() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=ids, attention_mask=mask).logits
            logits[mask.bool()].logsumexp(-1).square().mean().backward()
        return torch.cat([weights.grad.flatten() for weights in model.parameters()])

    found = gradients()
    model.set_attn_implementation("eager")
    wanted = gradients()
    assert (found - wanted).norm() < (1e-5 if device == "cpu" else 0.02) * wanted.norm()


def test_a_run_does_not_go_on_with_other_data_or_in_another_folder(small, pretrained, tmp_path) -> None:
    dataset.write(tmp_path / "corpus", {"text": [{"text": "int a;\n" * 20}]}, "test")
    with pytest.raises(UserError, match="other contents of --data"):
        run("pretrain", small, "scratch", str(tmp_path / "corpus"), pretrained.parent)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other things"):
        run("pretrain", small, "scratch", "corpus", tmp_path / "other")
    run("pretrain", small, "scratch", "corpus", pretrained.parent, "tuning.save_every=7")  # decides nothing


@pytest.mark.parametrize(
    ("stage", "model", "data", "changes", "says"),
    [
        ("pretrain", "scratch", "nowhere", [], "holds no dataset with a part text"),
        ("sft", "scratch", "corpus", [], "holds no dataset with a part sft"),
        ("sft", "no/such/model", "collected", [], "cannot load the model no/such/model"),
        ("sft", "", "collected", [], "--model is missing"),
        ("dessert", "scratch", "corpus", [], "no stage 'dessert'"),
        ("sft", "scratch", "collected", ["tuning.sequence_tokens=4"], "all 20 conversations are longer"),
        ("sft", "scratch", "collected", ["tuning.steps=many"], "no TOML"),
        ("sft", "scratch", "collected", ["tuning.steps='many'"], "must be of type int"),
        ("sft", "scratch", "collected", ["tuning.stepz=1"], "has no 'stepz'"),
        ("sft", "scratch", "collected", ["turning.steps=1"], "no section 'turning'"),
        ("sft", "scratch", "collected", ["tuning.batch=6"], "multiple of tuning.micro_batch"),
        ("sft", "scratch", "collected", ["tuning.precision='bfloat16'"], "needs adapters"),
        ("sft", "scratch", "collected", ["scratch.width=33"], "multiple of 2 x scratch.heads"),
    ],
)
def test_bad_requests_are_one_clear_line(small, tmp_path, stage, model, data, changes, says) -> None:
    with pytest.raises(UserError, match=says):
        run(stage, small, model, data, tmp_path / "out", *changes)


def test_stages_on_data_take_no_shapes(small) -> None:
    with pytest.raises(UserError, match="takes no shapes"):
        command.command(["64x64x64"], stage="sft", settings=TrainSettings("scratch", out=small / "out"))


def test_missing_packages_are_named_with_the_remedy(small, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match=r"needs the package trl: pip install 'cuda-l2\[train\]'"):
        run("pretrain", small, "scratch", "corpus", tmp_path / "out")


@pytest.mark.parametrize("stage", stages.STAGES)
def test_packaged_settings_are_readable_and_whole(stage, capsys) -> None:
    command.command(stage=stage, settings=TrainSettings(show=True))
    assert capsys.readouterr().out == stages.packaged(stage).read_text()
    assert stages.read(stage).stage == stage


def test_settings_of_a_file_count_before_the_packaged_and_options_before_both(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text("[tuning]\nsteps = 7\nlearning_rate = 1\n")
    read = stages.read("sft", tmp_path / "mine.toml", ["tuning.steps=9"])
    assert (read.tuning.steps, read.tuning.learning_rate) == (9, 1.0)
    assert read.tuning.batch == stages.read("sft").tuning.batch
