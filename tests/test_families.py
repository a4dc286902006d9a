"""The contract that every family keeps, and what is particular to the CPU's."""

import itertools
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import settled
from schedules import default, drawn

from cuda_l2 import contract
from cuda_l2.build.cpu import build
from cuda_l2.build.cuda import build_all as build_cuda
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Schedule, all_families, families_for
from cuda_l2.families.cpu_gemm import FAMILY as CPU_GEMM
from cuda_l2.families.cpu_gemm import PAIRS
from cuda_l2.library.kernel import Kernel
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.propose._base import FamilySpace, space_for
from cuda_l2.propose.random import RandomProposer
from cuda_l2.records import Build, BuildStatus, Gemm, Layout, Trial, VerdictStatus

SHAPES = (
    *("1x1x1", "1x1x1:tn", "7x5x3", "3x1x129:tn", "64x48x80", "33x65x257:tn", "1x200x300", "130x2x70:tn"),
    "100x100x600:fp16",
)
OTHER_MACHINES = [
    CpuTarget("one core, 128 bits", 1, 128, (32 << 10, 1 << 20, 0)),
    CpuTarget("many cores, 256 bits", 64, 256, (32 << 10, 512 << 10, 32 << 20)),
    CpuTarget("no cache known", 4, 512, (0, 0, 0)),
]
PRODUCTS = [family for family in all_families() if family.products]
GPUS = [compile_only("sm_80"), compile_only("sm_86"), compile_only("sm_90a")]


@pytest.mark.parametrize("family", PRODUCTS, ids=lambda family: family.name)
@pytest.mark.parametrize("shape", [*SHAPES, "256x512x4096", "4096x4096x4096:tn"])
def test_every_prefix_has_a_valid_value_and_the_default_is_valid(family, shape, target) -> None:
    gemm = Gemm.parse(shape)
    rng = np.random.default_rng(1)
    for machine in [target, *OTHER_MACHINES, *GPUS]:
        if not family.serves(gemm, machine):
            continue
        defaults = family.defaults(gemm, machine)
        assert defaults[0] == family.default(gemm, machine) and len(set(defaults)) == len(defaults)
        for values in defaults:
            Schedule(family, gemm, machine, values)
        for _ in range(50):
            drawn(family, gemm, machine, rng)


@pytest.mark.parametrize("family", PRODUCTS, ids=lambda family: family.name)
def test_an_invalid_schedule_cannot_be_constructed(family, target) -> None:
    gemm, machine = next(
        (Gemm.parse(shape), machine)
        for shape, machine in itertools.product(
            ("64x64x64", "4096x4096x256", "65x65x65", "64x64x65:tn"), [target, *GPUS]
        )
        if family.serves(Gemm.parse(shape), machine)
    )
    values = family.default(gemm, machine)
    for wrong in (values[:-1], (*values[:-1], 12345)):
        with pytest.raises(ValueError):
            Schedule(family, gemm, machine, wrong)


@pytest.mark.parametrize(
    ("shape", "shared"), [("512x512x512", 1), ("256x256x256", 1), ("64x4096x4096:tn", 0), ("512x100x512", 0)]
)
def test_the_second_default_shares_columns_where_every_thread_gets_a_panel(shape, shared) -> None:
    machine = CpuTarget("four cores, 512 bits", 4, 512, (48 << 10, 2 << 20, 32 << 20))
    gemm = Gemm.parse(shape)
    first, second = (Schedule(CPU_GEMM, gemm, machine, values).named for values in CPU_GEMM.defaults(gemm, machine))
    assert first["SPLIT_COLUMNS"] == 0 and second["SPLIT_COLUMNS"] == shared
    assert (second["NV"], second["MR"]) == (4, 6)


def test_several_families_make_one_space_that_keeps_each_ones_rules() -> None:
    gemm, machine = Gemm(512, 512, 512), compile_only("sm_90a")
    families = families_for(gemm, machine)
    space = space_for(families, gemm, machine)
    assert len(families) > 1 and len(space.defaults()) == len(families)  # one each, of the GPU's families
    for values, family in zip(space.defaults(), families, strict=True):
        candidate = space.render(values, "test")
        assert candidate.family == family.name
        build = Build(candidate.id, BuildStatus.FAILED, "not compiled")
        assert space.values_of(Trial(gemm, candidate, "", "", build)) == values
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(30):
        values = []
        for choice in space.choices:
            valid = space.valid(values)
            assert valid and set(valid) <= set(choice.values)
            values.append(int(rng.choice(valid)))
        seen.add(space.render(tuple(values), "test").family)
    assert seen == {family.name for family in families}


def test_the_source_compiles_alone(target, tmp_path) -> None:
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-std=gnu11"]
    command = [target.compiler, *flags, "-c", str(CPU_GEMM.source), "-o", str(tmp_path / "o")]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_rendering_is_repeatable_and_states_its_schedule(target) -> None:
    gemm = Gemm(64, 64, 64)
    schedule = default(CPU_GEMM, gemm, target)
    first, second = CPU_GEMM.render(schedule), CPU_GEMM.render(schedule)
    assert first.id == second.id and dict(first.schedule) == schedule.named
    assert contract.parse(first.source).threads == schedule.named["THREADS"]


