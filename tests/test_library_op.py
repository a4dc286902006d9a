"""The op in C++ on a driver that records: launches, streams, arguments, workspaces, and what it leaves to torch."""

import contextlib
import ctypes
import platform
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import STREAM, FakeDriver, fake_driver
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from cuda_l2 import contract
from cuda_l2.library.deploy import calls, entries, native
from cuda_l2.library.deploy.native import Native
from cuda_l2.records import Gemm
from cuda_l2.system import paths
from cuda_l2.system.native import compiled

HALF, BFLOAT = torch.float16, torch.bfloat16
NAME = "0123456789abcdef"
CUBIN = b"cubin"
DIRECT = """/* cuda-l2
target = "cuda"
arch = "sm_90a"
dtype = "DTYPE"
[[launch]]
kernel = "gemm"
grid = ["cdiv(m, 16)", "cdiv(n, 8)", 2]
block = [32, 4]
cluster = [1, 1, 2]
shared_bytes = 100000
args = ["a", "b", "c", "m", "n", "k", {int64 = "m * n"}]
edge = "programmatic"
*/
"""
MAPPED = """/* cuda-l2
target = "cuda"
arch = "sm_90a"
workspace = [
  {name = "kept", bytes = "4 * m * n + 2", kind = "persistent", fill = 0xffffffff},
  {name = "scrap", bytes = 64},
]
[[tensor_map]]
name = "map_b"
tensor = "b"
dims = [64, "n", "k / 64"]
strides = ["2 * k", 128]
box = [64, 32, 1]
swizzle = "128B"
l2_promotion = "256B"
[[tensor_map]]
name = "map_kept"
tensor = "kept"
dims = [16, "m"]
strides = [64]
box = [16, 8]
dtype = "float32"
out_of_bounds = "nan"
[[table]]
name = "order"
length = 5
value = "i * 3"
[[launch]]
kernel = "gemm"
grid = [7]
block = [128]
args = ["map_b", "map_kept", "a", "c", "kept", "scrap", "order"]
*/
"""


SAME = """
#define __CUDA_API_VERSION_INTERNAL  // the functions under their plain names
#include <cuda.h>
#include <type_traits>
#include "driver.h"
namespace ours = cuda_l2;
#define SAME_PLACE(a, b) static_assert(offsetof(ours::LaunchConfig, a) == offsetof(CUlaunchConfig, b))
static_assert(sizeof(ours::LaunchConfig) == sizeof(CUlaunchConfig) && sizeof(ours::LaunchAttribute) == sizeof(CUlaunchAttribute));
SAME_PLACE(grid, gridDimX); SAME_PLACE(block, blockDimX); SAME_PLACE(shared_bytes, sharedMemBytes);
SAME_PLACE(stream, hStream); SAME_PLACE(attributes, attrs); SAME_PLACE(attribute_count, numAttrs);
static_assert(offsetof(ours::LaunchAttribute, value) == offsetof(CUlaunchAttribute, value));
static_assert(offsetof(ours::LaunchAttribute, value.cluster) == offsetof(CUlaunchAttribute, value.clusterDim));
static_assert(sizeof(ours::EncodedMap) == sizeof(CUtensorMap) && alignof(ours::EncodedMap) % alignof(CUtensorMap) == 0);
static_assert(ours::kClusterDimension == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(ours::kProgrammaticSerialization == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
static_assert(ours::kMaxThreads == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
static_assert(ours::kMaxDynamicShared == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
static_assert(ours::kNonPortableClusters == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED);
static_assert(ours::kMultiprocessors == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(ours::kCapturing == CU_STREAM_CAPTURE_STATUS_ACTIVE && ours::kRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
template <class T> struct Arity;
template <class R, class... P> struct Arity<R (*)(P...)> {
  static constexpr size_t count = sizeof...(P), bytes = (sizeof(P) + ... + 0);
};
#define SAME_FUNCTION(name, ...)                                                              \\
  static_assert(Arity<decltype(&::name)>::count == Arity<decltype(ours::Driver::name)>::count); \\
  static_assert(Arity<decltype(&::name)>::bytes == Arity<decltype(ours::Driver::name)>::bytes, #name);
CUDA_L2_DRIVER(SAME_FUNCTION)
"""


