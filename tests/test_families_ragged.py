"""The family for rows that are no multiples of 16 bytes: its copies, its contract, and that it compiles clean."""

import numpy as np
import pytest
from schedules import default, drawn

from cuda_l2.build.cuda import build_all
from cuda_l2.contract import ContractError, code, kernel_id, parse_cuda
from cuda_l2.evaluator import Evaluator
from cuda_l2.families import _sm90
from cuda_l2.families.sm90_persistent import FAMILY as PERSISTENT
from cuda_l2.families.sm90_phases import FAMILY as PHASES
from cuda_l2.families.sm90_phases import phases
from cuda_l2.families.sm90_ragged import FAMILY
from cuda_l2.families.sm90_wave import FAMILY as WAVE
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Gemm

HOPPER = compile_only("sm_90a")
SHAPES = (
    "1x1x1",
    "3x5x7:tn",
    "777x4096x4095:tn:bf16",
    "513x515x517",
    "100x201x1001:tn",
    "2000x3000x2002",
    "64x64x8193",
)
COPIES = {  # what is copied: rows that end within 16 bytes
    "64x64x65": ["padded_a"],
    "64x65x64": ["padded_b"],
    "64x65x65": ["padded_a", "padded_b"],
    "64x64x65:tn": ["padded_a", "padded_b"],
    "64x65x64:tn": [],
}


def plan(schedule, gemm: Gemm):
    return parse_cuda(FAMILY.render(schedule).source).plan(gemm, HOPPER.sms)


