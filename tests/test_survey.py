"""survey.py and shortlist.py: what is tried on a shape, what is built, and that an interrupted run goes on."""

import dataclasses
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuda_l2.contract import kernel_id, parse_cuda
from cuda_l2.families._base import families_for
from cuda_l2.library.table import (
    COLD,
    PLAIN,
    PROGRAMMATIC,
    PoolRow,
    Row,
    pool_of,
    read_pool,
    read_table,
    write_pool,
    write_table,
)
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure import quick
from cuda_l2.measure.quick import Item, as_dependent
from cuda_l2.records import Accumulate, Gemm, Layout, from_json
from cuda_l2.runs.results import Header
from cuda_l2.runs.settings import SurveySettings
from cuda_l2.runs.shortlist import KNOWN_WITHIN, Shortlist, default_pool, near_pool
from cuda_l2.runs.survey import BUILDS, KIND, TIMES, Arm, Record, Survey, Times, _best
from cuda_l2.system.errors import UserError

HOPPER = dataclasses.replace(compile_only("sm_90a"), cores=2)
SHAPES = ("256x256x256", "4096x4096x512:tn", "128x512x4096", "512x2000x1001")


@pytest.fixture(scope="module")
def pool() -> list[PoolRow]:
    gemms = [Gemm.parse(shape + accumulate) for shape in SHAPES for accumulate in ("", ":fp16")]
    return default_pool(gemms, HOPPER, 6)


