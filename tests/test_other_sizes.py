"""Sizes of a task that nobody was shown."""

from dataclasses import replace

import numpy as np
import pytest

from cuda_l2 import tasks
from cuda_l2.records import Operation
from cuda_l2.tasks import other_sizes
from cuda_l2.tasks._base import definition
from cuda_l2.tasks.cases import OwnCases
from cuda_l2.tasks.other_sizes import FAR_COUNT, FAR_WHOLE, TINIEST, WHOLE_MULTIPLES

SEEDS = range(4)


def drawn(task: str, seed: int) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """Other sizes and far ones, on a CPU."""
    operation = tasks.parse(task)
    assert isinstance(operation, Operation)
    cases = OwnCases(operation, seed)
    return [dict(each.sizes) for each in cases.others], [dict(each.sizes) for each in cases.far]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cpu_meets_odd_sizes_whole_multiples_and_a_few_elements(seed: int) -> None:
    larger, smaller, whole, tiny = drawn("sum_rows:rows=64,columns=700", seed)[0]
    assert all(
        large > size > small
        for large, size, small in zip(
            *(s.values() for s in (larger, {"rows": 64, "columns": 700}, smaller)), strict=True
        )
    )
    assert whole == {"rows": 256, "columns": 768}
    assert 1 in tiny.values() and max(tiny.values()) < TINIEST


def test_whole_multiples_are_smaller_ones_where_a_task_has_many_sizes() -> None:
    sizes = drawn("instance_norm", 1)[0][2]
    assert {size % WHOLE_MULTIPLES[0] for size in sizes.values()} != {0}
    assert {size % WHOLE_MULTIPLES[-1] for size in sizes.values()} == {0}


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_asked_where_the_reference_has_no_finite_result(
    seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The eight largest of fewer than eight, and the variance of one element."""
    assert len(drawn("top_k:rows=5,vocabulary=700", seed)[0]) == 3
    assert all(sizes["columns"] > 1 for sizes in drawn("variance_rows:rows=5,columns=700", seed)[0])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("seed", SEEDS)
def test_one_size_is_far_larger_and_once_a_multiple_of_thousands(seed: int) -> None:
    most, whole = drawn("sum_rows:rows=64,columns=700", seed)[1]
    (size,) = (size for size in most.values() if size > 1000)
    assert size > FAR_COUNT and max(whole.values()) % FAR_WHOLE == 0


def test_steps_that_the_reference_takes_one_by_one_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_sizes.STEPS < 3000
    monkeypatch.setattr(other_sizes, "STEPS", 128)
    task = definition("linear_recurrence").task()
    found = [each for seed in range(12) for each in other_sizes.far(task, "cpu", np.random.default_rng(seed))]
    assert 64 < max(dict(each.sizes)["length"] for each in found) <= 128


def test_a_task_shown_large_or_whole_has_other_whole_sizes_or_none() -> None:
    assert {"m": 256, "n": 256, "k": 256} in drawn("matmul:m=1001,n=1001,k=1001", 1)[0]
    assert {"rows": 256, "columns": 768} not in drawn("sum_rows:rows=256,columns=768", 1)[0]


@pytest.mark.parametrize("task", ["log_softmax:rows=5,columns=700", "cross_entropy:rows=5,classes=700"])
def test_a_few_elements_are_never_those_whose_exact_result_is_zero(task: str) -> None:
    least = [min(list(sizes.values())[1] for sizes in drawn(task, seed)[0]) for seed in range(8)]
    assert 1 not in least and min(least) < TINIEST


def test_a_reference_that_fails_at_a_few_elements_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(definition("sum_rows"), reference=lambda x: x[:, 8])
    monkeypatch.setattr(other_sizes, "definition", lambda name: known)
    assert other_sizes._tiny(known.task({"rows": 5, "columns": 700}), np.random.default_rng(1)) == []
