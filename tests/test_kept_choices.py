"""The file of cuBLASLt's chosen algorithms: what one run chose the next one meets, and nothing is lost on the way."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cuda_l2.measure.choices import Choices, Place
from cuda_l2.measure.cublas import Algorithm
from cuda_l2.measure.tuned import Tuned, TunedLayout, recall, store
from cuda_l2.records import Accumulate, Gemm
from cuda_l2.runs import grid
from cuda_l2.system.errors import UserError

KEPT = Path(__file__).parents[1] / "results" / "h200" / "cublaslt.jsonl.gz"
MACHINE, METHOD = "a GPU", "adaptive"
SMALL, LARGE = Gemm.parse("64x64x64"), Gemm.parse("4096x4096x4096")


def place_in(folder: Path) -> Place:
    return lambda gemm, method: folder / f"{gemm.m}x{gemm.n}x{gemm.k}-{gemm.accumulate}-{method}.json"


def chosen(gemm: Gemm, us: float) -> Tuned:
    algorithm = Algorithm("00" * 64, 66, 1, 1, 1, "none", 0, 0, 0, 0, 0, 1.0)
    layout = TunedLayout((algorithm,), ("a kernel",), (us,), (3,), 0, 0.0)
    return Tuned(gemm.m, gemm.n, gemm.k, gemm.accumulate, METHOD, layout, None, 0.1, "2026-01-01T00:00:00+00:00")


@pytest.fixture
def cached(tmp_path: Path) -> Place:
    """A cache with the small product's choice."""
    place = place_in(tmp_path / "cache")
    store(place(SMALL, METHOD), chosen(SMALL, 2.0))
    return place


def test_what_is_packed_is_met_elsewhere(cached, tmp_path) -> None:
    file, other = tmp_path / "kept.gz", place_in(tmp_path / "other")
    assert Choices(file, MACHINE).pack(cached, [SMALL, LARGE], METHOD) == 1
    kept = Choices(file, MACHINE)
    kept.unpack(other(LARGE, METHOD), LARGE, METHOD)
    assert recall(other(LARGE, METHOD), LARGE, METHOD) is None, "the file has none"
    kept.unpack(other(SMALL, METHOD), SMALL, METHOD)
    assert recall(other(SMALL, METHOD), SMALL, METHOD) == chosen(SMALL, 2.0)
    store(other(SMALL, METHOD), chosen(SMALL, 1.0))
    kept.unpack(other(SMALL, METHOD), SMALL, METHOD)
    assert recall(other(SMALL, METHOD), SMALL, METHOD) == chosen(SMALL, 1.0), "what is there stays"


def test_a_file_keeps_what_it_held_for_other_products(cached, tmp_path) -> None:
    file = tmp_path / "kept.gz"
    early = Choices(file, MACHINE)
    store(cached(LARGE, METHOD), chosen(LARGE, 200.0))
    assert Choices(file, MACHINE).pack(cached, [LARGE], METHOD) == 1
    assert early.pack(cached, [SMALL], METHOD) == 2, "also of a run that ended meanwhile"
    store(cached(LARGE, METHOD), chosen(LARGE, 190.0))
    assert Choices(file, MACHINE).pack(cached, [LARGE], METHOD, renewed=False) == 2
    again = place_in(tmp_path / "again")
    Choices(file, MACHINE).unpack(again(LARGE, METHOD), LARGE, METHOD)
    assert recall(again(LARGE, METHOD), LARGE, METHOD) == chosen(LARGE, 200.0), "nothing was chosen since"
    assert Choices(file, MACHINE).pack(cached, [LARGE], METHOD) == 2
    other = place_in(tmp_path / "other")
    Choices(file, MACHINE).unpack(other(LARGE, METHOD), LARGE, METHOD)
    assert recall(other(LARGE, METHOD), LARGE, METHOD) == chosen(LARGE, 190.0)


def test_what_is_no_such_file_is_one_clear_error(cached, tmp_path) -> None:
    file = tmp_path / "kept.gz"
    kept = Choices(file, MACHINE)
    kept.pack(cached, [SMALL], METHOD)
    with pytest.raises(UserError, match="holds choices for a GPU, not for another"):
        Choices(file, "another")
    whole = file.read_bytes()
    damaged = [b"", whole[:30], gzip.compress(b"{}"), gzip.compress(gzip.decompress(whole) + b'{"m": 1}\n')]
    for data in damaged:
        file.write_bytes(data)
        for act in (lambda: Choices(file, MACHINE), lambda: kept.pack(cached, [SMALL], METHOD)):
            with pytest.raises(UserError, match="holds no choices"):
                act()
        assert file.read_bytes() == data


def test_the_file_that_is_kept_with_the_results_is_read(tmp_path) -> None:
    machine = json.loads(gzip.decompress(KEPT.read_bytes()).splitlines()[0])["machine"]
    place, kept, held = place_in(tmp_path), Choices(KEPT, machine), 0
    for gemm in grid.read_grid(grid.PAPER)[::25]:
        for accumulate in Accumulate:
            product = replace(gemm, accumulate=accumulate)
            kept.unpack(place(product, METHOD), product, METHOD)
            found = recall(place(product, METHOD), product, METHOD)
            held += bool(found and found.of(gemm.layout) and found.of(gemm.layout).times_us)
    assert held >= 76
