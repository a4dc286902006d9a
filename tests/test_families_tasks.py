"""families/cpu_elementwise.c and cpu_rows.c: every task in their tables comes out right, and searches choose among them."""

import numpy as np
import pytest
from made import CPU_CHECKS
from test_families import OTHER_MACHINES

from cuda_l2 import contract, tasks
from cuda_l2.families._base import families_for
from cuda_l2.families.cpu_columns import FAMILY as COLUMNS
from cuda_l2.families.cpu_elementwise import FAMILY as ELEMENTWISE
from cuda_l2.families.cpu_rows import FAMILY as ROWS
from cuda_l2.measure import other_work
from cuda_l2.optimizer import Optimizer, Settings
from cuda_l2.propose._base import draw, space_for
from cuda_l2.records import Gemm, VerdictStatus
from cuda_l2.report.tables import print_result
from cuda_l2.tasks._base import definition

SERVED = [*ELEMENTWISE.table, *ROWS.table, *COLUMNS.table]


@pytest.mark.corpus(4)
@pytest.mark.parametrize("name", SERVED)
def test_the_default_schedule_is_right(name, rig) -> None:
    task = definition(name).task()
    (family,) = families_for(task, rig.target)
    space = space_for([family], task, rig.target)
    candidate = space.render(space.defaults()[0], "default")
    with rig.open(task, 1) as bench:
        build = next(bench.build([candidate]))
        verdict = bench.verify(candidate, build)
    assert verdict.status is VerdictStatus.CORRECT, build.reason or verdict.reason
    assert verdict.passed == CPU_CHECKS


@pytest.mark.corpus(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*ELEMENTWISE.table, *ROWS.table])
def test_a_schedule_in_half_precision_is_right(name, dtype, rig) -> None:
    task = definition(name).task(dtype=dtype) if dtype in definition(name).dtypes else None
    families = families_for(task, rig.target) if task else ()
    if not families:
        pytest.skip("not in this type")
    space = space_for(families, task, rig.target)
    rng = np.random.default_rng([len(name), len(dtype)])
    candidate = space.render(draw(space, rng), "random")
    with rig.open(task, 1) as bench:
        build = next(bench.build([candidate]))
        verdict = bench.verify(candidate, build)
    assert verdict.status is VerdictStatus.CORRECT, build.reason or build.log or verdict.reason


@pytest.mark.parametrize("name", SERVED)
def test_every_schedule_that_can_be_drawn_can_be_written(name, target) -> None:
    task = definition(name).task()
    rng = np.random.default_rng(1)
    for machine in [target, *OTHER_MACHINES] * 5:
        space = space_for(families_for(task, machine), task, machine)
        candidate = space.render(draw(space, rng), "random")
        assert contract.parse_cpu(candidate.source).interface.bind(task) == {"rows": task.inputs[0].shape[0]} | {
            "columns": task.inputs[0].shape[1]
        }


@pytest.mark.parametrize(
    "text", ["sum_columns:rows=8,columns=9:float16", "conv2d_bias_relu", "max_rows:rows=2:bfloat16"]
)
def test_other_tasks_are_left_to_others(text, target) -> None:
    assert families_for(tasks.parse(text), target) == ()


def test_families_of_tasks_do_not_serve_products(target) -> None:
    families = families_for(Gemm(64, 64, 64), target)
    assert families and not {ELEMENTWISE, ROWS, COLUMNS} & set(families)


def test_a_task_is_searched_and_reported_like_a_product(tmp_path, monkeypatch, capsys) -> None:
    task = tasks.parse("softmax:rows=33,columns=70")
    with Optimizer(
        Settings(budget_s=3600, trials=2, archive=tmp_path / "archive.db", protocol="offline", target="cpu")
    ) as optimizer:
        result = optimizer.optimize(task)
        kept = optimizer.archive.trials(task)
    assert result.search.proposed == 2 and set(result.reports) == {"offline"}
    assert result.best and result.best.task == task and result.best.candidate.family == "cpu_rows"
    assert {trial.protocol for trial in kept} == {"search", "offline"}
    assert {trial.task for trial in kept} == {task} and result.source_path.exists()
    monkeypatch.setattr(other_work, "NOTICED_CORES", -1.0)
    print_result(result)
    assert "offline: other work kept" in capsys.readouterr().out
