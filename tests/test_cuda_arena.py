"""The device memory of a task, its sizes and what fits: machine/cuda/arena.py, rigs/cuda.py."""

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from fake_gpu import RMS_NORM, fake_gpu  # noqa: F401 - a fixture

from cuda_l2 import tasks
from cuda_l2.contract import ContractError, plan_cuda
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.alone import Job, given_file
from cuda_l2.machine.cuda.alone_main import _given
from cuda_l2.machine.cuda.arena import GUARD_BYTES, OUTSIDE, CudaArena
from cuda_l2.machine.cuda.windows import PRODUCT_WINDOWS, Sharing, buffer_name
from cuda_l2.machine.fills import GUARD_BYTE, POISON_WORDS, POISONS
from cuda_l2.measure.product_memory import other_layout
from cuda_l2.records import Gemm, Operation, Tensor, from_json, to_json
from cuda_l2.rigs.cuda import needed_bytes, require_feasible, together, windows
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.cases import OwnCases

TASK = tasks.parse("rms_norm:rows=10,columns=12")
MIXED = Operation(
    "mixed",
    (("n", 3),),
    inputs=(Tensor("x", "bfloat16", (2, 7)), Tensor("n", "int64", ())),
    weights=(Tensor("record", "float32", (0, 3)),),
    outputs=(Tensor("flags", "bool", (3,)), Tensor("out", "float64", (2,))),
)


@pytest.fixture
def arena(fake_gpu: Any) -> CudaArena:  # noqa: F811 - the fixture
    return CudaArena([TASK, tasks.parse("rms_norm:rows=3,columns=5")], 4096, windows=3)


def test_every_poison_is_a_word_that_repeats() -> None:
    for dtype, poison in POISONS.items():
        repeated = POISON_WORDS[dtype].to_bytes(4, "little") * 2
        assert repeated[: len(poison)] == poison


def test_few_places_have_every_window_of_every_tensor(fake_gpu: Any) -> None:  # noqa: F811
    met = set()
    with CudaArena([Gemm(64, 48, 80)], 1 << 20, windows=PRODUCT_WINDOWS, sharing=Sharing.OVERLAPPING) as arena:
        for seed in range(200):
            places = arena.covering(np.random.default_rng(seed))
            assert len(places) <= 6
            for tensor in arena.task.tensors:
                assert {arena.window_of(tensor, place) for place in places} == set(range(PRODUCT_WINDOWS))
            met |= set(places)
    assert met == set(range(PRODUCT_WINDOWS**2))


def test_windows_have_tensors_of_their_own(arena: CudaArena) -> None:
    x, gain, out = (*TASK.inputs, *TASK.weights, *TASK.outputs)
    plan = plan_cuda(RMS_NORM, TASK, 132)
    places = arena.places(plan)[: arena.windows]
    assert len({place["x"] for place in places}) == len({place["gain"] for place in places}) == 3
    assert len({place["out"] for place in places}) == 3
    assert arena.places(plan)[arena.windows + 1] == {**places[1], "out": places[2]["out"]}
    assert all(place[name].offset % 16 == 0 for place in places for name in ("x", "gain", "out", "kept"))
    for window in range(3):
        arena.tensor(x, window).fill_(window)
        arena.tensor(gain, window).fill_(window + 10)
    assert [float(arena.tensor(x, window).sum()) for window in range(3)] == [0, 120, 240]
    assert arena.damage() == OUTSIDE  # workspaces have no guards yet
    arena.fill_workspaces(persistent=True)
    assert arena.damage() == ""
    gap = arena.tensor(x, 0).numel() * 4 + places[0]["x"].offset
    arena.buffers[buffer_name(x)].bytes[gap].fill_(0)
    assert arena.damage() == OUTSIDE
    assert out.bytes == 480


def test_rotating_windows_have_outputs_of_their_own(fake_gpu: Any) -> None:  # noqa: F811
    arena = CudaArena([TASK], 4096, windows=3, sharing=Sharing.ROTATING)
    (out,) = TASK.outputs
    for window in range(3):
        arena.tensor(out, window).fill_(window)
    assert [float(arena.tensor(out, window).mean()) for window in range(3)] == [0, 1, 2]
    assert len({tuple(arena.written(window)[0][:2]) for window in range(3)}) == 3
    assert len(arena.poisons()) == 3


def test_snug_tensors_end_where_their_mapping_ends(arena: CudaArena) -> None:
    arena.select(TASK, snug=True)
    for tensor in (*TASK.inputs, *TASK.weights, *TASK.outputs):
        whole = arena.buffers[buffer_name(tensor)].size
        place = arena.place(tensor)
        assert 0 <= whole - (place.offset + tensor.bytes) < 16
        before = arena.buffers[place.buffer].bytes[place.offset - GUARD_BYTES : place.offset]
        assert (before == GUARD_BYTE).all()


def test_tensors_of_every_type_and_of_no_elements_are_held(fake_gpu: Any) -> None:  # noqa: F811
    arena = CudaArena([MIXED], 4096)
    given = {"x": torch.ones(2, 7, dtype=torch.bfloat16), "n": torch.tensor(5), "record": torch.empty(0, 3)}
    segments = arena.held(given)
    assert [segment.bytes for segment in segments] == [28, 8]
    for name, tensor in arena.given().items():
        assert tensor.shape == given[name].shape and tensor.dtype == given[name].dtype
    flags, out = MIXED.outputs
    for place, poison in ((flags, POISONS["bool"]), (out, POISONS["float64"])):
        arena.tensor(place).view(torch.uint8).copy_(torch.tensor(list(poison)).repeat(place.elements))
    assert arena.tensor(flags).dtype == torch.uint8 and arena.tensor(out).isnan().all()
    arena.tensor(flags).fill_(True)
    assert arena.outputs()["flags"].tolist() == [True] * 3
    assert arena.record_stride == 32 and [output[4] for output in arena.written()] == [0, 16]


