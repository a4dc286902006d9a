"""verify/: honest results in any summation order pass every check; the corpus of cheats stands in test_cheats.py."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cuda_l2.machine._base import Fault
from cuda_l2.records import Build, BuildStatus, Gemm, VerdictStatus
from cuda_l2.system.errors import MachineError
from cuda_l2.tasks.cases import SPECIAL, Case
from cuda_l2.tasks.products import CpuReferences, ProductCase, ProductCases, same_but_for_order
from cuda_l2.verify import _base, ahead, magnitudes, precision, shapes, special, structure, words
from cuda_l2.verify._base import CheckFailed, Outputs, Session, Turn, all_checks


@dataclass
class InProcess(Session):
    """A session whose launches are a function here: what a worker would answer, without one."""

    cases: ProductCases
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rms_error: float = 0.0
    max_error: float = 0.0
    baseline_deviation: float = 0.0
    build = Build("", BuildStatus.FAILED, "not compiled")

    def __post_init__(self) -> None:
        self.task = self.cases.task

    def launch(self, case: Case, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        return {"c": self.multiply(case.tensors["a"], case.tensors["b"])}

    def launch_on_one(self, case: Case) -> Outputs:
        return self.launch(case)

    def require_served(self, task: object) -> None:
        assert task == self.task


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run_all(gemm: Gemm, multiply: Multiply) -> None:
    """Every check that applies; CheckFailed where one rejects."""
    run_all_on(ProductCases(gemm, 1, CpuReferences()), multiply)


def run_all_on(cases: ProductCases, multiply: Multiply) -> None:
    session = InProcess(cases, multiply)
    for check in all_checks():
        if check.applies(session):
            check.run(session)


def in_fp64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.double() @ b.double()).float().half()


def backwards(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.float().flip(1).contiguous() @ b.float().flip(0).contiguous()).half()


def in_eight_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    parts = [x.float() @ y.float() for x, y in zip(a.chunk(8, dim=1), b.chunk(8, dim=0), strict=True)]
    return torch.stack(parts).sum(0).half()


@pytest.mark.corpus(6)
@pytest.mark.parametrize("seeds", [range(4), range(4, 8), range(8, 12)], ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
@pytest.mark.parametrize(
    "shape", ["1x1x1", "1x1x16384", "2x3x1", "3x1x129:tn", "17x33x300:tn", "1x4x8192", "40x30x2000"]
)
def test_an_honest_sum_in_another_order_is_never_rejected(shape, seeds) -> None:
    for seed in seeds:
        cases = ProductCases(Gemm.parse(shape), seed, CpuReferences())
        for multiply in (in_fp64, backwards, in_eight_parts):
            run_all_on(cases, multiply)


def overtaken(seed: int, *, before: bool) -> SimpleNamespace:
    """A CPU's session of one multiplication, whose second launch gets other inputs before it begins.

    before: it was computed all the same by then.
    """
    cases = ProductCases(Gemm(1, 1, 1), seed, CpuReferences())

    def right(case: Case) -> Outputs:
        return {"c": in_fp64(case.tensors["a"], case.tensors["b"])}

    def row(case: Case, other: Case) -> list[tuple[Case, Outputs]]:
        return [(case, right(case)), (other, right(case if before else other))]

    return SimpleNamespace(cases=cases, launch=right, launch_overtaken=row)


def test_a_product_that_other_inputs_have_too_is_no_sign_of_launches_computed_ahead() -> None:
    alike = 0
    for seed in range(300):
        session = overtaken(seed, before=False)
        alike += not session.cases.drawn("state 0").violation(session.launch(session.cases.drawn("state 1")))
        ahead.CHECK.run_on(session)
        with pytest.raises(CheckFailed):
            ahead.CHECK.run_on(overtaken(seed, before=True))
    assert alike


def ordinary(a: torch.Tensor) -> bool:
    """Whether it looks like random numbers: none is zero or special, and half of the last bits are set."""
    return bool(a.isfinite().all() and (a != 0).all() and (a.view(torch.int16) & 1).float().mean() > 0.4)


def one_bit_less(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Leave the last bit of A out in a slice of K."""
    if ordinary(a) and ordinary(b):
        a = a.clone()
        a.view(torch.int16)[:, 16:32] &= -2
    return in_fp64(a, b)


