"""What is particular to the Hopper families: their contracts' arithmetic, what they refuse, and that they compile clean."""

import itertools
import math
import re
from pathlib import Path

import machine_code
import numpy as np
import pytest
from schedules import default, drawn

from cuda_l2.build import cubin, sass
from cuda_l2.build.cuda import build_all
from cuda_l2.build.cuda_compiler import toolchain
from cuda_l2.contract import ContractError, code, evaluate, kernel_id, parse_cuda
from cuda_l2.evaluator import Evaluator
from cuda_l2.families import _sm90
from cuda_l2.families._base import Schedule, families_for
from cuda_l2.families._sm90_wave_space import Shape
from cuda_l2.families.sm90_ahead import FAMILY as AHEAD
from cuda_l2.families.sm90_fitted import FAMILY as FITTED
from cuda_l2.families.sm90_persistent import FAMILY as PERSISTENT
from cuda_l2.families.sm90_wave import FAMILY as WAVE
from cuda_l2.families.sm90_wave import WARPGROUPS
from cuda_l2.library.table import read_table
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Gemm
from cuda_l2.worlds.world import read

HOPPER = compile_only("sm_90a")
FAMILIES = [WAVE, PERSISTENT, FITTED, AHEAD]
SHAPES = (
    *(
        "64x64x64",
        "8x8x8",
        "1x1x8:tn",
        "16x4096x1024:tn:bf16",
        "33x520x2048",
        "100x201x304:tn",
        "256x256x8192",
        "256x1024x12288:tn",
        "1000x1000x1000:fp16",
    ),
    *("2048x2048x512:tn:fp16", "3000x2000x520", "64x12288x8192:tn", "4096x4096x4096", "16384x12288x64:tn"),
)
CASES = [
    pytest.param(family, Gemm.parse(shape), id=f"{family.name}-{shape}")
    for family in FAMILIES
    for shape in SHAPES
    if family.serves(Gemm.parse(shape), HOPPER)
]


def random_schedule(family, gemm: Gemm, rng: np.random.Generator, **wanted: int) -> Schedule:
    return drawn(family, gemm, HOPPER, rng, **wanted)


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_wave_model_is_near_the_times_that_were_recorded(gpu) -> None:
    """Half of the schedules within 13 %, nine of ten within 45 %, few rows apart from the others."""
    world = read(Path(__file__).parent.parent / "results" / gpu / "world" / "world.parquet")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in world.rows:
        if row.measured and row.family == WAVE.name:
            gemm = Gemm.parse(row.task)
            modelled = WAVE.estimate_us(gemm, world.target, WAVE.named(row.schedule))
            errors[gemm.m <= 40].append(abs(math.log(row.latency_us / modelled)))
    for found in errors.values():
        assert len(found) > 500 and np.median(found) < math.log(1.13) and np.quantile(found, 0.9) < math.log(1.45)


def test_the_wave_model_knows_boxes_rings_and_edges() -> None:
    few = Gemm.parse("16x2048x2048:tn")
    plain = {"ACC": 32, "BM": 64, "KB": 1, "CM": 1, "CN": 1, "LOCAL": 0, "CK": 1, "SL": 1, "COUNT": 0, "MINB": 1}

    def us(**chosen: int) -> float:
        return WAVE.estimate_us(few, HOPPER, {**plain, "SWAP": 0, "BN": 64, **chosen})

    assert us(SWAP=1, BN=16) < us() and us(STAGES=2) > us(STAGES=8) and us(EDGE=1) < us(EDGE=0) == us() < us(CM=2)


@pytest.mark.parametrize(("m", "both"), [(16, True), (63, True), (64, False), (512, False)])
def test_operands_are_swapped_too_where_few_rows_would_not_fill_a_box(m, both) -> None:
    ranked = [WAVE.named(values) for values in WAVE.ranked(Gemm(m, 2048, 2048), HOPPER, 200)]
    assert {chosen["SWAP"] for chosen in ranked} == ({0, 1} if both else {0})


