"""Which kernel serves a shape that was not tuned, or under a rule, on a driver that records."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import made_pack
import pytest
import torch
from fake_driver import FakeDriver, fake_driver
from made_pack import PLACE, TARGET, ListedPack, parameter_sizes, recipes_of

from cuda_l2 import contract
from cuda_l2.library.deploy import calls, choices, dispatch, pack, recipes, rules
from cuda_l2.library.deploy.choices import Choice
from cuda_l2.library.deploy.native import Native
from cuda_l2.library.deploy.recipes import FEW_ROWS, KERNELS, Recipe, candidate
from cuda_l2.library.table import family_of, read_times, schedule_text
from cuda_l2.records import Gemm, Layout
from cuda_l2.system.errors import UserError

WAVE = "256,4096,256,nn,fp32,cold,sm90_wave"
PERSISTENT = "128,16384,512,nn,fp32,programmatic,sm90_persistent"


def known(**rows: bool) -> dict[Gemm, Choice]:
    """Choices for m64x512x256 by whether a kernel serves them, which is then 1.5 times as fast as torch."""
    kernel = {"kernel": "a" * 16, "family": "sm90_wave", "schedule": "SWAP=1 BM=64"}
    found = [
        Choice(f"{name[1:]}x512x256", us=2.0, vendor_us=3.0, **(kernel if served else {}))
        for name, served in rows.items()
    ]
    return {choice.gemm: choice for choice in found}


@pytest.mark.parametrize(
    ("rows", "m", "serves"),
    [
        *[({"m16": True, "m32": True}, 17, 32), ({"m16": True, "m32": True}, 31, 32)],
        *[({"m16": False, "m32": True}, 20, 0), ({"m16": True, "m32": False}, 20, 0)],
        *[({"m16": True, "m33": True}, 20, 0), ({"m16": True}, 20, 0), ({"m32": True}, 20, 0), ({}, 20, 0)],
        ({"m8": False, "m16": True, "m24": True, "m32": False}, 20, 24),
    ],
)
def test_a_shape_is_served_between_two_near_rows_that_kernels_serve(rows, m, serves) -> None:
    found = choices.between(known(**rows), Gemm(m, 512, 256))
    assert (found.gemm.m if found else 0) == serves


def test_a_shape_between_is_torchs_where_its_tile_is_emptier_or_the_gain_is_small() -> None:
    def serves(m: int, **changes: object) -> bool:
        both = known(m64=True, m128=True)
        large = replace(both[Gemm(128, 512, 256)], **changes)
        return choices.between(both | {large.gemm: large}, Gemm(m, 512, 256)) is not None

    plain = "SWAP=0 BM=64"
    assert serves(65) and not serves(65, schedule=plain) and not serves(111, schedule=plain)
    assert serves(112, schedule=plain) and serves(127, schedule=plain) and not serves(95, schedule="BM=128")
    assert serves(120, schedule="BM=128") and serves(65, us=2.85) and not serves(65, us=2.86)
    assert serves(65, us=2.6, vendor_us=2.8) and not serves(65, us=2.7, vendor_us=2.8)
    assert not serves(65, family="cublaslt", schedule="W0=1")


def test_neighbours_differ_in_rows_alone() -> None:
    both = known(m16=True, m32=True)
    for other in (
        Gemm(20, 512, 128),
        Gemm(20, 256, 256),
        Gemm(20, 512, 256, Layout.TN),
        Gemm(20, 512, 256, dtype="bfloat16"),
    ):
        assert choices.between(both, other) is None
    demoted = both | {Gemm(32, 512, 256): replace(both[Gemm(32, 512, 256)], demoted=True)}
    assert choices.between(demoted, Gemm(20, 512, 256)) is None


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Iterator[Callable[..., list[Recipe]]]:
    """installed(*rows): the recipes of these rows, which are then the pack's kernels."""
    monkeypatch.setenv("CUDA_L2_HOME", str(tmp_path))

    def install(*rows: str) -> list[Recipe]:
        wanted = recipes_of(tmp_path, *rows)
        made_pack.install(ListedPack(wanted), monkeypatch)
        return wanted

    yield install
    made_pack.forget()


@pytest.fixture
def driver() -> Iterator[tuple[FakeDriver, Native]]:
    with fake_driver() as (fake, library):
        library.on_miss(dispatch.serve)
        yield fake, library


def chosen(recipe: Recipe, gemm: Gemm) -> Choice:
    made = candidate(family_of(recipe.family), dict(recipe.candidate.schedule), gemm, TARGET)
    assert made
    return Choice(str(gemm), contract.kernel_id(made.source), recipe.family, schedule_text(made.schedule), 3.0, 4.0)


