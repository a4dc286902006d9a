"""Answers that need no work, or leave a little of it out, are rejected for every task of our own by the cases judges use."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from cuda_l2.measure.protocols import SEARCH
from cuda_l2.tasks import parse
from cuda_l2.tasks._base import definitions
from cuda_l2.tasks.cases import FAR_BELOW, LEAST, MINUS_INFINITY, Case, OwnCases
from cuda_l2.tasks.tolerance import _moved, _SumsMoved, bounds
from cuda_l2.tasks.values import PEAK, Distribution, real, seeded
from cuda_l2.verify.seeds import SEEDS

EVERY = [(name, dtype) for name, known in definitions().items() for dtype in known.dtypes]
TOLERANCES = 4
"""By so many of them one element is off."""


def answers(case: Case, index: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong ones for one of the outputs."""
    limit = case.bounds[index]
    right = limit.rounded
    yield "zeros", torch.zeros_like(right)
    yield "ones", torch.ones_like(right)
    if right.dtype.is_floating_point and right.isfinite().any():
        if right.numel() > 1:
            yield "the mean", torch.full_like(right, float(right[right.isfinite()].double().mean()))
        off = right.double().flatten()
        first = int(right.isfinite().flatten().nonzero()[0])
        step = torch.finfo(right.dtype).eps * max(float(off[first].abs()), 1e-3)
        off[first] += max(TOLERANCES * limit.max_allowed, step)
        yield "one element off", off.to(right.dtype).reshape(right.shape)
    for name, tensor in case.tensors.items():
        if (tensor.shape, tensor.dtype) == (right.shape, right.dtype):
            yield f"the input {name}", tensor
    if right.ndim and len(right) > 1:
        yield "the last row repeats the one before", torch.cat([right[:-1], right[-2:-1]])
        yield "the last row is left out", torch.cat([right[:-1], torch.zeros_like(right[-1:])])
        yield "rows are swapped", right.roll(1, 0)
    if right.ndim and right.shape[-1] > 1:
        yield "the last column is left out", torch.cat([right[..., :-1], torch.zeros_like(right[..., -1:])], -1)
        yield "columns are shifted", right.roll(1, -1)
    if right.numel() > 1:
        yield "the last element is left out", torch.cat([right.flatten()[:-1], right.new_zeros(1)]).reshape(right.shape)


@pytest.mark.parametrize(("columns", "places"), [(70, {0, 1, 2, 3}), (4, {0, 1, 2, 3}), (3, None), (1, {0})])
def test_peaks_stand_at_even_and_odd_places_in_every_draw(columns, places) -> None:
    for seed in range(100):
        peaks = real((33, columns), seeded(seed, "x"), Distribution.LARGE)[3::4].max(-1)
        assert bool((peaks.values >= PEAK).all())
        assert places is None or set((peaks.indices % 4).tolist()) == places, seed


@pytest.mark.corpus(8)
@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=str)
def test_trivial_answers_are_rejected(name: str, dtype: str) -> None:
    task = definitions()[name].task(dtype=dtype)
    every = [case for _, case in judged(OwnCases(task, 11))]
    for index, output in enumerate(task.outputs):
        rejected: dict[str, bool] = {}
        for case in every:
            for what, wrong in answers(case, index):
                rejected[what] = rejected.get(what, False) or bool(case.bounds[index].violation(wrong))
        unseen = [what for what, found in rejected.items() if not found]
        assert len(rejected) > 2 and not unseen, (output.name, unseen)


@pytest.mark.corpus(8)
@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=str)
def test_every_tensor_counts(name: str, dtype: str) -> None:
    """The right answer for another value of one tensor is rejected."""
    known = definitions()[name]
    task = known.task(dtype=dtype)
    function, unseen = known.bind(dict(task.sizes)), {tensor.name for tensor in (*task.inputs, *task.weights)}
    for distribution, case in judged(OwnCases(task, 12)):
        other = known.draw(task, 12345, distribution)
        for tensor in list(unseen):
            results = function(**{**case.tensors, tensor: other[tensor]})
            if any(limit.violation(result) for limit, result in zip(case.bounds, results, strict=True)):
                unseen.discard(tensor)
    assert not unseen


