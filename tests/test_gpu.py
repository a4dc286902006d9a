"""The CUDA target on a real GPU: execution, verification, timing. Skipped where there is none."""

import json
from pathlib import Path

import pytest
import torch

from cuda_l2.evaluator import Evaluator
from cuda_l2.families._base import families_for
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.measure.heater import LONGEST_S, Heater
from cuda_l2.measure.rounds import Kernel
from cuda_l2.optimizer import Optimizer, Settings
from cuda_l2.propose._base import FamilySpace, space_for
from cuda_l2.records import Candidate, Gemm, Layout, TimingStatus
from cuda_l2.tasks import products

pytestmark = [pytest.mark.gpu]
CORPUS = Path(__file__).with_name("cuda_cheats")
HONEST = sorted(CORPUS.glob("honest_*.cu"))
SHAPES = ("64x64x64", "1x1x1", "7x5x3", "33x65x31:tn", "256x256x256", "100x333x777", "512x256x4096:tn")
SHAPES += ("128x128x128:nn:fp16",)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_familys_default_is_right_and_timed(gpu, shape) -> None:
    gemm = Gemm.parse(shape)
    with Evaluator(gemm, gpu) as evaluator:
        families = families_for(gemm, gpu.target)
        assert families
        spaces = [FamilySpace(family, gemm, gpu.target) for family in families]
        for trial in evaluator.evaluate([space.render(space.defaults()[0], "test") for space in spaces]):
            assert trial.timing and trial.timing.speedup, (trial.candidate.family, trial.status, trial.reason)


@pytest.mark.parametrize("protocol", ["offline", "rotating", "server"])
def test_a_protocol_times_every_baseline(gpu, protocol) -> None:
    gemm = Gemm.parse("256x512x128")
    with Evaluator(gemm, gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate((CORPUS / "honest_fma.cu").read_text())], gpu.protocols[protocol])
    timing = trial.timing
    assert timing and timing.candidate and timing.speedup, trial.reason
    names = {arm.name for arm in timing.baselines}
    assert {"torch.matmul", "cuBLAS NN", "cuBLAS TN", "cuBLASLt-AutoTuning NN", "cuBLASLt-AutoTuning TN"} <= names
    assert timing.reference.endswith(("NN", "torch.matmul", "switches", "max-autotune"))  # B in the task's own layout
    assert timing.conditions.sm_mhz > 0
    assert 0.2 < timing.empty_call_us < 20
    if protocol == "server":
        assert set(timing.conditions.host_call_to_done_us) == names | {"candidate", "empty kernel"}


def test_a_second_gpu_confirms_a_jump(gpu, monkeypatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    monkeypatch.setattr("cuda_l2.evaluator.jump", lambda speedup, best: "over 3x")
    gemm = Gemm.parse("1024x1024x1024")
    with Evaluator(gemm, gpu) as evaluator:
        family = families_for(gemm, gpu.target)[0]
        space = FamilySpace(family, gemm, gpu.target)
        right = space.render(space.defaults()[0], "test")
        (trial,) = evaluator.evaluate([right])
        found = gpu.elsewhere(gemm, Candidate("no candidate"))
    assert trial.review and trial.review.counts, (trial.status, trial.reason, trial.review)
    assert trial.review.elsewhere.startswith("GPU ") and trial.review.elsewhere.endswith("x"), trial.review.elsewhere
    assert found and found.speedup is None and found.status != "measured"


def test_a_closed_shapes_memory_is_free_again(gpu) -> None:
    with Evaluator(Gemm.parse("2048x2048x2048"), gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate((CORPUS / "honest_fma.cu").read_text())])
        assert trial.status == "measured", trial.reason
        arena = gpu.workers.get(evaluator._bench._arena(rotates=False)).arena
        held, _ = torch.cuda.mem_get_info()
    assert all(worker.arena is None for worker in gpu.workers._used.values())
    free, _ = torch.cuda.mem_get_info()
    assert free - held >= 0.9 * sum(buffer.size for buffer in arena.buffers.values())


def test_the_heater_works_while_the_host_goes_on(gpu) -> None:
    del gpu
    heater = Heater()
    a, b, c = heater._operands
    c.zero_()
    torch.cuda.synchronize()
    heater.run(10 * LONGEST_S)  # cut to the longest
    assert not heater._stream.query()
    heater.pause_ended()
    assert heater._share < 1
    torch.cuda.synchronize()
    assert torch.allclose(c.float(), a.float() @ b.float(), atol=0.2, rtol=1e-2)


def test_heavy_launches_are_timed_on_a_chip_at_work(gpu) -> None:
    gemm = Gemm.parse("4096x4096x1024")
    with Evaluator(gemm, gpu) as evaluator:
        family = families_for(gemm, gpu.target)[-1]
        space = FamilySpace(family, gemm, gpu.target)
        (trial,) = evaluator.evaluate([space.render(space.defaults()[0], "test")], gpu.protocols["offline"])
    assert trial.timing and trial.timing.candidate and trial.timing.speedup, trial.reason
    heated = gpu.protocols["offline"].heat_s
    launches = trial.timing.candidate.launches / trial.timing.candidate.rounds
    assert launches * trial.timing.candidate.latency_us.estimate * 1e-6 > heated / 2


