"""A C function called on torch tensors: what is refused, gradients, threads, forks; in C, through ctypes and torch's own."""

import os
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from default_kernel import GEMM, default_kernel, operands
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from cuda_l2.library import product as library_product
from cuda_l2.library.kernel import Kernel, TorchKernel
from cuda_l2.library.product import Product, overhead_us
from cuda_l2.library.saved import TorchsOwn
from cuda_l2.measure.baselines._base import product_baselines
from cuda_l2.records import Gemm


@pytest.fixture(scope="module")
def in_c(target) -> Kernel:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return default_kernel(GEMM, target)


@pytest.fixture
def through_ctypes(target, monkeypatch) -> Kernel:
    monkeypatch.setattr(library_product, "extension", lambda: None)
    return default_kernel(GEMM, target)


@pytest.fixture(params=["in_c", "through_ctypes"])
def kernel(request) -> Kernel:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["in_c", "through_ctypes", *(baseline.name for baseline in product_baselines("cpu"))])
def product(request) -> Product:
    """A kernel's, or torch's own where no kernel wins."""
    if request.param.startswith("torch"):
        return TorchKernel(TorchsOwn(GEMM, request.param, "it is slower", "cpu:x"))
    return request.getfixturevalue(request.param)


def close(c, a, b) -> bool:
    return torch.allclose(c.float(), a.float() @ b.float(), atol=0.05)


def test_a_call_fills_out_or_a_new_tensor(kernel) -> None:
    a, b = operands()
    out = torch.full((70, 50), torch.nan).half()
    assert kernel(a, b, out) is out and close(out, a, b)
    new = kernel(a, b)
    assert torch.equal(new, out) and new.data_ptr() != out.data_ptr()
    assert torch.equal(kernel(a, b, out=out), new)


def test_an_ordinary_call_stays_in_c(in_c, monkeypatch) -> None:
    monkeypatch.setattr(in_c, "_careful_call", None)
    a, b = operands()
    assert close(in_c(a, b), a, b)
    with torch.no_grad():
        weight = torch.nn.Parameter(b)
        assert close(in_c(a, weight), a, b)


A, B = operands()
OUT = torch.empty(70, 50).half()
TRACES = [
    pytest.param(torch.jit.trace, id="jit"),
    pytest.param(lambda function, a: make_fx(function)(a), id="make_fx"),
    pytest.param(lambda function, a: make_fx(function, pre_dispatch=True)(a), id="before dispatch"),
]
STAND_INS = {
    "functional": lambda: torch._to_functional_tensor(A),
    "zeros": lambda: torch._efficientzerotensor(70, 90, dtype=torch.float16),
    "within zeros": lambda: torch._efficientzerotensor(32 + 70 * 90, dtype=torch.float16)[32:].view(70, 90),
}
"""Tensors that torch's own operators know to hold nothing."""
SHARED = torch.zeros(70 * 90 + 70 * 50).half()
UNFIT = {
    "dtype of a": (A.float(), B, OUT),
    "bf16 b": (A, B.bfloat16(), OUT),
    "integers of as many bits": (A.view(torch.int16), B, OUT),
    "shape": (A[:69], B, OUT),
    "rank": (A.view(-1), B, OUT),
    "column-major a": (A.t().contiguous().t(), B, OUT),
    "row-major b": (A, B.contiguous(), OUT),
    "strided a": (torch.zeros(70, 92).half()[:, :90], B, OUT),
    "misaligned a": (torch.zeros(70 * 90 + 1).half()[1:].view(70, 90), B, OUT),
    "device": (A.to("meta"), B, OUT),
    "sparse": (A.to_sparse(), B, OUT),
    "column-major out": (A, B, torch.empty(50, 70).half().t()),
    "out of another shape": (A, B, torch.empty(50, 70).half()),
    "out of another type": (A, B, torch.empty(70, 50)),
    "out is a part of a": (SHARED[: 70 * 90].view(70, 90), B, SHARED[: 70 * 50].view(70, 50)),
    "out begins in a": (SHARED[: 70 * 90].view(70, 90), B, SHARED[6272 : 6272 + 70 * 50].view(70, 50)),
    "out in b": (A, SHARED[: 50 * 90].view(50, 90).t(), SHARED[64 : 64 + 70 * 50].view(70, 50)),
}


@pytest.mark.parametrize("tensors", UNFIT.values(), ids=UNFIT)
def test_tensors_that_do_not_fit_are_refused(kernel, tensors) -> None:
    with pytest.raises(ValueError, match=r"must be|must begin"):
        kernel(*tensors)


@pytest.mark.parametrize("what", [None, [[1.0]], A.numpy()], ids=["None", "a list", "an array"])
def test_what_is_no_tensor_is_refused(kernel, what) -> None:
    with pytest.raises(TypeError, match="a must be a torch tensor"):
        kernel(what, B)