def judged(cases: OwnCases) -> Iterator[tuple[Distribution, Case]]:
    """What a candidate is launched on at a task's own sizes, but for special values and changed tensors."""
    for seed in range(SEEDS):
        yield Distribution.NORMAL, cases.drawn(f"seed {seed}")
    for distribution in cases.distributions:
        yield distribution, cases.drawn("values", distribution)


@pytest.mark.parametrize("name", ["max_rows", "max_columns", "cummax", "max_pool2d"])
def test_a_largest_element_that_begins_at_zero_is_rejected_whatever_is_drawn(name: str) -> None:
    task = definitions()[name].task()
    for seed in range(4):
        case = OwnCases(task, seed).drawn("values", Distribution.UNIFORM)
        assert case.bounds[0].violation(case.bounds[0].rounded.clamp_min(0))


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_exponentials_from_a_largest_element_that_begins_at_zero_are_rejected(name: str) -> None:
    task = definitions()[name].task()
    known = definitions()[name].bind(dict(task.sizes))
    begins_at_zero = []

    def from_zero(x: torch.Tensor) -> torch.Tensor:
        largest = x.amax(-1, keepdim=True).clamp_min(0)
        logarithms = (x - largest) - (x - largest).exp().sum(-1, keepdim=True).log()
        return {"softmax": logarithms.exp(), "log_softmax": logarithms, "logsumexp": (x - logarithms)[..., 0]}[name]

    for distribution, case in judged(OwnCases(task, 13)):
        if case.bounds[0].violation(from_zero(**case.tensors)):
            begins_at_zero.append(distribution)
        assert not case.bounds[0].violation(known(**case.tensors)[0])
    # the sign of distant values is drawn
    assert {Distribution.FAR} <= set(begins_at_zero) <= {Distribution.FAR, Distribution.DISTANT}


def test_the_largest_of_every_other_element_is_rejected_in_few_rows_whatever_is_drawn() -> None:
    """Large values have peaks; else 33 rows may have none at an odd place whose exponential overflows."""
    task = parse("softmax:rows=33,columns=70")
    for seed in range(60):
        case = OwnCases(task, seed).drawn("values", Distribution.LARGE)
        exponentials = (case.tensors["x"] - case.tensors["x"][:, ::2].amax(-1, keepdim=True)).exp()
        assert case.bounds[0].violation(exponentials / exponentials.sum(-1, keepdim=True)), seed


def test_inputs_of_eight_bits_are_noticed_whatever_size_they_are_rounded_at() -> None:
    """Small values are of several sizes: those of one size alone escape who rounds at others."""
    task = parse("rms_norm:rows=33,columns=70")
    function = definitions()["rms_norm"].bind(dict(task.sizes))
    for least, most in ((0.002, 0.02), (0.02, 0.2)):
        cases = [OwnCases(task, seed).drawn("values", Distribution.SMALL) for seed in range(20)]
        rounded = [case for case in cases if least < case.tensors["x"].abs().max() < most]
        for case in rounded:
            coarse = case.tensors["x"].bfloat16().float()
            assert case.bounds[0].violation(function(**{**case.tensors, "x": coarse})[0])
        assert 3 < len(rounded) < 17


def test_a_byte_with_a_sign_that_is_read_without_it_is_rejected() -> None:
    case = OwnCases(definitions()["dequantise_int8"].task(), 1).drawn("seed 0")
    without = case.tensors["x"].view(torch.uint8).float() * case.tensors["scale"]
    assert case.bounds[0].violation(without)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_of_pytorchs_own_are_right_where_rounding_decides(dtype: torch.dtype) -> None:
    """fp16 sums overflow here, and what an infinity is as an integer lies far from the exact result."""

    def squares(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x * x).sum(-1).to(dtype),)

    tensors = {"x": torch.full((4, 8), 200.0, dtype=torch.float16)}
    (limit,) = bounds(squares, tensors)
    assert limit.free.all()
    assert limit.violation(squares(**tensors)[0]) == ""