def operands(gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
    dtype, tn = getattr(torch, gemm.dtype), gemm.layout is Layout.TN
    b = torch.ones(gemm.n, gemm.k, dtype=dtype).t() if tn else torch.ones(gemm.k, gemm.n, dtype=dtype)
    return torch.ones(gemm.m, gemm.k, dtype=dtype), b


def edge_recipe(wanted: list[Recipe], whole: Gemm) -> Recipe:
    """The kernel for an M that ends inside a tile."""
    return next(recipe for recipe in wanted if recipe.gemm == replace(whole, m=whole.m - 1))


def test_rows_between_tuned_ones_are_launched_by_the_larger_ones_schedule(installed, driver) -> None:
    fake, library = driver
    wanted, whole = installed(WAVE), Gemm.parse("256x4096x256:bf16")
    edge = edge_recipe(wanted, whole)
    upper = chosen(wanted[0], whole)
    assert upper.kernel != edge.id
    choices.add(PLACE, [upper, replace(upper, shape="128x4096x256:bf16")])
    gemm = replace(whole, m=250)
    plan = contract.parse_cuda(edge.candidate.source).plan(gemm, TARGET.sms)
    fake.parameters(parameter_sizes(plan))
    a, b = operands(gemm)
    calls.matmul(a, b)
    calls.matmul(a, b)
    first, second = fake.launches
    assert tuple(first.grid) == tuple(second.grid) == plan.launches[0].grid and first.words[3] == 250
    assert dispatch.pack().loaded == [edge.id] and library.counts()["vendor"] == 0
    assert torch.equal(calls.matmul(a[:100], b), a[:100] @ b)  # fewer than the least that was tuned
    choices.add(PLACE, [Choice("201x4096x256:bf16")])
    dispatch.forget()
    calls.matmul(*operands(replace(whole, m=201)))  # tuned, and torch won
    assert fake["launch_count"] == 2 and library.counts()["vendor"] == 2


def test_rows_for_which_a_family_writes_no_kernel_are_served_where_the_contract_accepts_them(
    installed, driver, monkeypatch
) -> None:
    monkeypatch.setattr(choices, "FILLED", 0)  # the kernel at hand would not serve so few rows of its last tile
    fake, library = driver
    wanted, gemm = installed(PERSISTENT), Gemm.parse("130x16384x512")
    upper = chosen(wanted[0], replace(gemm, m=256))
    assert candidate(family_of(upper.family), dict(wanted[0].candidate.schedule), gemm, TARGET) is None
    choices.add(PLACE, [upper, replace(upper, shape="128x16384x512")])
    plan = contract.parse_cuda(wanted[0].candidate.source).plan(gemm, TARGET.sms)
    fake.parameters(parameter_sizes(plan))
    calls.matmul(*operands(gemm))
    assert fake.launches[0].words[3] == 130 and library.counts()["launched"] == 1


def test_a_kernel_for_any_size_serves_what_was_tuned_with_it(installed, driver) -> None:
    fake, library = driver
    wanted = installed("64,64,64,nn,fp32,cold,sm80_gemm")
    family, gemm = family_of("sm80_gemm"), Gemm.parse("50x60x40")
    schedule = dict(wanted[0].candidate.schedule)
    exact, general = recipes.texts(family, schedule, gemm, TARGET)
    assert contract.kernel_id(exact.source) != contract.kernel_id(general.source)
    dispatch.pack().kernels[contract.kernel_id(general.source)] = dispatch.pack().kernels[wanted[0].id]
    kernel, text = contract.kernel_id(general.source), schedule_text(general.schedule)
    choices.add(PLACE, [Choice(str(gemm), kernel, family.name, text, 3.0, 4.0)])
    plan = contract.parse_cuda(general.source).plan(gemm, TARGET.sms)
    fake.parameters(parameter_sizes(plan))
    calls.matmul(*operands(gemm))
    assert tuple(fake.launches[0].grid) == plan.launches[0].grid and dispatch.pack().loaded == [kernel]
    assert library.counts()["launched"] == 1


def test_without_its_kernel_in_the_pack_a_neighbours_schedule_serves_nothing(installed, driver, recwarn) -> None:
    fake, library = driver
    wanted, whole = installed(WAVE), Gemm.parse("256x4096x256:bf16")
    upper = chosen(wanted[0], whole)
    choices.add(PLACE, [upper, replace(upper, shape="128x4096x256:bf16")])
    del dispatch.pack().kernels[edge_recipe(wanted, whole).id]
    a, b = operands(replace(whole, m=200))
    assert torch.equal(calls.matmul(a, b), a @ b)
    said = [each for each in recwarn if each.category is RuntimeWarning]  # others come with what other tests left
    assert fake["launch_count"] == 0 and library.counts()["vendor"] == 1 and not said


def test_a_deterministic_product_has_the_tables_kernel_whatever_was_tuned(installed, driver) -> None:
    fake, library = driver
    row, gemm = "64,1024,512,tn,fp32,cold,sm90_wave", Gemm.parse("64x1024x512:tn:bf16")
    wanted = installed(row, WAVE)
    recipe = next(recipe for recipe in wanted if recipe.gemm == gemm)
    choices.add(PLACE, [Choice(str(gemm))])
    plan = contract.parse_cuda(recipe.candidate.source).plan(gemm, TARGET.sms)
    fake.parameters(parameter_sizes(plan))
    calls.matmul(*operands(gemm))
    assert library.counts()["vendor"] == 1
    calls.matmul(*operands(gemm), deterministic=True)
    calls.linear(operands(gemm)[0], operands(gemm)[1].t(), deterministic=True)
    assert [tuple(launch.grid) for launch in fake.launches] == [plan.launches[0].grid] * 2
    assert dispatch.pack().loaded == [recipe.id]
    for shape in ("65x1024x512:tn:bf16", "64x1024x576:tn:bf16"):
        a, b = operands(Gemm.parse(shape))
        assert torch.equal(calls.matmul(a, b, deterministic=True), a @ b)
    assert fake["launch_count"] == 2


def test_with_a_bias_or_out_a_deterministic_product_is_torchs(installed, driver) -> None:
    fake, _ = driver
    gemm = Gemm.parse("64x1024x512:tn:bf16")
    installed("64,1024,512,tn,fp32,cold,sm90_wave")
    a, b = operands(gemm)
    bias, out = torch.ones(1024, dtype=torch.bfloat16), torch.empty(64, 1024, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(a, b.t(), bias)
    assert torch.equal(calls.matmul(a, b, bias=bias, deterministic=True), expected)
    assert torch.equal(calls.linear(a, b.t(), bias, deterministic=True), expected)
    assert calls.matmul(a, b, out=out, deterministic=True) is out and torch.equal(out, a @ b)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert calls.matmul(a.float(), b.float(), deterministic=True).dtype == torch.bfloat16
    assert fake["launch_count"] == 0


def test_the_rule_takes_the_row_with_weights_from_memory_and_no_kernel_that_waits(tmp_path) -> None:
    twice = recipes_of(tmp_path, "64,64,1024,tn,fp32")
    gemm = Gemm.parse("64x64x1024:tn")
    cold = next(row for row in read_times(KERNELS) if row.gemm == gemm and row.edge == "cold")
    made = rules.deterministic(gemm, TARGET, ListedPack(twice))
    assert made and dict(made.schedule) == dict(cold.schedule)
    waiting = ListedPack(recipes_of(tmp_path, "64,64,8192,nn,fp32,plain"))
    assert waiting.kernels and rules.deterministic(Gemm.parse("64x64x8192"), TARGET, waiting) is None


def test_the_deterministic_rule_leaves_out_what_was_not_proved(monkeypatch) -> None:
    table = rules._table()
    rows = Counter(replace(row.gemm, dtype="float16") for path in (KERNELS, FEW_ROWS) for row in recipes.evidence(path))
    unproved = next(row for gemm, row in table.items() if rows[gemm] == 1)
    monkeypatch.setattr(
        rules,
        "evidence",
        lambda path: {row: (1, "" if row == unproved else proof) for row, (_, proof) in recipes.evidence(path).items()},
    )
    left = rules._table.__wrapped__()
    assert unproved not in left.values() and set(left) == {gemm for gemm, row in table.items() if row != unproved}


def test_without_its_kernel_in_the_pack_a_rule_names_none(tmp_path) -> None:
    found = ListedPack(recipes_of(tmp_path, WAVE))
    assert rules.deterministic(Gemm.parse("64x1024x512:tn"), TARGET, found) is None
    assert rules.invariant(Gemm.parse("64x1024x512:tn"), TARGET, found) is None


def test_a_damaged_pack_is_said_to_be_damaged_where_one_is_needed(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(pack, "built_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(pack, "CARRIED", tmp_path)
    (tmp_path / pack.INDEX).write_text("{")
    for cached in (pack.installed, dispatch.pack):
        cached.cache_clear()
    with pytest.raises(UserError, match="damaged"), pytest.warns(RuntimeWarning):
        dispatch.required_pack()
    for cached in (pack.installed, dispatch.pack):
        cached.cache_clear()