@pytest.mark.parametrize(("text", "layout_a"), [("70x50x90", "column-major"), ("70x50x90:tn", "row-major")])
def test_tensors_whose_transposes_fit_are_read_as_the_transposed_product(target, text, layout_a) -> None:
    kernel = default_kernel(Gemm.parse(text), target)  # C' = B' A' is 70 x 50, so C is 50 x 70
    a, b = torch.randn(50, 90).half(), torch.randn(90, 70).half().t().contiguous().t()
    a = a.t().contiguous().t() if layout_a == "column-major" else a
    out = torch.empty(70, 50).half().t()
    c = kernel(a, b)
    assert c.shape == (50, 70) and close(c, a, b) and c.stride() == (1, 50)
    assert torch.equal(c.mT, kernel(b.mT, a.mT))
    assert torch.equal(kernel(a, b, out), c) and torch.equal(out, c)
    with pytest.raises(ValueError, match="must be"):
        kernel(a, b, torch.empty(50, 70).half())
    a.requires_grad_()
    (found,) = torch.autograd.grad(kernel(a, b).sum(), a)
    assert torch.allclose(found, torch.autograd.grad((a @ b).sum(), a)[0], atol=0.05)


def test_a_square_kernel_takes_column_major_operands_by_their_layout(target) -> None:
    kernel = default_kernel(Gemm(48, 48, 48), target)
    a, b = (torch.randn(48, 48).half() for _ in range(2))
    assert close(kernel(a, b), a, b) and close(kernel(a.t(), b.t()), a.t(), b.t())


def test_column_major_a_that_no_transposed_product_reads_is_told_what_to_do(kernel) -> None:
    with pytest.raises(ValueError, match=r"a is column-major: a\.contiguous\(\) copies it; where b and out are column"):
        kernel(A.t().contiguous().t(), B)


def test_out_may_lie_next_to_an_operand(kernel) -> None:
    both = torch.zeros(70 * 90 + 64 + 70 * 50).half()
    both[: 70 * 90] = A.flatten()
    out = both[6336 : 6336 + 70 * 50].view(70, 50)
    assert close(kernel(both[: 70 * 90].view(70, 90), B, out), A, B)


def test_the_stride_of_a_size_of_one_does_not_count(target) -> None:
    kernel = default_kernel(Gemm(1, 64, 32), target)
    a, b = torch.randn(1, 64)[:, :32].half().as_strided((1, 32), (7, 1)), torch.randn(32, 64).half()
    assert close(kernel(a, b), a, b)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_negated_view_is_refused(target) -> None:
    kernel = default_kernel(Gemm(1, 64, 1), target)
    a = torch.ones(1, 1, dtype=torch.complex32).conj().imag
    assert a.is_neg()
    with pytest.raises(ValueError, match=r"resolve_neg"):
        kernel(a, torch.ones(1, 64).half())


@pytest.mark.parametrize("other", [3, "out", numpy.zeros((70, 50), "float16")])
def test_out_that_is_no_tensor_is_refused(product, other) -> None:
    with pytest.raises(TypeError, match="out must be a torch tensor"):
        product(A, B, other)


@pytest.mark.parametrize("negated", range(3))
def test_negated_operands_are_refused(kernel, negated) -> None:
    given = [*operands(), torch.empty(70, 50).half()]
    given[negated] = torch._neg_view(given[negated])
    with pytest.raises(ValueError, match="resolve_neg"):
        kernel(*given)


def test_gradients_flow_as_through_torchs_product(product) -> None:
    a, b = (tensor.requires_grad_() for tensor in operands())
    weights = torch.randn(70, 50).half()
    ours = torch.autograd.grad((product(a, b) * weights).sum(), (a, b))
    for found, wanted in zip(ours, torch.autograd.grad(((a @ b) * weights).sum(), (a, b)), strict=True):
        assert torch.allclose(found, wanted, atol=0.05)
    (alone,) = torch.autograd.grad((product(a, b.detach()) * weights).sum(), a)
    assert torch.equal(alone, ours[0])


def test_gradients_flow_where_torch_func_asks_for_them(product) -> None:
    a, b = operands()
    found = torch.func.grad(lambda x: product(x, b).sum())(a)
    assert torch.allclose(found, torch.func.grad(lambda x: (x @ b).sum())(a), atol=0.05)


@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_tangents_flow_in_forward_mode(product, which) -> None:
    a, b = operands()
    with forward_ad.dual_level():
        if which != "b":
            a = forward_ad.make_dual(a, torch.randn(70, 90).half())
        if which != "a":
            b = forward_ad.make_dual(b, torch.randn(50, 90).half().t())
        found, wanted = (forward_ad.unpack_dual(c).tangent for c in (product(a, b), a @ b))
    assert torch.allclose(found, wanted, atol=0.05)