@pytest.mark.parametrize("shape", SHAPES)
def test_families_rank_their_default_first(shape) -> None:
    gemm = Gemm.parse(shape)
    for family in families_for(gemm, HOPPER):
        ranked = family.ranked(gemm, HOPPER, 5)
        assert ranked[0] == family.default(gemm, HOPPER) and len(set(ranked)) == len(ranked) <= 5
        names = [choice.name for choice in family.choices]
        assert all(
            0 < family.estimate_us(gemm, HOPPER, dict(zip(names, values, strict=True))) < 1e5 for values in ranked
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shortlist_holds_different_launches_of_valid_kernels(shape, pool) -> None:
    gemm = Gemm.parse(shape)
    shortlist = Shortlist(pool, HOPPER)
    options = shortlist.options(gemm)
    assert 3 < len(options) == len({option.key for option in options})
    assert len({option.kernel for option in options}) < len(options)  # some in several orders of tiles
    for option in options:
        source = shortlist.candidate(option, gemm).source
        assert kernel_id(source) == option.kernel
        assert pickle.loads(option.plan) == parse_cuda(source).plan(gemm, HOPPER.sms)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_pool_is_tried_kernel_by_kernel(shape, pool, monkeypatch) -> None:
    monkeypatch.setattr("cuda_l2.runs.shortlist.COUNTS", ((99, 4),))
    gemm = Gemm.parse(shape)
    few, every = (Shortlist(pool, HOPPER, whole=whole) for whole in (False, True))
    usable = (i for i in range(len(pool)) if every._usable(i, gemm, narrow=False))
    tried = {option.row for option in every.options(gemm)}
    assert {option.row for option in few.options(gemm)} < tried == {i for i in usable if every._orders(i, gemm, [], 1)}


def test_kernels_of_a_table_are_all_tried_those_of_a_pool_by_rank(tmp_path: Path) -> None:
    gemm = Gemm.parse("8192x4096x8192")
    shortlist = Shortlist(default_pool([gemm], HOPPER, 30), HOPPER, whole=True)
    first = {option.row: option for option in reversed(shortlist.options(gemm))}
    schedules = [schedule for option in first.values() if (schedule := shortlist.schedule(option, gemm, 0))]
    sizes = (dataclasses.replace(gemm, k=gemm.k + 64 * i) for i in range(len(schedules)))  # a table has one row a shape
    rows = [Row(g, PLAIN, s.family.name, tuple(s.named.items()), 1.0) for g, s in zip(sizes, schedules, strict=True)]
    write_table(tmp_path / "table.csv", rows)
    write_pool(tmp_path / "pool.csv", pool_of(rows))
    tried = []
    for name in ("table", "pool"):
        opened = survey(tmp_path / name, str(gemm), layouts="nn", **{name: tmp_path / f"{name}.csv"})
        (options,) = opened._shortlists([gemm]).values()
        tried.append({option.row for option in options})
    assert tried[0] == set(range(len(rows))) > tried[1]


@pytest.fixture(scope="module")
def table(pool: list[PoolRow]) -> list[Row]:
    """Rows for two shapes, one of them with another kernel for dependents."""
    shortlist, rows = Shortlist(pool, HOPPER), []
    for shape in SHAPES[::2]:
        gemm, found = Gemm.parse(shape), dict[int, Row]()
        for option in shortlist.options(gemm):
            schedule = shortlist.schedule(option, gemm, 0)
            assert schedule
            edge = PROGRAMMATIC if found else PLAIN
            found.setdefault(option.row, Row(gemm, edge, schedule.family.name, tuple(schedule.named.items()), 1.0))
        rows += list(found.values())[:2]
    return rows


def changed(a: PoolRow, b: PoolRow) -> set[str]:
    """Names of the choices in which two kernels of one family differ."""
    return {name for (name, x), (_, y) in zip(a.schedule, b.schedule, strict=True) if x != y}


def test_kernels_near_a_tables_differ_from_one_in_one_choice(table: list[Row]) -> None:
    own = pool_of(table)
    near = near_pool(table, HOPPER, 1000, 0)
    assert len(near) > 10 * len(own) and not set(near) & set(own)
    for kernel in near:
        twins = [other for other in own if (other.family, other.layout) == (kernel.family, kernel.layout)]
        assert any(1 <= len(changed(kernel, other)) <= 1 + ("STAGES" in changed(kernel, other)) for other in twins)
    few = near_pool(table, HOPPER, 3, 0)
    assert few and set(few) < set(near) and len(few) <= 3 * len(own)
    assert few == near_pool(table, HOPPER, 3, 0) != near_pool(table, HOPPER, 3, 1)


def test_near_a_tables_row_nothing_else_is_tried(table: list[Row]) -> None:
    rows = pool_of(table) + near_pool(table, HOPPER, 1000, 0)
    shortlist = Shortlist(rows, HOPPER, table, whole=True, near=True)
    for gemm in {row.gemm for row in table}:
        bases = pool_of(row for row in table if row.gemm == gemm)
        options = shortlist.options(gemm)
        assert {rows[option.row] for option in options} >= set(bases)
        for option in options:
            kernel = rows[option.row]
            twins = [base for base in bases if (base.family, base.layout) == (kernel.family, kernel.layout)]
            assert any(len(changed(kernel, base) - {"STAGES"}) <= 1 for base in twins)
        own = [option for option in options if option.own]
        assert {rows[option.row] for option in own} == set(bases) and len(own) == len(bases)
        every = len(shortlist._orders(own[0].row, gemm, [], 1 << 10))  # the table's own kernels in all orders of tiles
        assert sum(option.row == own[0].row for option in options) == every
    far = Gemm.parse("512x512x1024")  # the table names nothing for it
    assert {option.row for option in shortlist.options(far)} == {
        i for i in range(len(rows)) if shortlist._usable(i, far, narrow=False) and shortlist._orders(i, far, [], 1)
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_as_a_dependent_is_that_of_the_other_edge(shape, pool) -> None:
    gemm = Gemm.parse(shape)
    shortlist, checked = Shortlist(pool, HOPPER), 0
    for option in shortlist.options(gemm):
        schedule = shortlist.schedule(option, gemm, 1)
        assert (schedule is not None) == option.dependent
        if schedule:
            terms = parse_cuda(schedule.family.render(schedule).source)
            assert as_dependent(pickle.loads(option.plan)) == terms.plan(gemm, HOPPER.sms)
            checked += 1
    assert checked


def test_the_fp16_class_tries_fp16_sums_and_repeats_the_rest(pool) -> None:
    shortlist, gemm = Shortlist(pool, HOPPER), Gemm.parse("4096x4096x512:tn")
    narrow = dataclasses.replace(gemm, accumulate=Accumulate.FP16)
    for option in shortlist.options(narrow):
        named = dict(pool[option.row].schedule)
        assert named.get("ACC") == 16 or named.get("ACC16") == 1
    wide = shortlist.options(gemm)
    assert shortlist.repeat(narrow, [option.key for option in wide]) == wide


def test_known_times_come_first(pool) -> None:
    gemm = Gemm.parse(SHAPES[0])
    plain = Shortlist(pool, HOPPER).options(gemm)
    last = plain[-1]
    schedule = Shortlist(pool, HOPPER).schedule(last, gemm, 0)
    assert schedule
    known = [Row(gemm, PLAIN, schedule.family.name, tuple(schedule.named.items()), 1.0)]
    slow = Shortlist(pool, HOPPER).schedule(plain[0], gemm, 0)
    assert slow
    known.append(Row(gemm, PLAIN, slow.family.name, tuple(slow.named.items()), 1.1 * KNOWN_WITHIN))
    options = Shortlist(pool, HOPPER, known).options(gemm)
    assert options[0].key == last.key
    assert options[1].row == last.row or options[1].row != plain[0].row


def record(size: tuple[int, int, int], accumulate: str = "fp32") -> Record:
    arms = (
        Arm(0, Layout.NN, (("ORDER", 2),), "abc", (1.25, math.inf), (1.5, 2.0)),
        Arm(1, Layout.TN, (), "def", (0.1, 0.2), (0.3, 0.4), "wrong"),
    )
    return Record(Gemm(*size, accumulate=Accumulate(accumulate)), arms, 0.5)


def store(folder: Path, header: Header, *records: Record) -> None:
    """What a run of this header timed; what another one did is gone."""
    (folder / TIMES).unlink(missing_ok=True)
    with Times(folder / TIMES, header) as times:
        for each in records:
            times.append(each)


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    brain = dataclasses.replace(record((1, 2, 3)), gemm=Gemm.parse("1x2x3:bf16"))
    header = Header("a machine", {}, {}, kind=KIND)
    store(tmp_path, header, record((1, 2, 3)), record((4, 5, 6), "fp16"), brain)
    with Times(tmp_path / TIMES, header) as times:
        assert times.records == [record((1, 2, 3)), record((4, 5, 6), "fp16"), brain]


def survey(folder: Path, grid: str, **settings: Any) -> Survey:
    """With its pool."""
    found = Survey(SurveySettings(grid=grid, out=folder, **settings), HOPPER, lambda text: None)
    found.pool()
    return found


def loaded(folder: Path, grid: str, **settings: Any) -> Survey:
    found = survey(folder, grid, **settings)
    found.load()
    found.close()
    return found


@pytest.mark.parametrize(
    ("finals", "best"),
    [
        ((math.nan, math.nan, math.nan), [1, 2]),  # of each layout the fastest
        ((7.0, math.nan, math.nan), [0, 2]),
        ((7.0, 6.0, 3.0), [0, 1, 2]),
    ],
)
def test_the_fp16_class_tries_what_was_timed_twice_or_was_the_fastest_with_fp32_sums(finals, best) -> None:
    layouts, firsts = (Layout.NN, Layout.NN, Layout.TN, Layout.TN), (6.0, 5.0, 4.0, math.nan)
    arms = [
        Arm(i, layout, (), str(i), (first, math.nan), (final, math.nan))
        for i, (layout, first, final) in enumerate(zip(layouts, firsts, (*finals, math.nan), strict=True))
    ]
    assert _best(arms) == best


def test_a_run_goes_on_from_what_its_folder_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = "64x64x64,128x64x64"
    gemms = SurveySettings(grid=shapes).gemms()
    assert len(gemms) == 4
    rows = default_pool(gemms[:1], HOPPER, 1)[:1]
    write_pool(tmp_path / "given.csv", rows)
    first = loaded(tmp_path / "out", shapes, pool=tmp_path / "given.csv")
    assert [(g.m, g.n, g.k) for g in first.pending()] == list(dict.fromkeys((g.m, g.n, g.k) for g in gemms))
    first.build()
    lines = [json.loads(line) for line in (tmp_path / "out" / BUILDS).read_text().splitlines()]
    assert {line["kernel"] for line in lines} == set(first.artifacts) and all(
        line["status"] == "built" for line in lines
    )
    assert all(Path(artifact).exists() for artifact in first.artifacts.values())
    header = first._header()
    store(tmp_path / "out", header, record((128, 64, 64)))
    again = loaded(tmp_path / "out", shapes)
    assert again.rows == rows and [(g.m, g.n, g.k) for g in again.pending()] == [(64, 64, 64)]
    kernel = next(iter(first.artifacts))  # the fp16 class tries what was best with fp32 sums, also of an earlier run
    best = Arm(0, Layout.NN, (), kernel, (1.0, math.nan), (1.0, math.nan))
    fp32 = Record(Gemm(64, 64, 64), (best,))
    store(tmp_path / "out", header, fp32)
    narrow = loaded(tmp_path / "out", "64x64x64", accumulate="fp32,fp16")
    assert [gemm.accumulate for gemm in narrow.pending()] == ["fp16"]
    narrow.build()
    assert set(narrow.artifacts) == {option.kernel for option in narrow._finalists[Gemm(64, 64, 64)]} == {kernel}
    write_pool(tmp_path / "given.csv", [*rows, dataclasses.replace(rows[0], layout=None)])
    with pytest.raises(UserError, match="another pool"):
        survey(tmp_path / "out", shapes, pool=tmp_path / "given.csv")
    store(tmp_path / "out", dataclasses.replace(header, machine="another"))
    with pytest.raises(UserError, match="measured with machine another, not"):
        again.load()
    store(tmp_path / "out", header)
    monkeypatch.setattr("cuda_l2.runs.survey.FINAL_ROUNDS", 7, raising=False)
    with pytest.raises(UserError, match="rounds"):
        again.load()


def test_a_table_gives_the_pool_and_no_other_kernels(tmp_path: Path) -> None:
    gemm = Gemm.parse("256x256x256")
    rows = default_pool([gemm], HOPPER, 2)
    shortlist = Shortlist(rows, HOPPER)
    chosen = []
    for option in shortlist.options(gemm)[:2]:
        schedule = shortlist.schedule(option, gemm, 0)
        assert schedule
        chosen.append(Row(gemm, PLAIN, schedule.family.name, tuple(schedule.named.items()), 1.0 + len(chosen)))
    write_table(tmp_path / "table.csv", chosen[:1])
    ragged = Gemm.parse("250x256x256")  # the same pool compiles to kernels with bounds there
    first = loaded(tmp_path / "out", f"{gemm},{ragged}", layouts="nn", table=tmp_path / "table.csv", state="cold")
    first.build()
    assert first.rows == pool_of(chosen[:1]) and len(first.rows) == 1
    assert set(first.artifacts) == {kernel_id(chosen[0].candidate(HOPPER).source)}
    assert first._header().settings["cold"]
    write_table(tmp_path / "table.csv", chosen[1:])
    with pytest.raises(UserError, match="another pool"):
        survey(tmp_path / "out", str(gemm), layouts="nn", table=tmp_path / "table.csv")
    store(tmp_path / "out", first._header(), record((256, 256, 256)))
    warm = survey(tmp_path / "out", str(gemm), layouts="nn")
    with pytest.raises(UserError, match="measured with cold True, not False"):
        warm.load()
    header = first._header()
    earlier = dataclasses.replace(header, settings={k: v for k, v in header.settings.items() if k != "tried"})
    store(tmp_path / "out", earlier, record((256, 256, 256)))  # of a table's kernels it timed the first by rank
    with pytest.raises(UserError, match="tried"):
        first.load()


@pytest.mark.parametrize("settings", [{"near": 3}, {"near": -1, "table": Path("table.csv")}])
def test_near_needs_a_table_and_a_number(settings) -> None:
    with pytest.raises(UserError, match="--near"):
        SurveySettings(**settings)


def test_what_a_table_names_is_timed_twice_and_long_launches_seldom() -> None:
    bench: Any = object.__new__(quick._Bench)
    bench.finalists, bench.least_rounds = 2, 7
    items = [Item(Layout.NN, "", b"", dependent=False, finalist=i == 4) for i in range(5)]
    arms = [quick._Arm(i, quick.PLAIN, None, 1, first=1.0 + i) for i in range(5)]
    final, more = bench._final(None, items, arms, 5.0)
    assert [arm.index for arm in final] == [0, 1, 4] and not more
    rounds = [bench._final_rounds(guess_us) for guess_us in (2.0, 40.0, 80.0, 1000.0)]
    assert rounds == sorted(rounds, reverse=True) and rounds[0] == rounds[1] > rounds[2] > rounds[3] == 7
    bench.least_rounds = 31
    assert [bench._final_rounds(guess_us) for guess_us in (2.0, 1000.0)] == [rounds[0], 31]


def test_workspaces_of_a_plan_lie_apart_and_plans_share_them() -> None:
    """Both copies of ragged operands in one buffer made every such kernel wrong."""
    bench: Any = object.__new__(quick._Bench)
    bench.tensors, bench.workspaces, bench.outgrown = {}, {}, []
    bench.torch = SimpleNamespace(
        half=torch.half,
        int32=torch.int32,
        randn=lambda size, dtype, device: torch.zeros(size, dtype=dtype),
        full=lambda shape, fill, dtype, device: torch.full(shape, fill, dtype=dtype),
    )
    size = 1 << 20
    spaces = [SimpleNamespace(bytes=size, persistent=kind, fill=0) for kind in (False, False, True, True)]
    found = [bench._workspace(space, place) for place, space in enumerate(spaces)]
    assert all(b - a >= size for a, b in itertools.pairwise(sorted(found)))
    assert found == [bench._workspace(space, place) for place, space in enumerate(spaces)]


@pytest.mark.gpu
def test_select_times_chooses_and_goes_on(gpu, tmp_path: Path) -> None:
    del gpu  # the command opens its own
    shapes = "64x64x64,256x256x2048,1024x1024x512"
    command = [sys.executable, "-P", "-m", "cuda_l2.cli", "select", "--grid", shapes, "--accumulate", "fp32,fp16"]
    command += ["--most", "6", "--out", str(tmp_path / "out")]
    for run in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        assert ("kernels built" in done.stderr) == (run == 0)
    _, *lines = (tmp_path / "out" / TIMES).read_text().splitlines()
    assert len(lines) == 6
    for each in (from_json(Record, line) for line in lines):
        assert all(not arm.reason and math.isfinite(arm.first[0]) for arm in each.arms)
    rows = read_table(tmp_path / "out" / "schedules.csv")
    assert len(rows) == 3 * 2 * 2 * 2 and len(read_pool(tmp_path / "out" / "pool.csv")) > 6
    from cuda_l2.machine.cuda.target import detect  # noqa: PLC0415

    assert len({kernel_id(row.candidate(detect()).source) for row in rows}) <= 6
    cold = [*command[:5], "--grid", shapes, "--accumulate", "fp32,fp16", "--state", "cold"]
    cold += ["--table", str(tmp_path / "out" / "schedules.csv"), "--out", str(tmp_path / "cold")]
    done = subprocess.run(cold, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    both = read_table(tmp_path / "cold" / "schedules.csv")
    assert [row for row in both if row.edge != COLD] == rows and len(both) == 3 * 2 * 2 * 3
    assert {kernel_id(row.candidate(detect()).source) for row in both} <= {
        kernel_id(row.candidate(detect()).source) for row in rows
    }
    told = [*command[:5], "--grid", shapes, "--table", str(tmp_path / "out" / "schedules.csv"), "--reports", "2"]
    told += ["--out", str(tmp_path / "told")]
    done = subprocess.run(told, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    found = read_table(tmp_path / "told" / "schedules.csv")
    assert len(found) == len(rows) and {(row.gemm, row.edge) for row in found} == {(row.gemm, row.edge) for row in rows}
    write_table(tmp_path / "again.csv", rows)
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "out" / "schedules.csv").read_text()