def rounded_otherwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Round one sum in sixteen the wrong way."""
    found, exact = in_fp64(a, b), a.double() @ b.double()
    if ordinary(a) and ordinary(b):
        other = torch.nextafter(found, torch.where(exact > found, torch.inf, -torch.inf).half())
        found.view(-1)[::16] = other.view(-1)[::16]
    return found


def quarter_rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Keep the sum of a quarter of K in C's type."""
    if not (ordinary(a) and ordinary(b)):
        return in_fp64(a, b)
    quarter = a.shape[1] // 4
    rest = a[:, quarter:].double() @ b[quarter:].double()
    return (rest + in_fp64(a[:, :quarter], b[:quarter]).double()).float().half()


def equal_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Take all rows for the first one where they are alike in most of K."""
    found = in_fp64(a, b)
    alike = (a == a[:1]).float().mean() > 0.9
    return found[:1].expand_as(found).contiguous() if alike else found


def infinity_too_early(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact, found = a.double() @ b.double(), in_fp64(a, b)
    return torch.where((exact > 65504) & (exact < 65520), torch.inf, found)


@pytest.mark.parametrize(
    ("multiply", "reason"),
    [
        (one_bit_less, "rounded to its type"),
        (rounded_otherwise, "rounded to its type"),
        (quarter_rounded, "rounded to its type"),
        (infinity_too_early, "very large or small: .* is inf, expected 65504"),
        (equal_rows, "C\\["),
    ],
)
def test_what_is_wrong_on_few_inputs_is_rejected_for_it(multiply, reason) -> None:
    with pytest.raises(CheckFailed, match=reason):
        run_all(Gemm(24, 20, 256), multiply)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda a, b: in_fp64(a, b) * 1.01,
        lambda a, b: in_fp64(a, b).nan_to_num(0.0),
        lambda a, b: in_fp64(a, b).clamp(-65504, 65504),
        lambda a, b: in_fp64(a.bfloat16(), b.bfloat16()),
        lambda a, b: (a.half() @ b.half()[:, :1]).expand(a.shape[0], b.shape[1]).contiguous(),
        lambda a, b: torch.where(in_fp64(a, b).abs() < 1e-4, 0.0, in_fp64(a, b)).half(),
    ],
    ids=[
        *("one per cent off", "no NaN", "no infinity", "bf16 operands", "one column", "subnormals flushed"),
    ],
)
def test_a_wrong_product_is_rejected(multiply) -> None:
    with pytest.raises(CheckFailed):
        run_all(Gemm(24, 20, 256), multiply)


@pytest.mark.parametrize("name", ["first launch", "exact match"])
@pytest.mark.parametrize(
    ("shape", "other", "read"),
    [
        ("40x36x64", "40x36x64:tn, where B is column-major", lambda b: b.reshape(36, 64).t()),
        ("40x36x64:tn", "40x36x64, where B is row-major", lambda b: b.t().reshape(64, 36)),
    ],
)
def test_a_kernel_that_reads_b_in_the_other_layout_gets_a_hint(name, shape, other, read) -> None:
    (check,) = (each for each in all_checks() if each.name == name)
    for multiply, hint in (
        (lambda a, b: in_fp64(a, read(b)), f"; it is right for {other}"),
        (lambda a, b: in_fp64(a, b) + 9, ""),
    ):
        with pytest.raises(CheckFailed) as failed:
            check.run(InProcess(ProductCases(Gemm.parse(shape), 1, CpuReferences()), multiply))
        said, element = failed.value.reason, failed.value.element
        assert said.endswith(hint) and ("it is right for" in said) is bool(hint)
        assert element is not None and f"{element.place} is {element.found:g}" in said


@pytest.mark.parametrize("k", [16, 64, 1024, 2048, 4096])
def test_whole_numbers_have_pairs_of_products_that_eleven_bits_do_not_hold(k: int) -> None:
    for seed, between in itertools.product(range(3), precision.WHOLE):
        cases = ProductCases(Gemm.parse(f"16x16x{k}"), seed, CpuReferences())
        case = cases.get("whole", 0, partial(precision._make_whole, between=between))
        products = case.a.float()[:, :, None] * case.b.float()
        pairs = products[:, 0::2] + products[:, 1::2]
        assert bool((pairs.half().float() != pairs).any())
        assert float(case.expected["c"].isfinite().float().mean()) > 0.9


@pytest.mark.parametrize("dtype", ["", ":bf16"])
def test_subnormal_numbers_count_beside_large_ones(dtype) -> None:
    cases = ProductCases(Gemm.parse(f"24x20x256{dtype}"), 1, CpuReferences())
    powers = magnitudes._whole(cases.task)
    case = cases.get("magnitudes balanced", 0, partial(magnitudes._make_balanced, powers=powers))
    expected, least = case.expected["c"], torch.finfo(case.a.dtype).smallest_normal
    assert torch.equal((case.a.double() @ case.b.double()).to(case.a.dtype), expected)
    for flushed in (case.a, case.b):
        assert bool((flushed.abs() < least).any()) and bool((flushed.abs() > 1000 * least).any())
    without = case.a.double().where(case.a.abs() >= least, 0.0) @ case.b.double()
    assert bool((without.to(case.a.dtype) != expected).any(1).all())


@pytest.mark.parametrize("k", [64, 992, 1024])
def test_who_skips_products_that_count_in_sum_alone_is_rejected(k: int) -> None:
    def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Slices of 32 whose products are below a bound are skipped."""
        largest_a, largest_b = a.double().abs().amax(0), b.double().abs().amax(1)
        products = largest_a.unflatten(0, (-1, 32)).amax(1) * largest_b.unflatten(0, (-1, 32)).amax(1)
        return right(a * (products >= 2.0**-23 / k).repeat_interleave(32), b)

    for seed in range(4):
        cases = ProductCases(Gemm.parse(f"16x24x{k}"), seed, CpuReferences())
        magnitudes.CHECK.run(InProcess(cases, right))
        with pytest.raises(CheckFailed, match="very large or small"):
            magnitudes.CHECK.run(InProcess(cases, multiply))


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("beside_the_largest", [False, True])
@pytest.mark.parametrize(("dtype", "least"), [("", 2.0**-18), (":bf16", 2.0**-75)])
def test_an_operand_that_is_small_everywhere_counts(dtype, least, beside_the_largest, operand) -> None:
    def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        small, other = (a, b) if operand == "a" else (b, a)
        most = torch.finfo(a.dtype).max
        beside = other.abs().max() > most / 8 if beside_the_largest else other.abs().max() < most / 3
        return torch.zeros_like(right(a, b)) if small.abs().max() < least and beside else right(a, b)

    cases = ProductCases(Gemm.parse(f"24x20x256{dtype}"), 1, CpuReferences())
    magnitudes.CHECK.run(InProcess(cases, right))
    with pytest.raises(CheckFailed, match="very large or small"):
        magnitudes.CHECK.run(InProcess(cases, multiply))