def test_out_is_refused_where_gradients_are_recorded(kernel) -> None:
    a, b = operands()
    for tensors in ((a.clone().requires_grad_(), b, OUT), (a, b, OUT.clone().requires_grad_())):
        with pytest.raises(ValueError, match=r"left out where gradients are recorded.*no_grad"):
            kernel(*tensors)
        with torch.no_grad():
            assert close(kernel(*tensors), a, b)


def test_a_backward_pass_learns_that_out_has_changed(kernel) -> None:
    out = torch.ones(70, 50).half()
    scale = torch.ones(70, 50).half().requires_grad_()
    loss = (scale * out).sum()  # saves out
    kernel(*operands(), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_mode_takes_its_own_tensors(product) -> None:
    with torch.inference_mode():
        a, b = operands()
        assert close(product(a, b, torch.empty(70, 50).half()), a, b)
        assert close(product(a, b), a, b)
    a, b = operands()
    assert close(product(a, b), a, b)  # though the first call, which made its buffers, was in inference mode


@pytest.mark.parametrize("stand_in", STAND_INS)
def test_a_tensor_without_memory_is_refused(kernel, stand_in) -> None:
    with pytest.raises(ValueError, match="memory of its own"):
        kernel(STAND_INS[stand_in](), B)


def test_vmap_is_refused(product) -> None:
    with pytest.raises(ValueError, match="memory of its own"):
        torch.vmap(lambda a: product(a, B))(torch.zeros(3, 70, 90).half())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("trace", TRACES)
def test_a_trace_is_refused(kernel, trace) -> None:
    a, b = operands()
    with torch.no_grad(), pytest.raises(ValueError, match="a trace"):
        trace(lambda a: kernel(a, b), a)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_stand_in_for_a_tensor_is_refused(kernel) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - of torch's own making

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(ValueError, match="memory of its own"):
        kernel(mode.from_tensor(A), mode.from_tensor(B))


@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_compiled_functions_call_the_product_outside_their_graphs(product) -> None:
    compiled = torch.compile(lambda a, b: product(a * 2, b) + 1, backend="eager")
    a, b = operands()
    assert torch.allclose(compiled(a, b).float(), (a * 2).float() @ b.float() + 1, atol=0.1)


def test_threads_take_turns(product) -> None:
    def agrees(pair) -> bool:
        first = product(*pair)
        return close(first, *pair) and all(torch.equal(product(*pair), first) for _ in range(100))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(agrees, [operands() for _ in range(4)]))


def child_status(work) -> int:
    """Exit status of a forked child that does this."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: that is the point
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if work() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_process_calls_with_threads_of_its_own(kernel) -> None:
    a, b = operands()
    before = kernel(a, b)
    assert child_status(lambda: torch.equal(kernel(a, b), before)) == 0
    assert torch.equal(kernel(a, b), before)


def test_a_fork_waits_for_the_call_of_another_thread(in_c) -> None:
    a, b = operands()
    before, over = in_c(a, b), threading.Event()

    def work() -> None:
        out = torch.empty_like(before)
        while not over.is_set():
            in_c(a, b, out)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert [child_status(lambda: torch.equal(in_c(a, b), before)) for _ in range(5)] == [0] * 5
    finally:
        over.set()
        thread.join()


def test_without_pythons_headers_calls_go_on_after_one_warning(target, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(library_product.sysconfig, "get_path", lambda name: str(tmp_path))
    library_product.extension.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"several microseconds slower.*Python\.h is missing.*python3-dev"):
            kernel = default_kernel(GEMM, target)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = default_kernel(GEMM, target)
    finally:
        library_product.extension.cache_clear()
    a, b = operands()
    assert close(kernel(a, b), a, b) and torch.equal(kernel(a, b), again(a, b))


def test_a_wheels_compiled_call_needs_neither_headers_nor_a_compiler(monkeypatch, tmp_path) -> None:
    carried = tmp_path / library_product.carried_call().name
    assert library_product._abi() in carried.name
    shutil.copyfile(library_product.built_call(), carried)
    monkeypatch.setattr(library_product, "carried_call", lambda: carried)
    monkeypatch.setattr(library_product, "built_call", lambda: pytest.fail("it was compiled"))
    library_product.extension.cache_clear()
    try:
        module = library_product.extension()
        assert module and module.__file__ == str(carried)
    finally:
        library_product.extension.cache_clear()


def test_a_torch_without_dlpacks_functions_is_named(monkeypatch) -> None:
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    library_product.extension.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"install torch 2\.10"):
            assert library_product.extension() is None
    finally:
        library_product.extension.cache_clear()


def test_a_call_that_does_nothing_is_measured_once() -> None:
    assert 0 < overhead_us(GEMM) == overhead_us(GEMM)
