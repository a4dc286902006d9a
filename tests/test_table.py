"""library/table.py: the dispatch table and pools as CSV files, and what is wrong with bad ones."""

import gzip
from pathlib import Path

import pytest

from cuda_l2.families._base import families_for
from cuda_l2.library import table
from cuda_l2.library.table import PLAIN, PROGRAMMATIC, PoolRow, Row
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Gemm, Layout
from cuda_l2.system.errors import UserError

HOPPER = compile_only("sm_90a")


def rows(shape: str = "512x1024x256:tn") -> list[Row]:
    """Every family's default, under both edges."""
    gemm = Gemm.parse(shape)
    found = []
    for family in families_for(gemm, HOPPER):
        names = [choice.name for choice in family.choices]
        named = dict(zip(names, family.default(gemm, HOPPER), strict=True))
        for edge, name in enumerate((PLAIN, PROGRAMMATIC)):
            chosen = named | {"PDL": max(edge, named["PDL"]), "EDGE": edge}
            found.append(Row(gemm, name, family.name, tuple(chosen.items()), 12.25 + edge))
    return found


def test_a_table_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for pair in (rows()[:2], rows("4096x4096x4096:nn:fp16")[-2:]):
        table.write_table(path, pair)
        assert table.read_table(path) == pair
    everything = [*rows(), *rows("64x64x64"), *rows("64x64x64:bf16")]
    table.write_table(path, everything)
    assert table.read_times(path) == everything
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    assert table.read_times(path.with_suffix(".gz")) == everything


def test_a_table_without_types_is_of_float16(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    table.write_table(path, rows()[:1])
    older = "\n".join(line.rpartition(",")[0] for line in path.read_text().splitlines())
    path.write_text(older)
    assert older.startswith(",".join(table.COLUMNS) + "\n") and table.read_table(path) == rows()[:1]


def test_a_row_gives_its_familys_candidate() -> None:
    for row in rows():
        candidate = row.candidate(HOPPER)
        assert candidate.family == row.family and candidate.schedule == row.schedule
        assert ('edge = "programmatic"' in candidate.source) == (row.edge == PROGRAMMATIC)


def test_a_schedule_that_does_not_fit_is_said() -> None:
    row = rows()[-1]
    wrong = Row(row.gemm, row.edge, row.family, tuple({**dict(row.schedule), "BM": 63}.items()), row.us)
    with pytest.raises(UserError, match="BM=63"):
        wrong.candidate(HOPPER)
    with pytest.raises(UserError, match="does not name"):
        Row(row.gemm, row.edge, row.family, row.schedule[1:], row.us).candidate(HOPPER)


LINE = "64,64,64,nn,fp32,plain,cpu_gemm,A=1,2.5"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "columns"),
        ("m,n,k\n1,2,3", "columns"),
        (LINE.replace("64,64,64", "64,64,x"), "line 2.*x"),
        (LINE.replace("64,64,64", "64,64,0"), "line 2.*at least 1"),
        (LINE.replace("nn", "nt"), "line 2.*nt"),
        (LINE.replace("fp32", "fp8"), "line 2.*fp8"),
        (LINE.replace("plain", "early"), "line 2.*edge"),
        (LINE.replace("cpu_gemm", "best"), "line 2.*no family 'best'"),
        (LINE.replace("A=1", "A"), "line 2"),
        (LINE.replace("A=1", "A=1 A=2"), "line 2.*once"),
        (LINE.replace("A=1", ""), "line 2.*NAME=number"),
        (LINE.replace("2.5", "-1"), "line 2.*time"),
        (LINE.replace("2.5", "nan"), "line 2.*time"),
        (LINE.rsplit(",", 1)[0], "line 2.*too few"),
        (f"{LINE}\n{LINE}", "line 3.*already"),
    ],
)
def test_a_bad_table_says_where_and_what(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text if "columns" in says else ",".join(table.COLUMNS) + "\n" + text + "\n")
    with pytest.raises(UserError, match=says):
        table.read_table(path)


def test_a_pool_holds_each_kernel_once(tmp_path: Path) -> None:
    path = tmp_path / "pool.csv"
    family = families_for(rows()[0].gemm, HOPPER)[0]
    compiled = [choice.name for choice in family.choices if choice.compiled]
    schedule = tuple((name, value) for name, value in rows()[0].schedule if name in compiled)
    pool = [PoolRow(family.name, schedule), PoolRow(family.name, schedule, Layout.TN)]
    table.write_pool(path, [*pool, pool[0]])
    assert table.read_pool(path) == pool
    table.write_pool(path, [PoolRow(family.name, schedule[1:])])
    with pytest.raises(UserError, match=f"line 2.*{schedule[0][0]}"):
        table.read_pool(path)
    table.write_pool(path, [])
    with pytest.raises(UserError, match="no kernel"):
        table.read_pool(path)