@pytest.mark.parametrize("family", [WAVE, PERSISTENT], ids=lambda family: family.name)
@pytest.mark.parametrize(
    ("shape", "rows", "promotions"),
    [
        ("256x16384x1024", 64, ("256B", "128B")),
        ("256x16384x1024:bf16", 64, ("256B", "128B")),
        ("256x16384x1024", 128, ("256B", "256B")),
        ("256x16384x1024:tn", 64, ("256B", "256B")),
    ],
)
def test_row_major_b_that_streams_past_few_rows_is_fetched_as_its_box_lies(family, shape, rows, promotions) -> None:
    gemm = Gemm.parse(shape)
    schedule = random_schedule(family, gemm, np.random.default_rng(3), SWAP=0, BM=rows)
    assert tuple(each.l2_promotion for each in plan(schedule).tensor_maps[:2]) == promotions


def plan(schedule: Schedule, gemm: Gemm | None = None):
    gemm = gemm or schedule.task
    return parse_cuda(schedule.family.render(schedule).source).plan(gemm, HOPPER.sms)


@pytest.mark.parametrize(("family", "gemm"), CASES)
def test_schedules_fit_the_device(family, gemm) -> None:
    rng = np.random.default_rng(1)
    schedules = [random_schedule(family, gemm, rng) for _ in range(25)]
    schedules.append(default(family, gemm, HOPPER))
    for schedule in schedules:
        chosen, (launch,) = schedule.named, plan(schedule).launches
        block = launch.shared_bytes + _sm90.ALIGNMENT_BYTES  # barriers, and what keeps the ring's alignment
        assert (block + 1024) * chosen.get("MINB", 1) <= 228 << 10
        assert block + 1024 <= HOPPER.shared_bytes  # a watched stress build has 768 bytes more before the ring
        assert launch.coresident == (chosen.get("SL", 1) > 1)
        if launch.coresident or family is PERSISTENT:
            assert math.prod(launch.grid) <= HOPPER.sms
        assert launch.programmatic == (chosen["EDGE"] > 0) and (chosen["PDL"] or not chosen["EDGE"])
        assert chosen["ACC"] == 32 or gemm.accumulate == "fp16"


