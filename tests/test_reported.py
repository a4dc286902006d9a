"""reported.py: kernels of a table timed as reports time them, and what is tried and timed again."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, PoolRow, Row, pool_of
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.quick import Sampled
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import Arm, Build, BuildStatus, Candidate, Gemm, Interval, Layout, Timing, TimingStatus
from cuda_l2.runs import reported
from cuda_l2.runs.reported import Entry, ReportTimer, finalists
from cuda_l2.runs.settings import SurveySettings
from cuda_l2.runs.shortlist import Shortlist, default_pool, distance
from cuda_l2.runs.survey import Survey
from cuda_l2.system.errors import UserError

HOPPER = replace(compile_only("sm_90a"), cores=2)
SIZE = "4096x4096x4096"
BUILT = Build("0", BuildStatus.BUILT, artifact="a.cubin")


@pytest.fixture(scope="module")
def pool() -> list[PoolRow]:
    return default_pool([Gemm.parse(SIZE), Gemm.parse(f"{SIZE}:tn")], HOPPER, 4)


def row(pool: Sequence[PoolRow], index: int, shape: str, edge: str = PLAIN, us: float = 1.0) -> Row:
    """A kernel of the pool as a table has it, in its first order of tiles."""
    gemm, shortlist = Gemm.parse(shape), Shortlist(pool, HOPPER)
    schedule = shortlist.schedule(shortlist._orders(index, gemm, [], 1)[0], gemm, int(edge == PROGRAMMATIC))
    assert schedule
    return Row(gemm, edge, schedule.family.name, tuple(schedule.named.items()), us)


def served(pool: Sequence[PoolRow], layout: Layout) -> list[int]:
    """Kernels of the pool, made for Hopper, that serve the shape in a layout: they can be dependents."""
    gemm, shortlist = replace(Gemm.parse(SIZE), layout=layout), Shortlist(pool, HOPPER)
    made = [i for i, each in enumerate(pool) if each.layout is layout and each.family.startswith("sm90")]
    return [i for i in made if shortlist._orders(i, gemm, [], 1)]


def test_what_a_table_names_for_shapes_alike_is_tried_nearest_first(pool: list[PoolRow]) -> None:
    nn, tn = served(pool, Layout.NN), served(pool, Layout.TN)
    table = [
        row(pool, nn[0], SIZE),
        row(pool, nn[1], "4096x4096x16384"),
        row(pool, nn[2], "4096x8192x4096"),
        row(pool, nn[1], "4096x8192x8192"),
        row(pool, nn[3], "4096x4096x4096:fp16"),
        row(pool, nn[3], SIZE, COLD),
        row(pool, tn[0], f"{SIZE}:tn"),
        row(pool, tn[1], "8192x4096x4096:tn"),
    ]
    options = {
        count: Shortlist(pool, HOPPER, table, whole=True, alike=count).options(table[0].gemm) for count in (1, 5)
    }
    assert [option.row for option in options[5]] == [nn[0], nn[2], nn[1]]
    assert [option.own for option in options[5]] == [True, False, False]
    assert options[1] == options[5][:2]
    cold = Shortlist(pool, HOPPER, table, whole=True, alike=5, cold=True).options(table[0].gemm)
    assert [(option.row, option.own) for option in cold] == [(nn[3], True)]
    assert distance(table[0].gemm, table[3].gemm) == 2 == distance(table[3].gemm, table[0].gemm)


def test_the_tables_own_comes_with_every_launch_that_it_names(pool: list[PoolRow]) -> None:
    first, second, *_ = served(pool, Layout.NN)
    table = [row(pool, first, SIZE), row(pool, second, SIZE, PROGRAMMATIC)]
    options = Shortlist(pool, HOPPER, table, whole=True, alike=3).options(table[0].gemm)
    assert [(option.row, option.own) for option in options] == [(first, True), (second, True)]


def entry(name: str, layout: Layout = Layout.NN, *, own: bool = False, dependent: bool = False) -> Entry:
    return Entry(layout, Candidate(name), Candidate(f"{name} dependent") if dependent else None, own)


def sampled(*times: float) -> list[Sampled]:
    return [Sampled([us, math.nan]) for us in times]


@pytest.mark.parametrize(
    ("times", "again"),
    [
        ((5.0, 6.0, 7.0, 8.0), []),  # nothing looked faster than the table's own
        ((7.0, 6.0, 8.0, 5.0), [0, 3, 1]),
        ((9.0, 6.0, 8.0, 5.0), [0, 3, 1]),  # two of three at most
        ((math.nan, 6.0, 8.0, 5.0), [0, 3, 1]),  # it was not measured
        ((7.0, math.nan, math.nan, 5.0), [0, 3]),
    ],
)
def test_what_looked_faster_than_the_tables_own_is_timed_again_beside_it(times, again) -> None:
    entries = [entry("a", own=True), entry("b"), entry("c"), entry("d"), entry("e", Layout.TN, own=True)]
    assert finalists(entries, sampled(*times, 1.0)) == again


def test_layouts_without_a_row_of_their_own_have_their_fastest_timed_again() -> None:
    entries = [entry(name, Layout.TN) for name in "abc"]
    assert finalists(entries, sampled(3.0, 1.0, 2.0)) == [1, 2]


class Rig:
    """A rig that knows each source's times, one a run, and keeps what it was asked."""

    protocols: Mapping[str, Protocol] = {}

    def __init__(self, times: Mapping[str, Sequence[float]]) -> None:
        self.times = {name: list(each) for name, each in times.items()}
        self.asked: list[tuple[int, dict[str, Layout | None]]] = []

    @contextlib.contextmanager
    def open(self, gemm: Gemm, seed: int, *, both_layouts: bool) -> Iterator["Rig"]:
        del seed
        assert gemm == gemm.any_layout and both_layouts
        yield self

    def build(self, candidates: Sequence[Candidate]) -> list[Build]:
        return [
            Build("0", BuildStatus.FAILED, reason="no such choice") if each.source == "broken" else BUILT
            for each in candidates
        ]

    def time_kernels(self, kernels: Mapping[str, Kernel], protocol: Protocol) -> dict[str, Timing]:
        self.asked.append((protocol.max_rounds, {k.candidate.source: k.layout for k in kernels.values()}))
        return {name: self._timing(kernel.candidate.source) for name, kernel in kernels.items()}

    def _timing(self, source: str) -> Timing:
        us = self.times[source].pop(0)
        if math.isnan(us):
            return Timing(TimingStatus.WRONG_OUTPUT, "offline", "a wrong result")
        arm = Arm(source, Interval(us, us, us), 1, 1)
        return Timing(TimingStatus.MEASURED, "offline", candidate=arm, speedup=Interval(1, 1, 1))

    def close(self) -> None:
        pass