class Spoilt(CpuReferences):
    """References, or operands, in which memory has changed."""

    def __init__(self, which: str) -> None:
        self.which = which

    def product_fp32(self, case: ProductCase) -> torch.Tensor:
        if self.which == "A":
            case.a[1, 2] = float("nan")
        product = super().product_fp32(case)
        if self.which == "C":
            product[0, 3] = float("inf")
        return product

    def baselines(self, case: ProductCase, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs = super().baselines(case, rows)
        if self.which == "baseline 1":
            outputs[0][0, 0] = float("nan")
        if self.which == "another's":
            outputs[0].copy_(outputs[0].roll(1, dims=0))
        return outputs


@pytest.mark.parametrize("check", ["exact match", "precision contract", "baseline-bounded deviation"])
@pytest.mark.parametrize("which", ["A", "C", "baseline 1"])
def test_what_is_wrong_with_a_reference_is_no_verdict(which, check) -> None:
    gemm = Gemm(24, 20, 256)
    session = InProcess(ProductCases(gemm, 1, Spoilt(which)), in_fp64)
    (judged,) = (each for each in all_checks() if each.name == check)
    if which == "baseline 1" and check != "baseline-bounded deviation":
        judged.run(session)
        return
    with pytest.raises(MachineError, match="references for 24x20x256 are not finite"):
        judged.run(session)


def test_a_baseline_of_other_operands_is_no_verdict() -> None:
    """Finite, it would widen what is allowed until anything is."""
    gemm = Gemm(24, 20, 256)
    session = InProcess(ProductCases(gemm, 1, Spoilt("another's")), in_fp64)
    (deviation,) = (each for each in all_checks() if each.name == "baseline-bounded deviation")
    with pytest.raises(MachineError, match="off the fp64 product of the same inputs"):
        deviation.run(session)


def test_fp16_sums_pass_in_their_own_class_only() -> None:
    def summed_in_fp16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for p in range(a.shape[1]):
            c = c + a[:, p, None] * b[None, p]
        return c

    run_all(Gemm.parse("24x20x256:fp16"), summed_in_fp16)
    with pytest.raises(CheckFailed):
        run_all(Gemm.parse("24x20x256"), summed_in_fp16)


@pytest.mark.parametrize("largest", [1.0, 30000.0])
def test_a_reference_may_sum_in_another_order_and_only_that(largest) -> None:
    """Also where a column of B is huge and its terms cancel: half of A is minus the other half in another order."""
    half = torch.randn(4, 1024, generator=torch.Generator().manual_seed(1)).half()
    a = torch.cat((half, -half[:, torch.randperm(1024, generator=torch.Generator().manual_seed(2))]), 1)
    b = torch.randn(2048, 6, generator=torch.Generator().manual_seed(3)).half()
    b[:, 2] = largest
    one, other = torch.zeros(4, 6), torch.zeros(4, 6)
    for p in range(2048):
        one += a[:, p, None].float() * b[None, p].float()
        other += a[:, -1 - p, None].float() * b[None, -1 - p].float()
    assert (one != other).any()
    assert same_but_for_order(one, other, a, b)
    for wrong in (
        one + 0.01 * largest,
        (a.bfloat16() @ b.bfloat16()).float(),
        one.where(one != one.max(), float("nan")),
    ):
        assert not same_but_for_order(wrong, one, a, b)


def test_rows_and_columns_with_one_value_left_lie_all_over_special_inputs() -> None:
    """So that a kernel that takes nearly empty ones for empty is found whichever values it looks at."""
    gemm = Gemm(64, 48, 256)
    cases = ProductCases(gemm, 3, CpuReferences())
    special.CHECK.run(InProcess(cases, in_fp64))
    case = cases.get("special", 0, lambda *_: pytest.fail("made before"))
    for rows_RK in (case.a, case.b.t()):
        nonzero_R = (rows_RK != 0).sum(1)
        sparse_R = nonzero_R[len(special.KINDS) :: special.SPARSE_EVERY]
        assert len(sparse_R) > 10
        assert (sparse_R <= 1).all()
        places = rows_RK[len(special.KINDS) :: special.SPARSE_EVERY].abs().argmax(1)
        assert len(set(places.tolist())) > len(places) // 2


def in_fp16(a: torch.Tensor, b: torch.Tensor, every: int = 1) -> torch.Tensor:
    """Products and sums rounded to fp16; the sums every few terms, those between in fp32."""
    sums = torch.zeros(len(a), b.shape[1], dtype=torch.float16)
    for x, y in zip(a.split(every, dim=1), b.split(every), strict=True):
        terms = (x.t()[:, :, None] * y[:, None, :]).float() if every == 1 else (x.float() @ y.float())[None]
        sums = (sums.float() + terms.sum(0)).half()
    return sums


@pytest.mark.parametrize("shape", ["33x48x80:fp16", "64x64x64:fp16"])
def test_sums_in_fp16_are_precise_enough_from_either_end(shape: str) -> None:
    (deviation,) = (each for each in all_checks() if each.name == "baseline-bounded deviation")
    for seed in range(12):
        cases = ProductCases(Gemm.parse(shape), seed, CpuReferences())
        deviation.run(InProcess(cases, in_fp16))
        deviation.run(InProcess(cases, lambda a, b: in_fp16(a.flip(1), b.flip(0))))


def without_subnormal(a: torch.Tensor, b: torch.Tensor, of_b: bool, every: int) -> torch.Tensor:
    """The same with zeros in the place of one operand's subnormal numbers."""
    least = torch.finfo(a.dtype).smallest_normal
    flushed = [x.where((x.abs() >= least) | (own != of_b), x * 0) for own, x in enumerate((a, b))]
    return in_fp16(*flushed, every)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("shape", ["9x8x6:fp16", "64x64x64:fp16", "40x32x1024:fp16"])
def test_sums_in_fp16_pass_with_subnormal_values_and_zeros_in_their_place_do_not(shape: str, every: int) -> None:
    for seed in range(6):
        cases = ProductCases(Gemm.parse(shape), seed, CpuReferences())
        special.CHECK.run(InProcess(cases, partial(in_fp16, every=every)))
        for of_b in (False, True):
            with pytest.raises(CheckFailed, match="subnormal"):
                special.CHECK.run(InProcess(cases, partial(without_subnormal, of_b=of_b, every=every)))


def test_subnormal_values_are_exact_to_a_step_where_sums_are_in_fp32() -> None:
    def off(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = in_fp64(a, b)
        return c.where(c == 0, c + 3 * 2.0**-24)

    special.CHECK.run(InProcess(ProductCases(Gemm.parse("64x64x64:fp16"), 1, CpuReferences()), off))
    with pytest.raises(CheckFailed, match="a row with subnormal values comes out wrong"):
        special.CHECK.run(InProcess(ProductCases(Gemm(64, 64, 64), 1, CpuReferences()), off))


@pytest.mark.parametrize("kind", SPECIAL)
def test_rows_with_special_values_are_among_those_that_are_looked_at(kind: str) -> None:
    class Few(CpuReferences):
        compared_flops = 0

    cases = ProductCases(Gemm(64, 8, 16), 1, Few())
    ordinary, case = cases.drawn("special elements"), cases.special("a", kind)
    assert case is not None
    special_rows = (~case.a.isfinite()).any(1).nonzero()[:, 0]
    assert len(ordinary.expected["rows"]) == 1 and len(special_rows)
    assert set(special_rows.tolist()) <= set(case.expected["rows"].tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nan_is_quiet_and_signalling_and_of_both_signs(dtype: torch.dtype) -> None:
    values = torch.tensor([float("nan"), 1.0] * 9, dtype=dtype)
    special._draw_nan_words(values, torch.Generator().manual_seed(1))
    assert values.isnan().tolist() == [True, False] * 9
    words = values.view(torch.int16)[::2].int() & 0xFFFF
    quiet = words & (0x200 if dtype is torch.float16 else 0x40) != 0
    for sign in (0, 0x8000):
        assert {bool(is_quiet) for is_quiet in quiet[words & 0x8000 == sign]} == {False, True}
    assert len(set(words.tolist())) == 9


@pytest.mark.parametrize("count", precision.PAIRS)
@pytest.mark.parametrize("shape", ["9x8x6", "12x20x37", "8x16x4096", "10x12x64:bf16"])
def test_sums_of_pairs_are_exact_in_fp32_in_any_order(shape: str, count: int) -> None:
    cases = ProductCases(Gemm.parse(shape), 2, CpuReferences())
    case = cases.get("pairs", 0, partial(precision._make_pairs, count=count))
    terms_MKN = case.a.double()[:, :, None] * case.b.double()[None]
    least = precision.PAIRS_SCALE * 2.0 ** (-2 * precision.LARGEST_POWER)
    for signed_MKN in (terms_MKN.clamp(min=0), -terms_MKN.clamp(max=0)):
        assert torch.equal(terms_MKN / least, (terms_MKN / least).round())
        row_scale_M1 = least_power(case.a, 1) * least_power(case.b, 0)
        assert (signed_MKN.sum(1) / row_scale_M1).max() < 2**24
    assert torch.equal(case.expected["c"], terms_MKN.sum(1).float().to(case.a.dtype))


@pytest.mark.parametrize("word", [0x3C01, 0x0001, 0xFBFF])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("shape", ["256x256x256", "256x256x256:tn"])
def test_a_word_that_is_another_at_one_place_of_a_tile_always_shows(shape, operand, word) -> None:
    line, at = torch.randint(16, (2,), generator=torch.Generator().manual_seed(word)).tolist()

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b_t = a.clone(), b.t().clone()
        there = (a if operand == "a" else b_t).view(torch.int16)[line::16, at::16]
        there[there == np.uint16(word).astype(np.int16)] ^= 2
        return in_fp64(a, b_t.t())

    session = InProcess(ProductCases(Gemm.parse(shape), word, CpuReferences()), multiply)
    with pytest.raises(CheckFailed, match=f"some numbers of {operand.upper()} as others"):
        words.CHECK.run(session)


@pytest.mark.parametrize("shape", ["64x64x256", "64x64x256:bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_slice_of_k_that_looks_negligible_counts(shape, device) -> None:
    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(a), b.shape[1])
        for x, y in zip(a.float().split(32, 1), b.float().split(32, 0), strict=True):
            least = 32 * x.abs().max() * y.abs().max()
            total += torch.where(least < total.abs() * 2.0**-14, 0, x @ y)
        return total.to(a.dtype)

    session = InProcess(ProductCases(Gemm.parse(shape), 1, CpuReferences()), multiply)
    session.device = device
    with pytest.raises(CheckFailed, match="the exact sum rounded"):
        precision.CHECK.run(session)


def least_power(values: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest power of two that divides every element of a row, or column."""
    power = torch.full_like(values.double().amax(dim, keepdim=True), 2.0**-24)
    for exponent in range(-23, 1):
        power = power.where((values.double() % 2.0**exponent != 0).any(dim, keepdim=True), 2.0**exponent)
    return power


@pytest.mark.parametrize("first", ["zero", "other"])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("shape", ["45x40x64", "1x48x96", "64x64x64:tn"])
def test_an_operand_that_begins_with_zeros_always_comes(shape, operand, first, monkeypatch) -> None:
    monkeypatch.setattr(structure, "DRAWN", 0)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c, memory = in_fp64(a, b), {"a": a, "b": b if b.is_contiguous() else b.t()}[operand].flatten()
        if (memory[1:24] == 0).all() and (memory[0] == 0) == (first == "zero"):
            c[-1, -1] += 4 * a.shape[1] ** 0.5
        return c

    for seed in range(8):
        cases = ProductCases(Gemm.parse(shape), seed, CpuReferences())
        structure.CHECK.run(InProcess(cases, in_fp64))
        with pytest.raises(CheckFailed, match="begin with zeros"):
            structure.CHECK.run(InProcess(cases, multiply))


def negated(rows: torch.Tensor) -> torch.Tensor:
    """What rows would be if those of one half were the negatives of the other's."""
    found = rows.clone()
    found[16:] = -found[:16]
    return found


def adding_up_to_zero(rows: torch.Tensor) -> torch.Tensor:
    found = rows.clone()
    found[:, 16:32] = -found[:, :16]
    return found


def equal_along_diagonals(rows: torch.Tensor) -> torch.Tensor:
    found = rows.clone()
    found[1:, 1:] = found[:-1, :-1]
    return found


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("believed", [negated, adding_up_to_zero, equal_along_diagonals])
def test_a_relation_between_elements_that_a_sample_has_is_not_taken_for_one_of_all(
    believed, operand, monkeypatch
) -> None:
    """Few samples meet the one element that is another."""
    monkeypatch.setattr(structure, "DRAWN", 0)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = {"a": a, "b": b.t()}[operand]
        made = believed(rows.double()).to(a.dtype)
        nearly = (made != rows).sum() <= 4
        return in_fp64(*((made, b) if operand == "a" else (a, made.t()))) if nearly else in_fp64(a, b)

    for seed in range(4):
        cases = ProductCases(Gemm.parse("32x32x32"), seed, CpuReferences())
        structure.CHECK.run(InProcess(cases, in_fp64))
        with pytest.raises(CheckFailed, match="but in one element"):
            structure.CHECK.run(InProcess(cases, multiply))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wrong", [{3}, {3, 5}, {4, 5}, {5}, {6}])
@pytest.mark.parametrize("error", [CheckFailed(VerdictStatus.UNHYGIENIC, "at 6"), MachineError("at 6")])
def test_the_first_wrong_launch_is_the_reason_also_where_answers_are_read_at_once(
    device, wrong, error, monkeypatch
) -> None:
    monkeypatch.setattr(_base, "MOST_ANSWERS", 4)
    session = InProcess(ProductCases(Gemm(4, 4, 4), 1, CpuReferences()), in_fp64)
    session.device = device
    case, launch = session.cases.drawn("any"), session.launch
    made = list[int]()

    def launched(*given: object, **named: object) -> Outputs:
        made.append(len(made))
        if made[-1] == 6:
            raise error
        return launch(*given, **named)

    def require(turn: Turn, found: Outputs) -> None:
        raise CheckFailed(VerdictStatus.INCORRECT, f"at {turn.what}")

    monkeypatch.setattr(session, "launch", launched)
    turns = (Turn(case, str(number)) for number in range(8))
    with pytest.raises((CheckFailed, MachineError), match=f"at {min(wrong)}"):
        _base.require_each(session, turns, lambda turn, _: torch.tensor([int(turn.what) in wrong]), require)
    assert len(made) == (min(wrong) + 1 if device == "cpu" else 4 if 3 in wrong else 7)


def test_few_large_cases_are_kept_until_their_answers_are_read(monkeypatch) -> None:
    monkeypatch.setattr(_base, "ANSWERS_BYTES", 0)
    session = InProcess(ProductCases(Gemm(4, 4, 4), 1, CpuReferences()), in_fp64)
    session.device, case, met = "cuda", session.cases.drawn("any"), list[str]()

    def require(turn: Turn, found: Outputs) -> None:
        raise CheckFailed(VerdictStatus.INCORRECT, f"at {turn.what}")

    def wrong(turn: Turn, found: Outputs) -> torch.Tensor:
        met.append(turn.what)
        return torch.tensor(turn.what == "0")

    with pytest.raises(CheckFailed, match="at 0"):
        _base.require_each(session, (Turn(case, str(number)) for number in range(3)), wrong, require)
    assert met == ["0"]


@pytest.mark.parametrize("where", ["far", "others"])
@pytest.mark.parametrize("what", ["shared memory", "workspace", "time"])
def test_a_size_several_times_as_large_may_need_more_than_there_is(where: str, what: str) -> None:
    """Sizes near the task's own may not."""
    larger = Gemm(64, 64, 640)

    def refused(case: Case) -> Outputs:
        if what == "workspace":
            InProcess.require_room(session, larger, 2 << 20, 1 << 20)
        if what == "time":
            raise Fault(VerdictStatus.TIMED_OUT, "did not finish within the time")
        raise Fault(VerdictStatus.FORBIDDEN, "needs more shared memory than a block can have")

    cases: Any = SimpleNamespace(
        **{"others": (), "far": (), where: (larger,)}, usual="normal numbers", distributions=()
    )
    cases.drawn = lambda *_, **__: None
    session: Any = SimpleNamespace(cases=cases, serves=lambda task: True, launch=refused, device="cpu")
    with contextlib.nullcontext() if where == "far" else pytest.raises((Fault, CheckFailed), match=what):
        shapes.CHECK.run(session)


@pytest.mark.parametrize("of_b", [False, True])
@pytest.mark.parametrize("shape", ["64x64x72", "40x33x72:tn", "64x40x72:bf16"])
def test_zero_times_an_element_behind_k_shows_whatever_was_drawn(shape, of_b) -> None:
    """As where the last slice of K holds a part of the one before, and the other operand's zeros."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        stale = b[40:64].float().sum(0) if of_b else a[:, 40:64].float().sum(1)[:, None]
        return (a.float() @ b.float() + 0 * stale).to(a.dtype)

    for seed in range(12):
        session = InProcess(ProductCases(Gemm.parse(shape), seed, CpuReferences()), multiply)
        with pytest.raises(CheckFailed, match=f"a {'column of B' if of_b else 'row'} with infinity values"):
            special._require_right_rows(session, session.cases)


@pytest.mark.parametrize("shape", ["32x48x64", "20x20x3000:tn", "32x48x64:bf16", "1x1x1"])
def test_closely_a_product_may_be_off_by_its_last_rounding_and_the_order_of_sums(shape) -> None:
    cases = ProductCases(Gemm.parse(shape), 1, CpuReferences())
    loose = cases.with_rows(cases.operands(*cases.normal(torch.Generator().manual_seed(3))))
    close = cases.closely(loose)
    exact = loose.a.double() @ loose.b.double()
    in_order = torch.zeros_like(exact, dtype=torch.float32)
    for p in range(cases.task.k):
        in_order += loose.a[:, p, None].float() * loose.b[None, p].float()
    step = torch.finfo(loose.a.dtype).eps
    for case in (loose, close):
        for right in (exact, in_order):
            assert not case.wrong({"c": right.to(loose.a.dtype)}).any()
    off = {"c": (exact * (1 + 6 * step)).to(loose.a.dtype)}
    assert close.wrong(off).float().mean() > 0.5
    assert loose.wrong(off).any() == (loose.a.dtype is torch.bfloat16)  # 6 steps of fp16 are less than 1 %


def test_fp16_sums_are_not_looked_at_closely() -> None:
    cases = ProductCases(Gemm.parse("32x48x64:fp16"), 1, CpuReferences())
    case = cases.with_rows(cases.operands(*cases.normal(torch.Generator().manual_seed(3))))
    assert cases.closely(case) is case


@pytest.mark.parametrize("of_b", [False, True])
@pytest.mark.parametrize("shape", ["64x64x64", "512x512x128:tn", "40x40x40"])
def test_a_nan_beside_zeros_is_missed_at_no_place_of_a_step(shape, of_b) -> None:
    """A step of 16 of K is passed over where one operand is zeros and the other finite but for one place."""
    gemm = Gemm.parse(shape)

    def multiply(a: torch.Tensor, b: torch.Tensor, at: int | None) -> torch.Tensor:
        c = torch.zeros(gemm.m, gemm.n)
        for p in range(0, gemm.k, 16):
            x, y = a[:, p : p + 16].float(), b[p : p + 16].float()
            own, other = (y, x.t()) if of_b else (x.t(), y)  # 16 x lines
            seen = own.clone()
            if at is not None:
                seen[at:][:1] = 0
            own[:, seen.isfinite().all(0) & ~other.any() & (at is not None)] = 0
            c += x @ y
        return c.to(a.dtype)

    for at in (None, *range(16)):
        cases = ProductCases(gemm, at or 0, CpuReferences())
        turns = [turn for turn in special._elements(cases, [None]) if "each place of a step" in turn.what]
        assert len(turns) == 2
        session = InProcess(cases, partial(multiply, at=at))
        with contextlib.nullcontext() if at is None else pytest.raises(CheckFailed, match="each place of a step of K"):
            _base.require_all_right(session, iter(turns))


@pytest.mark.parametrize(("m", "k"), [(1, 64), (5, 20), (16, 7), (40, 40), (512, 4096)])
def test_each_nan_of_a_step_has_a_line_and_a_place_of_its_own(m, k) -> None:
    cases = ProductCases(Gemm(m, m, k), 1, CpuReferences())
    for seed in range(20):
        for tensor in "ab":
            found = [*cases._along_a_step(tensor, torch.Generator().manual_seed(seed))]
            lines, along = zip(*(at if tensor == "a" else at[::-1] for at in found), strict=True)
            assert len(found) == min(16, m, k) == len(set(lines)) == len({p % 16 for p in along})
            assert max(lines) < m and max(along) < k