def test_a_process_that_launches_alone_is_given_the_same_tensors() -> None:
    plan, given = plan_cuda(RMS_NORM, TASK, 132), {"x": torch.rand(2, 7).bfloat16(), "n": torch.tensor(5)}
    given["record"] = torch.empty(0, 3)
    with given_file(MIXED, given) as path:
        job = sanitizer.job(sanitizer.Tool.INITCHECK, Path("kernel.cubin"), plan, MIXED, path)
        assert from_json(Job, to_json(job)) == job and not job.fills_scratch
        found = _given(job)
    assert list(found) == ["x", "n", "record"]
    assert found["x"].tobytes() == given["x"].view(torch.uint8).numpy().tobytes()
    assert found["n"].view("<i8").tolist() == [5] and not found["record"].size
    product = Job("kernel.cubin", plan, Gemm(3, 5, 7), 1)
    assert from_json(Job, to_json(product)) == product
    assert {name: values.nbytes for name, values in _given(product).items()} == {"a": 42, "b": 70}


def test_a_smaller_task_lies_in_the_same_memory(arena: CudaArena) -> None:
    other = tasks.parse("rms_norm:rows=3,columns=5")
    buffers = dict(arena.buffers)
    arena.select(other)
    assert arena.buffers == buffers and arena.windows == 1
    assert tuple(arena.given()["x"].shape) == (3, 5)


def test_a_contract_that_takes_no_odd_sizes_meets_other_ones_too() -> None:
    source = RMS_NORM.replace('["rows"]\nblock', '["rows / (1 - min(columns % 8, 1))"]\nblock')
    large = tasks.parse("rms_norm:rows=64,columns=512")
    served = []
    for other in OwnCases(large, 3, "cuda").others:
        with contextlib.suppress(ContractError):
            plan_cuda(source, other, 132)
            served.append(dict(other.sizes)["columns"])
    assert [columns % 32 == 0 for columns in served] == [False, False, True, True] and 512 not in served
    assert all(columns % 16 == 8 for columns in served[:2])


def test_a_task_too_large_for_the_gpu_says_so() -> None:
    large = tasks.parse("softmax:rows=100000,columns=100000")
    with pytest.raises(UserError, match=r"needs about .* GiB of GPU memory .* choose smaller sizes"):
        require_feasible(large, 50 << 20, 2, 80 << 30)
    require_feasible(tasks.parse("softmax", "cuda"), 50 << 20, 2, 60 << 30)


def test_as_many_judge_at_once_as_memory_holds() -> None:
    found = [together(Gemm(size, size, size), 50 << 20, 2, 80 << 30) for size in (256, 8192, 16384)]
    assert found[0] >= 8 > found[1] >= found[2] == 1 and found == sorted(found, reverse=True)


@pytest.mark.full
def test_every_tasks_own_gpu_sizes_fit_a_gpu() -> None:
    from cuda_l2.tasks._base import definitions  # noqa: PLC0415

    for definition in definitions().values():
        for dtype in definition.dtypes:
            task = definition.task(dtype=dtype, target="cuda")
            assert dict(task.sizes) == dict(definition.gpu)
            assert needed_bytes(task, 50 << 20, 2) < 70 << 30, str(task)


def test_windows_fit_the_cache_where_one_does() -> None:
    assert windows(tasks.parse("softmax:rows=64,columns=64"), 50 << 20) == 4
    assert windows(tasks.parse("softmax", "cuda"), 50 << 20) == 2


@pytest.mark.parametrize("shape", ["24x10x12", "24x10x12:tn", "64x48x80"])
def test_a_products_windows_lie_as_timed_ones_always_have(fake_gpu: Any, shape: str) -> None:  # noqa: F811
    """Published times depend on it."""
    gemm = Gemm.parse(shape)
    a, b, c, other = (*gemm.tensors, other_layout(gemm))
    row = 2 * gemm.k
    arena = CudaArena([gemm], 4096, windows=4, sharing=Sharing.OVERLAPPING, beside=[other])
    assert arena.shift(a) == row * (256 // math.gcd(row, 256))
    assert arena.shift(c) >= c.bytes + 16
    assert [arena.place(a, window).offset for window in range(4)] == [4096 + i * arena.shift(a) for i in range(4)]
    assert arena.span(a).numel() == a.bytes + 3 * arena.shift(a)
    for tensor in (b, other):  # whole rows of B as it lies, so that a window is a matrix
        assert (
            arena.shift(tensor) % (tensor.bytes // tensor.shape[tensor.column_major]) == arena.shift(tensor) % 256 == 0
        )
        assert [arena.place(tensor, 4 * i + 3).offset for i in range(4)] == [
            4096 + i * arena.shift(tensor) for i in range(4)
        ]
    windows = [[arena.window_of(tensor, place) for tensor in (a, b, c)] for place in range(arena.place_count)]
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert len({(found[one], found[two]) for found in windows}) == 16, "every pair of windows meets once"
    arena = CudaArena([gemm], 4096, windows=5, sharing=Sharing.PACKED, beside=[other])
    for tensor in (a, b, c, other):
        assert arena.shift(tensor) == -(-tensor.bytes // 256) * 256
        assert [arena.place(tensor, w).offset for w in range(5)] == [4096 + w * arena.shift(tensor) for w in range(5)]
    values = torch.rand(gemm.k, gemm.n).half()
    for tensor in (b, other):
        arena.tensor(tensor, 2).copy_(values)
    assert torch.equal(arena.tensor(b, 2), arena.tensor(other, 2)) and arena.tensor(b).stride() == b.strides