def timer(monkeypatch: pytest.MonkeyPatch, rig: Rig, *, cold: bool = False) -> ReportTimer:
    def opened(target: str, request: Any) -> Rig:
        assert target == "cuda" and {each.kind for each in request.baselines} == {"cuBLASLt-AutoTuning"}
        return rig

    monkeypatch.setattr(reported, "open_rig", opened)
    return ReportTimer(cold=cold)


@pytest.mark.parametrize("cold", [False, True])
def test_all_are_timed_as_in_a_report_and_finalists_in_twice_the_rounds(monkeypatch: pytest.MonkeyPatch, cold) -> None:
    times = {"a": (5.0, 5.5), "a dependent": (4.0, 4.5), "b": (4.8, 5.2), "c": (6.0,), "d": (math.nan,)}
    rig = Rig(times)
    entries = [entry("a", own=True, dependent=True), entry("b"), entry("c"), entry("d", Layout.TN)]
    with timer(monkeypatch, rig, cold=cold) as timing:
        found = timing.time(Gemm.parse(f"{SIZE}:tn"), entries)
    first, final = reported.protocols(cold=cold)
    assert final.max_rounds == final.min_rounds == 2 * first.max_rounds
    nn = Layout.NN
    assert rig.asked == [
        (first.max_rounds, {"a": nn, "a dependent": nn, "b": nn, "c": nn, "d": Layout.TN}),
        (final.max_rounds, {"a": nn, "a dependent": nn, "b": nn}),
    ]
    assert found[0] == Sampled([5.0, 4.0], [5.5, 4.5])
    assert [each.first[0] for each in found[1:3]] == [4.8, 6.0] and found[1].final[0] == 5.2
    assert all(math.isnan(us) for us in (*found[2].final, *found[3].first, found[1].final[1]))
    assert [bool(each.reason) for each in found] == [False, False, False, True]


