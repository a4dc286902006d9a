"""The CPU's winners in cuda_l2.matmul: which calls they serve, what the archive must say, and when torch serves."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import made
import pytest
import torch
from default_kernel import GEMM, default_kernel, operands
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from cuda_l2.archive import Archive
from cuda_l2.build import cpu
from cuda_l2.library import saved
from cuda_l2.library.deploy import calls, winners
from cuda_l2.library.deploy.accelerate import accelerate
from cuda_l2.library.kernel import Kernel
from cuda_l2.library.product import Product
from cuda_l2.records import Gemm
from cuda_l2.system import paths

OVERHEAD_US = 3.0
GAIN_US = OVERHEAD_US + winners.OWN_US
BIAS_US = 7.0


@pytest.fixture(scope="module")
def kernel(target) -> Kernel:
    return default_kernel(GEMM, target)


@pytest.fixture
def reported(kernel, target, tmp_path, monkeypatch) -> Iterator[Callable[..., None]]:
    """reported(torch_us): an archive whose report says that the kernel takes 100 us, and torch so many."""
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path))
    monkeypatch.setattr(Product, "call_overhead_us", OVERHEAD_US)
    monkeypatch.setattr(winners, "bias_us", lambda gemm: BIAS_US)
    forget()

    def report(torch_us: float, machine: str = target.machine) -> None:
        timing = made.timing(100.0, {"torch fp16": torch_us})
        build = cpu.build(kernel.candidate, target)
        trial = made.trial("", 1.0, "offline", machine, task=GEMM, candidate=kernel.candidate, build=build)
        with Archive(paths.default_archive()) as archive:
            archive.append(replace(trial, timing=timing))

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield report
    torch.set_num_threads(threads)
    forget()


def forget() -> None:
    winners._winners.clear()
    winners._reported.cache_clear()
    winners._warn.cache_clear()


def by_torch() -> int:
    """Calls that torch has served."""
    return calls.native().counts()["vendor"]


def test_a_winner_serves_its_shape(reported, kernel) -> None:
    reported(200.0)
    (a, b), before = operands(), by_torch()
    out = torch.empty(70, 50).half()
    expected = kernel(a, b)
    assert torch.equal(calls.matmul(a, b), expected) and torch.equal(calls.linear(a, b.t()), expected)
    assert calls.matmul(a, b, out=out) is out and torch.equal(out, expected)
    assert torch.equal(calls.matmul(a.view(7, 10, 90), b), expected.view(7, 10, 50))
    assert by_torch() == before


def test_other_calls_are_torchs(reported) -> None:
    reported(200.0)
    (a, b), before = operands(), by_torch()
    others = [
        *[(a[:69], b), (a, b.contiguous()), (a.bfloat16(), b.bfloat16()), (a.float(), b.float())],
        *[(torch.randn(70, 180).half()[:, ::2], b), (torch.randn(6301).half()[1:].view(70, 90), b)],
    ]
    for number, (x, y) in enumerate(others, 1):
        assert torch.equal(calls.matmul(x, y), x @ y)
        assert by_torch() == before + number
    assert torch.equal(calls.matmul(a, b, deterministic=True), a @ b) and by_torch() == before + len(others) + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert calls.matmul(a, b).dtype == torch.bfloat16


@pytest.mark.parametrize(("torch_us", "serves"), [(100 + GAIN_US + 1, True), (100 + GAIN_US - 1, False), (90.0, False)])
def test_a_winner_that_gains_less_than_a_call_costs_does_not_serve(reported, torch_us, serves) -> None:
    reported(torch_us)
    before = by_torch()
    calls.matmul(*operands())
    assert by_torch() - before == (not serves)


@pytest.mark.parametrize(("gain_us", "serves"), [(GAIN_US + BIAS_US + 1, True), (GAIN_US + BIAS_US - 1, False)])
def test_a_bias_is_added_to_a_winners_rounded_product_where_that_still_gains(reported, kernel, gain_us, serves) -> None:
    reported(100 + gain_us)
    (a, b), bias = operands(), torch.randn(50).half()
    ours, torchs = kernel(a, b) + bias, torch.nn.functional.linear(a, b.t(), bias)
    assert not torch.equal(ours, torchs)
    expected = ours if serves else torchs
    layer = torch.nn.Linear(90, 50).half()
    with torch.no_grad():
        layer.weight.copy_(b.t())
        layer.bias.copy_(bias)
    assert torch.equal(accelerate(layer)(a), expected) and torch.equal(calls.matmul(a, b, bias=bias), expected)
    assert torch.equal(calls.linear(a.view(7, 10, 90), b.t(), bias), expected.view(7, 10, 50))
    assert torch.equal(calls.matmul(a, b), kernel(a, b))
    out = torch.empty(70, 50).half()
    assert calls.matmul(a, b, bias=bias, out=out) is out
    assert torch.equal(out, ours if serves else (a @ b).add_(bias))


def test_another_bias_is_torchs(reported) -> None:
    reported(200.0)
    a, b = operands()
    for bias in (torch.randn(1).half(), torch.randn(70, 50).half()):
        assert torch.equal(calls.linear(a, b.t(), bias), torch.nn.functional.linear(a, b.t(), bias))
    for bias in (torch.randn(50), torch.randn(51).half(), torch.randn(50).bfloat16()):
        with pytest.raises(RuntimeError):
            calls.linear(a, b.t(), bias)


def test_gradients_flow_through_a_winner_with_a_bias(reported) -> None:
    reported(200.0)
    a, b = operands()
    tensors = [a.requires_grad_(), b.t().detach().requires_grad_(), torch.randn(50).half().requires_grad_()]
    grad = torch.ones(70, 50).half()
    found = calls.linear(*tensors)
    with torch.no_grad():
        assert torch.equal(found, calls.linear(*tensors)) and not torch.equal(
            found, torch.nn.functional.linear(*tensors)
        )
    wanted = torch.autograd.grad(torch.nn.functional.linear(*tensors), tensors, grad)
    for one, other in zip(torch.autograd.grad(found, tensors, grad), wanted, strict=True):
        torch.testing.assert_close(one, other)  # the weight's is another product, whose sums may have another order
    x, weight, bias = (tensor.detach() for tensor in tensors)
    several = torch.stack([bias, bias + 1])
    each = torch.vmap(lambda one: calls.linear(x, weight, one))(several)
    assert torch.equal(each, torch.stack([calls.linear(x, weight, one) for one in several]))
    ones = torch.func.grad(lambda one: calls.linear(x, weight, one).float().sum())(bias)
    assert torch.equal(ones, torch.full((50,), 70.0).half())


def test_a_report_of_another_machine_says_nothing(reported) -> None:
    reported(200.0, machine="cpu:other")
    before = by_torch()
    calls.matmul(*operands())
    assert by_torch() == before + 1


def test_the_archive_is_asked_once_a_shape(reported, monkeypatch) -> None:
    asked, best = [], saved.best
    monkeypatch.setattr(saved, "best", lambda gemm, path: asked.append(str(gemm)) or best(gemm, path))
    a, b = operands()
    calls.matmul(a, b)  # there is no archive yet
    reported(200.0)
    calls.matmul(a, b)
    assert asked == [] and list(winners._winners.values()) == [None]
    forget()
    for _ in range(2):
        calls.matmul(a, b)
        calls.matmul(a[:9], b)
    assert asked == ["70x50x90:tn"]


def test_where_torch_is_held_to_fewer_threads_it_serves(reported) -> None:
    reported(200.0)
    (a, b), before = operands(), by_torch()
    calls.matmul(a, b)
    assert by_torch() == before
    torch.set_num_threads(1)  # as in a worker of a data loader
    calls.matmul(a, b)
    assert by_torch() == before + 1


def test_gradients_flow_through_a_winner(reported) -> None:
    reported(200.0)
    a, b = (tensor.requires_grad_() for tensor in operands())
    before = by_torch()
    grad = torch.ones(70, 50).half()
    calls.matmul(a, b).backward(grad)
    assert by_torch() == before
    expected = torch.autograd.grad(a @ b, (a, b), grad)
    assert torch.equal(a.grad, expected[0]) and torch.equal(b.grad, expected[1])


def test_a_first_call_in_any_mode_leaves_a_kernel_for_all(reported, kernel) -> None:
    reported(200.0)
    (a, b), before = operands(), by_torch()
    expected = kernel(a, b)
    with torch.device("meta"), torch.inference_mode():
        assert torch.equal(calls.matmul(a, b), expected)
    out = torch.zeros(70, 50).half()
    assert torch.equal(calls.matmul(a, b), expected) and torch.equal(calls.matmul(a, b, out=out), expected)
    assert by_torch() == before


def test_a_child_of_a_fork_computes_with_threads_of_its_own(reported, kernel) -> None:
    reported(200.0)
    a, b = operands()
    expected = calls.matmul(a, b)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(calls.matmul(a, b), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_damaged_archive_is_said_once_and_torch_serves(reported) -> None:
    paths.default_archive().write_bytes(b"no database" * 99)
    (a, b), before = operands(), by_torch()
    with pytest.warns(RuntimeWarning, match="torch serves products on the CPU") as said:
        assert torch.equal(calls.matmul(a, b), a @ b) and torch.equal(calls.matmul(a[:5], b), a[:5] @ b)
    assert len(said) == 1 and by_torch() == before + 2


def test_a_traced_graph_asks_for_no_winner(reported) -> None:
    reported(200.0)
    a, b = operands()
    with torch.no_grad():
        assert torch.equal(torch.compile(calls.matmul, fullgraph=True, backend="eager")(a, b), a @ b)
    assert not winners._winners


def test_torch_serves_what_is_traced_or_seen_by_a_dispatch_mode(reported) -> None:
    reported(200.0)
    (a, b), (other, _), before = operands(), operands(), by_torch()
    calls.matmul(a, b)
    with torch.no_grad():
        graphs = [
            trace(function)
            for function in (lambda x: calls.matmul(x, b), lambda x: calls.linear(x, b.t()))
            for trace in (lambda f: torch.jit.trace(f, a, check_trace=False), lambda f: make_fx(f)(a))
        ]
    assert all(torch.equal(graph(other), other @ b) for graph in graphs)
    with FlopCounterMode(display=False) as counter:
        calls.matmul(a, b)
    assert counter.get_total_flops() == 2 * 70 * 50 * 90 and by_torch() == before


def test_out_that_is_no_tensor_is_refused_as_by_torch(reported) -> None:
    reported(200.0)
    with pytest.raises(TypeError, match="out"):
        calls.matmul(*operands(), out=3)


def test_torch_serves_negated_views(reported) -> None:
    reported(200.0)
    a, b = operands()
    for x, y in ((torch._neg_view(a), b), (a, torch._neg_view(b))):
        assert torch.equal(calls.matmul(x, y), x @ y) and torch.equal(calls.linear(x, y.t()), x @ y)
    out = torch.zeros(70, 50).half()
    calls.matmul(a, b, out=torch._neg_view(out))
    assert torch.equal(out, -(a @ b))


@pytest.mark.parametrize("shape", ["70x50x64:tn", "70x50x64:tn:bf16"])
def test_what_adding_a_bias_takes_is_found_in_either_type(shape: str) -> None:
    assert 0 < winners.bias_us(Gemm.parse(shape)) < float("inf")