@pytest.mark.corpus(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_schedules_are_correct(shape, target, rig) -> None:
    gemm = Gemm.parse(shape)
    space = FamilySpace(families_for(gemm, target)[0], gemm, target)
    proposer = RandomProposer(space, list, np.random.default_rng(len(shape)))
    with Evaluator(gemm, rig) as evaluator:
        for trial in settled(evaluator).evaluate(proposer.propose(3)):  # which builds several at a time
            assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)


def pairs(shape: str, swap: int, target: CpuTarget) -> Schedule:
    """A schedule that multiplies pairs of bf16 in several blocks of K and of columns."""
    gemm = Gemm.parse(shape)
    if not target.multiplies_pairs(gemm.dtype):
        pytest.skip("this CPU multiplies no pairs of bf16")
    wanted = default(CPU_GEMM, gemm, target).named | {"SWAP": swap, "MR": 5, "NV": 2, "KC": 128, "NC": 32}
    assert wanted["WIDEN"] == PAIRS
    return Schedule(CPU_GEMM, gemm, target, tuple(wanted.values()))


@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("shape", ["29x45x301:bf16", "29x45x301:tn:bf16", "80x64x258:bf16", "80x64x258:tn:bf16"])
def test_pairs_of_bf16_are_right_and_without_the_look_at_small_numbers_they_are_not(shape, swap, target, rig) -> None:
    schedule = pairs(shape, swap, target)
    honest = CPU_GEMM.render(schedule)
    look = "return x > 0 && y > 0 && x + y >= SAFE_EXPONENTS;"
    assert look in honest.source
    flushing = replace(honest, source=honest.source.replace(look, "return x + y > 0;"))
    with Evaluator(schedule.task, rig) as evaluator:
        right, wrong = settled(evaluator).evaluate([honest, flushing])
    assert right.status == "measured", right.reason
    assert wrong.verdict is not None and wrong.verdict.status != VerdictStatus.CORRECT


@pytest.mark.parametrize("swap", [0, 1])
@pytest.mark.parametrize("layout", ["nn", "tn"])
@pytest.mark.parametrize("factors", ["any", "normal"])
def test_products_of_bf16_of_any_size_are_those_of_fp32(factors, layout, swap, target) -> None:
    """One product an element, in a row's first or last pair, rounded once: many are subnormal, of some a factor is."""
    schedule = pairs(f"37x40x129:{layout}:bf16", swap, target)
    candidate = CPU_GEMM.render(schedule)
    kernel = Kernel(schedule.task, candidate, build(candidate, target), target.machine)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 1 << 16, (2, 40), generator=generator, dtype=torch.int32)
    if factors == "normal":  # of 2^-75 to 2^-54
        words = (words & 0x8FFF) % (21 << 7) + (52 << 7) + (words & 0x8000)
    left, right = (each.to(torch.int16).view(torch.bfloat16) for each in words)
    left, right = (each.where(each.isfinite(), 1.0) for each in (left[:37], right))
    wanted = (left[:, None].float() * right.float()).bfloat16()
    assert factors == "any" or (wanted.float().abs() < 2**-126).any()
    for k in (0, 1, 127, 128):
        a, b = torch.zeros(37, 129).bfloat16(), torch.zeros(129, 40).bfloat16()
        a[:, k], b[k] = left, right
        assert torch.equal(kernel(a, b if layout == "nn" else b.t().contiguous().t()), wanted)


@pytest.mark.parametrize(
    ("dtype", "bits", "extensions", "has"),
    [
        ("bfloat16", 512, ("avx512f", "avx512_bf16"), True),
        ("float16", 512, ("avx512f", "avx512_bf16"), False),
        ("bfloat16", 512, ("avx512f",), False),
        ("bfloat16", 256, ("avx2", "avx512_bf16"), False),
    ],
)
def test_pairs_are_multiplied_where_a_cpu_can(dtype, bits, extensions, has) -> None:
    machine = CpuTarget("two cores", 2, bits, (32 << 10, 1 << 20, 32 << 20), extensions=extensions)
    gemm = replace(Gemm(512, 512, 512), dtype=dtype)
    named = default(CPU_GEMM, gemm, machine).named
    assert (named["WIDEN"] == PAIRS) is has
    tried = [drawn(CPU_GEMM, gemm, machine, np.random.default_rng(seed)).named for seed in range(40)]
    assert any(each["WIDEN"] == PAIRS for each in tried) is has
    assert not any(each["WIDEN"] == PAIRS and each["VECTOR_BITS"] < 512 for each in tried)