def test_a_dependent_launch_that_fails_leaves_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig({"a": (5.0, 5.5), "a dependent": (math.nan, math.nan), "b": (4.0, 4.5)})
    with timer(monkeypatch, rig) as timing:
        found = timing.time(Gemm.parse(SIZE), [entry("a", own=True, dependent=True), entry("b")])
    assert [(each.first[0], each.final[0], each.reason) for each in found] == [(5.0, 5.5, ""), (4.0, 4.5, "")]
    assert math.isnan(found[0].first[1]) and math.isnan(found[0].final[1])


def test_nothing_is_timed_twice_where_the_tables_own_are_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig({"a": (1.0,), "b": (2.0,)})
    with timer(monkeypatch, rig) as timing:
        assert timing.time(Gemm.parse(SIZE), [entry("a", own=True), entry("b")])
        assert len(rig.asked) == 1
        assert timing.time(Gemm.parse(SIZE), []) == []  # the table has nothing for it


def test_a_kernel_that_does_not_build_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with timer(monkeypatch, Rig({})) as timing, pytest.raises(UserError, match="no such choice"):
        timing.time(Gemm.parse(SIZE), [entry("broken")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reports": 3}, "of --table"),
        ({"reports": -1, "table": Path("table.csv")}, "of --table"),
        ({"reports": 3, "near": 2, "table": Path("table.csv")}, "--near"),
        ({"choices": Path("chosen.jsonl"), "table": Path("table.csv")}, "goes with --reports"),
    ],
)
def test_reports_need_a_table_and_a_number(settings, message) -> None:
    with pytest.raises(UserError, match=message):
        SurveySettings(**settings)


def test_a_survey_by_reports_times_dependents_of_the_tables_own_alone(
    pool: list[PoolRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda_l2.library.table import write_table  # noqa: PLC0415

    other, own, *_ = served(pool, Layout.NN)
    table = [row(pool, own, SIZE), row(pool, other, "4096x4096x8192")]
    write_table(tmp_path / "table.csv", table)
    sources: list[list[tuple[str, bool, bool]]] = []

    class Timer(ReportTimer):
        def __init__(self, choices: Path | None, *, cold: bool) -> None:
            assert choices == tmp_path / "chosen.jsonl" and not cold

        def time(self, gemm: Gemm, entries: Sequence[Entry]) -> list[Sampled]:
            assert str(gemm) == SIZE
            sources.append([(each.plain.family, each.dependent is not None, each.own) for each in entries])
            return [Sampled([2.0 - i, math.nan], [2.5 - i, math.nan]) for i in range(len(entries))]

        def close(self) -> None:
            pass

    monkeypatch.setattr(reported, "ReportTimer", Timer)
    monkeypatch.setattr("cuda_l2.runs.survey.bus_id", lambda: "test_reported")
    settings = SurveySettings(
        grid=SIZE,
        layouts="nn",
        table=tmp_path / "table.csv",
        reports=4,
        choices=tmp_path / "chosen.jsonl",
        out=tmp_path,
    )
    with Survey(settings, HOPPER, lambda text: None) as survey:
        survey.pool()
        survey.load()
        survey.build()
        assert len(survey.artifacts) == 2 and survey.rows == pool_of(table)
        assert survey.time(lambda gemm, stage: None, lambda gemm: None)
        (record,) = survey.records.values()
        header = survey._header().settings
    assert sources == [[(table[0].family, True, True), (table[1].family, False, False)]]
    assert [arm.final[0] for arm in record.arms] == [2.5, 1.5]
    assert header["tried"] == "4 alike" and header["rounds"] == "11 and 22"
