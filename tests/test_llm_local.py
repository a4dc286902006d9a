"""Models that run in this process: folders as people have them, settings of generation, thoughts, pace and budget."""

import json
import math
import re
import shutil
import socketserver
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from made import trial

from cuda_l2.archive import Archive
from cuda_l2.learn import models
from cuda_l2.learn.settings import Sampling, Scratch
from cuda_l2.learn.writer import Writer
from cuda_l2.llm._base import Message, Outcome, Pace, Request, open_model
from cuda_l2.llm.client import Client
from cuda_l2.llm.exchanges import ExchangeLog
from cuda_l2.llm.kinds import hf
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.propose._llm import Asking, LlmProposer
from cuda_l2.propose._prompt import Templates
from cuda_l2.propose._question import Sources
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

GEMM = Gemm(64, 64, 64)
SETTINGS = ModelSettings(answer_tokens=8, concurrency=2, retries=0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder as save_pretrained writes it: a Llama of random weights that reads bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    models.make(Scratch(1, 16, 2, 300), ["void f(void) { return; }\n"], 1 << 17, 0).save(folder)
    return folder


@pytest.fixture
def own(tiny, tmp_path) -> Path:
    return shutil.copytree(tiny, tmp_path / "own")


def answers(folder: Path, text: str = "hello") -> list:
    replies: list = []
    asked = [Request((Message("user", text),), SETTINGS.answer_tokens, seed=seed) for seed in range(3)]
    open_model(f"hf:{folder}", SETTINGS).ask(asked, lambda i, reply: replies.append(reply))
    return replies


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    "settings",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": False},
        {"stop_strings": ["}"], "max_length": 3, "min_length": 5},
        {"prompt_lookup_num_tokens": 3, "guidance_scale": 1.5},
        {"do_sample": False, "temperature": 0.5, "top_k": 7},
    ],
)
def test_settings_of_generation_do_not_change_what_comes_back(own, settings) -> None:
    change(own / "generation_config.json", **settings)
    replies = answers(own)
    assert [reply.outcome for reply in replies] == [Outcome.ANSWERED] * 3 and len({reply.text for reply in replies}) > 1
    pupil = models.load(str(own), "float32")
    before = pupil.model.generation_config
    written = Writer(pupil.model, pupil.tokenizer, Sampling(1.0, 100, 8, 0, 2)).write([[1, 2, 3], [4, 5]])
    assert len(written) == 2 and all(0 < len(answer) <= 8 for answer in written)
    assert pupil.model.generation_config is before


def emptied(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (emptied, "holds no model: no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"half"), "cannot load the model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot load the model"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot load the model"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "cannot load the model"),
        (lambda folder: (folder / "generation_config.json").write_text("[1]"), "cannot load the model"),
        (lambda folder: change(folder / "config.json", hidden_size="large"), "cannot load the model"),
        (lambda folder: change(folder / "config.json", model_type="t5", architectures=None), "cannot load the model"),
        (lambda folder: change(folder / "config.json", auto_map={"AutoConfig": "x.C"}, model_type="x"), "custom code"),
    ],
)
def test_a_folder_that_is_no_model_is_one_clear_line(own, damage, says) -> None:
    damage(own)
    for load in (lambda: open_model(f"hf:{own}", SETTINGS), lambda: models.load(str(own), "float32")):
        with pytest.raises(UserError, match=says) as caught:
            load()
        assert "\n" not in str(caught.value)


def test_a_hub_that_does_not_answer_is_asked_once_and_what_its_cache_holds_is_loaded(
    tiny, tmp_path, monkeypatch
) -> None:
    asked = []

    class Hub(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(200).split(b"\r\n")[0].decode())  # and the connection ends

    cached = tmp_path / "models--some--one"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    shutil.copytree(tiny, cached / "snapshots" / ("a" * 40))
    with socketserver.TCPServer(("127.0.0.1", 0), Hub) as server:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(UserError, match=f"there is no folder some/other, {address} does not answer"):
                hf.load("some/other", "auto")
            model, _ = hf.load("some/one", "auto")
        finally:
            server.shutdown()
            thread.join()
    assert model.config.vocab_size
    assert [line for line in asked if line.startswith("HEAD")] == ["HEAD / HTTP/1.1"] * 2  # once a model


