"""Choosing few kernels for many shapes, from times made up so that the best choice is known."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from cuda_l2.contract import kernel_id
from cuda_l2.families._base import families_for
from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, PoolRow, joined
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Accumulate, Gemm, Layout
from cuda_l2.runs.selection import Case, choose, current, select, summary, table
from cuda_l2.runs.shortlist import EDGE
from cuda_l2.runs.survey import Arm, Record

NAN = math.nan
SIZE = (256, 256, 256)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_close_to_the_best_of_all(seed) -> None:
    rng = np.random.default_rng(seed)
    worth_SK = rng.random((12, 9)).astype(np.float32) ** 2
    worth_SK[rng.random(worth_SK.shape) < 0.3] = 0
    weights_S = rng.random(12)

    def value(chosen) -> float:
        return float((worth_SK[:, chosen].max(axis=1, initial=0) * weights_S).sum())

    for most in (1, 2, 3, 4):
        found = choose(worth_SK, weights_S, most)
        best = max(value(list(each)) for each in itertools.combinations(range(9), most))
        assert len(found) <= most and len(set(found)) == len(found)
        assert value(found) >= (1 - 1e-5 if most == 1 else 0.98) * best


def test_swaps_mend_what_greed_spoils() -> None:
    """The kernel that is fair everywhere is taken first, and is in the way of two that are perfect together."""
    worth_SK = np.array([[1, 0, 0.6], [1, 0, 0.6], [0, 1, 0.6], [0, 1, 0.6]], np.float32)
    assert choose(worth_SK, np.ones(4), 1) == [2]
    assert choose(worth_SK, np.ones(4), 2) == [0, 1]


def test_kernels_that_add_nothing_are_left_out() -> None:
    worth_SK = np.array([[1, 1, 0.5], [0.9, 1, 0.2]], np.float32)
    assert choose(worth_SK, np.ones(2), 3) == [1]
    assert choose(np.zeros((2, 3), np.float32), np.ones(2), 3) == []


def test_weights_decide_who_is_served() -> None:
    worth_SK = np.eye(3, dtype=np.float32)
    assert choose(worth_SK, np.array([0.1, 5.0, 1.0]), 1) == [1]
    assert choose(worth_SK, np.array([0.1, 5.0, 1.0]), 2) == [1, 2]


def arm(kernel: str, layout: str, plain: float, dependent: float = NAN, final: tuple[float, float] = (NAN, NAN)) -> Arm:
    return Arm(0, Layout(layout), (), kernel, (plain, dependent), final)


def times(*arms: Arm, size: tuple[int, int, int] = SIZE, accumulate: str = "fp32") -> Record:
    return Record(Gemm(*size, accumulate=Accumulate(accumulate)), arms)


def test_a_dependent_launch_is_used_where_it_is_faster() -> None:
    found = select([times(arm("x", "nn", 2.0, 1.5), arm("y", "tn", 3.0, 4.0))], most=2)
    assert found.kept[Case(Gemm(*SIZE), PLAIN, Layout.NN)].us == 2.0
    early = found.kept[Case(Gemm(*SIZE), PROGRAMMATIC, Layout.NN)]
    assert (early.us, early.edge) == (1.5, 1)
    late = found.kept[Case(Gemm(*SIZE), PROGRAMMATIC, Layout.TN)]
    assert (late.us, late.edge) == (3.0, 0)
    assert found.kept[Case(Gemm(*SIZE), PLAIN, None)].arm.kernel == "x"


def test_the_limit_costs_the_shapes_that_share() -> None:
    other = (512, 512, 512)
    records = [
        times(arm("x", "nn", 1.0), arm("y", "nn", 1.1), arm("z", "nn", 5.0)),
        times(arm("x", "nn", 9.0), arm("y", "nn", 2.2), arm("z", "nn", 2.0), size=other),
    ]
    everything, one = select(records, 3), select(records, 1)
    assert everything.kernels == ("x", "z") and one.kernels == ("y",)
    assert everything.ratio(Case(Gemm(*other), PLAIN, None)) == 1.0
    assert one.ratio(Case(Gemm(*other), PLAIN, None)) == pytest.approx(2.0 / 2.2)
    assert one.offered == 3


def test_the_second_pass_counts_and_corrects_the_first() -> None:
    """All that was timed twice took 10 % longer the second time, so what was timed once is taken to as well."""
    record = times(arm("x", "nn", 1.0, final=(1.1, NAN)), arm("y", "nn", 2.0, final=(2.2, NAN)), arm("z", "nn", 1.05))
    found = select([record], 3)
    assert found.best[Case(Gemm(*SIZE), PLAIN, Layout.NN)].us == 1.1
    assert found.kernels == ("x",)


def test_the_fp16_class_may_use_kernels_that_sum_in_fp32() -> None:
    """y was timed in both classes and was twice as slow the second time; so would z have been."""
    wide = times(arm("y", "nn", 1.0, final=(1.0, NAN)), arm("z", "nn", 1.2, final=(1.2, NAN)))
    narrow = times(arm("y", "nn", 2.0, final=(2.0, NAN)), arm("h", "nn", 3.0, final=(3.0, NAN)), accumulate="fp16")
    uses = select([wide, narrow], 1).kept
    assert uses[Case(Gemm(*SIZE, accumulate=Accumulate.FP16), PLAIN, Layout.NN)].arm.kernel == "y"
    only_z = select([times(arm("z", "nn", 1.2)), narrow], 3)
    assert Case(Gemm(*SIZE, accumulate=Accumulate.FP16), PLAIN, None) in only_z.kept


def test_what_a_table_names_stays_unless_another_is_surely_faster() -> None:
    record = times(arm("x", "nn", 1.004, 0.9), arm("y", "nn", 1.0, 0.8), arm("z", "tn", 1.0))
    named = {
        (Gemm(*SIZE), PLAIN): ("x", frozenset({(EDGE, 0)})),
        (Gemm(*SIZE), PROGRAMMATIC): ("x", frozenset({(EDGE, 1)})),
    }
    kept = select([record], 3, table=named).kept
    assert kept[Case(Gemm(*SIZE), PLAIN, Layout.NN)].arm.kernel == "x"
    assert kept[Case(Gemm(*SIZE), PLAIN, Layout.NN)].us == 1.004
    assert kept[Case(Gemm(*SIZE), PROGRAMMATIC, Layout.NN)].arm.kernel == "y"
    assert select([record], 3).kept[Case(Gemm(*SIZE), PLAIN, Layout.NN)].arm.kernel == "y"
    otherwise = {
        (Gemm(*SIZE), PLAIN): ("x", frozenset({("ORDER", 2), (EDGE, 0)}))
    }  # the same kernel, launched otherwise
    assert select([record], 3, table=otherwise).kept[Case(Gemm(*SIZE), PLAIN, Layout.NN)].arm.kernel == "y"


def test_kernels_of_what_is_not_timed_stay_and_count() -> None:
    record = times(arm("x", "nn", 2.0), arm("y", "nn", 1.0))
    elsewhere = {(Gemm(512, 512, 512), PLAIN): ("x", frozenset({(EDGE, 0)}))}
    assert select([record], 1, table=elsewhere).kernels == ("x",)
    assert select([record], 2, table=elsewhere).kernels == ("x", "y")
    unseen = {(Gemm(512, 512, 512), PLAIN): ("w", frozenset({(EDGE, 0)}))}
    assert select([record], 1, table=unseen).kernels == ()
    here = {
        (Gemm(*SIZE), PLAIN): ("x", frozenset({(EDGE, 0)})),
        (Gemm(*SIZE), PROGRAMMATIC): ("x", frozenset({(EDGE, 0)})),
    }
    assert select([record], 1, table=here).kernels == ("y",)


@pytest.mark.parametrize("given", [[0], [0, 2], [1, 2]])
def test_given_columns_are_chosen_and_the_others_suit_them(given) -> None:
    worth_SK = np.random.default_rng(len(given)).random((12, 9)).astype(np.float32)
    found = choose(worth_SK, np.ones(12), 4, given)
    assert set(given) <= set(found) and len(found) == 4
    rest = [k for k in range(9) if k not in given]
    values = [worth_SK[:, [*given, *more]].max(axis=1).sum() for more in itertools.combinations(rest, 4 - len(given))]
    assert worth_SK[:, found].max(axis=1).sum() >= 0.98 * max(values)
    assert choose(worth_SK, np.ones(12), 1, [0, 1]) == [0, 1]


def test_cold_times_choose_cold_launches_alone() -> None:
    found = select([times(arm("x", "nn", 9.0), arm("y", "tn", 8.0))], 2, cold=True)
    assert {case.edge for case in found.kept} == {COLD}
    assert found.kept[Case(Gemm(*SIZE), COLD, None)].arm.kernel == "y"
    assert found.kept[Case(Gemm(*SIZE), COLD, Layout.NN)].us == 9.0


def test_the_table_holds_whole_schedules() -> None:
    target, gemm = compile_only("sm_90a"), Gemm(*SIZE)
    family = families_for(gemm, target)[0]
    named = dict(zip([c.name for c in family.choices], family.default(gemm, target), strict=True)) | {"PDL": 2}
    pool = [PoolRow(family.name, tuple((c.name, named[c.name]) for c in family.choices if c.compiled))]
    chosen = select([times(arm("x", "nn", 2.0, 1.5), arm("x", "tn", 2.5, 3.0))], 1)
    found = table(chosen, pool)
    assert [(row.gemm.layout, row.edge, row.us, dict(row.schedule)["EDGE"]) for row in found] == [
        (Layout.NN, PLAIN, 2.0, 0),
        (Layout.NN, PROGRAMMATIC, 1.5, 1),
        (Layout.TN, PLAIN, 2.5, 0),
        (Layout.TN, PROGRAMMATIC, 2.5, 0),
    ]
    for row in found:
        assert row.candidate(target).family == family.name
    current_rows = current(found, target)
    launch = {name: value for name, value in found[1].schedule if name in (*family.launched, EDGE)}
    assert current_rows[found[1].gemm, PROGRAMMATIC] == (
        kernel_id(found[1].candidate(target).source),
        frozenset(launch.items()),
    )
    cold = table(select([times(arm("x", "nn", 5.0))], 1, cold=True), pool)
    assert [(row.edge, row.us, dict(row.schedule)["EDGE"]) for row in cold] == [(COLD, 5.0, 0)]
    both = joined(found, cold)
    assert len(both) == 5 and both[0] == cold[0]
    assert joined(both, [dataclasses.replace(cold[0], us=4.0)])[0].us == 4.0
    assert "1 distinct kernel kept of 1 timed" in summary(chosen, pool)
