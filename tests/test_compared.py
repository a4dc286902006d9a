"""The public call beside torch.matmul, on scripted times."""

import csv
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cuda_l2.commands import library
from cuda_l2.library.deploy import compared, dispatch
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.compared import OURS, TORCHS, compare, summary, table
from cuda_l2.records import Gemm
from cuda_l2.runs.grid import MOST_DRAWN, MOST_DRAWN_MNK, drawn_shapes
from cuda_l2.system.errors import UserError

FAST, SLOW, NOISY = Gemm.parse("64x64x64"), Gemm.parse("64x64x128:tn"), Gemm.parse("64x64x256:bf16")


class Scripted:
    """Times of both calls, the same in every round."""

    def __init__(self, ours: float, torchs: float) -> None:
        self.times = {OURS: ours, TORCHS: torchs}

    def capture(self, name: str, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        assert name in self.times

    def sample(self, name: str) -> float:
        return self.times[name]


class NoLibrary:
    def mark(self) -> int:
        return 0

    def release(self, mark: int) -> None:
        assert mark == 0


@pytest.fixture(autouse=True)
def _on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compared, "native", NoLibrary)
    served = {FAST: Choice(str(FAST), "a" * 16, us=2.0, vendor_us=3.0), SLOW: Choice(str(SLOW), "b" * 16, demoted=True)}
    monkeypatch.setattr(dispatch, "known", lambda device: served)


def test_what_is_slower_twice_is_slower_and_what_is_slower_once_is_not() -> None:
    times: dict[Gemm, list[tuple[float, float]]] = {
        FAST: [(2.0, 3.0)],
        SLOW: [(4.0, 3.0), (4.0, 3.0)],
        NOISY: [(4.0, 3.0), (3.0, 3.0)],
    }

    def opened(gemm: Gemm) -> Scripted:
        return Scripted(*times[gemm].pop(0))

    found = list(compare([FAST, SLOW, NOISY], 0, opened))
    assert [each.shape for each in found] == [str(gemm) for gemm in (FAST, SLOW, NOISY, SLOW, NOISY)]
    last = {each.shape: each for each in found}
    fast, slow, noisy = (last[str(gemm)] for gemm in (FAST, SLOW, NOISY))
    assert (fast.kernel, fast.us, fast.torch_us, fast.ratio.estimate, fast.again) == ("a" * 16, 2.0, 3.0, 1.5, None)
    assert slow.slower and not slow.kernel
    assert not noisy.slower and noisy.again is not None and noisy.ratio.estimate == 0.75
    assert not any(times.values())
    lines = summary(last.values())
    assert lines[0] == "3 shapes: geometric mean 0.945x, worst 0.750x"
    assert lines[1] == "1 shapes that kernels serve: geometric mean 1.500x, worst 1.500x"
    assert lines[2] == "below 0.99 both times: 64x64x128:tn"
    rows = list(csv.DictReader(table(last.values()).splitlines()))
    assert [row["again"] for row in rows] == ["", "0.7500", "1.0000"] and rows[0]["ratio"] == "1.5000"


def test_between_tuned_rows_the_larger_ones_kernel_is_named(monkeypatch) -> None:
    lower, upper, between = (replace(FAST, m=m) for m in (16, 32, 20))
    known = {gemm: Choice(str(gemm), name * 16) for gemm, name in ((lower, "c"), (upper, "d"))}
    monkeypatch.setattr(dispatch, "known", lambda device: known)
    (found,) = compare([between], 0, lambda gemm: Scripted(2.0, 3.0))
    assert found.kernel == "d" * 16


def test_a_shape_without_memory_is_left_out() -> None:
    def opened(gemm: Gemm) -> Scripted:
        if gemm is SLOW:
            raise torch.OutOfMemoryError
        return Scripted(2.0, 3.0)

    dispatch.warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="64x64x128:tn is not measured"):
        assert [each.shape for each in compare([SLOW, FAST], 0, opened)] == [str(FAST)]


def test_random_shapes_are_the_seeds_and_within_their_bounds() -> None:
    found = drawn_shapes(300, 1)
    assert found == drawn_shapes(300, 1) and found != drawn_shapes(300, 2)
    assert all(max(g.m, g.n, g.k) <= MOST_DRAWN and g.m * g.n * g.k <= MOST_DRAWN_MNK for g in found)
    assert {(g.layout, g.dtype) for g in found} == {(a, d) for a in ("nn", "tn") for d in ("float16", "bfloat16")}
    few, odd = sum(g.m < 16 for g in found), sum(g.k % 8 != 0 for g in found)
    assert few > 30 and odd > 150


def test_bench_without_a_gpu_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        library.bench("64x64x64")
    with pytest.raises(UserError, match="name shapes"):
        library.bench()