def test_adapters_become_part_of_the_weights(own, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    base, tokenizer = hf.load(str(own), torch.float32)
    lora = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora)
    for part in (adapted, tokenizer):
        part.save_pretrained(tmp_path / "adapters")
    pupil = models.load(str(tmp_path / "adapters"), "float32")
    pupil.save(tmp_path / "saved")
    ids = torch.arange(20)[None]
    wanted = adapted(input_ids=ids).logits
    for model in (pupil.model, hf.load(str(tmp_path / "saved"), torch.float32)[0]):
        assert torch.allclose(model(input_ids=ids).logits, wanted, atol=1e-5)
        assert all(weights.requires_grad for weights in model.parameters())
    shutil.rmtree(own)
    with pytest.raises(UserError, match="cannot load the model"):
        models.load(str(tmp_path / "adapters"), "float32")


def test_a_model_without_a_chat_template_is_asked_plainly(own) -> None:
    (own / "chat_template.jinja").unlink()
    assert [reply.outcome for reply in answers(own)] == [Outcome.ANSWERED] * 3
    model = open_model(f"hf:{own}", SETTINGS)
    assert model._text((Message("system", "you"), Message("user", "hello"))) == "you\n\nhello\n\n"


def test_files_of_gguf_are_told_what_reads_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(UserError, match=r"a\.gguf needs the package gguf: pip install 'cuda-l2\[gguf\]'"):
            open_model(f"hf:{name}", SETTINGS)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"holds 2 GGUF files; name one of them, as in .*a\.gguf"):
        open_model(f"hf:{tmp_path}", SETTINGS)


@pytest.mark.parametrize("length", [0, 4, 72])
def test_a_gguf_file_that_is_damaged_is_one_clear_line(tmp_path, length) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes((b"GGUF\3\0\0\0" + b"\0" * 64)[:length])
    for name in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(UserError, match="cannot load the model"):
            open_model(f"hf:{name}", SETTINGS)


def test_thoughts_that_the_template_opens_are_no_answer(own) -> None:
    template = own / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}assistant:\n<think>\n{% endif %}")
    assert all(reply.text.startswith("<think>") for reply in answers(own))
    template.write_text(template.read_text().replace("<think>", "<think></think>"))
    assert not any(reply.text.startswith("<think>") for reply in answers(own))


def test_a_models_pace_is_measured(tiny) -> None:
    pace = open_model(f"hf:{tiny}", SETTINGS).pace()
    assert pace is not None and all(0 < speed < math.inf for speed in (pace.read_tokens_s, pace.written_tokens_s))


HOUR = 3600.0


@pytest.mark.parametrize("bound", ["--budget", "--model-seconds"])
@pytest.mark.parametrize(
    ("pace", "asked", "says"),
    [
        (Pace(1e9, 1e9), 2, "2 prompts of"),
        (Pace(1.0, 1.0), 0, "0 of an answer, too few for a kernel; give more time"),
        (Pace(1e9, 0.01), 0, r"3\d of an answer, too few for a kernel"),
        (Pace(1e9, 0.1), 1, r"writes 0\.1: in 3\d\d\d s 1 prompt of"),
        (None, 2, ""),
    ],
    ids=["quick", "slow to read", "slow to write", "time for one", "unknown"],
)
def test_what_the_pace_leaves_time_for_is_said_before_a_model_is_asked(
    bound, pace, asked, says, tiny, tmp_path, target
) -> None:
    seconds = HOUR if bound == "--model-seconds" else None
    settings = ModelSettings(answer_tokens=1000, concurrency=2, retries=0, model_seconds=seconds)
    notes: list[str] = []
    with Archive(tmp_path / "archive.db"), ExchangeLog(tmp_path / "archive.db") as log:
        model = open_model(f"hf:{tiny}", settings)
        model.pace = lambda: pace
        requests: list = []
        model.ask = lambda asked, on_reply, deadline: requests.extend(asked)
        sources = Sources(lambda: [trial("x", 2.0, machine=target.machine)])
        proposer = LlmProposer(
            *(GEMM, target, Client(model, log, settings), Templates(), sources, np.random.default_rng(0)),
            Asking(on_note=notes.append, one_round=True),
        )
        proposer.deadline = time.perf_counter() + (HOUR if seconds is None else 10 * HOUR)
        for _ in range(2):
            assert proposer.propose(2) == []
        summary = proposer.summary()
    assert len(requests) == 2 * asked
    if asked and says:
        (note,) = notes
        assert re.search(says, note) and "ended" not in summary
    elif says:
        assert notes == [] and re.search(says, summary)