def test_a_fault_costs_its_candidate_only(gpu) -> None:
    sources = [CORPUS / name for name in ("illegal_address.cu", "honest_fma.cu", "endless_loop.cu", "honest_mma.cu")]
    with Evaluator(Gemm(256, 256, 256), gpu) as evaluator:
        statuses = [t.status for t in evaluator.evaluate([Candidate(path.read_text()) for path in sources])]
    assert statuses == ["crashed", "measured", "timed-out", "measured"]


def test_a_process_outlives_the_memory_of_a_shape(gpu) -> None:
    met = []
    for _ in range(2):
        with CudaArena([Gemm(64, 64, 64)], 1 << 20) as arena:
            met.append(gpu.workers.get(arena))
            gpu.workers.detach()
            assert met[-1].alive
    assert met[0] is met[1]


def test_the_gpus_reference_agrees_with_the_cpus(gpu) -> None:
    gemm = Gemm(640, 768, 1024)
    cases = products.ProductCases(gemm, 1, products.CudaReferences(lambda gemm, a, b: []))
    assert gemm.flops > products.CPU_FLOPS
    a, b = (torch.randint(-31, 32, shape, device="cuda").float() for shape in ((gemm.m, gemm.k), (gemm.k, gemm.n)))
    case = cases.operands(a, b)
    assert torch.equal(cases.product_fp32(case).cpu(), case.a.cpu().float() @ case.b.cpu().float())


def test_optimize_finds_a_kernel_and_reports_it(gpu, tmp_path) -> None:
    del gpu  # one at a time is enough; this opens its own
    with Optimizer(Settings(budget_s=4, archive=tmp_path / "archive.db", target="cuda")) as optimizer:
        result = optimizer.optimize(Gemm(256, 256, 256))
    assert set(result.reports) == {"offline", "server"}
    assert result.source_path and result.source_path.suffix == ".cu"
    assert json.dumps(result.reports["offline"].environment)


@pytest.mark.parametrize("protocol", ["offline", "rotating", "server"])
def test_kernels_of_both_layouts_are_timed_in_one_run(gpu, protocol) -> None:
    shapes = [Gemm.parse(shape) for shape in ("256x512x1024", "256x512x1024:tn")]
    sources = [space_for([family], gemm, gpu.target) for gemm in shapes for family in families_for(gemm, gpu.target)]
    candidates = [space.render(space.defaults()[0], "test") for space in sources]
    layouts = [gemm.layout for gemm in shapes for _ in families_for(gemm, gpu.target)]
    with gpu.open(shapes[0], 0, both_layouts=True) as bench:
        built = zip(candidates, bench.build(candidates), layouts, strict=True)
        kernels = {f"kernel {number}": Kernel(*parts) for number, parts in enumerate(built)}
        assert len(kernels) >= 4
        timings = bench.time_kernels(kernels, gpu.protocols[protocol])
    assert list(timings) == list(kernels)
    for name, timing in timings.items():
        assert timing.candidate and timing.speedup, timing.reason
        assert timing.candidate.name == name
        arms = {arm.name for arm in timing.baselines}
        assert {"cuBLASLt-AutoTuning NN", "cuBLASLt-AutoTuning TN"} <= arms and not arms & set(kernels)
        assert timing.reference in arms


def test_a_kernel_that_reads_the_wrong_layout_is_noticed_among_others(gpu) -> None:
    shapes = [Gemm.parse(shape) for shape in ("256x512x1024", "256x512x1024:tn")]
    candidates = []
    for gemm in shapes:
        space = space_for(families_for(gemm, gpu.target), gemm, gpu.target)
        candidates.append(space.render(space.defaults()[0], "test"))
    with gpu.open(shapes[0], 0, both_layouts=True) as bench:
        nn, tn = bench.build(candidates)
        kernels = {"right": Kernel(candidates[0], nn, Layout.NN), "wrong": Kernel(candidates[1], tn, Layout.NN)}
        timings = bench.time_kernels(kernels, gpu.protocols["offline"])
    assert {timing.status for timing in timings.values()} == {TimingStatus.WRONG_OUTPUT}


def test_the_fp16_class_meets_the_autotuned_algorithms_of_both_classes(gpu) -> None:
    with Evaluator(Gemm.parse("256x512x1024:fp16"), gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate((CORPUS / "honest_mma.cu").read_text())], gpu.protocols["offline"])
    assert trial.timing and trial.timing.candidate, trial.reason
    names = {arm.name for arm in trial.timing.baselines}
    assert {f"cuBLASLt-AutoTuning{kind} {layout}" for kind in ("", "-32F") for layout in ("NN", "TN")} <= names
