"""Weights ahead on a real GPU: results follow every write that the op is told of, in eager calls and in graphs."""

import pytest
import torch
from test_rules_gpu import exact, operands

import cuda_l2
from cuda_l2 import contract
from cuda_l2.families._base import Schedule
from cuda_l2.families.sm90_ahead import FAMILY
from cuda_l2.library.deploy import calls, dispatch, pack
from cuda_l2.library.deploy.entries import AHEAD
from cuda_l2.library.deploy.recipes import Recipe
from cuda_l2.records import Gemm

pytestmark = pytest.mark.gpu
GEMM = Gemm.parse("16x1024x4096:tn:bf16")
ROUNDS = 20


@pytest.fixture(scope="module")
def kernel(gpu, tmp_path_factory):
    """A kernel that reads weights ahead, in the op's table for GEMM and for its transpose, K x N."""
    if not gpu.target.runs("sm_90a"):
        pytest.skip("the kernels are for Hopper GPUs")
    cuda_l2.matmul(*[torch.ones(8, 8, device="cuda").half()] * 2)
    calls.native().clear()
    found = []
    for gemm in (GEMM, Gemm.parse("16x4096x1024:tn:bf16")):
        made = FAMILY.render(Schedule(FAMILY, gemm, gpu.target, FAMILY.default(gemm, gpu.target)))
        found.append(Recipe(contract.kernel_id(made.source), FAMILY.name, (), gemm, made, 0, ""))
    kernels = pack.build(found, tmp_path_factory.mktemp("pack"))
    for recipe in found:
        said = dispatch.launch(recipe.candidate, recipe.gemm, 0, recipe.id, kernels)
        assert "callers must allow" in said
        assert dispatch.launch(recipe.candidate, recipe.gemm, 0, recipe.id, kernels, AHEAD) == ""
    yield
    calls.native().clear()


class Model(torch.nn.Module):
    """Products in a row, each of which waits for the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.x, b = operands(GEMM)
        self.up = torch.nn.Linear(GEMM.k, GEMM.n, bias=False, device="cuda", dtype=torch.bfloat16)
        self.down = torch.nn.Linear(GEMM.n, GEMM.k, bias=False, device="cuda", dtype=torch.bfloat16)
        self.requires_grad_(False)
        self.up.weight.copy_(b.t())
        cuda_l2.accelerate(self, weights_ahead=True)

    def forward(self) -> list[torch.Tensor]:
        first = self.up(self.x)
        return [first, self.down(first), self.up(self.x)]

    def expected(self) -> list[torch.Tensor]:
        weights = self.up.weight.t(), self.down.weight.t()
        first = (self.x.double() @ weights[0].double()).bfloat16()
        return [first, (first.double() @ weights[1].double()).bfloat16(), first]

    def agrees(self, found: list[torch.Tensor]) -> bool:
        pairs = zip(found, self.expected(), strict=True)
        return all(torch.allclose(ours, right, rtol=2e-2, atol=1.0) for ours, right in pairs)


def test_results_follow_writes_one_two_and_three_launches_back(kernel) -> None:
    model, before = Model(), calls.native().counts()
    for number in range(ROUNDS):
        for back in range(3):
            model.up.weight.copy_(torch.randn_like(model.up.weight))
            model.x.copy_(torch.randn_like(model.x))
            for _ in range(back):
                model.down(torch.ones(GEMM.m, GEMM.n, device="cuda", dtype=torch.bfloat16))
            assert model.agrees(model()), (number, back)
    after = calls.native().counts()
    assert after["read_ahead"] > before["read_ahead"] and after["vendor"] == before["vendor"]


def test_integers_come_out_exactly(kernel) -> None:
    a, b = operands(GEMM)
    for _ in range(3):
        assert torch.equal(cuda_l2.matmul(a, b, weights_ahead=True), exact(a, b))


def test_a_graph_follows_writes_before_it_and_the_step_that_it_captured(kernel) -> None:
    model, graph = Model(), torch.cuda.CUDAGraph()
    model()
    with torch.cuda.graph(graph):
        outputs = model()
    for _ in range(ROUNDS):
        model.up.weight.copy_(torch.randn_like(model.up.weight))
        graph.replay()
        assert model.agrees(outputs)
    step, noise = torch.cuda.CUDAGraph(), torch.randn_like(model.up.weight)
    with torch.cuda.graph(step):
        model.up.weight.copy_(noise)
        outputs = model()
    for _ in range(ROUNDS):  # replays write the weight, and no counter moves
        noise.normal_()
        step.replay()
        assert model.agrees(outputs)
        noise.normal_()
        step.replay()
        assert model.agrees(model())


def test_a_weight_written_on_another_stream_is_followed_there(kernel) -> None:
    model, other = Model(), torch.cuda.Stream()
    for _ in range(ROUNDS):
        model()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            model.up.weight.copy_(torch.randn_like(model.up.weight))
            found = model()
        torch.cuda.current_stream().wait_stream(other)
        assert model.agrees(found) and model.agrees(model())