def tiles_by_block(launch, clustered: int) -> list[tuple[int, int, int]]:
    """Row and column of the cluster's tile and the part of K, as find_work of sm90_wave_work.cuh has them."""
    x, y, z = launch.grid
    names = [argument.name for argument in launch.arguments]
    numbers = [bytes.fromhex(argument.data) for argument in launch.arguments[names.index("k") + 1 :]]
    box_rows, box_log2, box_columns = (int.from_bytes(number, "little") for number in numbers[:3])
    tables = [bytes.fromhex(argument.data) for argument in launch.arguments if argument.kind == "table"]
    found = []
    for i, j, k in itertools.product(range(x // clustered), range(y), range(z)):
        part = k if launch.coresident else 0
        if tables and box_columns == 0:
            tile = int(np.frombuffer(tables[0], np.uint16)[i])
            found.append((tile & 255, tile >> 8, part))
        elif launch.coresident and box_rows == 0:
            found.append((j, i, part))
        else:
            box = 0 if launch.coresident else k
            found.append((box * box_rows + (i & (box_rows - 1)), j * box_columns + (i >> box_log2), part))
    return found


@pytest.mark.parametrize(
    "shape", ["1024x1024x1024", "512x2048x2048:tn", "1000x1000x1000", "256x4096x4096:tn", "256x512x8192"]
)
def test_every_order_takes_every_tile_once(shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(2)
    orders = set()
    for _ in range(80):
        order = int(rng.choice([0, -1, 1, 2, 4, 8, 16]))
        schedule = random_schedule(WAVE, gemm, rng, BM=64, ORDER=order)
        c, (launch,) = schedule.named, plan(schedule).launches
        rows, columns = (gemm.n, gemm.m) if c["SWAP"] else (gemm.m, gemm.n)
        gm, gn = -(-rows // (c["BM"] * c["CM"])), -(-columns // (c["BN"] * c["CN"]))
        clustered = c["CM"] * c["CN"] * c["CK"]
        tiles = tiles_by_block(launch, clustered)
        assert sorted(tiles) == list(itertools.product(range(gm), range(gn), range(c["SL"])))
        found = c["ORDER"]
        if found <= 0:  # neighbours in the grid are neighbours in a row of tiles, or in a column
            assert launch.grid[0] == clustered * (gm if found else gn)
        elif clustered == 1:
            in_order = sorted(tiles, key=lambda tile: tile[2]) if launch.coresident else by_linear_index(launch, tiles)
            box = {(row, column) for row, column, _ in in_order[:16]}
            assert box == set(itertools.product(range(found), range(16 // found)))
        orders.add((found, c["SWAP"], c["SL"] > 1, clustered > 1))
    assert len({order for order, *_ in orders}) > 3 and len(orders) > 8


def by_linear_index(launch, tiles: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Tiles by block, x slowest, in the order in which blocks begin: x fastest."""
    x, y, z = launch.grid
    return [tiles[(i * y + j) * z + k] for k in range(z) for j in range(y) for i in range(x)]


def test_the_persistent_kernels_division_is_exact() -> None:
    """`place` of sm90_persistent.cu multiplies by inverses that the contract gives."""
    for shape in ("16384x12288x64", "5000x8008x72:tn"):
        gemm, rng = Gemm.parse(shape), np.random.default_rng(3)
        for _ in range(20):
            schedule = random_schedule(PERSISTENT, gemm, rng, BM=64)
            c, (launch,) = schedule.named, plan(schedule).launches
            numbers = [int.from_bytes(bytes.fromhex(argument.data), "little") for argument in launch.arguments[6:]]
            assert numbers[:3] == [c["COLUMNS"], c["BAND"], c["GPC"]]
            whole, width, narrow = numbers[3:6]
            x, y = _sm90.sides(gemm, c["SWAP"])
            gm, gn = -(-x.rows // (c["BM"] * c["CM"])), -(-y.rows // (c["BN"] * c["CN"]))
            length, total = (gm, gn) if c["COLUMNS"] else (gn, gm)
            per, rest = c["BAND"] * length, total % c["BAND"]
            for t in range(gm * gn):
                band = t * whole >> 40
                assert band == t // per
                assert (t - band * per) * width >> 40 == (t - band * per) // c["BAND"]
                assert not rest or (t - band * per) * narrow >> 40 == (t - band * per) // rest


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_tma_cannot_address_is_not_served(family) -> None:
    m = 64 if family is AHEAD else 1024
    for shape in ("1024x1020", "1020x1024", "1024x1001:tn"):
        assert not family.serves(Gemm.parse(f"{m}x{shape}"), HOPPER)
    assert family.serves(Gemm.parse(f"{m}x1024x1024"), HOPPER)
    for arch in ("sm_80", "sm_100a"):
        assert not family.serves(Gemm.parse(f"{m}x1024x1024"), compile_only(arch))


def test_columns_that_are_no_multiple_of_8_are_stored_one_by_one() -> None:
    gemm = Gemm.parse("1000x1001x1024:tn")
    assert WAVE.serves(gemm, HOPPER) and not PERSISTENT.serves(gemm, HOPPER)
    schedule = default(WAVE, gemm, HOPPER)
    assert WAVE.macros(schedule)["EDGES"] == 2


def test_a_contract_takes_shapes_of_the_same_divisibility_and_refuses_others() -> None:
    gemm = Gemm.parse("1024x1024x1024")
    for family in FAMILIES:
        schedule = random_schedule(family, gemm, np.random.default_rng(4), SWAP=0, BM=128, BN=128, ORDER=0, CK=1, SL=1)
        assert plan(schedule, Gemm.parse("1280x1536x2048")).launches
        for shape in ("1024x1024x1016", "1024x1000x1024", "1024x1024x1023"):
            with pytest.raises(ContractError):
                plan(schedule, Gemm.parse(shape))
    with pytest.raises(ContractError):  # more tiles than the table has entries
        plan(random_schedule(WAVE, gemm, np.random.default_rng(4), BM=128, BN=64), Gemm.parse("8192x8192x1024"))


@pytest.mark.parametrize("shape", ["256x256x8192", "100x201x4104:tn", "256x1024x12288"])
def test_the_exchange_through_l2_has_a_place_for_every_sum(shape) -> None:
    gemm, rng, seen = Gemm.parse(shape), np.random.default_rng(5), set()
    for _ in range(60):
        schedule = random_schedule(WAVE, gemm, rng, SWAP=0, BM=64, SL=int(rng.choice([2, 4, 8])))
        c = schedule.named
        if c["SL"] == 1:
            continue
        built = plan(schedule)
        blocks = math.prod(built.launches[0].grid)
        threads = 128 * WARPGROUPS[c["BM"]]
        kept = c["BM"] * c["BN"] // threads // c["CK"] // c["SL"]  # sums a thread, RL of the kernel
        parts = next(workspace for workspace in built.workspaces if workspace.name == "parts")
        assert parts.bytes == blocks * (c["SL"] - 1) * kept * threads * 4
        assert parts.persistent == (not c["COUNT"]) and (c["COUNT"] or parts.fill == 0xFFFFFFFF)
        seen.add(c["COUNT"])
    assert seen


def test_a_candidate_is_one_text() -> None:
    gemm = Gemm.parse("1024x1024x1024")
    for family in FAMILIES:
        source = family.render(default(family, gemm, HOPPER)).source
        assert '#include "' not in source
        assert source.count("bool elect_one()") == 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_kernel_serves_every_order_and_edge(family) -> None:
    gemm, kernels, contracts = Gemm.parse("4096x2048x1024:tn"), set(), set()
    fixed = {choice.name: choice.values[0] for choice in family.choices if choice.compiled}
    fixed |= {"BM": 128, "BN": 256, "CM": 2, "STAGES": 3, "PDL": 2}
    for seed in range(20):
        source = family.render(random_schedule(family, gemm, np.random.default_rng(seed), **fixed)).source
        kernels.add(kernel_id(source))
        contracts.add(source)
    assert len(kernels) == 1 and len(contracts) > 5


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_code_knows_of_the_compiled_choices_alone(family) -> None:
    gemm = Gemm.parse("4096x2048x1024:tn")
    text = code(family.render(default(family, gemm, HOPPER)).source)
    for choice in family.choices:
        assert bool(re.search(rf"#define {choice.name}\b", text)) == choice.compiled


def test_inverse_expressions_are_the_contracts_own() -> None:
    assert evaluate(_sm90.zero("m % 64", "n % 8"), {"m": 128, "n": 16}) == 1
    with pytest.raises(ContractError):
        evaluate(_sm90.zero("m % 64", "n % 8"), {"m": 128, "n": 17})


def test_defaults_and_random_schedules_compile_clean() -> None:
    rng = np.random.default_rng(6)
    schedules = []
    for family, shape in [
        (WAVE, "256x256x8192"),
        (WAVE, "1000x1001x1000:tn:fp16"),
        (WAVE, "512x2048x2048"),
        (PERSISTENT, "4096x4096x4096"),
        (PERSISTENT, "3000x2000x520:tn:fp16"),
        (AHEAD, "16x4096x1024:tn:bf16"),
        (AHEAD, "33x520x2048"),
    ]:
        gemm = Gemm.parse(shape)
        schedules += [default(family, gemm, HOPPER), random_schedule(family, gemm, rng)]
    for shape, wanted in [
        ("4x1024x8192:tn:bf16", {"BM": 64, "BN": 8, "CK": 2}),  # pairs of sums are sent
        ("33x1024x8192:tn:bf16", {"BM": 64, "BN": 40, "CK": 2}),
        ("777x6144x4096:tn:bf16", {"BM": 192, "BN": 200, "CK": 1}),  # the most sums that fit the registers
        ("16x1024x8192", {"BM": 64, "BN": 16, "CK": 4}),
        ("16x1024x8192:tn:bf16", {"BM": 64, "BN": 32, "CK": 8}),  # 128 blocks in clusters of 8
    ]:
        schedules.append(random_schedule(FITTED, Gemm.parse(shape), rng, SWAP=1, **wanted))
        assert wanted.items() <= schedules[-1].named.items()
    builds = build_all([schedule.family.render(schedule) for schedule in schedules], HOPPER)
    for schedule, build in zip(schedules, builds, strict=True):
        assert build.status is BuildStatus.BUILT, (schedule.named, build.reason)
        assert not build.warnings and not any(kernel.spill_bytes for kernel in build.kernels), schedule.named


def test_fitted_tiles_are_split_in_pairs_of_sums_too() -> None:
    gemm = Gemm.parse("4x2112x7168:tn:bf16")
    wanted = {"SWAP": 0, "BM": 64, "BN": 80, "CK": 4}  # 10 sums a thread and block
    schedule = random_schedule(FITTED, gemm, np.random.default_rng(8), **wanted)
    assert wanted.items() <= schedule.named.items()
    assert not Shape(schedule.named).splits()  # as sm90_wave's would have to
    (build,) = build_all([FITTED.render(schedule)], HOPPER)
    assert build.status is BuildStatus.BUILT and not any(kernel.spill_bytes for kernel in build.kernels)


def test_a_ring_holds_what_the_end_of_a_split_needs() -> None:
    gemm, rng = Gemm.parse("160x4096x8192:tn:bf16"), np.random.default_rng(3)
    wanted = {"SWAP": 1, "BM": 192, "BN": 160, "KB": 1, "CK": 2}
    for _ in range(20):
        schedule = random_schedule(FITTED, gemm, rng, **wanted)
        assert Shape(schedule.named).ring_bytes(schedule.named["STAGES"]) >= Shape(schedule.named).staging_bytes


def test_searches_have_the_families_whose_spaces_are_recorded() -> None:
    found = families_for(Gemm.parse("16x4096x1024:tn:bf16"), HOPPER)
    assert WAVE in found and AHEAD not in found and FITTED not in found


def test_weights_ahead_is_for_those_who_asked() -> None:
    gemm = Gemm.parse("16x4096x1024:tn:bf16")
    made = AHEAD.render(default(AHEAD, gemm, HOPPER))
    terms = parse_cuda(made.source)
    assert terms.constant == ("b",) and terms.plan(gemm, HOPPER.sms).programmatic
    assert parse_cuda(WAVE.render(default(WAVE, gemm, HOPPER)).source).constant == ()


@pytest.mark.parametrize("swap", [0, 1])
def test_weights_are_loaded_before_the_wait_and_the_rest_after_it(swap) -> None:
    """In the machine code: loads of operands (UTMALDG) around the wait for the launch ahead (ACQBULK)."""
    rng = np.random.default_rng(5)
    gemm = Gemm.parse("16x4096x1024:tn:bf16")
    found = {}
    for family in (WAVE, AHEAD):
        fixed = {"SWAP": swap, "BM": 64, "BN": 16, "KB": 1, "CM": 1, "CN": 1, "CK": 1, "SL": 1, "PDL": 1, "EDGE": 1}
        (build,) = build_all([family.render(random_schedule(family, gemm, rng, **fixed))], HOPPER)
        (kernel,) = cubin.read(Path(build.artifact).read_bytes()).kernels
        texts = sass.disassemble(kernel.words, HOPPER.arch, toolchain().nvdisasm)
        words = " ".join(texts[word] for word in kernel.words)
        found[family] = re.findall("UTMALDG|ACQBULK", words)
    assert found[WAVE][0] == "ACQBULK" and found[AHEAD][:2] == ["UTMALDG", "ACQBULK"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *("256x256x8192", "100x201x304:tn", "1000x1000x1000", "3000x2000x520:tn:fp16"),
        *("16x4096x1024:tn:bf16", "33x520x2048", "64x2112x712:tn"),
    ],
)
def test_random_schedules_are_correct(gpu, shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(7)
    with Evaluator(gemm, gpu, weights_ahead=True) as evaluator:
        for family in (family for family in FAMILIES if family.serves(gemm, gpu.target)):
            candidates = [family.render(random_schedule(family, gemm, rng)) for _ in range(4)]
            for trial in evaluator.evaluate(candidates):
                assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)


def test_machine_code_of_the_tables_kernels_is_as_recorded() -> None:
    """A kernel of each family and kind of sum; machine_code.py compares all of them."""
    if toolchain().version != machine_code.NVRTC:
        pytest.skip(f"the machine code was recorded with NVRTC {machine_code.NVRTC}")
    table = read_table(machine_code.TABLE)
    rows = {(str(row.gemm), row.edge): row for row in table}
    kinds = {}
    for line in machine_code.recorded():
        row = rows[line.gemm, line.edge]
        named = dict(row.schedule)
        kinds.setdefault((row.family, named.get("CK", 1) > 1, named.get("SL", 1) > 1), line)
    assert len(kinds) == 6
    kernels = {(str(row.gemm), row.edge, row.family, kernel) for row, kernel, _ in machine_code.kernels(table)}
    assert {(line.gemm, line.edge, line.family, line.kernel) for line in machine_code.recorded()} == kernels
    assert machine_code.compare(kinds.values(), table) == list(kinds.values())
    pack, rows = machine_code.recorded(machine_code.PACK), machine_code.pack_rows()
    now = {(str(row.gemm), row.edge, row.family, kernel) for row, kernel, _ in machine_code.kernels(rows)}
    assert {(line.gemm, line.edge, line.family, line.kernel) for line in pack} < now
    kinds = list({line.family: line for line in pack}.values())
    assert len(kinds) == 6 and machine_code.compare(kinds, rows) == kinds
