"""What is particular to the mma.sync family: its space, its contracts' arithmetic, and that it compiles clean everywhere."""

import dataclasses
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from schedules import default, drawn

from cuda_l2.build.cuda import build_all
from cuda_l2.contract import ContractError, parse_cuda
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Schedule, families_for
from cuda_l2.families._sm80_space import CHOICES, SPARE_SHARED_BYTES
from cuda_l2.families.sm80_gemm import FAMILY, conflicts
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.propose._base import space_for
from cuda_l2.records import BuildStatus, Gemm
from cuda_l2.worlds.world import read

SHAPES = (
    *("1x1x1", "1x1x1:tn", "7x5x3:fp16", "33x65x31:tn", "64x64x64", "100x333x777", "300x8x50000:tn", "64x4096x4096"),
    *("512x512x512:fp16", "1000x1000x1001", "4096x4096x4096:tn", "4096x4096x64:tn:fp16", "8192x512x2048"),
    *("99999999x16x8", "16x99999999x7:tn"),
)
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a")
DIRECT, PLAIN, PIPELINED = 0, 1, 2


def machine(arch: str) -> CudaTarget:
    return dataclasses.replace(compile_only(arch), cores=2)


HOPPER = machine("sm_90a")


def random_schedule(gemm: Gemm, target: CudaTarget, rng: np.random.Generator, **wanted: int) -> Schedule:
    return drawn(FAMILY, gemm, target, rng, **wanted)


def plan(schedule: Schedule, shape: str = ""):
    gemm = Gemm.parse(shape) if shape else schedule.task
    return parse_cuda(FAMILY.render(schedule).source).plan(gemm, HOPPER.sms)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_schedules_fit_the_device(shape, arch) -> None:
    gemm, target, rng = Gemm.parse(shape), machine(arch), np.random.default_rng(1)
    assert FAMILY.serves(gemm, target)
    for schedule in [default(FAMILY, gemm, target), *(random_schedule(gemm, target, rng) for _ in range(20))]:
        choice, launches = schedule.named, plan(schedule).launches
        gemm_launch = launches[0]
        threads = 32 * choice["WARPS_M"] * choice["WARPS_N"] * choice["WARPS_K"]
        assert gemm_launch.block == (threads, 1, 1) and threads <= 512
        assert gemm_launch.shared_bytes + SPARE_SHARED_BYTES <= target.shared_bytes
        sums = choice["BM"] * choice["BN"] // (32 * choice["WARPS_M"] * choice["WARPS_N"])
        assert sums // (1 + choice["ACC16"]) < min(255, 65536 // threads)
        assert len(launches) == 1 + (choice["SPLIT_K"] > 1)
        assert all(launch.programmatic == (choice["EDGE"] > 0) for launch in launches)
        assert choice["PDL"] or not choice["EDGE"]


def test_every_value_of_every_choice_is_valid_somewhere() -> None:
    """Among them what the paper's section 5 lists: 2 to 8 stages, tiles of 96, 160 and 192, strides up to 16384."""
    rng = np.random.default_rng(2)
    seen: dict[str, set[int]] = {}
    for shape in (*SHAPES, "12288x32768x8192", "256x256x256"):
        gemm = Gemm.parse(shape)
        for _ in range(60):
            drawn(FAMILY, gemm, HOPPER, rng, seen)
    assert {name: sorted(values) for name, values in seen.items()} == {c.name: sorted(c.values) for c in CHOICES}