@pytest.mark.parametrize("shape", SHAPES)
def test_schedules_fit_the_device(shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(1)
    for schedule in [default(FAMILY, gemm, HOPPER), *(drawn(FAMILY, gemm, HOPPER, rng) for _ in range(25))]:
        *_, launch = plan(schedule, gemm).launches
        assert launch.kernel == "gemm" and not launch.coresident
        assert launch.shared_bytes + _sm90.STATIC_BYTES <= HOPPER.shared_bytes
        assert (launch.shared_bytes + _sm90.STATIC_BYTES + 1024) * schedule.named["MINB"] <= 228 << 10
        assert launch.grid[0] <= HOPPER.sms * schedule.named["MINB"]


def test_it_serves_what_the_other_hopper_families_cannot_address() -> None:
    for shape in ("1024x1024x1020", "1024x1020x1024", "1024x1024x1001:tn"):
        gemm = Gemm.parse(shape)
        assert FAMILY.serves(gemm, HOPPER) and not WAVE.serves(gemm, HOPPER) and not PERSISTENT.serves(gemm, HOPPER)
    assert not FAMILY.serves(Gemm.parse("1024x1024x1024"), HOPPER)
    for arch in ("sm_80", "sm_100a"):
        assert not FAMILY.serves(Gemm.parse("1023x1023x1023"), compile_only(arch))


@pytest.mark.parametrize("shape", COPIES)
def test_operands_whose_rows_are_whole_are_not_copied(shape) -> None:
    gemm = Gemm.parse(shape)
    made = plan(default(FAMILY, gemm, HOPPER), gemm)
    assert [workspace.name for workspace in made.workspaces] == COPIES[shape]
    assert [launch.kernel for launch in made.launches] == ["pad", "gemm"][not COPIES[shape] :]
    if COPIES[shape]:
        sizes = {"padded_a": gemm.m * -(-gemm.k // 8) * 16}
        rows, length = (gemm.n, gemm.k) if gemm.layout == "tn" else (gemm.k, gemm.n)
        sizes["padded_b"] = rows * -(-length // 8) * 16
        assert {workspace.name: workspace.bytes for workspace in made.workspaces}.items() <= sizes.items()
        pad, multiply = made.launches
        assert multiply.programmatic  # it waits for the copies itself
        counts = [int.from_bytes(bytes.fromhex(argument.data), "little") for argument in pad.arguments[-2:]]
        copied = [sizes[name] // 16 for name in COPIES[shape]]
        assert counts == [copied[0] if "padded_a" in COPIES[shape] else 0, sum(copied)]
        assert pad.grid[0] * pad.block[0] * 2 >= sum(copied)


def test_one_kernel_serves_every_remainder_of_a_layout_and_type() -> None:
    fixed = {"BM": 128, "BN": 128, "KB": 1, "CK": 1, "MINB": 1, "STAGES": 5}
    rng, kernels = np.random.default_rng(2), set()
    for shape in ("1000x1000x1001", "1001x1001x1000", "777x1003x1002", "4096x4097x8"):
        source = FAMILY.render(drawn(FAMILY, Gemm.parse(shape), HOPPER, rng, **fixed)).source
        kernels.add(kernel_id(source))
        assert "#define BAND" not in code(source)
    assert len(kernels) == 1


def test_a_contract_refuses_a_shape_whose_rows_it_would_not_copy() -> None:
    schedule = default(FAMILY, Gemm.parse("1000x1001x1000:tn"), HOPPER)
    assert plan(schedule, Gemm.parse("500x777x1008:tn")).launches
    with pytest.raises(ContractError):
        plan(schedule, Gemm.parse("1000x1001x1001:tn"))


def test_defaults_and_random_schedules_compile_clean() -> None:
    rng, schedules = np.random.default_rng(3), []
    for shape in ("777x4096x4095:tn:bf16", "513x515x517", "64x64x8193:tn"):
        gemm = Gemm.parse(shape)
        schedules += [default(FAMILY, gemm, HOPPER), drawn(FAMILY, gemm, HOPPER, rng)]
    for schedule, build in zip(
        schedules, build_all([FAMILY.render(schedule) for schedule in schedules], HOPPER), strict=True
    ):
        assert build.status is BuildStatus.BUILT, (schedule.named, build.reason)
        assert not build.warnings and not any(kernel.spill_bytes for kernel in build.kernels), schedule.named


PHASED = ("1x4096x4095:tn:bf16", "100x4096x4100:tn:bf16", "256x4100x4100:tn", "33x512x1002:tn", "7x64x71:tn:bf16")


@pytest.mark.parametrize("shape", PHASED)
def test_phases_of_b_cover_it_in_rows_of_whole_chunks(shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(5)
    count = phases(gemm)
    for schedule in [default(PHASES, gemm, HOPPER), *(drawn(PHASES, gemm, HOPPER, rng) for _ in range(10))]:
        made = parse_cuda(PHASES.render(schedule).source).plan(gemm, HOPPER.sms)
        pad, multiply = made.launches
        (shifted,) = made.workspaces
        assert shifted.bytes == count * gemm.m * -(-(gemm.k + 7) // 8) * 16
        assert pad.grid[0] * pad.block[0] * 2 >= shifted.bytes // 16
        assert multiply.programmatic and multiply.shared_bytes + _sm90.STATIC_BYTES <= HOPPER.shared_bytes
        moved, rows_of_b = made.tensor_maps
        assert moved.dims == (-(-(gemm.k + 7) // 8) * 8, gemm.m, count)
        assert rows_of_b.dims[:2] == (gemm.k * count, gemm.n // count)
        assert all(stride % 16 == 0 for each in (moved, rows_of_b) for stride in each.strides)


def test_phases_serve_few_rows_of_column_major_b_whose_rows_are_in_groups() -> None:
    assert all(PHASES.serves(Gemm.parse(shape), HOPPER) for shape in PHASED)
    for shape in ("33x512x1002", "33x512x1000:tn", "33x513x1002:tn", "777x512x1002:tn"):
        assert not PHASES.serves(Gemm.parse(shape), HOPPER)
    schedule = default(PHASES, Gemm.parse("100x4096x4100:tn"), HOPPER)
    terms = parse_cuda(PHASES.render(schedule).source)
    assert terms.plan(Gemm.parse("90x2048x4099:tn"), HOPPER.sms).launches
    for shape in ("100x4095x4100:tn", "100x4096x4104:tn"):
        with pytest.raises(ContractError):
            terms.plan(Gemm.parse(shape), HOPPER.sms)


def test_phases_compile_clean() -> None:
    rng = np.random.default_rng(6)
    schedules = [drawn(PHASES, Gemm.parse(shape), HOPPER, rng) for shape in PHASED[:3]]
    for schedule, build in zip(
        schedules, build_all([PHASES.render(schedule) for schedule in schedules], HOPPER), strict=True
    ):
        assert build.status is BuildStatus.BUILT, (schedule.named, build.reason)
        assert not build.warnings and not any(kernel.spill_bytes for kernel in build.kernels), schedule.named


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PHASED)
def test_phases_are_correct(gpu, shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(7)
    with Evaluator(gemm, gpu) as evaluator:
        for trial in evaluator.evaluate([PHASES.render(drawn(PHASES, gemm, gpu.target, rng)) for _ in range(4)]):
            assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, "30x3000x30", "129x130x131:tn:bf16"])
def test_random_schedules_are_correct(gpu, shape) -> None:
    gemm, rng = Gemm.parse(shape), np.random.default_rng(4)
    with Evaluator(gemm, gpu) as evaluator:
        for trial in evaluator.evaluate([FAMILY.render(drawn(FAMILY, gemm, gpu.target, rng)) for _ in range(4)]):
            assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)
