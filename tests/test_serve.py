"""examples/serve: transformers' own server with accelerated models answers what the plain one does."""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from conftest import example
from made_pack import forget

import cuda_l2
from cuda_l2.learn import models
from cuda_l2.learn.settings import Scratch
from cuda_l2.library.deploy import dispatch
from cuda_l2.library.deploy.accelerate import AcceleratedLinear
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError


@pytest.fixture(scope="module")
def serve():
    return example("serve/serve")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama of one layer with random weights in bf16, and its tokenizer."""
    place = tmp_path_factory.mktemp("model")
    made = models.make(Scratch(layers=1, width=32, heads=2, vocabulary=300), ["the sea is blue\n"] * 20, 512, 0)
    for part in (made.model.to(torch.bfloat16), made.tokenizer):
        part.save_pretrained(place)
    return place


def test_a_server_with_an_accelerated_model_answers_the_same_texts(folder, tmp_path) -> None:
    tool = example("serve/compare")
    arms = [("--device cpu", False), ("--device cpu", True)]
    with tool.running(str(folder), arms, "1-2", tmp_path) as servers:
        samples, texts = tool.compare(servers, tokens=8, rounds=1)
        logs = [servers[arm].log.read_text() for arm in arms]
        asked = [server.process.args[-1] for server in servers.values()]
        ports = {server.address.rpartition(":")[2] for server in servers.values()}
    assert asked == ["0", "0"] and len(ports - {"0"}) == 2  # ports of the system's choice
    assert ["layers accelerated" in log for log in logs] == [False, True]
    plain, ours = (texts[arm] for arm in arms)
    assert plain == ours and all(len(answers) == 1 and "".join(answers) for answers in ours.values())
    row = tool.table(samples, texts)[-1].split(" | ")
    assert row[0] == "| --device cpu" and row[4] == "4 of 4" and float(row[1]) > 0


def test_a_server_that_ends_is_an_error_with_its_last_lines(tmp_path, monkeypatch) -> None:
    tool = example("serve/compare")
    monkeypatch.setattr("sys.executable", "cat")  # which knows no --plain
    with pytest.raises(UserError, match=r"a server ended with status 1:\ncat: .*--plain"):
        tool.Server("model", ("", False), "1", tmp_path).wait()


def test_texts_are_the_same_where_every_answer_is(tmp_path) -> None:
    tool, samples, texts = example("serve/compare"), None, {}
    samples = tool.Samples()
    for arm, second, time in (
        (("", False), "a", 0.5),
        (("", True), "b", 0.25),
        (("-x", False), "a", 1),
        (("-x", True), "a", 1),
    ):
        texts[arm] = {prompt: {"a"} for prompt in tool.PROMPTS} | {tool.PROMPTS[1]: {"a", second}}
        samples.add(arm, 0, time)
    rows = [line.split(" | ")[1:] for line in tool.table(samples, texts)[2:]]
    assert rows[0] == ["2.0", "4.0", "2.000 [-inf, inf]", "3 of 4", "4 of 4 |"]
    assert rows[1][3:] == ["4 of 4", "4 of 4 |"]


def test_every_model_that_is_loaded_is_accelerated(serve, folder, monkeypatch, capsys) -> None:
    kept = vars(transformers.PreTrainedModel)["from_pretrained"]
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", kept)  # it is put back afterwards
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    serve.hook("1-4")
    ours, _ = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    kinds = {type(module) for module in ours.modules() if isinstance(module, torch.nn.Linear)}
    assert kinds == {AcceleratedLinear}
    assert "cuda-l2: 8 layers accelerated, 12 products; on the CPU" in capsys.readouterr().err
    ids = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)


def test_a_model_without_a_layer_that_kernels_serve_is_an_error(serve) -> None:
    patched = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    patched.forward = lambda x: x
    for module in (torch.nn.Linear(4, 4), patched, torch.nn.ReLU()):
        with pytest.raises(UserError, match="--plain serves the model"):
            serve.prepare(torch.nn.Sequential(module), "1")


def test_a_transformers_without_a_server_is_one_clear_line(serve, monkeypatch) -> None:
    monkeypatch.setattr(serve.metadata, "entry_points", lambda **names: ())
    monkeypatch.setattr("sys.argv", ["serve.py", "model"])
    with pytest.raises(SystemExit, match=r"^serve\.py: this transformers has no server: pip install"):
        serve.main()


def test_what_has_no_choice_is_tuned_before_the_server_listens_alone(serve, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gemms = [Gemm.parse(f"{rows}x64x64:tn:bf16") for rows in (1, 2, 4)]
    choices = {gemms[0]: Choice(str(gemms[0]), "0123456789abcdef"), gemms[1]: Choice(str(gemms[1]))}
    tuned: list[list[Gemm]] = []
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "known", lambda device: choices)
        patched.setattr(cuda_l2, "tune", tuned.append)
        request = threading.Thread(target=lambda: said.append(serve.tune(gemms)))
        said = [serve.tune(gemms)]
        request.start()
        request.join()
    assert tuned == [[gemms[2]]] and said == ["tuned kernels serve 1"] * 2
    forget()
    assert serve.tune(gemms).startswith("torch's kernels serve: ")  # for there is no GPU here
