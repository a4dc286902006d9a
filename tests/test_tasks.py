"""tasks/: every task of our own computes, everywhere it says it does, and its tolerance tells fp32 from less."""

import math
import sys

import numpy as np
import pytest
import torch

from cuda_l2 import tasks
from cuda_l2.records import Gemm, Operation, from_json, to_json
from cuda_l2.system.errors import UserError
from cuda_l2.tasks._base import LARGER, SMALLER, Definition, definition, definitions
from cuda_l2.tasks.tolerance import bounds
from cuda_l2.tasks.values import (
    FEW,
    TO_ZERO,
    Distribution,
    Domain,
    Values,
    booleans,
    integers,
    normal,
    put,
    put_far_below,
    seeded,
)

OWN = definitions()
CASES = [(name, dtype) for name, known in OWN.items() for dtype in known.dtypes]
CHOICES = {"count_positive", "greedy_token", "argmin_columns", "speculative_acceptance", "gumbel_sampling"}
"""Whose outputs are integers that rounded inputs may leave as they are."""


def test_two_tasks_of_one_name_are_said_with_their_file(monkeypatch) -> None:
    from cuda_l2.tasks import _base  # noqa: PLC0415
    from cuda_l2.tasks.own import attention  # noqa: PLC0415

    monkeypatch.setattr(attention, "TASKS", (*attention.TASKS, attention.TASKS[0]))
    with pytest.raises(UserError, match=rf"two tasks are named {attention.TASKS[0].name}.*attention\.py"):
        _base.definitions.__wrapped__()


