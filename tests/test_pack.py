"""The pack of compiled kernels: what it holds, that changes to it are seen, and that its recipes are those of the table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import test_rules_gpu
from made_pack import recipes_of

from cuda_l2 import contract
from cuda_l2.build import cubin
from cuda_l2.library.deploy import pack, recipes
from cuda_l2.library.deploy.recipes import AHEAD, ANY_SIZE, FEW_ROWS, KERNELS, serving
from cuda_l2.library.table import family_of, read_table, read_times
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError

TARGET = compile_only("sm_90a")
RESULTS = Path(__file__).parents[1] / "results" / "h200"


@pytest.fixture(scope="module")
def wanted():
    return recipes.recipes()


@pytest.fixture(scope="module")
def small(wanted, tmp_path_factory):
    """A pack of two small kernels, fp16 and bf16."""
    chosen = [recipe for recipe in wanted if recipe.family == "sm80_gemm"][:2]
    return pack.build(chosen, tmp_path_factory.mktemp("pack"))


def copied(found: pack.Pack, folder: Path) -> Path:
    for name in (pack.INDEX, pack.DATA):
        (folder / name).write_bytes((found.folder / name).read_bytes())
    return folder


def test_every_recipe_is_one_kernel_that_serves_its_shape(wanted) -> None:
    assert len({recipe.id for recipe in wanted}) == len(wanted) > 400
    assert {recipe.gemm.dtype for recipe in wanted} == {"float16", "bfloat16"}
    for recipe in wanted:
        assert contract.parse_cuda(recipe.candidate.source).plan(recipe.gemm, TARGET.sms).launches
    table = [recipe for recipe in recipes.recipes(KERNELS) if recipe.shapes]
    assert len(table) == len(read_table(KERNELS)) and all(recipe.proof.startswith("correct") for recipe in table)
    assert {recipe.id for recipe in table} < {recipe.id for recipe in wanted}


def test_a_kernel_for_few_rows_is_compiled_for_whole_tiles_and_for_parts(wanted) -> None:
    (row,) = (row for row in read_table(FEW_ROWS) if row.gemm.m == 4 and row.gemm.n == 6144)
    compiled = {name: value for name, value in row.schedule if name in family_of(row.family).compiled}
    ids = {recipe.id for recipe in wanted}
    for rows in (1, 4, 15, 16, 17, 32):
        gemm = replace(row.gemm, m=rows, dtype="bfloat16")
        made = list(serving(family_of(row.family), compiled, gemm, TARGET))
        assert not made or {contract.kernel_id(each.source) for each in made} <= ids, rows
        assert made or rows > 16


def test_the_proved_kernels_are_the_ones_that_are_written_now() -> None:
    proved = [recipe for recipe in recipes.recipes(FEW_ROWS, ANY_SIZE, AHEAD) if recipe.proof]
    assert len(proved) > 80 and all(recipe.id in recipe.proof for recipe in proved)


@pytest.mark.parametrize("row", test_rules_gpu.TABLE)
def test_the_table_has_the_rows_that_tests_on_a_gpu_name(row, tmp_path) -> None:
    assert recipes_of(tmp_path, row)


@pytest.mark.full
def test_the_recipes_are_the_tables_kernels() -> None:
    rows = read_table(RESULTS / "schedules.csv")
    assert recipes.distinct(rows, RESULTS / "proof" / "kernels.csv") == KERNELS.read_text()


def test_a_pack_holds_the_kernels_code(small) -> None:
    assert pack.Pack(small.folder).identity == small.identity and not small.verify()
    assert {kernel.dtype for kernel in small.kernels.values()} == {"float16", "bfloat16"}
    for name in small.kernels:
        assert [kernel.name for kernel in cubin.read(small.cubin(name)).kernels] == ["gemm"]


def test_a_changed_kernel_is_not_loaded(small, tmp_path) -> None:
    folder = copied(small, tmp_path)
    first, second = small.kernels.values()
    data = bytearray((folder / pack.DATA).read_bytes())
    data[first.offset : first.offset + first.size] = data[second.offset : second.offset + first.size]
    (folder / pack.DATA).write_bytes(data)
    changed = pack.Pack(folder)
    with pytest.raises(UserError, match="cuda-l2 library build"):
        changed.cubin(first.id)
    assert changed.cubin(second.id) and len(changed.verify()) == 1
    (folder / pack.DATA).write_bytes(data[: first.offset + 9])
    assert len(pack.Pack(folder).verify()) == 2


def test_an_index_that_was_changed_is_refused(small, tmp_path) -> None:
    folder = copied(small, tmp_path)
    fields = json.loads((folder / pack.INDEX).read_text())
    fields["kernels"][0]["sha256"] = "0" * 64
    (folder / pack.INDEX).write_text(json.dumps(fields))
    with pytest.raises(UserError, match="its hash is another"):
        pack.Pack(folder)
    (folder / pack.INDEX).write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        pack.Pack(folder)


@pytest.mark.corpus(1)
@pytest.mark.parametrize(
    "shape", ["1x4096x4096:tn:bf16", "17x1536x8960:tn:bf16", "300x4096x4096", "2048x28672x4096:tn:bf16", "64x64x64"]
)
def test_shapes_of_models_are_served_by_kernels_of_the_pack(wanted, shape) -> None:
    gemm, names, found = Gemm.parse(shape), {recipe.id for recipe in wanted}, 0
    for recipe in wanted:
        if recipe.gemm.dtype == gemm.dtype and recipe.gemm.layout == gemm.layout:
            made = next(serving(family_of(recipe.family), dict(recipe.schedule), gemm, TARGET), None)
            found += made is not None and contract.kernel_id(made.source) in names
    assert found >= 5


@pytest.mark.corpus(1)
@pytest.mark.parametrize(
    "shape", ["129x130x131:tn", "30x3000x30", "5x77x19:bf16", "777x4096x4095:tn:bf16", "513x515x517"]
)
def test_sizes_that_divide_nothing_are_served_by_kernels_of_the_pack(shape) -> None:
    gemm, wanted, found = Gemm.parse(shape), recipes.recipes(ANY_SIZE), set()
    names = {recipe.id for recipe in wanted}
    for family, schedule in {(recipe.family, recipe.schedule) for recipe in wanted}:
        for made in serving(family_of(family), dict(schedule), gemm, TARGET):
            if contract.kernel_id(made.source) in names:
                assert contract.parse_cuda(made.source).plan(gemm, TARGET.sms).launches
                found.add(family)
    assert found >= ({"sm90_ragged", "sm80_gemm"} if gemm.flops < 1 << 24 else {"sm90_ragged"})


def test_the_most_general_kernel_is_one_for_all_sizes_on_a_side_of_one_trip() -> None:
    family = family_of("sm80_gemm")
    (row, *_) = (row for row in read_times(ANY_SIZE) if row.family == family.name)
    chosen = dict(row.schedule)
    shapes = [
        Gemm.parse(f"{m}x{n}x{k}:{row.gemm.layout}") for m, n, k in ((3, 64, 7), (128, 9, 16), (33, 50, 31), (8, 8, 8))
    ]
    kernels = {
        contract.kernel_id(made.source)
        for gemm in shapes
        if (made := recipes.candidate(family, chosen, family.general(gemm, chosen), TARGET))
    }
    trips = {gemm.k <= chosen["BK"] for gemm in shapes}
    assert len(kernels) == len(trips) == 1