def test_numbers_and_sums_move_up_and_down_by_the_least_share() -> None:
    generator, share = torch.Generator().manual_seed(1), 2.0**-24
    moved = _moved({"x": torch.full((100,), 1.5)}, share, generator)["x"]
    with _SumsMoved(generator).by(share):
        sums = torch.full((100, 3), 0.5, dtype=torch.float64).sum(-1)
    for found in (moved, sums):
        assert set(found.tolist()) == {1.5 * (1 - share), 1.5 * (1 + share)}


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_a_short_row_of_minus_infinity_before_its_end_has_one(columns: int) -> None:
    cases = OwnCases(parse(f"softmax:rows=40,columns={columns}"), 3)
    case = cases.special("x", MINUS_INFINITY[1])
    assert case and int(case.tensors["x"].isneginf().sum()) == 1


def test_counts_by_sums_of_ones_are_no_matter_of_rounding() -> None:
    def positive(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ((x > 0).to(x.dtype).sum(-1).long(),)

    tensors = {"x": torch.randn(64, 64)}
    (limit,) = bounds(positive, tensors)
    assert not limit.free.any() and limit.violation(positive(**tensors)[0] + 1)


def test_integers_that_differences_of_sums_decide_are_no_matter_of_one_chain() -> None:
    """The least of distances which are 2^-17 and hold the rounding of sums near one."""

    def nearest(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dots = (x[:, None] * y).sum(-1)
        lengths = (x * x).sum(-1).sqrt()[:, None] * (y * y).sum(-1).sqrt()
        return ((1 - dots / lengths).argmin(-1),)

    generator, wrong = torch.Generator().manual_seed(1), 0
    for _ in range(8):
        x, y = (2000 + 8 * torch.randn(rows, 512, generator=generator) for rows in (32, 16))
        (limit,) = bounds(nearest, {"x": x, "y": y})
        lengths = chain(x * x).sqrt() * chain(y * y).sqrt()[:, 0]
        found = (1 - chain(x[:, None] * y)[..., 0] / lengths).argmin(-1)
        assert not limit.violation(found)
        wrong += int((found != limit.exact).sum())
    assert wrong  # or nothing is shown


@pytest.mark.parametrize("task", ["cumsum:rows=4,columns=9", "sum_rows:rows=5,columns=33"])
def test_one_chain_of_sums_is_right_at_sizes_far_from_those_shown(task: str) -> None:
    """PyTorch's own sums are in pieces, or in fp64."""
    for seed in range(40):
        cases = OwnCases(parse(task), seed)
        for case in (cases.drawn("shape", task=far) for far in cases.far):
            sums = np.add.accumulate(case.tensors["x"].numpy(), axis=-1, dtype=np.float32)
            (limit,) = case.bounds
            assert not limit.violation(torch.from_numpy(sums if limit.exact.ndim > 1 else sums[:, -1]))


def chain(terms: torch.Tensor) -> torch.Tensor:
    """Sums of the last dimension, one term after the other in fp32."""
    return torch.from_numpy(np.add.accumulate(terms.numpy(), axis=-1, dtype=np.float32)[..., -1:])


def chained_layer_norm(x: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    mean = chain(x) / x.shape[-1]
    return (x - mean) * torch.rsqrt(chain((x - mean) ** 2) / x.shape[-1] + 1e-5) * gain + shift


def chained_top_p(logits: torch.Tensor) -> torch.Tensor:
    ordered, order = torch.sort(logits, stable=True, dim=-1, descending=True)
    exponentials = (ordered - ordered[:, :1]).exp()
    each = exponentials / chain(exponentials)
    before = torch.from_numpy(np.add.accumulate(each.numpy(), axis=-1, dtype=np.float32)) - each
    return torch.full_like(logits, -torch.inf).scatter(-1, order, ordered.masked_fill(before > 0.9, -torch.inf))


COARSE = {"count_positive", "hinge", "speculative_acceptance"}
"""Tasks in which inputs of 12 bits of significand are no matter of rounding, or hide in an average."""


@pytest.mark.parametrize("name", sorted({name for name, dtype in EVERY if dtype == "float32"} - COARSE))
def test_inputs_of_twelve_bits_are_noticed(name: str) -> None:
    """A tolerance for honest sums must leave this: TF32 has 11."""

    def coarse(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor.clone()
        return ((tensor.view(torch.int32) + 0x400) & ~0x7FF).view(torch.float32)

    known = definitions()[name]
    cases = OwnCases(known.task(), 5)
    function = known.bind(dict(cases.task.sizes))
    with torch.no_grad():
        assert any(
            limit.violation(found)
            for _, case in judged(cases)
            for results in [function(**{each: coarse(tensor) for each, tensor in case.tensors.items()})]
            for limit, found in zip(case.bounds, results, strict=True)
        )


CHAINED = {
    "cosine_distance": lambda x, y: (1 - chain(x * y) / (chained_norm(x) * chained_norm(y)))[:, 0],
    "layer_norm": chained_layer_norm,
    "normalise_rows": lambda x: x / chain(x * x).sqrt().clamp_min(1e-12),
    "temperature_softmax": lambda logits, temperature: chained_softmax(logits / temperature[:, None]),
    "top_p_filter": chained_top_p,
    "variance_rows": lambda x: (chain((x - chain(x) / x.shape[-1]) ** 2) / (x.shape[-1] - 1))[:, 0],
}


def test_the_least_number_stands_in_inputs_alone_and_where_pytorch_is_right() -> None:
    """A gain's would overflow in an honest order of products, and a square of it overflows in any."""
    norm, variance, softmax = (
        OwnCases(parse(text), 1)
        for text in ("rms_norm:rows=8,columns=40", "variance_rows:rows=8,columns=40", "softmax:rows=8,columns=40")
    )
    assert norm.special("gain", LEAST) is None and norm.special("x", LEAST) is None
    assert variance.special("x", LEAST) is None
    case = softmax.special("x", LEAST)
    assert case and float(case.tensors["x"].min()) == torch.finfo(torch.float32).min


def chained_norm(x: torch.Tensor) -> torch.Tensor:
    return chain(x * x).sqrt().clamp_min(1e-8)


def chained_softmax(x: torch.Tensor) -> torch.Tensor:
    exponentials = (x - x.amax(-1, keepdim=True)).exp()
    return exponentials / chain(exponentials)


@pytest.mark.parametrize("name", CHAINED)
def test_one_chain_of_sums_is_right_whatever_is_drawn(name: str) -> None:
    for seed in range(6):
        cases = OwnCases(definitions()[name].task(), seed)
        each = [case for _, case in judged(cases)] + [cases.drawn("shape", task=far) for far in cases.far[:1]]
        for case in each:
            (limit,) = case.bounds
            assert not limit.violation(CHAINED[name](**case.tensors)), (seed, case.task)


OTHERWISE = {
    "batch_norm_training": lambda x, gain, shift: (
        (x - x.mean((0, 2, 3), keepdim=True))
        * torch.rsqrt(x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5)
        * gain[:, None, None]
        + shift[:, None, None]
    ),
    "causal_depthwise_conv1d": lambda x, w: functional.silu(
        sum(
            functional.pad(x[..., : x.shape[-1] - lag] * w[:, :, w.shape[-1] - 1 - lag], (lag, 0))
            for lag in range(w.shape[-1])
        )
    ),
    "moving_average": lambda parameter, average: 0.99 * average + 0.01 * parameter,
    "pairwise_squared_distance": lambda x, y: (x[:, None] - y).square().sum(-1),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_form_of_a_formula_is_right_with_special_values(name: str) -> None:
    """One that leaves padding out, or in which infinity meets neither zero nor another infinity."""
    cases = OwnCases(definitions()[name].task(), 1)
    for tensor in cases.real_tensors:
        for kind in cases.special_kinds:
            case = cases.special(tensor, kind)
            vector = cases.drawn("special").tensors[tensor].dim() < 2
            assert bool(case) == (kind != FAR_BELOW or not vector) or kind == LEAST
            assert case is None or not case.violation({"out": OTHERWISE[name](**case.tensors)}), (tensor, kind)


def test_what_pytorch_computes_is_judged_by_the_tolerance_of_its_own_inputs(rig) -> None:
    """By that of other inputs it would be no baseline here: it errs more than PyTorch does there."""
    task = parse("cross_entropy_smoothed:rows=37,classes=95:float16")

    def differs(seed: int) -> bool:
        (limit,) = (case := OwnCases(task, seed).timed(0)).bounds
        logits, target = case.tensors["logits"], case.tensors["target"]
        result = functional.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
        return bool(limit.violation(result))

    with rig.open(task, next(filter(differs, range(200)))) as bench:
        timing = bench.time_baselines(SEARCH)
    assert timing.reference == "torch eager" and not timing.conditions.left_out