@pytest.mark.corpus(1)
@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("layout", ["nn", "tn"])
def test_every_vector_width_operand_order_and_widening_is_correct(bits, layout, target, rig) -> None:
    if bits > target.vector_bits:
        pytest.skip(f"this CPU has {target.vector_bits}-bit vectors")
    gemm = Gemm.parse(f"29x45x150:{layout}")
    machine = replace(target, vector_bits=bits)
    usual = default(CPU_GEMM, gemm, machine).named
    candidates = []
    for swap, widen in itertools.product((0, 1), (0, 1, 2)):
        wanted = usual | {"SWAP": swap, "WIDEN": widen, "MR": 5, "NV": 2, "KC": 128, "NC": 32}
        try:
            schedule = Schedule(CPU_GEMM, gemm, machine, tuple(wanted.values()))
        except ValueError:
            assert widen == 0 and (swap or layout == "tn")
            continue
        candidates.append(CPU_GEMM.render(schedule))
    assert len(candidates) >= 4
    with Evaluator(gemm, rig) as evaluator:
        for trial in settled(evaluator).evaluate(candidates):
            assert trial.status == "measured", (dict(trial.candidate.schedule), trial.reason)


def test_the_contracts_workspace_is_the_kernels(target) -> None:
    """The verifier guards the byte behind the workspace, so a formula that is too small fails other tests; this one
    pins that it is not wasteful."""
    gemm = Gemm(512, 512, 512)
    schedule = default(CPU_GEMM, gemm, target)
    candidate = CPU_GEMM.render(schedule)
    assert build(candidate, target).status is BuildStatus.BUILT
    assert contract.parse(candidate.source).workspace_bytes(Gemm(512, 512, 512)) < (1 << 20) * (1 + target.cores)


@pytest.mark.corpus(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_bf16_products_use_bf16_tensor_instructions_alone(arch) -> None:
    machine, rng = replace(compile_only(arch), cores=2), np.random.default_rng(5)
    candidates, gemms = [], []
    for gemm in map(Gemm.parse, ("512x1024x4096:tn:bf16", "100x201x304:bf16")):
        for family in families_for(gemm, machine):
            for schedule in (default(family, gemm, machine), drawn(family, gemm, machine, rng)):
                candidates.append(family.render(schedule))
                gemms.append(gemm)
    assert len({candidate.family for candidate in candidates}) == (4 if arch == "sm_90a" else 1)
    for gemm, candidate, built in zip(gemms, candidates, build_cuda(candidates, machine), strict=True):
        assert built.status is BuildStatus.BUILT, built.reason
        plan = contract.plan_cuda(candidate.source, gemm, machine.sms)
        assert {tensor_map.dtype for tensor_map in plan.tensor_maps} <= {"bfloat16"}
        used = {opcode for kernel in built.kernels for opcode in kernel.tensor_instructions}
        assert used and all(opcode.endswith(".F32.BF16") for opcode in used)


@pytest.mark.corpus(2)
@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("shape", ["7x5x3:bf16", "29x45x150:tn:bf16", "130x2x300:bf16"])
def test_bf16_products_on_a_cpu_are_the_exact_ones_rounded(bits, shape, target) -> None:
    """On integers, infinities, NaN, subnormals and values that are halfway between two of bf16."""
    if bits > target.vector_bits:
        pytest.skip(f"this CPU has {target.vector_bits}-bit vectors")
    gemm, machine, rng = Gemm.parse(shape), replace(target, vector_bits=bits), np.random.default_rng(bits)
    a = torch.from_numpy(rng.integers(-9, 10, (gemm.m, gemm.k))).bfloat16()
    b = torch.from_numpy(rng.integers(-9, 10, (gemm.k, gemm.n))).bfloat16()
    a[0, :] = 0
    a[0, 0], a[1, 0], a[2, 0], a[3, 0] = 2.0**-133, torch.inf, torch.nan, 3e38
    b[0, :] = 1
    expected = (a.double() @ b.double()).float().bfloat16()
    assert 0 < expected[0, 0] < 2.0**-126 and expected[3, 0].isfinite()
    stored = b.t().contiguous().t() if gemm.layout is Layout.TN else b
    for swap, widen in itertools.product((0, 1), (0, 1, 2)):
        schedule = drawn(CPU_GEMM, gemm, machine, rng, SWAP=swap, WIDEN=widen, KC=128, NC=32)
        candidate = CPU_GEMM.render(schedule)
        built = build(candidate, machine)
        assert built.status is BuildStatus.BUILT, built.log
        found = Kernel(gemm, candidate, built)(a, stored)
        assert torch.equal(found.isnan(), expected.isnan()) and found[2].isnan().all()
        assert torch.equal(found.nan_to_num(5.0), expected.nan_to_num(5.0))
    with pytest.raises(ValueError, match="bfloat16"):
        Kernel(gemm, candidate, built)(a.half(), stored)
    with pytest.raises(contract.ContractError, match='the header needs dtype = "float16"'):
        Kernel(replace(gemm, dtype="float16"), candidate, built)


@pytest.mark.parametrize(("level_2", "block"), [(512 << 10, 128), (1 << 20, 256), (0, 256)])
def test_the_default_block_fits_the_second_level_cache(level_2: int, block: int) -> None:
    machine = CpuTarget("two cores, 256 bits", 2, 256, (32 << 10, level_2, 32 << 20))
    gemm = Gemm(512, 512, 512)
    assert Schedule(CPU_GEMM, gemm, machine, CPU_GEMM.default(gemm, machine)).named["NC"] == block