ENTRY = """\
from cuda_l2.tasks._base import Definition
from cuda_l2.tasks.values import normal

TASKS = (
    Definition(
        "mine", lambda x, rows: x * 2, inputs={"x": normal("rows columns")},
        cpu={"rows": 4, "columns": 8}, gpu={"rows": 4, "columns": 8},
    ),
)
"""
MISTAKES = {
    "a comma forgotten": (("    ),\n)", "    )\n)"), "a comma follows it"),
    "no table": (("TASKS", "TABLE"), "TASKS must be a tuple"),
    "a name unknown": (('normal("', 'norml("'), r"line 6: NameError: name 'norml'"),
    "no Python": (("TASKS =", "TASKS = ="), "line 4: invalid syntax"),
    "a name that no identity may have": (('"mine"', '"my-task"'), r"line 5: task 'my-task': a name has small letters"),
    "no input": (('{"x": normal("rows columns")}', "{}"), "an input and an output"),
    "a tensor named as a size": (('"x":', '"rows":'), "rows names two things"),
    "sizes of one machine alone": (('gpu={"rows": 4, "columns": 8}', 'gpu={"rows": 4}'), "columns stands in one alone"),
    "an indefinite tensor that is none": (("gpu=", "indefinite=('width',), gpu="), "indefinite names width"),
    "a rigid size that is none": (("gpu=", "rigid=('width',), gpu="), "rigid names width"),
    "a parameter that is nothing": (("x, rows:", "x, y:"), "its reference takes y, which"),
    "an input that is not taken": (("lambda x, rows: x", "lambda rows: rows"), "its reference does not take x"),
    "a type that is none": (("gpu=", "dtypes=('float64',), gpu="), "dtypes must be some of"),
    "a shape of no sizes": (('"rows columns"', '"rows width"'), "cannot read the expression 'width'"),
    "flops of no sizes": (("gpu=", 'flops="2*n", gpu='), "cannot read the expression '2\\*n'"),
}
FAILURES = {
    "two results for one output": (("x * 2", "(x, x)"), "returns Tensor, Tensor; return a tensor for each"),
    "nothing": (("x * 2", "None"), "its reference returns NoneType"),
    "no method": (("x * 2", "x.doubled()"), "mine cannot be computed at sizes .*AttributeError"),
    "shapes that do not fit": (("x * 2", "x @ x"), "mine cannot be computed at sizes .*RuntimeError"),
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a file as the only one among our own tasks, and loads it."""
    from cuda_l2.tasks import _base, own  # noqa: PLC0415

    def load(text: str) -> dict[str, Definition]:
        (tmp_path / "written_here.py").write_text(text)
        return _base.definitions.__wrapped__()

    monkeypatch.setattr(own, "__path__", [str(tmp_path)])
    yield load
    sys.modules.pop("cuda_l2.tasks.own.written_here", None)


def test_an_entry_as_the_page_describes_it_is_a_task(table) -> None:
    (known,) = table(ENTRY).values()
    assert known.group == "written here" and str(known.task()) == "mine:rows=4,columns=8"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_table_is_one_error_with_its_file(table, mistake) -> None:
    (old, new), said = MISTAKES[mistake]
    assert old in ENTRY
    with pytest.raises(UserError, match=rf"written_here\.py.*{said}"):
        table(ENTRY.replace(old, new))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_reference_that_fails_is_one_error(table, failure) -> None:
    (old, new), said = FAILURES[failure]
    assert old in ENTRY
    (known,) = table(ENTRY.replace(old, new)).values()
    with pytest.raises(UserError, match=said):
        known.task()


def test_sizes_that_leave_fewer_operations_than_none_are_refused(table) -> None:
    (known,) = table(ENTRY.replace("gpu=", 'flops="2*rows-6", gpu=')).values()
    assert known.task().flops == 2
    with pytest.raises(UserError, match=r"mine cannot be computed at sizes .*is negative"):
        known.task({"rows": 2})


def test_there_are_tasks_of_every_group() -> None:
    groups = {known.group for known in OWN.values()}
    assert len(OWN) >= 60
    assert groups == {
        *("linear algebra", "convolution", "reduction", "elementwise", "attention", "sampling"),
        *("embedding", "loss", "optimizer"),
    }


@pytest.mark.corpus(16)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_reference_computes_what_it_declares(name: str, dtype: str) -> None:
    known = OWN[name]
    task = known.task(dtype=dtype)
    assert tasks.parse(str(task)) == task and from_json(Operation, to_json(task)) == task
    drawn, function = known.draw(task, seed=1), known.bind(dict(task.sizes))
    for tensor in (*task.inputs, *task.weights):
        assert str(drawn[tensor.name].dtype) == f"torch.{tensor.dtype}" and drawn[tensor.name].shape == tensor.shape
    results = function(**drawn)
    for tensor, result, again in zip(task.outputs, results, function(**known.draw(task, seed=1)), strict=True):
        assert str(result.dtype) == f"torch.{tensor.dtype}" and tuple(result.shape) == tensor.shape
        assert torch.equal(result, again), "the same seed gives the same result"
        assert not result.isnan().any()
        assert result.isfinite().all() or "filter" in name  # what is filtered out is -inf
    (allowed, *_) = limits = bounds(function, drawn)
    assert [limit.violation(result) for limit, result in zip(limits, results, strict=True)] == [""] * len(results)
    if allowed.dtype.is_floating_point:
        assert 0 <= allowed.eager_max <= allowed.max_allowed < 0.2 * max(1.0, float(results[0].abs().max()))


@pytest.mark.corpus(8)
@pytest.mark.parametrize("name", OWN)
def test_less_precision_and_other_answers_are_noticed(name: str) -> None:
    known = OWN[name]
    task = known.task()
    drawn, function = known.draw(task, seed=2), known.bind(dict(task.sizes))
    limits = bounds(function, drawn)

    def noticed(results) -> bool:
        return any(limit.violation(result) for limit, result in zip(limits, results, strict=True))

    assert noticed([torch.zeros_like(result) for result in function(**drawn)])
    assert noticed(function(**known.draw(task, seed=3))), "the answer for other inputs"
    rounded = {name: t.half().float() if t.dtype == torch.float32 else t for name, t in drawn.items()}
    if name not in CHOICES and limits[0].exact.numel() > 1:  # an average hides the precision of its terms
        assert noticed(function(**rounded))


@pytest.mark.corpus(8)
@pytest.mark.parametrize("name", OWN)
def test_other_sizes_and_values_than_the_ones_shown(name: str) -> None:
    known, rng = OWN[name], np.random.default_rng(5)
    for index, distribution in enumerate(Distribution):
        task = known.task(known.other_sizes(rng, (LARGER, SMALLER)[index % 2]))
        drawn, function = known.draw(task, 7, distribution), known.bind(dict(task.sizes))
        for limit, result in zip(bounds(function, drawn), function(**drawn), strict=True):
            assert limit.violation(result) == ""
    assert all(dict(task.sizes)[rigid] == known.cpu[rigid] for rigid in known.rigid)


def test_larger_sizes_leave_a_single_element_behind_vectors_and_smaller_ones_any_number() -> None:
    known, rng = definition("gelu"), np.random.default_rng(5)
    shown = {name: 32 * (2 + i) for i, name in enumerate(known.cpu)}
    for start in (-1, 0, 1):
        sizes = {name: size + start for name, size in shown.items()}
        for _ in range(20):
            larger = known.other_sizes(rng, LARGER, sizes=sizes)
            assert all(size % 32 == 1 and size > sizes[name] for name, size in larger.items())
            smaller = known.other_sizes(rng, SMALLER, sizes=sizes)
            assert all(size % 2 == 1 and size < sizes[name] for name, size in smaller.items())
    drawn = [known.other_sizes(rng, SMALLER, sizes=shown) for _ in range(40)]
    assert {size % 8 for sizes in drawn for size in sizes.values()} == {1, 3, 5, 7}
    small = known.other_sizes(rng, LARGER, sizes=dict.fromkeys(shown, 4))
    assert all(size in (5, 7) for size in small.values())


@pytest.mark.parametrize("multiple", [2, 4, 8])
def test_sizes_that_vectors_divide_are_an_odd_number_of_them(multiple: int) -> None:
    known, rng = definition("gelu"), np.random.default_rng(5)
    for count in range(1, 40):
        sizes = dict.fromkeys(known.cpu, multiple * count)
        larger, smaller = (known.other_sizes(rng, near, sizes=sizes, multiple=multiple) for near in (LARGER, SMALLER))
        assert all(size % (2 * multiple) == multiple for size in (*larger.values(), *smaller.values()))
        assert all(size > multiple * count for size in larger.values())
        assert all(size <= multiple * count for size in smaller.values())


def test_nothing_is_asked_where_noise_reaches_the_border_to_infinity() -> None:
    given = {
        "x": torch.tensor([65504, 65504, -65504, 60000, 65504], dtype=torch.float16),
        "y": torch.tensor([15, 40, -16, 16, 5000], dtype=torch.float16),
    }
    (limit,) = bounds(lambda x, y: (x + y,), given)
    infinity = float("inf")
    assert limit.free.tolist() == [True, True, True, False, False]
    right = [65504, infinity, -infinity, 60000, infinity]
    for at, other in enumerate((infinity, 65504, -65504, infinity, 65504)):
        found = torch.tensor([*right[:at], other, *right[at + 1 :]], dtype=torch.float16)
        assert bool(limit.violation(found)) == (at > 2), at
    assert not bounds(lambda x, y: (x.float() + y.float(),), given)[0].free.any()


@pytest.mark.corpus(8)
@pytest.mark.parametrize("name", OWN)
def test_sizes_for_a_gpu_can_be_computed_and_fit_one(name: str) -> None:
    task = OWN[name].task(OWN[name].gpu)
    assert 1 << 20 < task.bytes < 16 << 30
    assert OWN[name].task().bytes < 2 << 20


def test_fp16_sums_of_fp16_products_are_noticed() -> None:
    known = definition("matmul")
    task = known.task({"m": 32, "n": 32, "k": 512}, "float16")
    drawn, function = known.draw(task, seed=1), known.bind({})
    (limit,) = bounds(function, drawn)
    total = torch.zeros(32, 32, dtype=torch.float16)
    for k in range(512):
        total += torch.outer(drawn["a"][:, k], drawn["b"][k])
    assert "off by" in limit.violation(total) or "RMS" in limit.violation(total)


def test_another_order_of_fp32_sums_is_accepted() -> None:
    known = definition("sum_rows")
    task = known.task({"rows": 16, "columns": 9984})
    for distribution in Distribution:
        x = known.draw(task, 1, distribution)["x"]
        (limit,) = bounds(known.bind({}), {"x": x})
        partial = torch.zeros(16, 32)
        for i in range(0, 9984, 32):  # each lane sums 312 numbers one after the other
            partial += x[:, i : i + 32]
        assert limit.violation(partial.cumsum(1)[:, -1]) == ""


def test_integers_may_differ_only_where_rounding_decides() -> None:
    x = torch.tensor([[0.0, 1.0, 1.0 + 2.0**-23], [0.0, 1.0, 2.0]])
    (limit,) = bounds(lambda x: (x.argmax(-1),), {"x": x})
    assert limit.violation(torch.tensor([1, 2])) == ""
    assert "[1]" in limit.violation(torch.tensor([2, 1]))


def test_infinities_must_stand_where_they_belong() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    (limit,) = bounds(lambda x: (torch.where(x > 0, x, -torch.inf),), {"x": x})
    assert limit.violation(torch.tensor([1.0, -torch.inf, 2.0])) == ""
    for wrong in ([1.0, -1.0, 2.0], [1.0, torch.inf, 2.0], [1.0, -torch.inf, torch.nan], [1.0, torch.nan, 2.0]):
        assert "kind" in limit.violation(torch.tensor(wrong))
    assert "not torch.float32[3]" in limit.violation(torch.tensor([1.0, -torch.inf, 2.0]).double())
    assert "not torch.float32[3]" in limit.violation(torch.tensor([1.0, -torch.inf]))


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        (Values("rows 4", Domain.POSITIVE), lambda t: bool((t > 0).all())),
        (Values("rows 4", Domain.UNIT), lambda t: bool(((t >= 0) & (t < 1)).all())),
        (Values("rows 4", Domain.PROBABILITIES), lambda t: torch.allclose(t.sum(-1), torch.ones(30))),
        (Values("rows 4", Domain.LOG_PROBABILITIES), lambda t: torch.allclose(t.exp().sum(-1), torch.ones(30))),
        (Values("rows rows", Domain.DEFINITE), lambda t: bool((torch.linalg.eigvalsh(t) > 0).all())),
        (
            Values("rows rows", Domain.TRIANGULAR),
            lambda t: torch.equal(t, t.tril()) and bool((t.diagonal() >= 1).all()),
        ),
        (integers("rows 4", "rows/2"), lambda t: bool(((t >= 0) & (t < 15)).all())),
        (booleans("rows 4"), lambda t: t.dtype == torch.bool),
    ],
)
@pytest.mark.parametrize("distribution", Distribution)
def test_every_distribution_stays_in_the_domain(values, holds, distribution) -> None:
    assert holds(values.draw({"rows": 30}, "float32", seeded(3, "x"), distribution))


def test_distributions_are_what_they_are_named_for() -> None:
    drawn = {d: normal("1 rows").draw({"rows": 10000}, "float32", seeded(1, "x"), d) for d in Distribution}
    assert abs(float(drawn[Distribution.OFFSET].mean()) - 8) < 0.1
    assert abs(float(drawn[Distribution.WIDE].std()) - 8) < 0.3
    assert 0.8 < float((drawn[Distribution.SPARSE] == 0).float().mean()) < 0.95
    assert drawn[Distribution.CONSTANT].unique().numel() == 1
    assert float(drawn[Distribution.UNIFORM].max()) <= 0 < float(drawn[Distribution.OFFSET].min())


def test_of_a_sparse_vector_few_elements_are_left() -> None:
    for seed in range(9):
        drawn = normal("rows").draw({"rows": 10000}, "float32", seeded(seed, "x"), Distribution.SPARSE)
        assert 1 <= int((drawn != 0).sum()) <= FEW


def test_the_largest_of_a_uniform_row_in_four_stand_a_power_of_two_apart() -> None:
    drawn = normal("rows 8192").draw({"rows": 40}, "float32", seeded(1, "x"), Distribution.UNIFORM)
    strides = set()
    for row in drawn[1::4]:
        (at,) = (row > -0.5 * TO_ZERO).nonzero(as_tuple=True)
        apart = at.diff()
        strides.add(int(apart.mode().values))
        assert float((apart == apart.mode().values).float().mean()) > 0.2
    assert len(strides) > 3 and all(stride & (stride - 1) == 0 for stride in strides)


def test_a_wide_row_in_four_has_halves_and_the_largest_of_eight_bits() -> None:
    drawn = normal("rows 70").draw({"rows": 40}, "float32", seeded(1, "x"), Distribution.WIDE)
    halves = (2 * drawn == (2 * drawn).round()).all(-1)
    assert halves[3::4].all() and int(halves.sum()) == 10 and (drawn[3::4, -1] == drawn[3::4].abs().amax(-1)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_keeps_its_sign_in_every_type(dtype: torch.dtype) -> None:
    values = torch.zeros(2, dtype=dtype)
    for place, value in enumerate((math.nan, -math.nan)):
        put(values[place], value)
    assert values.isnan().all() and values.signbit().tolist() == [False, True]


def test_a_row_far_below_zero_stays_in_its_type() -> None:
    for dtype, near in ((torch.float16, -3e4), (torch.bfloat16, -1e9), (torch.float32, -1e9)):
        row = torch.zeros(1000, dtype=dtype)
        put_far_below(row, seeded(1, "x"))
        assert row.isfinite().all() and float(row.float().mean()) == pytest.approx(near, rel=0.01)
        assert len(row.unique()) > 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("softmux", "no task 'softmux'; choose from softmax, softplus"),
        ("softmax:lines=4", "has no size lines"),
        ("softmax:rows=0", "at least 1"),
        ("softmax:int8", "not int8"),
        ("softmax@abcd1234", "revision"),
        ("conv2d:window=90", "cannot be computed"),
        ("64x64", "MxNxK"),
    ],
)
def test_a_task_that_cannot_be_is_one_clear_line(text, says) -> None:
    with pytest.raises(UserError, match=says) as error:
        tasks.parse(text)
    assert "\n" not in str(error.value)


def test_a_matrix_product_is_a_task_too() -> None:
    assert tasks.parse("64x32x16:tn") == Gemm.parse("64x32x16:tn")


def test_a_reference_that_does_not_fit_its_declaration_is_refused() -> None:
    x = {"x": normal("rows")}
    with pytest.raises(UserError, match=r"returns Tensor, Tensor; return a tensor for each of its outputs, out$"):
        Definition("two", lambda x: (x, x), x, {"rows": 4}, {"rows": 8}).task()
    with pytest.raises(UserError, match="columns"):
        Definition("one", lambda x: x, {"x": normal("columns")}, {"rows": 4}, {"rows": 8}).task()
