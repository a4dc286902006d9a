"""families/gpu_*.cu: schedules fit the machine and compile clean; a CPU runs them; a GPU judges them."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import schedules
import torch
from cuda_on_cpu import Compiled, bench_of
from fake_gpu import fake_gpu  # noqa: F401 - a fixture
from mutation.subjects import Subject

from cuda_l2 import contract, tasks
from cuda_l2.build.cuda import build_all
from cuda_l2.build.cuda_compiler import compile_source, toolchain
from cuda_l2.contract import ContractError
from cuda_l2.contract.cuda import Plan
from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import Family, Schedule, all_families, families_for, inlined
from cuda_l2.families._gpu_task import GpuTaskFamily
from cuda_l2.families.sm80_gemm import FAMILY as SM80_GEMM
from cuda_l2.machine.cuda.target import CudaTarget, compile_only
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.propose._base import FamilySpace, draw
from cuda_l2.records import BuildStatus, Candidate, Gemm, Operation, VerdictStatus
from cuda_l2.runs.task_bench import read_tasks, sample
from cuda_l2.tasks._base import LARGER, SMALLER, definition
from cuda_l2.tasks.cases import OwnCases
from cuda_l2.tasks.tolerance import bounds
from cuda_l2.tasks.values import Distribution
from cuda_l2.verify.shapes import tried

FAMILIES = [family for family in all_families() if isinstance(family, GpuTaskFamily)]
SERVED = [(family, name) for family in FAMILIES for name in family.table]
NAMES = [name for _, name in SERVED]
HOPPER = compile_only("sm_90a")
MAX_STATIC_BYTES = 48 << 10


def shown(name: str, dtype: str = "") -> list[Operation]:
    """A task at its sizes for CPUs and GPUs, and at odd ones; attention at depths that tensor cores take."""
    known = definition(name)
    dtype = dtype or ("float16" if name.startswith("attention") else "float32")
    odd = known.other_sizes(np.random.default_rng(3), LARGER) | ({"depth": 32} if name.startswith("attention") else {})
    return [known.task(sizes, dtype) for sizes in (known.cpu, known.gpu, odd)]


def random(family: GpuTaskFamily, task: Operation, target: CudaTarget, seed: int) -> Candidate:
    space = FamilySpace(family, task, target)
    return space.render(draw(space, np.random.default_rng(seed)), "random")


def default(family: GpuTaskFamily, task: Operation, target: CudaTarget) -> Candidate:
    return family.render(schedules.default(family, task, target))


def plan(candidate: Candidate, task: Operation, sms: int = HOPPER.sms) -> Plan:
    return contract.parse_cuda(candidate.source).plan(task, sms)


def test_twenty_tasks_and_more_are_served_by_one_family_each() -> None:
    assert len(FAMILIES) >= 8 and len(NAMES) == len(set(NAMES)) >= 70
    for family, name in SERVED:
        (task, *_) = shown(name)
        assert families_for(task, HOPPER) == (family,)


@pytest.mark.parametrize(
    "text", ["softmax:rows=8,columns=9@abcd", "attention", "attention:depth=24:float16", "cholesky"]
)
def test_other_tasks_are_left_to_others(text: str) -> None:
    task = dataclasses.replace(tasks.parse("softmax"), revision="abcd") if "@" in text else tasks.parse(text)
    assert families_for(task, HOPPER) == ()
    assert not set(families_for(Gemm(64, 64, 64), HOPPER)) & set(FAMILIES)


@pytest.mark.corpus(6)
@pytest.mark.parametrize(("family", "name"), SERVED, ids=NAMES)
def test_schedules_fit_the_device(family: GpuTaskFamily, name: str) -> None:
    dtypes = set(definition(name).dtypes) & ({"float16"} if family.name == "gpu_attention" else {"float32", "float16"})
    for dtype in sorted(dtypes):
        for task in shown(name, dtype):
            for target in (HOPPER, compile_only("sm_80"), compile_only("sm_120a")):
                candidates = [default(family, task, target), *(random(family, task, target, seed) for seed in range(4))]
                for candidate in candidates:
                    planned = plan(candidate, task, target.sms)
                    assert all(launch.shared_bytes < target.shared_bytes for launch in planned.launches)
                    assert contract.parse_cuda(candidate.source).interface.names == tuple(
                        tensor.name for tensor in (*task.inputs, *task.weights, *task.outputs)
                    )


@pytest.mark.full
def test_every_value_of_every_choice_is_valid_somewhere() -> None:
    rng = np.random.default_rng(2)
    for family in FAMILIES:
        seen: dict[str, set[int]] = {}
        for name in family.table:
            for task in [*shown(name), *([shown(name, "float16")[1]] if "float16" in definition(name).dtypes else [])]:
                for _ in range(60):
                    schedules.drawn(family, task, HOPPER, rng, seen)
        assert {name: sorted(values) for name, values in seen.items()} == {
            choice.name: sorted(choice.values) for choice in family.choices
        }


@pytest.mark.corpus(4)
@pytest.mark.parametrize("family", [*FAMILIES, SM80_GEMM], ids=lambda family: family.name)
def test_the_source_compiles_alone(family: Family) -> None:
    compiled = compile_source(inlined(family.source), "sm_80", toolchain(), with_cutlass=False)
    assert compiled.status is BuildStatus.BUILT, compiled.log


@pytest.mark.corpus(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_defaults_and_random_schedules_compile_clean(arch: str) -> None:
    target = dataclasses.replace(compile_only(arch), cores=2)
    cases = [(family, name) for family in FAMILIES for name in list(family.table)[:: max(1, len(family.table) // 2)]]
    defaults, others = [], []
    for seed, (family, name) in enumerate(cases):
        _, large, _ = shown(name)
        defaults.append(default(family, large, target))
        others.append(random(family, large, target, seed))
    for candidate, build in zip(defaults + others, build_all(defaults + others, target), strict=True):
        assert build.status is BuildStatus.BUILT, (candidate.schedule, build.reason)
        assert all(kernel.shared_bytes <= MAX_STATIC_BYTES for kernel in build.kernels)
        if candidate in defaults:
            assert not any(kernel.spill_bytes or kernel.stack_bytes for kernel in build.kernels), candidate.schedule


def test_a_contract_takes_shapes_of_the_same_divisibility_and_refuses_others() -> None:
    (family,) = families_for(tasks.parse("softmax:rows=64,columns=512"), HOPPER)
    candidate = default(family, tasks.parse("softmax:rows=64,columns=512"), HOPPER)
    assert plan(candidate, tasks.parse("softmax:rows=7,columns=500")).launches
    for text in ("softmax:rows=64,columns=510", "softmax:rows=64,columns=1024"):  # vectors; what registers hold
        with pytest.raises(ContractError):
            plan(candidate, tasks.parse(text))
    (family,) = families_for(tasks.parse("gelu"), HOPPER)
    assert plan(default(family, tasks.parse("gelu"), HOPPER), tasks.parse("gelu:rows=3,columns=11")).launches


def test_clusters_are_for_hopper_and_later() -> None:
    task = definition("temperature_softmax").task(definition("temperature_softmax").gpu)
    for arch, blocks in (("sm_80", 1), ("sm_90a", 8)):
        target = compile_only(arch)
        candidate = default(families_for(task, target)[0], task, target)
        assert dict(candidate.schedule)["CLUSTER"] == blocks
        assert contract.parse_cuda(candidate.source).arch == arch


def test_every_task_of_the_sample_has_a_family() -> None:
    listed = read_tasks("sample", HOPPER)
    assert listed == sample("cuda") and len(listed) >= 20
    for task in listed:
        assert dict(task.sizes) == dict(definition(task.name).gpu)


ON_CPU = {
    "gelu_tanh:rows=5,columns=77": "QUICK=1",
    "bias_gelu_residual:rows=9,columns=24:bfloat16": "VEC=8",
    "complex_multiply:rows=3,columns=35:float16": "VEC=8",
    "rotary_embedding:batch=1,heads=2,length=7,half=12": "VEC=4",
    "adamw:count=4099": "",
    "softmax:rows=7,columns=500": "KEEP=1",
    "layer_norm:rows=5,columns=300": "KEEP=2 LANES=64",
    "temperature_softmax:rows=2,vocabulary=4104": "CLUSTER=2 KEEP=1 LANES=256",
    "cross_entropy:rows=9,classes=130": "TAIL=1 KEEP=0",
    "max_rows:rows=11,columns=129:float16": "LANES=8",
    "mean_columns:rows=200,columns=72": "SPLITS=4 TAIL=1",
    "argmin_columns:rows=200,columns=72": "SPLITS=2 TAIL=0",
    "embedding_bag_weighted:batch=3,length=300,vocabulary=50,width=20": "SPLITS=2",
    "focal:rows=33,columns=47": "TAIL=1",
    "transpose_add:rows=44,columns=100": "VEC=4 TILE=32",
    "clip_gradient_norm:small=5,middle=1000,large=3001": "BACKWARDS=1",
    "lamb:count=3003": "BACKWARDS=1",
    "max_pool2d:batch=1,channels=2,height=13,width=20": "VEC=4",
    "conv2d_depthwise:batch=1,channels=2,height=11,width=17": "",
    "causal_depthwise_conv1d:batch=1,channels=5,length=40": "VEC=4",
    "attention_causal:batch=1,heads=2,length=75,depth=32:float16": "KEYS=32",
    "attention_grouped_query:batch=1,heads=1,length=37,depth=16:bfloat16": "KEYS=16",
}
"""Tasks, and what their schedules are to hold."""


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.corpus(4)
@pytest.mark.parametrize(("text", "wanted"), ON_CPU.items(), ids=[text.partition(":")[0] for text in ON_CPU])
def test_a_cpu_finds_the_kernels_right(text: str, wanted: str, tmp_path: Path) -> None:
    """By tests/cuda_on_cpu.h: indices, edges, reductions and clusters of real candidates, through their contracts."""
    task, target = tasks.parse(text), dataclasses.replace(HOPPER, sms=3)
    (family,) = families_for(task, target)
    values: list[int] = []
    asked = dict(pair.split("=") for pair in wanted.split())
    likely = dict(zip([c.name for c in family.choices], family.default(task, target), strict=True))
    for choice in family.choices:
        valid = family.valid_values(task, target, values)
        if choice.name in asked:
            assert int(asked[choice.name]) in valid, (choice.name, valid)
        nearest = int(asked.get(choice.name, likely[choice.name]))
        values.append(min(valid, key=lambda value: abs(value - nearest)))
    kernel = Compiled(family.render(Schedule(family, task, target, tuple(values))).source, tmp_path)
    cases = OwnCases(task, 1)
    for distribution in ("normal", "offset", "large", "far", "small", "sparse", "constant"):
        case = cases.drawn("case", Distribution(distribution))
        found = kernel.run(task, case.tensors, target.sms)
        for output, limit in zip(task.outputs, case.bounds, strict=True):
            assert not limit.violation(found[output.name]), (distribution, output.name)


ROWS = (
    *("relu", "gelu_tanh", "silu_gate", "mish", "softplus", "hardswish", "scale_shift_clamp", "softmax", "log_softmax"),
    *("logsumexp", "layer_norm", "rms_norm", "max_rows", "hinge"),
)
NOT_FINITE = {
    **dict.fromkeys(ROWS, "rows=7,columns=40"),
    **dict.fromkeys(("argmin_columns", "mean_columns"), "rows=40,columns=8"),
    "greedy_token": "rows=7,vocabulary=40",
    "cross_entropy_smoothed": "rows=7,classes=40",
    "max_pool2d": "batch=1,channels=1,height=9,width=40",
}
"""Without gelu: of inf, torch's vectors for CPUs make NaN."""


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.corpus(4)
@pytest.mark.parametrize(("name", "sizes"), NOT_FINITE.items(), ids=list(NOT_FINITE))
def test_nan_and_infinities_are_treated_as_torch_does(name: str, sizes: str, tmp_path: Path) -> None:
    task, target = tasks.parse(f"{name}:{sizes}"), dataclasses.replace(HOPPER, sms=3)
    (family,) = families_for(task, target)
    kernel = Compiled(default(family, task, target).source, tmp_path)
    known = definition(name)
    tensors = known.draw(task, 1)
    x = tensors[task.inputs[0].name].view(-1, task.inputs[0].shape[-1])
    x[0, 3], x[1, 5], x[2, 7], x[3], x[4, 1], x[4, 2] = math.nan, math.inf, -math.inf, -math.inf, math.inf, math.nan
    found = kernel.run(task, tensors, target.sms)
    for output, right in zip(task.outputs, known.bind(dict(task.sizes))(**tensors), strict=True):
        torch.testing.assert_close(found[output.name], right, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(
    ("shape", "choices", "line", "mutated"),
    [
        (
            *("temperature_softmax:rows=5,vocabulary=1032", {"VEC": 4, "LANES": 256, "KEEP": 1}),
            *("if (lane + i * STRIDE < vectors) finish", "if ((lane ^ 1) + i * STRIDE < vectors) finish"),
        ),
        (
            *("cross_entropy:rows=37,classes=1030", {"VEC": 2, "LANES": 32, "ROWS": 4, "TAIL": 1}),
            *("sum += __ldcg(numbers + i)", "sum = __ldcg(numbers + i)"),
        ),
    ],
    ids=["an even number of vectors", "no more rows than threads"],
)
def test_what_is_right_at_the_shown_sizes_alone_is_wrong_at_others(shape, choices, line, mutated, tmp_path) -> None:
    task, target = tasks.parse(shape), dataclasses.replace(HOPPER, sms=3)
    subject = Subject("kernel", "gpu_rows", shape, choices)
    source, cases = subject.candidate(target).source, OwnCases(task, 1, "cuda")
    right, wrong = (Compiled(text, tmp_path) for text in (source, source.replace(line, mutated)))
    assert mutated not in source

    def holds(kernel: Compiled, at: Operation) -> bool:
        known = definition(at.name)
        tensors = known.draw(at, 1)
        try:
            found = kernel.run(at, tensors, target.sms)
        except AssertionError as error:
            assert "writes around" in str(error)
            return False
        limits = bounds(known.bind(dict(at.sizes)), tensors)
        return not any(limit.violation(found[output.name]) for output, limit in zip(at.outputs, limits, strict=True))

    def serves(at: Operation) -> bool:
        with contextlib.suppress(ContractError):
            return bool(contract.plan_cuda(source, at, target.sms))
        return False

    sizes = tried(SimpleNamespace(cases=cases, serves=serves, device="cuda"))
    assert holds(right, task) and holds(wrong, task) and all(holds(right, at) for at in sizes)
    assert not all(holds(wrong, at) for at in sizes)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_pairs_that_are_added_in_fp16_show_on_huge_numbers(tmp_path: Path) -> None:
    subject = Subject("norm", "gpu_rows", "layer_norm:rows=7,columns=1000:float16", {"VEC": 2})
    task, cases = subject.task, OwnCases(subject.task, 1)
    source = subject.candidate(HOPPER).source
    narrow = source.replace("sum += e.x[k];", "sum = widened(narrowed(sum + e.x[k]));", 1)
    for text, rejected in ((source, set()), (narrow, {Distribution.HUGE, Distribution.DISTANT})):
        kernel = Compiled(text, tmp_path)
        drawn = {each: cases.drawn("values", each) for each in Distribution}
        wrong = {each for each, case in drawn.items() if case.violation(kernel.run(task, case.tensors, 3))}
        assert wrong == rejected
    assert Distribution.HUGE in cases.distributions
    assert Distribution.HUGE not in OwnCases(tasks.parse("softmax"), 1).distributions


def small_ones(name: str) -> Iterator[Operation]:
    """A task at sizes that loads of vectors divide and at the CPU's, in each of its types."""
    known = definition(name)
    for dtype in known.dtypes:
        yield known.task(known.other_sizes(np.random.default_rng(1), SMALLER, multiple=32), dtype)
        yield known.task(dtype=dtype)


@pytest.mark.corpus(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_familys_default_passes_every_check_and_is_timed_on_a_stand_in(family, fake_gpu, tmp_path) -> None:  # noqa: F811
    task = next(task for name in family.table for task in small_ones(name) if family.serves(task, HOPPER))
    bench, candidate, build = bench_of(fake_gpu, default(family, task, HOPPER).source, task, tmp_path)
    verdict = bench.verify(candidate, build)
    assert verdict.status is VerdictStatus.CORRECT, (verdict.check, verdict.reason)
    at_own_sizes = [name for name in verdict.passed if name != "other shapes"]  # which some kernels are compiled for
    assert at_own_sizes == [
        *("five seeds", "alignment", "other values", "where timed", "special values", "hygiene", "state", "often"),
        *("memory", "side by side", "concurrency"),
    ]
    timing = bench.time(candidate, build, CUDA_PROTOCOLS["search"])
    assert timing.speedup, timing.reason


GPU_MEASURED = (
    "bias_gelu_residual:rows=1000,columns=1024:float16",
    "adamw:count=1000003",
    "softmax:rows=1000,columns=1024",
    "temperature_softmax:rows=9,vocabulary=128256",  # clusters
    "cross_entropy:rows=100,classes=32000",  # the last block adds up
    "mean_columns:rows=1000,columns=1024",
    "mse:rows=1000,columns=1023",
    "clip_gradient_norm:small=1000,middle=100000,large=1000001",
    "transpose_add:rows=1000,columns=1024",
    "conv2d_depthwise:batch=2,channels=32,height=56,width=56",
    "attention_causal:batch=1,heads=4,length=1000,depth=64:float16",
)
"""One of each family, and of each way to join blocks."""


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), SERVED, ids=NAMES)
def test_a_gpu_finds_default_and_random_schedules_right(family: GpuTaskFamily, name: str, gpu: Any) -> None:
    small, _, odd = shown(name)
    for task in (small, odd):
        candidates = [default(family, task, gpu.target), *(random(family, task, gpu.target, seed) for seed in range(2))]
        candidates = list({candidate.id: candidate for candidate in candidates}.values())
        with gpu.open(task, 1) as bench:
            for candidate, build in zip(candidates, bench.build(candidates), strict=True):
                verdict = bench.verify(candidate, build)
                assert verdict.status is VerdictStatus.CORRECT, (candidate.schedule, build.reason or verdict.reason)


@pytest.mark.gpu
@pytest.mark.parametrize("text", GPU_MEASURED)
def test_a_gpu_measures_defaults_through_the_whole_path(text: str, gpu: Any) -> None:
    """With stress builds and the sanitizer's tools where it works."""
    task = tasks.parse(text)
    (family,) = families_for(task, gpu.target)
    with Evaluator(task, gpu) as evaluator:
        (trial,) = evaluator.evaluate([default(family, task, gpu.target)], full=True)
    assert trial.status == "measured", trial.reason
