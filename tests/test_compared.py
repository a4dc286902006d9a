"""The public call beside torch.matmul and cuBLASLt, on scripted times."""

import csv
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cuda_l2.commands import library
from cuda_l2.library.deploy import compared, dispatch
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.compared import ALONE, OURS, TORCHS, compare, summary, table
from cuda_l2.library.deploy.tuning import Arm
from cuda_l2.records import Candidate, Gemm
from cuda_l2.runs.grid import MOST_DRAWN, MOST_DRAWN_MNK, drawn_shapes
from cuda_l2.system.errors import UserError

FAST, SLOW, NOISY = Gemm.parse("64x64x64"), Gemm.parse("64x64x128:tn"), Gemm.parse("64x64x256:bf16")
ALGORITHMS = [Arm("cublaslt", Candidate("", "cublaslt", (("W0", number),), "cublaslt")) for number in range(3)]


def none(gemm: Gemm) -> list[Arm]:
    return []


class Scripted:
    """Times of the calls and of algorithms, the same in every round; one of 0 us does not run."""

    def __init__(self, ours: float, torchs: float, *algorithms: float, alone: float = 0.0) -> None:
        own = {ALONE: alone} if alone else {}
        self.times = {OURS: ours, TORCHS: torchs, **own, **dict(zip(ALGORITHMS, algorithms, strict=False))}

    def capture(self, name: str, call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        assert name in self.times

    def prepare(self, arm: Arm) -> bool:
        return self.times.get(arm, 0) > 0

    def alone(self, name: str) -> bool:
        return name in self.times

    def sample(self, name: str | Arm) -> float:
        return self.times[name]


class NoLibrary:
    def mark(self) -> int:
        return 0

    def release(self, mark: int) -> None:
        assert mark == 0

    def clear(self) -> None:
        pass


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

    found = list(compare([FAST, SLOW, NOISY], 0, opened, none))
    assert [each.shape for each in found] == [str(gemm) for gemm in (FAST, SLOW, NOISY, SLOW, NOISY)]
    last = {each.shape: each for each in found}
    fast, slow, noisy = (last[str(gemm)] for gemm in (FAST, SLOW, NOISY))
    assert (fast.kernel, fast.first.us, fast.first.torch_us, fast.again) == ("a" * 16, 2.0, 3.0, None)
    assert fast.first.ratio.estimate == 1.5 and fast.first.over_cublaslt is None
    assert slow.slower and not slow.kernel
    assert not noisy.slower and noisy.again is not None and noisy.first.ratio.estimate == 0.75
    assert not any(times.values())
    lines = summary(last.values())
    assert lines[0] == "3 shapes over torch.matmul: geometric mean 0.945x, worst 0.750x"
    assert lines[1] == "1 shapes that kernels serve, over torch.matmul: geometric mean 1.500x, worst 1.500x"
    assert lines[2:] == [
        "below 0.99 of torch.matmul both times: 64x64x128:tn",
        "below 0.99 of autotuned cuBLASLt both times: none",
    ]
    rows = list(csv.DictReader(table(last.values()).splitlines()))
    assert [row["again"] for row in rows] == ["", "0.7500", "1.0000"] and rows[0]["ratio"] == "1.5000"


def test_the_fastest_algorithm_that_runs_is_the_other_bar() -> None:
    times = {FAST: [(2.0, 3.0, 9.0, 2.5, 0.0)], SLOW: [(2.0, 3.0, 1.0), (2.0, 3.0, 1.5)]}
    algorithms = {FAST: ALGORITHMS, SLOW: ALGORITHMS[:1]}
    found = list(compare([FAST, SLOW], 0, lambda gemm: Scripted(*times[gemm].pop(0)), lambda gemm: algorithms[gemm]))
    fast, _, slow = found
    assert (fast.first.cublaslt_us, fast.first.over_cublaslt.estimate, fast.again) == (2.5, 1.25, None)
    assert slow.slower_than_cublaslt and not slow.slower and not fast.slower_than_cublaslt
    lines = summary([fast, slow])
    assert lines[2] == "2 shapes over autotuned cuBLASLt: geometric mean 0.791x, worst 0.500x"
    assert lines[-1] == "below 0.99 of autotuned cuBLASLt both times: 64x64x128:tn"
    rows = list(csv.DictReader(table([fast, slow]).splitlines()))
    assert [(row["cublaslt_us"], row["over_cublaslt"], row["over_cublaslt_again"]) for row in rows] == [
        *[("2.5", "1.2500", ""), ("1.0", "0.5000", "0.7500")],
    ]


def test_a_kernel_is_timed_beside_the_call_that_launches_it() -> None:
    times = {FAST: Scripted(2.0, 3.0, 2.5, alone=1.9), NOISY: Scripted(2.0, 3.0)}
    fast, noisy = compare([FAST, NOISY], 0, times.__getitem__, lambda gemm: ALGORITHMS[:1])
    assert (fast.first.alone_us, fast.first.cublaslt_us, noisy.first.alone_us) == (1.9, 2.5, 0.0)
    assert "1 kernels launched alone: geometric mean 0.950 of the call's time" in summary([fast, noisy])
    assert [row["alone_us"] for row in csv.DictReader(table([fast, noisy]).splitlines())] == ["1.9", ""]


def test_between_tuned_rows_the_larger_ones_kernel_is_named(monkeypatch) -> None:
    lower, upper, between = (replace(FAST, m=m) for m in (16, 32, 20))
    kernel = {"family": "sm90_wave", "schedule": "SWAP=1 BM=64", "us": 2.0, "vendor_us": 3.0}
    known = {gemm: Choice(str(gemm), name * 16, **kernel) for gemm, name in ((lower, "c"), (upper, "d"))}
    monkeypatch.setattr(dispatch, "known", lambda device: known)
    (found,) = compare([between], 0, lambda gemm: Scripted(2.0, 3.0), none)
    assert found.kernel == "d" * 16


def test_a_shape_without_memory_is_left_out() -> None:
    def opened(gemm: Gemm) -> Scripted:
        if gemm is SLOW:
            raise torch.OutOfMemoryError
        return Scripted(2.0, 3.0)

    dispatch.warn.cache_clear()
    with pytest.warns(RuntimeWarning, match="64x64x128:tn is not measured"):
        assert [each.shape for each in compare([SLOW, FAST], 0, opened, none)] == [str(FAST)]


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