@pytest.fixture
def driver() -> Iterator[tuple[FakeDriver, Native]]:
    with fake_driver() as found:
        yield found


def put(library: Native, text: str, shape: str, name: str = NAME, cubin: bytes = CUBIN) -> str:
    gemm = Gemm.parse(shape)
    plan = contract.parse_cuda(text).plan(gemm, 132)
    return library.put(entries.packed(plan, gemm, 0), name, cubin)


def direct(fake: FakeDriver, library: Native, shape: str) -> None:
    fake.parameters([8, 8, 8, 4, 4, 4, 8])
    assert put(library, DIRECT.replace("DTYPE", Gemm.parse(shape).dtype), shape) == ""


def mapped(fake: FakeDriver, library: Native, shape: str = "32x64x128:tn") -> None:
    fake.parameters([128, 128, 8, 8, 8, 8, 12])
    assert put(library, MAPPED, shape) == ""


def operands(m: int, n: int, k: int, dtype=HALF) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)


def test_a_launch_is_the_plans_on_the_current_stream(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    c = calls.matmul(a, b)
    (launch,) = fake.launches
    assert [*launch.grid] == [3, 3, 2] and [*launch.block] == [32, 4, 1] and [*launch.cluster] == [1, 1, 2]
    assert launch.shared == 100000 and launch.programmatic == 1 and launch.stream == STREAM
    assert [*launch.words[:7]] == [a.data_ptr(), b.data_ptr(), c.data_ptr(), 33, 24, 16, 33 * 24]
    assert c.shape == (33, 24) and c.is_contiguous() and c.dtype == HALF
    fake.stream(STREAM + 1)
    calls.matmul(a, b)
    assert fake.launches[1].stream == STREAM + 1
    assert library.counts()["launched"] == 2 and library.counts()["vendor"] == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "leading", "transposed"),
    [
        ("6x24x16", HALF, (2, 3), False),
        ("6x24x16:tn", HALF, (2, 3), True),
        ("6x24x16:tn:bf16", BFLOAT, (6,), True),
        ("1x24x16:bf16", BFLOAT, (), False),
    ],
)
def test_ranks_types_and_layouts_find_their_entry(driver, shape, dtype, leading, transposed) -> None:
    fake, library = driver
    direct(fake, library, shape)
    a = torch.ones(*leading, 16, dtype=dtype)
    b = torch.ones(24, 16, dtype=dtype).t() if transposed else torch.ones(16, 24, dtype=dtype)
    assert calls.matmul(a, b).shape == (*leading, 24)
    assert fake["launch_count"] == 1
    if transposed:
        assert calls.linear(a, b.t()).shape == (*leading, 24)
        assert fake["launch_count"] == 2


def test_a_plain_call_does_without_torchs_dispatcher(driver, monkeypatch) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    direct(fake, library, "33x24x16:tn")
    for name in ("DIRECT_PRODUCT", "DIRECT_LINEAR", "_into"):
        monkeypatch.setattr(calls, name, None)
    a, b = operands(33, 24, 16)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for c in (calls.matmul(a, b), calls.linear(a, b.t().contiguous())):
                assert type(c) is torch.Tensor and c.shape == (33, 24) and c.dtype == HALF and not c.requires_grad
                assert c._use_count() == 1
                assert c.is_inference() == (mode is torch.inference_mode)
            out = torch.empty(33, 24, dtype=HALF)
            assert calls.matmul(a, b, out=out) is out and fake.launches[-1].words[2] == out.data_ptr()
            assert out.is_inference() or out._version == 1
    assert fake["launch_count"] == 9 and library.counts()["vendor"] == 0
    with torch.no_grad():  # a module's weight
        assert calls.linear(a, torch.nn.Parameter(b.t().contiguous())).shape == (33, 24)
    assert fake["launch_count"] == 10
    gone = weakref.ref(calls.matmul(a, b))
    assert gone() is None