@pytest.mark.parametrize("raster", [0, 1])
@pytest.mark.parametrize("stride", [0, 128, 512, 1024])
@pytest.mark.parametrize("split", [1, 2])
def test_every_tile_has_one_block_a_part(raster, stride, split) -> None:
    """The arithmetic of find_work in sm80_gemm.cu, over the contract's grid."""
    gemm = Gemm.parse("1100x1080x8192")
    wanted = {"LOAD": PIPELINED, "BM": 96, "BN": 128, "BK": 64, "WARPS_K": 1, "SPLIT_K": split, "RASTER": raster}
    schedule = random_schedule(gemm, HOPPER, np.random.default_rng(3), **wanted, BLOCK_SWIZZLE=stride)
    choice, grid = schedule.named, plan(schedule).launches[0].grid
    assert choice["BLOCK_SWIZZLE"] == stride and choice["SPLIT_K"] == split
    work = []
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                along = x + z // split * grid[0] if stride else x
                row, column = (along if raster else y) * 96, (y if raster else along) * 128
                if not stride or (row < gemm.m if raster else column < gemm.n):
                    work.append((row, column, z % split))
    tiles = [(r, c, s) for r in range(0, 1100, 96) for c in range(0, 1080, 128) for s in range(split)]
    assert sorted(work) == tiles
    if stride and split == 1:  # a strip is swept before the next begins
        side, axis = (96, 0) if raster else (128, 1)
        strips = [place[axis] // side // (stride // side) for place in work]
        assert all(a <= b for a, b in pairwise(strips))


def test_a_contract_takes_shapes_of_the_same_divisibility_and_refuses_others() -> None:
    rng = np.random.default_rng(4)
    whole = random_schedule(Gemm.parse("1024x1024x1024"), HOPPER, rng, LOAD=PIPELINED, BM=128, BN=128, BK=64, WARPS_K=1)
    assert plan(whole, "4096x2048x512").launches
    for shape in ("1024x1024x1032", "1024x1032x1024", "1000x1024x1024", "1024x1024x1023"):
        with pytest.raises(ContractError):
            plan(whole, shape)
    ragged = random_schedule(Gemm.parse("1001x1002x1004"), HOPPER, rng, LOAD=PIPELINED)
    assert FAMILY.macros(ragged) | {"K_VECTOR": 4, "N_VECTOR": 2, "WHOLE_M": 0} == FAMILY.macros(ragged)
    assert plan(ragged, "77x4098x300").launches
    for shape in ("1001x1001x1004", "1001x1002x1002"):
        with pytest.raises(ContractError):
            plan(ragged, shape)
    once = default(FAMILY, Gemm.parse("64x64x64"), HOPPER)
    assert FAMILY.macros(once)["ONE_TRIP"]
    with pytest.raises(ContractError):
        plan(once, "64x64x128")


def test_dependent_launch_is_for_hopper_and_later() -> None:
    gemm, rng = Gemm.parse("256x256x256"), np.random.default_rng(5)
    for arch, offered in (("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_100a", True)):
        schedule = random_schedule(gemm, machine(arch), rng, PDL=2)
        assert (schedule.named["PDL"] == 2) == offered
        assert parse_cuda(FAMILY.render(schedule).source).arch == (arch if offered else "sm_80")


@pytest.mark.corpus(2)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_defaults_and_random_schedules_compile_clean(arch) -> None:
    target, rng = machine(arch), np.random.default_rng(6)
    cases = [("64x64x64", DIRECT), ("100x333x777:tn", PLAIN), ("1000x1000x1001:fp16", PIPELINED), ("4096x4096x4096", 2)]
    defaults = [default(FAMILY, Gemm.parse(shape), target) for shape, _ in cases]
    others = [random_schedule(Gemm.parse(shape), target, rng, LOAD=load) for shape, load in cases]
    builds = build_all([FAMILY.render(schedule) for schedule in defaults + others], target)
    for schedule, build in zip(defaults + others, builds, strict=True):
        assert build.status is BuildStatus.BUILT, (schedule.named, build.reason)
        assert any(kernel.tensor_instructions for kernel in build.kernels)
        if schedule in defaults:
            assert not any(kernel.spill_bytes or kernel.stack_bytes for kernel in build.kernels), schedule.named


def test_the_model_is_near_the_times_that_were_recorded() -> None:
    """Half of the schedules within 20 %, nine of ten within 50 %, ragged sizes apart from the others."""
    world = read(Path(__file__).parent.parent / "results" / "h100" / "world" / "world.parquet")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in world.rows:
        if row.measured and row.family == FAMILY.name:
            gemm = Gemm.parse(row.task)
            modelled = FAMILY.estimate_us(gemm, world.target, FAMILY.named(row.schedule))
            errors[gemm.k % 8 > 0 or gemm.n % 8 > 0].append(abs(math.log(row.latency_us / modelled)))
    for found in errors.values():
        assert len(found) > 50 and np.median(found) < math.log(1.2) and np.quantile(found, 0.9) < math.log(1.5)


@pytest.mark.parametrize("load", [DIRECT, PLAIN, PIPELINED])
def test_the_narrower_the_loads_of_a_row_the_slower_by_the_model(load) -> None:
    schedule = random_schedule(Gemm.parse("512x512x512:tn"), HOPPER, np.random.default_rng(0), LOAD=load)
    rows = [dataclasses.replace(schedule.task, k=k) for k in (512, 508, 510, 511)]  # vectors of 8, 4, 2 and 1
    times = [FAMILY.estimate_us(gemm, HOPPER, schedule.named) for gemm in rows]
    assert times == sorted(times) and times[3] > 1.5 * times[0]


@pytest.mark.parametrize(
    ("width", "swizzle", "clocks"),
    [
        (64, (0, 3, 3), 8),
        (64, (1, 3, 3), 4),
        (64, (2, 3, 3), 2),
        (64, (3, 3, 3), 1),
        (32, (0, 3, 3), 4),
        (16, (0, 3, 3), 2),
    ],
)
def test_rows_of_shared_memory_in_the_same_banks_are_read_one_after_the_other(width, swizzle, clocks) -> None:
    assert conflicts(width, *swizzle) == clocks


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("shape", SHAPES)
def test_guesses_are_valid_and_sorted_by_the_model_behind_the_default(shape, arch) -> None:
    gemm, target = Gemm.parse(shape), machine(arch)
    ranked = FAMILY.ranked(gemm, target, 40)
    schedules = [Schedule(FAMILY, gemm, target, values) for values in ranked]  # ValueError where one is not valid
    times = [FAMILY.estimate_us(gemm, target, schedule.named) for schedule in schedules]
    assert times[1:] == sorted(times[1:]) and len(set(ranked)) == len(ranked)
    assert ranked[:2] == FAMILY.ranked(gemm, target, 2) and ranked[0] == FAMILY.default(gemm, target)


@pytest.mark.parametrize(
    ("shape", "tile"), [("128x128x256:tn", (16, 16, 1, 1, 4, 256)), ("256x512x64:tn", (16, 64, 1, 2, 1, 64))]
)
def test_guesses_of_tiny_products_hold_what_won_on_a_gpu(shape, tile) -> None:
    """As results/h200/schedules.csv has it."""
    gemm = Gemm.parse(shape)
    names = ("BM", "BN", "WARPS_M", "WARPS_N", "WARPS_K", "BK")
    guesses = [FAMILY.named(values) for values in FAMILY.ranked(gemm, HOPPER, 16)]
    assert tile in [tuple(guess[name] for name in names) for guess in guesses if guess["LOAD"] == DIRECT]


@pytest.mark.parametrize("shape", ["777x4096x4095:tn:bf16", "1024x1001x333", "300x4095x1024"])
def test_large_products_of_ragged_rows_begin_with_the_family_made_for_them(shape) -> None:
    gemm = Gemm.parse(shape)
    space = space_for(families_for(gemm, HOPPER), gemm, HOPPER)
    assert space.split(space.ranked(1)[0])[0].name == "sm90_ragged"


def test_fp32_tasks_never_sum_in_fp16() -> None:
    rng, name = np.random.default_rng(7), "HMMA.16816.F16"
    schedules = [
        random_schedule(Gemm.parse(shape), HOPPER, rng, ACC16=1) for shape in ("512x256x512", "512x256x512:fp16")
    ]
    builds = build_all([FAMILY.render(schedule) for schedule in schedules], HOPPER)
    found = [{i for kernel in build.kernels for i in kernel.tensor_instructions} for build in builds]
    assert found == [{"HMMA.16816.F32"}, {name}]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", ["1x1x1", "33x65x31:tn", "100x333x777", "192x320x512:fp16", "64x4096x4096", "1000x1000x1001"]
)
def test_random_schedules_are_correct(gpu, shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(8)
    with Evaluator(gemm, gpu) as evaluator:
        candidates = [FAMILY.render(random_schedule(gemm, gpu.target, rng, LOAD=load)) for load in (0, 1, 2, 2)]
        for trial in evaluator.evaluate(candidates):
            assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)
