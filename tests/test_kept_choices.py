"""The file of cuBLASLt's chosen algorithms: what one run chose the next one meets, and nothing is lost on the way."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_l2.measure import choices
from cuda_l2.measure.cublas import Algorithm
from cuda_l2.measure.tuned import Tuned, TunedLayout, recall, store
from cuda_l2.records import Accumulate, Gemm
from cuda_l2.runs import grid
from cuda_l2.system.errors import UserError

KEPT = Path(__file__).parents[1] / "results" / "h200" / "cublaslt.jsonl.gz"
MACHINE, METHOD = "a GPU", "adaptive"
SMALL, LARGE = Gemm.parse("64x64x64"), Gemm.parse("4096x4096x4096")


def place_in(folder: Path) -> choices.Place:
    return lambda gemm, method: folder / f"{gemm.m}x{gemm.n}x{gemm.k}-{gemm.accumulate}-{method}.json"


def chosen(gemm: Gemm, us: float) -> Tuned:
    algorithm = Algorithm("00" * 64, 66, 1, 1, 1, "none", 0, 0, 0, 0, 0, 1.0)
    layout = TunedLayout((algorithm,), ("a kernel",), (us,), (3,), 0, 0.0)
    return Tuned(gemm.m, gemm.n, gemm.k, gemm.accumulate, METHOD, layout, None, 0.1, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def cached(tmp_path: Path) -> choices.Place:
    """A cache with the small product's choice."""
    place = place_in(tmp_path / "cache")
    store(place(SMALL, METHOD), chosen(SMALL, 2.0))
    return place


def test_what_is_packed_is_met_elsewhere(cached, tmp_path) -> None:
    file, other = tmp_path / "kept.gz", place_in(tmp_path / "other")
    assert choices.pack(file, MACHINE, cached, [SMALL, LARGE], METHOD) == 1
    choices.unpack(file, MACHINE, other, [LARGE])
    assert recall(other(SMALL, METHOD), SMALL, METHOD) is None, "it was not asked for"
    choices.unpack(file, MACHINE, other, [SMALL, LARGE])
    assert recall(other(SMALL, METHOD), SMALL, METHOD) == chosen(SMALL, 2.0)
    store(other(SMALL, METHOD), chosen(SMALL, 1.0))
    choices.unpack(file, MACHINE, other, [SMALL])
    assert recall(other(SMALL, METHOD), SMALL, METHOD) == chosen(SMALL, 1.0), "what is there stays"


def test_a_file_keeps_what_it_held_for_other_products_and_not_for_other_machines(cached, tmp_path) -> None:
    file = tmp_path / "kept.gz"
    store(cached(LARGE, METHOD), chosen(LARGE, 200.0))
    choices.pack(file, MACHINE, cached, [LARGE], METHOD)
    assert choices.pack(file, MACHINE, cached, [SMALL], METHOD) == 2
    store(cached(LARGE, METHOD), chosen(LARGE, 190.0))
    assert choices.pack(file, MACHINE, cached, [LARGE], METHOD) == 2
    again = place_in(tmp_path / "again")
    choices.unpack(file, MACHINE, again, [SMALL, LARGE])
    assert recall(again(LARGE, METHOD), LARGE, METHOD) == chosen(LARGE, 190.0)
    assert choices.pack(file, "another GPU", cached, [SMALL], METHOD) == 1


def test_what_is_no_such_file_is_one_clear_error(cached, tmp_path) -> None:
    file = tmp_path / "kept.gz"
    choices.pack(file, MACHINE, cached, [SMALL], METHOD)
    with pytest.raises(UserError, match="holds choices for a GPU, not for another"):
        choices.unpack(file, "another", cached, [SMALL])
    whole = file.read_bytes()
    damaged = [b"", whole[:30], gzip.compress(b"{}"), gzip.compress(gzip.decompress(whole) + b'{"m": 1}\n')]
    for data in damaged:
        file.write_bytes(data)
        for act in (
            lambda: choices.unpack(file, MACHINE, cached, [SMALL]),
            lambda: choices.pack(file, MACHINE, cached, [SMALL], METHOD),
        ):
            with pytest.raises(UserError, match="holds no choices"):
                act()
        assert file.read_bytes() == data


def test_the_file_that_is_kept_with_the_results_is_read(tmp_path) -> None:
    machine = json.loads(gzip.decompress(KEPT.read_bytes()).splitlines()[0])["machine"]
    place = place_in(tmp_path)
    gemms = [replace(gemm, accumulate=accumulate) for gemm in grid.read_grid(grid.PAPER) for accumulate in Accumulate]
    choices.unpack(KEPT, machine, place, gemms)
    assert len(list(tmp_path.iterdir())) >= 1900
    gemm = Gemm(4096, 4096, 4096, accumulate=Accumulate.FP32)
    assert recall(place(gemm, METHOD), gemm, METHOD).of(gemm.layout).times_us