class Marked(torch.Tensor):
    """A subclass, which may stand for anything."""


def unusual(a: torch.Tensor, b: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Calls that only torch's dispatcher sees for what they are."""
    negative, memory = torch._neg_view(a), torch.ones(2000, dtype=HALF)
    quick = calls.QUICK_PRODUCT

    def in_mode(mode: Any) -> object:
        with mode:
            return quick(a, b)

    def in_graph() -> object:
        found = []
        make_fx(lambda a, b: (found.append(quick(a, b)), a)[1], pre_dispatch=True)(a, b)
        return found[0]

    def functionalized() -> object:
        found = []
        torch.func.functionalize(lambda a: (found.append(quick(a, b)), a.clone())[1])(a)
        return found[0]

    def traced() -> object:
        found = []
        torch.jit.trace(lambda a, b: (found.append(quick(a, b)), a)[1], (a, b), check_trace=False)
        return found[0]

    def forward_mode() -> object:
        with forward_ad.dual_level():
            return quick(forward_ad.make_dual(a, a), b)

    def batched() -> object:
        found = []
        torch.vmap(lambda a: (found.append(quick(a, b)), a)[1])(a[None])
        return found[0]

    def functional() -> object:
        found = []
        torch.func.grad(lambda a: (found.append(quick(a, b)), a.sum())[1])(a)
        return found[0]

    return {
        "autocast": lambda: in_mode(torch.autocast("cpu", dtype=BFLOAT)),
        "a dispatch mode": lambda: in_mode(FakeTensorMode(allow_non_fake_inputs=True)),
        "a trace": traced,
        "a trace before dispatch": in_graph,
        "functionalize": functionalized,
        "zeros without memory": lambda: quick(torch._efficientzerotensor(a.shape, dtype=HALF), b),
        "zeros within such": lambda: quick(torch._efficientzerotensor(66, 16, dtype=HALF)[32:65], b),
        "forward mode": forward_mode,
        "vmap": batched,
        "grad": functional,
        "a negative view": lambda: quick(negative, b),
        "a subclass": lambda: quick(a.as_subclass(Marked), b),
        "meta": lambda: quick(a.to("meta"), b.to("meta")),
        "sparse": lambda: quick(a.to_sparse(), b),
        "no tensor": lambda: quick(a, 3.0),
        "one operand": lambda: quick(a),
        "another type": lambda: quick(a, b.float()),
        "no entry": lambda: quick(a[:5], b),
        "a negative result": lambda: quick(a, b, torch._neg_view(torch.empty(33, 24, dtype=HALF))),
        "a result that wants a gradient": lambda: quick(a, b, torch.empty(33, 24, dtype=HALF, requires_grad=True)),
        "a result in an operand": lambda: quick(memory[:528].view(33, 16), b, memory[512:1304].view(33, 24)),
        "a result of another shape": lambda: quick(a, b, memory[512:1304].view(24, 33)),
        "four": lambda: quick(a, b, None, None),
    }


@pytest.mark.parametrize("which", unusual(*operands(33, 24, 16)))
def test_what_is_out_of_the_ordinary_goes_through_the_dispatcher(driver, which) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    assert unusual(*operands(33, 24, 16))[which]() is None and fake["launch_count"] == 0


def test_a_functionalized_call_reads_what_was_written_to_its_operand(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    seen = []

    def doubled(a: torch.Tensor) -> torch.Tensor:
        a = a.clone()
        seen.append(torch._from_functional_tensor(a.mul_(2)).data_ptr())
        return calls.matmul(a, b)

    torch.func.functionalize(doubled)(a)
    assert [launch.words[0] for launch in fake.launches] == seen and seen[0]


def test_a_graph_traced_before_dispatch_has_the_product(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    graph = make_fx(lambda a: calls.matmul(a, b), pre_dispatch=True)(a)
    assert torch.equal(graph(a * 2), a @ b * 2) and fake["launch_count"] == 0


def test_a_mode_that_moves_out_has_its_new_memory_written(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    out, moved = torch.empty(2, 33, 24, dtype=HALF)

    class Moving(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out.set_(moved)
            return function(*args, **(kwargs or {}))

    with Moving():
        assert calls.QUICK_PRODUCT(a, b, out) is None
        assert calls.matmul(a, b, out=out) is out
    assert [launch.words[2] for launch in fake.launches] == [moved.data_ptr()]


def test_a_default_device_is_no_mode_that_sees_products(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    with torch.device("cpu"):
        assert calls.QUICK_PRODUCT(a, b) is not None
        assert "_Product" in type(calls.matmul(a, b.requires_grad_()).grad_fn).__name__
        assert type(calls.matmul(a[:5], b).grad_fn).__name__ == "MmBackward0"
    assert fake["launch_count"] == 2


def test_a_mode_sees_products_of_a_shape_that_a_kernel_serves(driver) -> None:
    """Tuning a model again notes its shapes so."""
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    seen = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Noting():
        calls.matmul(a, b)
        calls.linear(a, b.t())
        calls.matmul(a, b.clone().requires_grad_())
    operators = {"cuda_l2.product.default", "cuda_l2.linear.default", "cuda_l2.matmul.default"}
    assert operators <= {*seen} and fake["launch_count"] == 3


def wanting(m: int, n: int, k: int, which: str) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(*shape).half() for shape in ((m, k), (k, n)))
    return a.requires_grad_("a" in which), b.requires_grad_("b" in which)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("which", ["a", "b", "ab"])
def test_gradients_are_recorded_without_the_operators_and_keep_what_they_need(driver, which, transposed) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = wanting(33, 24, 16, which)
    rows, given = a.view(3, 11, 16), torch.randn(3, 11, 24).half()
    result = calls.linear(rows, b.t()) if transposed else calls.matmul(rows, b)
    assert fake["launch_count"] == 1 and "_Product" in type(result.grad_fn).__name__
    assert [kept is not None for kept in result.grad_fn.saved_tensors] == ["b" in which, "a" in which]
    found = torch.autograd.grad(result, [tensor for tensor in (a, b) if tensor.requires_grad], given)
    again = [tensor.detach().requires_grad_() for tensor in (a, b)]
    right = torch.autograd.grad(again[0].view(3, 11, 16) @ again[1], again, given)
    for ours, theirs in zip(
        found, [each for each, name in zip(right, "ab", strict=True) if name in which], strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("call", [calls.matmul, lambda a, b: calls.linear(a, b.t())])
def test_gradients_of_a_vector(driver, call) -> None:
    fake, library = driver
    direct(fake, library, "1x24x16")
    a, b = wanting(1, 24, 16, "ab")
    (found_a, found_b) = torch.autograd.grad(call(a[0], b).sum(), (a, b))
    assert fake["launch_count"] == 1
    assert torch.allclose(found_a[0], b.sum(1), atol=1e-2) and torch.allclose(found_b, a[0, :, None].expand(16, 24))


def test_torch_makes_what_the_driver_does_not_launch_and_gradients_are_kept(driver, monkeypatch) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = wanting(33, 24, 16, "ab")

    def none(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("torch failed; its message stands above")

    monkeypatch.setattr(calls, "DIRECT_PRODUCT", none)
    fake["fails"] = 1
    result = calls.matmul(a, b)
    assert torch.equal(result, a @ b) and "_Product" in type(result.grad_fn).__name__


def test_gradients_have_gradients(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = wanting(33, 24, 16, "ab")
    (first,) = torch.autograd.grad(calls.matmul(a, b), a, torch.ones(33, 24).half(), create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), b)
    assert torch.equal(second, torch.full_like(b, 33))


def test_what_was_kept_for_a_gradient_and_changed_since_is_an_error(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = wanting(33, 24, 16, "a")
    result = calls.matmul(a, b)
    b.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("call", [calls.matmul, lambda a, b: calls.linear(a, b.t())])
def test_torch_records_products_that_no_kernel_serves(driver, call) -> None:
    fake, _ = driver
    a, b = wanting(33, 24, 16, "ab")
    result = call(a, b)
    assert fake["launch_count"] == 0 and type(result.grad_fn).__name__ == "MmBackward0"
    assert torch.equal(result, a @ b)


def test_transforms_of_torch_func_take_the_operators(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = wanting(33, 24, 16, "b")
    found = torch.func.grad(lambda a: (calls.matmul(a, b.detach()) * 0).sum() + a.sum())(a)
    assert torch.equal(found, torch.ones_like(a))


def test_constants_go_through_the_dispatcher_which_sees_what_writes_them(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    library.constant(b._cdata)
    try:
        assert calls.QUICK_PRODUCT(a, b) is None and fake["launch_count"] == 0
        assert calls.matmul(a, b).shape == (33, 24) and fake["launch_count"] == 1
    finally:
        library.variable(b._cdata)
    assert calls.QUICK_PRODUCT(a, b) is not None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the recording driver has that processor's calls")
def test_results_are_made_without_the_dispatcher_where_torch_has_a_function_for_it() -> None:
    a, b = operands(6, 24, 16)
    with fake_driver("-DEMPTY_STRIDED") as (fake, library):
        direct(fake, library, "6x24x16")
        product = calls.matmul(a.view(2, 3, 16), b)
        with torch.inference_mode():
            inferred = torch.ops.cuda_l2.product(a, b)
        assert (fake["empty_count"], fake["empty_type"], fake["empty_index"]) == (2, 0, -1)  # of the CPU
        assert [launch.words[2] for launch in fake.launches] == [product.data_ptr(), inferred.data_ptr()]
    assert (product.shape, product.stride(), product.dtype) == ((2, 3, 24), (72, 24, 1), HALF)
    assert inferred.shape == (6, 24) and inferred.is_inference() and not product.is_inference()
    assert product.add_(1)._version == 1 and not product.requires_grad


@pytest.mark.parametrize("missing", ["WRAP", "AUTOCASTS"])
def test_without_a_function_of_torchs_the_dispatcher_serves_all(driver, monkeypatch, missing) -> None:
    _, library = driver
    monkeypatch.setattr(native, missing, "_ZNot_there")
    assert library.quick(torch.matmul, transposed=False) is None


def test_tensor_maps_are_encoded_once_per_pointer(driver) -> None:
    fake, library = driver
    mapped(fake, library)
    a, b = torch.ones(32, 128, dtype=HALF), torch.ones(64, 128, dtype=HALF)
    other = b.clone()
    for weight in (b, b, other, b, other):
        calls.matmul(a, weight.t())
    over_b, over_kept, over_other = fake.maps
    assert (over_b.address, over_other.address) == (b.data_ptr(), other.data_ptr())
    assert [*over_b.dims[:3]] == [64, 64, 2] and [*over_b.strides[:2]] == [256, 128] and over_b.rank == 3
    assert [*over_b.box[:3]] == [64, 32, 1] and [*over_b.steps[:3]] == [1, 1, 1] and [*over_b.enums] == [6, 0, 3, 3, 0]
    assert [*over_kept.enums] == [7, 0, 0, 0, 1] and over_kept.rank == 2
    assert library.counts()["encoded"] == 3
    assert [launch.words[0] for launch in fake.launches] == [x.data_ptr() for x in (b, b, other, b, other)]


def test_the_enums_are_the_drivers() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    for words, kind, prefix in (
        (entries.MAP_DTYPES, driver.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE_"),
        (entries.INTERLEAVES, driver.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE_"),
        (entries.SWIZZLES, driver.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE_"),
    ):
        for word, number in words.items():
            assert int(getattr(kind, prefix + word.upper())) == number
    for word, number in entries.PROMOTIONS.items():
        name = f"CU_TENSOR_MAP_L2_PROMOTION_{'NONE' if word == 'none' else 'L2_' + word}"
        assert int(getattr(driver.CUtensorMapL2promotion, name)) == number


def test_structures_numbers_and_functions_are_those_of_cuda_h(tmp_path) -> None:
    headers = pytest.importorskip("cuda.pathfinder").find_nvidia_header_directory("cudart")
    if not headers or not (Path(headers) / "cuda.h").exists():
        pytest.skip("cuda.h is not installed: pip install 'cuda-l2[cuda]'")
    source = tmp_path / "same.cpp"
    source.write_text(SAME)
    command = [
        paths.cxx_name(),
        "-std=c++17",
        "-fsyntax-only",
        f"-I{headers}",
        f"-I{native.SOURCE.parent}",
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_persistent_workspace_is_filled_once_a_stream(driver) -> None:
    fake, library = driver
    mapped(fake, library)
    a, b = torch.ones(32, 128, dtype=HALF), torch.ones(64, 128, dtype=HALF)
    for stream in (STREAM, STREAM, STREAM + 1, STREAM):
        fake.stream(stream)
        calls.matmul(a, b.t())
    kept = [launch.words[4] for launch in fake.launches]
    assert kept[0] == kept[1] == kept[3] != kept[2]
    assert fake["fill_count"] == 2 and not any(address % 1024 for address in kept)
    words = (32 * 64 * 4 + 2 + 3) // 4
    assert ctypes.c_uint32.from_address(kept[0] + 4 * (words - 1)).value == 0xFFFFFFFF


def test_a_captured_graph_has_a_workspace_of_its_own(driver) -> None:
    fake, library = driver
    mapped(fake, library)
    a, b = torch.ones(32, 128, dtype=HALF), torch.ones(64, 128, dtype=HALF)
    for capture in (0, 1, 1, 2, 0):
        fake.capture(capture)
        calls.matmul(a, b.t())
    kept = [launch.words[4] for launch in fake.launches]
    assert kept[0] == kept[4] and kept[1] == kept[2] and len(set(kept)) == 3
    assert fake["fill_count"] == 3


def test_a_table_is_padded_to_the_structure(driver) -> None:
    fake, library = driver
    fake.parameters([128, 128, 8, 8, 8, 8, 4096])  # the structure is longer than the table's ten bytes
    assert put(library, MAPPED, "32x64x128:tn") == ""
    calls.matmul(torch.ones(32, 128, dtype=HALF), torch.ones(64, 128, dtype=HALF).t())
    assert fake.launches[0].words[6] == 0x0009000600030000 and fake.launches[0].tails[6] == 0


@pytest.mark.parametrize(
    ("sizes", "text", "cubin", "why"),
    [
        ([8, 8, 8, 4, 4, 4], DIRECT, CUBIN, "fewer parameters"),
        ([8, 8, 8, 4, 4, 4, 8, 8], DIRECT, CUBIN, "more parameters"),
        ([8, 8, 8, 4, 4, 4, 4], DIRECT, CUBIN, "other parameters"),
        ([8, 8, 8, 4, 4, 4, 8], DIRECT, b"other", "does not load"),
        ([8, 8, 8, 4, 4, 4, 8], DIRECT.replace('"gemm"', '"other"'), CUBIN, "other is missing"),
        ([8, 8, 8, 4, 4, 4, 8], DIRECT.replace("100000", "300000"), CUBIN, "shared memory"),
        ([8, 8, 8, 4, 4, 4, 8], DIRECT.replace("[32, 4]", "[1024, 1]"), CUBIN, ""),
        ([8, 8, 8, 4, 4, 4, 8], DIRECT.replace("edge =", "coresident = true\nedge ="), CUBIN, "wait for one another"),
    ],
)
def test_what_the_device_cannot_launch_is_left_to_torch(driver, sizes, text, cubin, why) -> None:
    fake, library = driver
    fake.parameters(sizes)
    said = put(library, text.replace("DTYPE", "float16"), "33x24x16", cubin=cubin)
    assert why in said and bool(why) == bool(said)
    a, b = operands(33, 24, 16)
    result = calls.matmul(a, b)
    assert fake["launch_count"] == (not why)
    assert not why or torch.equal(result, a @ b)


def test_a_plan_that_ends_early_is_refused(driver) -> None:
    _, library = driver
    gemm = Gemm.parse("33x24x16")
    plan = entries.packed(contract.parse_cuda(DIRECT.replace("DTYPE", "float16")).plan(gemm, 132), gemm, 0)
    assert "ends early" in library.put(plan[:-1], NAME, CUBIN)
    assert "another version" in library.put(b"\x63" + plan[1:], NAME, CUBIN)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(16, 33, dtype=HALF).t(), torch.ones(16, 24, dtype=HALF)),  # A is column-major
        (torch.ones(33, 32, dtype=HALF)[:, :16], torch.ones(16, 24, dtype=HALF)),  # rows are apart
        (torch.ones(33, 16, dtype=HALF), torch.ones(16, 48, dtype=HALF)[:, ::2]),
        (torch.ones(33 * 16 + 1, dtype=HALF)[1:].view(33, 16), torch.ones(16, 24, dtype=HALF)),  # not aligned
        (torch.ones(33, 16), torch.ones(16, 24)),
        (torch.ones(33, 16, dtype=BFLOAT), torch.ones(16, 24, dtype=BFLOAT)),  # no entry for this type
        (torch.ones(2, 33, 16, dtype=HALF), torch.ones(2, 16, 24, dtype=HALF)),
        (torch.ones(33, 16, dtype=HALF), torch.ones(16, dtype=HALF)),
        (torch.ones(0, 16, dtype=HALF), torch.ones(16, 24, dtype=HALF)),
    ],
)
def test_what_no_kernel_serves_goes_to_torch(driver, a, b) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    assert torch.equal(calls.matmul(a, b), torch.matmul(a, b))
    assert fake["launch_count"] == 0 and library.counts()["vendor"] == 1


def test_a_miss_is_asked_once_and_then_known(driver) -> None:
    fake, library = driver
    asked = []

    def resolve(key: entries.Key) -> None:
        asked.append(str(entries.gemm_of(key)))
        if key[4] == 33:
            direct(fake, library, "33x24x16:bf16")

    library.on_miss(resolve)
    for m in (33, 34, 33, 34):
        calls.matmul(*operands(m, 24, 16, BFLOAT))
    assert asked == ["33x24x16:bf16", "34x24x16:bf16"]
    assert fake["launch_count"] == 2 and library.counts()["vendor"] == 2


def test_a_launch_that_fails_warns_once_and_torch_serves_the_call(driver, capfd) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    fake["fails"] = 1
    a, b = operands(33, 24, 16)
    assert torch.equal(calls.matmul(a, b), a @ b) and torch.equal(calls.matmul(a, b), a @ b)
    fake["fails"] = 0
    assert torch.equal(calls.matmul(a, b), a @ b)
    assert fake["launch_count"] == 0
    assert library.counts()["vendor"] == 3
    assert capfd.readouterr().err.count("cannot be launched (error 719)") == 1


def test_out_is_written_in_place_and_its_version_counts(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    out = torch.zeros(33, 24, dtype=HALF)
    before = out._version
    assert calls.matmul(a, b, out=out) is out
    assert fake.launches[0].words[2] == out.data_ptr() and out._version > before
    for other in (torch.zeros(24, 33, dtype=HALF).t(), a.new_zeros(33 * 24 + 8)[1 : 33 * 24 + 1].view(33, 24)):
        calls.matmul(a, b, out=other)
        assert torch.equal(other, a @ b)
    assert fake["launch_count"] == 1


def test_out_that_overlaps_an_operand_is_torchs(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    memory = torch.ones(4096, dtype=HALF)
    a, b, out = memory[: 33 * 16].view(33, 16), memory[1024 : 1024 + 384].view(16, 24), memory[800:1592].view(33, 24)
    with contextlib.suppress(RuntimeError):
        calls.matmul(a, b, out=out)
    with contextlib.suppress(RuntimeError):
        calls.matmul(a, b, out=memory[:792].view(33, 24))
    assert fake["launch_count"] == 0
    calls.matmul(a, b, out=memory[1408:2200].view(33, 24))  # begins where B ends
    assert fake["launch_count"] == 1


def test_every_thread_enters_the_devices_context(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = operands(33, 24, 16)
    calls.matmul(a, b)
    entered = fake["context_sets"]
    calls.matmul(a, b)
    assert fake["context_sets"] == entered
    thread = threading.Thread(target=lambda: calls.matmul(a, b))
    thread.start()
    thread.join()
    assert fake["context_sets"] == entered + 1
    assert len({launch.context for launch in fake.launches}) == 1 and fake["launch_count"] == 3


def test_gradients_use_the_op_too(driver) -> None:
    fake, library = driver
    direct(fake, library, "33x24x16")
    a, b = (x.requires_grad_() for x in operands(33, 24, 16))
    c = calls.matmul(a, b)
    assert fake["launch_count"] == 1 and c.requires_grad
    c.backward(torch.ones(33, 24, dtype=HALF))
    assert torch.equal(a.grad, torch.full_like(a, 24)) and torch.equal(b.grad, torch.full_like(b, 33))


def test_one_module_serves_every_plan_of_a_kernel(driver) -> None:
    fake, library = driver
    for m in (33, 34, 35):
        direct(fake, library, f"{m}x24x16")
    assert fake["module_count"] == 1 and fake["exchanged"] == 1


class Matrix(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), *[(name, ctypes.c_uint64) for name in ("rows", "columns", "leading")]]


class Call(ctypes.Structure):
    _fields_ = [
        *[("addresses", ctypes.c_uint64 * 3), *[(name, ctypes.c_uint64) for name in ("workspace", "bytes", "stream")]],
        *[("algorithm", ctypes.c_uint64 * 8), *[(name, Matrix) for name in "abc"], ("operation", ctypes.c_int * 3)],
    ]


def test_an_algorithm_of_cublaslt_is_launched_on_the_operands_as_the_library_sees_them(driver) -> None:
    _, library = driver
    path = str(compiled(Path(__file__).with_name("fake_cublaslt.c"), "-shared", "-fPIC"))
    fake, words = ctypes.CDLL(path), tuple(range(2, 10))
    count, alive = (ctypes.c_int.in_dll(fake, name) for name in ("call_count", "alive"))
    count.value = 0

    def put_algorithm(shape: str, first: int = 2, room: int = 4096) -> str:
        algorithm = struct.pack("<8Q", first, *words[1:])
        return library.put(entries.packed_algorithm(Gemm.parse(shape), 0, algorithm, room, path), "0", b"")

    assert put_algorithm("32x64x128:tn:bf16") == put_algorithm("32x64x128") == ""
    a, b = operands(32, 64, 128, BFLOAT)
    turned = b.t().contiguous().t()
    c, d = calls.matmul(a, turned), calls.matmul(a.half(), b.half())
    assert count.value == 2 and library.counts()["launched"] == 2 and library.counts()["vendor"] == 0
    tn, nn = (Call * 16).in_dll(fake, "calls")[:2]
    assert tuple(tn.addresses) == (a.data_ptr(), turned.data_ptr(), c.data_ptr()) and nn.addresses[2] == d.data_ptr()
    assert tn.workspace % 1024 == 0 and tn.workspace and (tn.bytes, tn.stream) == (4096, STREAM)
    assert tuple(tn.algorithm) == words and tuple(tn.operation) == (68, 0, 1) and tuple(nn.operation) == (68, 0, 0)

    def seen(call: Call) -> list[tuple[int, ...]]:
        return [(each.type, each.rows, each.columns, each.leading) for each in (call.a, call.b, call.c)]

    assert seen(tn) == [(14, 128, 32, 128), (14, 128, 64, 128), (14, 64, 32, 64)]
    assert seen(nn) == [(2, 128, 32, 128), (2, 64, 128, 64), (2, 64, 32, 64)]
    assert "does not take the algorithm" in put_algorithm("64x64x64", first=1)
    assert "more workspace" in put_algorithm("64x64x64", room=64)
    library.clear()
    assert alive.value == 0
