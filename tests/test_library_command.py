"""cuda-l2 library without a GPU: what it lists, checks and exports, what it imports, and what it says."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from fake_driver import fake_driver

from cuda_l2 import contract
from cuda_l2.commands import library, tune
from cuda_l2.library.deploy import batches, calls, choices, dispatch, imported, pack, recipes, tuning, vendor
from cuda_l2.library.deploy.choices import Choice, Place
from cuda_l2.library.table import read_table
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

SOURCE = """/* cuda-l2
target = "cuda"
arch = "sm_80"
[[launch]]
kernel = "gemm"
grid = ["cdiv(n, 16)", "cdiv(m, 16)"]
block = [16, 16]
args = ["a", "b", "c", "m", "n", "k"]
*/
#include <cuda_fp16.h>
extern "C" __global__ void gemm(const half *a, const half *b, half *c, int m, int n, int k) {
  const int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
  if (row < m && column < n) c[row * n + column] = __float2half(__half2float(a[row * k]) * __half2float(b[column]));
}
"""
PLACE = Place("H100 9.0 132", "580.1", "CUDA 13.0, torch 2.11", "0123456789abcdef")


@pytest.fixture(scope="module")
def two_recipes():
    return [recipe for recipe in recipes.recipes() if recipe.family == "sm80_gemm"][:2]


@pytest.fixture
def small(two_recipes, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(recipes, "recipes", lambda: two_recipes)
    made = pack.build(two_recipes, tmp_path / "pack")
    monkeypatch.setattr(pack, "installed", functools.cache(lambda: made))
    return made


def test_a_pack_is_listed(small, capsys) -> None:
    library.list_kernels()
    text = capsys.readouterr().out
    assert small.identity in text and all(name in text for name in small.kernels) and "not proved as a whole" in text
    library.list_kernels(json=True)
    assert len(json.loads(capsys.readouterr().out)["kernels"]) == 2


def test_verify_finds_a_changed_kernel(small, capsys) -> None:
    library.verify()
    assert "2 of 2 kernels are as they were built" in capsys.readouterr().out
    (small.folder / pack.DATA).write_bytes(b"x" * 9)
    with pytest.raises(SystemExit, match="1"):
        library.verify()
    assert "0 of 2" in capsys.readouterr().out


def test_exported_sources_are_the_kernels(small, tmp_path) -> None:
    library.export(tmp_path / "out")
    for name in small.kernels:
        assert contract.kernel_id((tmp_path / "out" / f"{name}.cu").read_text()) == name
    assert {row.gemm.dtype for row in read_table(tmp_path / "out" / "kernels.csv")} == {"float16", "bfloat16"}


def test_a_build_goes_where_calls_find_it(small, tmp_path, capsys) -> None:
    library.build(out=tmp_path / "again")
    assert "2 kernels" in capsys.readouterr().out
    assert pack.Pack(tmp_path / "again").identity == small.identity


@pytest.mark.parametrize(
    ("change", "shapes", "says"),
    [
        (lambda s: s, (), "name the shapes"),
        (lambda s: s.replace('"gemm"\n', '"missing"\n'), ("64x64x64",), "missing"),
        (lambda s: s.replace("sm_80", "sm_100a"), ("64x64x64",), "sm_100a"),
        (lambda s: s.replace("cdiv(n, 16)", "n / (n - 64)"), ("64x64x64",), "does not serve 64x64x64"),
        (
            lambda s: s.replace("if (row", 'asm volatile("mov.u32 %0, %clock;" : "=r"(m));\n  if (row'),
            ("64x64x64",),
            "clock",
        ),
        (lambda s: s.replace("block =", "coresident = true\nblock ="), ("64x64x64",), "wait for one another"),
        (lambda s: "no contract\n" + s, ("64x64x64",), "contract"),
    ],
)
def test_an_import_is_judged_by_the_rules(small, tmp_path, change, shapes, says) -> None:
    (tmp_path / "mine.cu").write_text(change(SOURCE))
    with pytest.raises(UserError, match=says):
        library.import_source(tmp_path / "mine.cu", *shapes)


def test_compiled_code_is_not_imported(small, tmp_path) -> None:
    (tmp_path / "mine.cubin").write_bytes(small.cubin(next(iter(small.kernels))))
    with pytest.raises(UserError, match="cannot read"):
        library.import_source(tmp_path / "mine.cubin", "64x64x64")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_an_import_serves_nothing(small, tmp_path) -> None:
    (tmp_path / "mine.cu").write_text(SOURCE)
    with pytest.raises(UserError, match="serves nothing before"):
        library.import_source(tmp_path / "mine.cu", "64x64x64")
    with pytest.raises(UserError, match="none here"):
        library.demote("64x64x64")


def test_a_shape_is_demoted_for_weights_ahead_too(small, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "serves", lambda device: True)
    monkeypatch.setattr(choices, "place_of", lambda device, identity: replace(PLACE, pack=identity))
    library.demote("16x64x64:tn")
    kept = [choices.read(place) for place in library._places(small)]
    assert len(kept) == 2 and all(known[Gemm.parse("16x64x64:tn")].demoted for known in kept)


def test_the_check_of_batches_prints_differences_and_times(monkeypatch, capsys) -> None:
    checked = []
    monkeypatch.setattr(
        batches, "times_us", lambda gemms: [(gemm, dict.fromkeys(batches.COLUMNS, 2.5)) for gemm in gemms]
    )
    monkeypatch.setattr(batches, "check", lambda gemm: checked.append(gemm) or [])
    library.invariant("1-4x64x64:tn", "9x64x64:tn")
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first == "rows have the same bits in every batch" and all(name in head for name in batches.COLUMNS)
    assert [line.split()[0] for line in lines] == [f"{m}x64x64:tn" for m in (1, 2, 4, 9)] and len(checked) == 1
    assert all(line.count("2.50 us") == 3 for line in lines)
    monkeypatch.setattr(batches, "check", lambda gemm: ["7 rows from row 3 on"])
    with pytest.raises(SystemExit, match="1"):
        library.invariant("4x64x64")
    assert "other bits: 1x64x64: 7 rows from row 3 on" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_check_of_batches_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        library.invariant("4x64x64")


def test_an_imported_kernel_serves_its_shape(small, monkeypatch) -> None:
    gemm = Gemm.parse("33x24x16")
    name = imported.keep(SOURCE, [gemm])
    monkeypatch.setattr(dispatch, "target_of", lambda device: compile_only("sm_90a"))
    monkeypatch.setattr(choices, "place_of", lambda device, identity: PLACE)
    monkeypatch.setattr(dispatch, "pack", lambda: small)
    monkeypatch.setattr(pack.Pack, "cubin", lambda self, kernel: b"cubin" + self.kernels[kernel].id.encode())
    choices.add(PLACE, [Choice(str(gemm), name, imported.FAMILY, "", 3.0, 4.0)])
    dispatch.known.cache_clear()
    with fake_driver() as (fake, native):
        fake.parameters([8, 8, 8, 4, 4, 4])
        native.on_miss(dispatch.serve)
        calls.matmul(torch.ones(33, 16).half(), torch.ones(16, 24).half())
        (launch,) = fake.launches
        assert [*launch.grid] == [2, 3, 1] and [*launch.words[3:6]] == [33, 24, 16]
        native.clear()
        dispatch.known.cache_clear()
        dispatch.warn.cache_clear()
        (imported.folder(name) / imported.SOURCE).write_text(SOURCE.replace("row < m", "row < m - 1"))
        with pytest.warns(RuntimeWarning, match="was changed"):
            calls.matmul(torch.ones(33, 16).half(), torch.ones(16, 24).half())
    dispatch.known.cache_clear()


def test_tuning_counts_our_kernels_apart_from_the_librarys(monkeypatch, capsys) -> None:
    chosen = [
        Choice("16x64x64:tn:bf16", "one", "sm90_fitted", "", 1.0, 2.0),
        Choice("32x64x64:tn:bf16", vendor.FAMILY, vendor.FAMILY, "", 1.0, 1.1),
        Choice("64x64x64:tn:bf16", us=1.0, vendor_us=1.0),
    ]
    monkeypatch.setattr(tuning, "tune", lambda *_, **named: chosen)
    tune.command(*(choice.shape for choice in chosen))
    assert capsys.readouterr().out.strip() == (
        "3 shapes tuned; our kernels serve 1, algorithms of cuBLASLt 1, torch's own 1"
    )
