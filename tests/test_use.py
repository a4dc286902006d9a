"""docs/use.md: its layer is the example's and computes what torch's does; the cost of calls is reported where it counts."""

import textwrap
from pathlib import Path

import pytest
import torch
from conftest import example
from default_kernel import default_kernel
from made import timing

from cuda_l2.library import product
from cuda_l2.library.kernel import TorchKernel
from cuda_l2.library.saved import TorchsOwn
from cuda_l2.optimizer import Result
from cuda_l2.records import Gemm
from cuda_l2.report import tables
from cuda_l2.search import Progress

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def layer(target):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 48).half()
    kernels = [default_kernel(Gemm.parse(f"{rows}x48x96:tn"), target) for rows in (6, 32)]
    return example("linear").FastLinear(linear, kernels)


def test_the_documents_layer_is_the_examples() -> None:
    text, source = ((ROOT / path).read_text() for path in ("docs/use.md", "examples/linear.py"))
    shown = source[source.index("class FastLinear") : source.index("\n\n\ndef main")]
    assert textwrap.indent(shown, "    ", lambda line: line.strip()) in text


@pytest.mark.parametrize("shape", [(32, 96), (2, 3, 96), (6, 1, 96), (5, 96), (96,), (0, 96)], ids=str)
def test_the_layer_computes_what_torchs_does_for_every_batch(layer, shape) -> None:
    x = torch.randn(shape).half()
    with torch.no_grad():
        found, wanted = layer(x), layer.linear(x)
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-2)


def test_the_layer_leaves_to_torch_what_has_no_kernel(layer) -> None:
    own = TorchKernel(TorchsOwn(Gemm.parse("1x48x96:tn"), "torch fp16", "it is slower", "cpu:x"))
    made = type(layer)(layer.linear, [own, *layer.kernels.values()])
    assert list(made.kernels) == [6, 32]


def test_the_layer_calls_the_kernel_where_there_is_one_and_torch_where_it_cannot(layer, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(layer.linear, "forward", lambda x: calls.append(x.shape) or torch.zeros(len(x), 48).half())
    with torch.no_grad():
        layer(torch.randn(32, 96).half())
        assert calls == []
        layer(torch.randn(33, 96).half())
        layer(torch.randn(32 * 96 + 1).half()[1:].view(32, 96))  # begins at an odd address
        assert calls == [(33, 96), (32, 96)]


def test_the_layer_trains(layer) -> None:
    x = torch.randn(32, 96).half()
    parameters = list(layer.parameters())
    ours, torchs = (torch.autograd.grad(f(x).sum(), parameters) for f in (layer, layer.linear))
    for found, wanted in zip(ours, torchs, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)


def test_a_kernel_of_another_layer_is_refused(layer, target) -> None:
    for shape in ("6x48x96", "6x96x48:tn"):
        with pytest.raises(ValueError, match="the layer needs Mx48x96:tn"):
            type(layer)(layer.linear, [layer.kernels[6], default_kernel(Gemm.parse(shape), target)])


def test_the_table_of_call_costs_holds_every_way_against_the_kernel_alone(target) -> None:
    tool = example("call_cost")
    arms = tool.ways(tool.default_kernel(Gemm.parse("8x8x8:tn"), 1))
    times = tool.sampled(arms, 2)
    assert [len(means) for means in times.values()] == [2] * len(arms)
    table = tool.table({"alone": [4.0, 2.0], "called": [5.0, 3.5]})
    assert table.splitlines()[2:] == ["| alone | 3.00 | 2.00 | 0.00 |", "| called | 4.25 | 3.50 | 1.50 |"]


def test_the_report_says_what_a_caller_gets_where_a_call_costs_much(target, monkeypatch) -> None:
    monkeypatch.setattr(product, "overhead_us", lambda gemm: 1.0)
    result = Result(Gemm(64, 64, 64), target, Progress(), {}, None)
    said = tables._call_cost(result, timing(4.0, {"torch": 20.0}))
    assert said.startswith("a call from Python costs 1.0 us beside the kernel's 4.0 us")
    assert said.endswith("gives 4.00x instead of 5.00x")
    assert tables._call_cost(result, timing(10.0, {"torch": 50.0})) == ""
