"""measure/: intervals, the strongest baseline, checks of timed outputs."""

import dataclasses
import json
import math
import os
import subprocess
from collections.abc import Collection
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import torch
from clocks import ticking
from conftest import honest_source

from cuda_l2.evaluator import Evaluator
from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure import torch_worker
from cuda_l2.measure.baselines._base import TorchProduct, all_baselines, baselines_of, beginning, named
from cuda_l2.measure.intervals import mean_interval, median_interval
from cuda_l2.measure.operands import ProductOperands, slots_for
from cuda_l2.measure.outputs import WrongOutput, rms_over_rounding
from cuda_l2.measure.protocols import CPU_PROTOCOLS, CUDA_PROTOCOLS, Protocol, brief
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms
from cuda_l2.measure.torch_baselines import WORKER, TorchBaselines
from cuda_l2.records import Accumulate, Candidate, Gemm, Layout
from cuda_l2.system.errors import UserError
from cuda_l2.system.loading import PROGRAM

PAPER_IN_SHORT = Protocol(
    "paper", round_s=0, min_rounds=2, max_rounds=1 << 30, halfwidth=0.0, warmup_s=0.2, measure_s=0.5, mean=True
)


def test_the_median_interval_is_the_textbooks() -> None:
    # ranks from the binomial table: n = 10 gives the 2nd and 9th, n = 6 the extremes
    assert median_interval(range(1, 11)).low == 2 and median_interval(range(1, 11)).high == 9
    assert median_interval(range(1, 7)).low == 1 and median_interval(range(1, 7)).high == 6
    assert math.isinf(median_interval([1, 2, 3, 4, 5]).low)


@pytest.mark.parametrize("n", [6, 9, 10, 15, 40])
def test_the_median_interval_covers_at_least_95_percent(n) -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        interval = median_interval(rng.exponential(size=n).tolist())
        hits += interval.low <= math.log(2) <= interval.high
    assert hits / 2000 > 0.94


def test_means() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.estimate == 2.0
    assert interval.high - 2.0 == pytest.approx(1.959964 / math.sqrt(3))
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_every_baseline_has_a_name_of_its_own_by_which_results_know_it() -> None:
    found = all_baselines()
    assert all(each.name == name and named(name) is each for name, each in found.items())
    assert found["cuBLASLt-AutoTuning-32F TN"].layout is Layout.TN and found["cuBLAS NN"].kind == "cuBLAS"
    with pytest.raises(UserError, match="this version has no baseline 'cuBLAS NT'"):
        named("cuBLAS NT")


def test_text_that_a_user_gives_chooses_baselines_by_the_beginnings_of_their_names() -> None:
    known = baselines_of(TorchProduct, "cpu")
    assert [each.name for each in beginning(["torch widened"], known)] == [
        "torch widened, preallocated",
        "torch widened",
        "torch widened, one thread",
    ]
    assert beginning([], known) == known
    with pytest.raises(UserError, match=r"begins with 'cuBLAS'; choose from .*torch fp16"):
        beginning(["torch fp16", "cuBLAS"], known)


@pytest.mark.parametrize("shape", ["33x20x50", "33x20x50:tn", "1x1x1", "2x1x700:tn"])
def test_every_baseline_computes_the_task_on_every_layout(shape, rig) -> None:
    gemm = Gemm.parse(shape)
    with Arena([gemm], slots=4, workspace_bytes=64) as arena:
        baselines = rig.baselines
        baselines.attach(arena)
        for seed in range(5):
            operands = ProductOperands(arena, gemm, np.random.default_rng(seed))
            operands.refresh(4)
            for baseline in baselines_of(TorchProduct, "cpu"):
                arm = baselines.arm(baseline)
                arena.poison_outputs(range(4))
                arm.prepare([2, 0, 3, 1])
                arm.run(5.0)
                operands.check(range(4), element_wise=True)
                operands.require_untouched(4)


def test_torch_is_timed_on_one_thread_too_where_a_product_is_small() -> None:
    one = named("torch widened, one thread")
    assert one.serves(Gemm(256, 256, 256)) and not one.serves(Gemm(256, 256, 257))
    gemm, threads = Gemm(8, 8, 8), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        worker = torch_worker.Worker()
        worker._task, worker._memory = gemm, torch.zeros(384, dtype=torch.uint8)
        found = []
        for name in ("torch widened, preallocated", one.name, "torch fp16"):
            worker.handle({"op": "prepare", "arm": name, "calls": [{"a": 0, "b": 128, "c": 256}]})
            found.append(torch.get_num_threads())
        worker._mode.close()
    finally:
        torch.set_num_threads(threads)
    assert found == [2, 1, 2]


@pytest.fixture
def filled():
    """An arena whose outputs are right, and its operands."""
    gemm = Gemm(40, 30, 50)
    with Arena([gemm], slots=3, workspace_bytes=64) as arena:
        operands = ProductOperands(arena, gemm, np.random.default_rng(0))
        operands.refresh(3)
        arena.poison_outputs(range(3))
        for slot in range(3):
            a, b = (operands.values(tensor, 3)[slot] for tensor in gemm.inputs)
            output(arena, slot)[:] = (a @ b).half().numpy().view(np.uint16)
        operands.check(range(3), element_wise=True)
        yield arena, operands


def output(arena: Arena, slot: int) -> np.ndarray:
    """C of one slot as raw words."""
    (c,) = arena.outputs(slot).values()
    return c.numpy().view(np.uint16)


def flip(arena: Arena, place: int) -> None:
    """Change a byte, whatever it is: those around operands are drawn."""
    arena._bytes[place] ^= 0xFF


@pytest.mark.parametrize("slot", [0, 1, 2])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda arena, slot: output(arena, slot).__setitem__((39, 29), 0x7DAD),
        lambda arena, slot: output(arena, slot).__setitem__((0, 0), 0x4C00),  # 16
        lambda arena, slot: output(arena, slot).__setitem__(slice(None), output(arena, (slot + 1) % 3)),
        lambda arena, slot: np.bitwise_and(output(arena, slot), 0xFFC0, out=output(arena, slot)),
        lambda arena, slot: flip(arena, arena.offset("c", slot) + arena.task.outputs[0].bytes),
    ],
    ids=["unwritten", "one wrong element", "another launch's answer", "fewer bits", "behind the output"],
)
def test_a_spoilt_output_of_any_launch_is_seen(filled, spoil, slot) -> None:
    arena, operands = filled
    spoil(arena, slot)
    with pytest.raises(WrongOutput):
        for _ in range(3):
            operands.check(range(3), element_wise=True)
            operands.require_untouched(3)


def test_timed_launches_may_err_as_long_sums_in_fp16_do_and_not_in_the_fp32_class() -> None:
    k, generator = 16384, torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator).half().float() for shape in ((64, k), (k, 64)))
    sums = torch.zeros(64, 64)
    for i in range(0, k, 16):  # as wgmma rounds them
        sums = (sums + a[:, i : i + 16] @ b[i : i + 16]).half().float()
    exact = a @ b
    ratio = float((sums - exact).square().mean().sqrt() / (exact.half().float() - exact).square().mean().sqrt())
    assert rms_over_rounding(Accumulate.FP16, 512) < ratio < rms_over_rounding(Accumulate.FP16, k) < 2 * ratio
    assert ratio > 10 * rms_over_rounding(Accumulate.FP32, k)


def test_old_answers_are_wrong_after_a_refresh(filled) -> None:
    _, operands = filled
    operands.refresh(3)
    with pytest.raises(WrongOutput):
        operands.check(range(3), element_wise=True)


@pytest.mark.parametrize(("shape", "slots"), [("64x64x64", 128), ("256x256x256", 64), ("1x4096x4096", 1)])
def test_the_launches_of_a_sample_fit_into_a_last_level_cache_together(shape, slots) -> None:
    gemm = Gemm.parse(shape)
    assert slots_for(gemm) == slots and (slots == 1 or slots * gemm.bytes < 32 << 20)


def test_touched_operands_are_seen(filled) -> None:
    arena, operands = filled
    operands.require_untouched(3)
    arena.given(2)["b"].view(torch.int16)[-1, -1] ^= 1
    with pytest.raises(WrongOutput):
        operands.require_untouched(3)


@pytest.mark.parametrize(
    "protocol", [*[p for p in CPU_PROTOCOLS.values() if p.name != "paper"], PAPER_IN_SHORT], ids=lambda p: p.name
)
def test_every_protocol_measures_and_names_the_strongest_baseline(protocol, rig) -> None:
    with Evaluator(Gemm(45, 40, 64), rig) as evaluator:
        (trial,) = evaluator.evaluate([Candidate(honest_source())], protocol)
        timing = trial.timing
        assert timing is not None and timing.speedup is not None, trial.reason
        fastest = min(timing.baselines, key=lambda arm: arm.latency_us.estimate)
        assert timing.reference == fastest.name
        assert dict(timing.speedups)[timing.reference] == timing.speedup
        assert timing.max_difference > 0
        if not protocol.selects:
            assert {arm.name for arm in timing.baselines} == {each.name for each in baselines_of(TorchProduct, "cpu")}
        assert timing.candidate.rounds >= protocol.min_rounds
        assert timing.speedup.estimate > 0


def test_while_an_arm_is_timed_the_clocks_thread_lies_on_its_first_core(rig, monkeypatch) -> None:
    """Other threads of an arm spin on theirs after a run, and would be waited for."""
    before = os.sched_getaffinity(0)
    seen: dict[type, list[set[int]]] = {Worker: [], TorchBaselines: []}
    for kind, cores in seen.items():

        def run(arm: Any, *given: Any, run: Any = kind.run, cores: list[set[int]] = cores, **named: Any) -> float:
            cores.append(os.sched_getaffinity(0))
            return float(run(arm, *given, **named))

        monkeypatch.setattr(kind, "run", run)
    with Evaluator(Gemm(45, 40, 64), rig) as evaluator:
        (trial,) = evaluator.evaluate([Candidate(honest_source())])
    assert trial.timing is not None, trial.reason
    assert all({min(before)} in cores for cores in seen.values()), seen
    assert os.sched_getaffinity(0) == before


def test_inputs_differ_between_evaluators_unless_seeded(rig) -> None:
    def sample(seed: int | None) -> bytes:
        with Evaluator(Gemm(8, 8, 8), rig, seed=seed) as evaluator:
            list(evaluator.evaluate([Candidate(honest_source())]))
            return (evaluator._bench._operands._words["a"] & 0x7FFF).tobytes()  # signs flip with every round

    assert sample(1) == sample(1)
    assert sample(None) != sample(None)


def test_kernels_that_reach_the_power_limit_run_a_while_before_they_are_timed() -> None:
    pytest.importorskip("cuda.bindings")
    from cuda_l2.measure.graph_rounds import MAX_WARM_LAUNCHES, heavy_round_s, warm_launches  # noqa: PLC0415

    assert warm_launches(2e-6, 256, 0.004) == 256
    assert warm_launches(4e-5, 64, 0.0) == 64
    assert warm_launches(4e-5, 64, 0.004) == 50 and warm_launches(4e-5, 64, 0.01) == MAX_WARM_LAUNCHES
    assert warm_launches(1e-3, 4, 0.004) == 2 and warm_launches(3e-3, 1, 0.004) == 1
    assert warm_launches(1e-2, 1, 0.004) == 1
    heated = dataclasses.replace(PAPER_IN_SHORT, round_s=0.001, heat_s=0.004)
    assert heavy_round_s(1e-3, heated) == 0.004 and heavy_round_s(2e-6, heated) == 0.001
    assert heavy_round_s(1e-3, dataclasses.replace(heated, round_s=0.02)) == 0.02


def run(kind: type[Rounds], protocol: Protocol, names: Collection[str], **named: Any) -> Any:
    """Rounds of these arms, over, by a clock that moves when it is read."""
    terms = Terms(protocol, np.random.default_rng(0), clock=named.pop("clock", None) or ticking())
    rounds = kind([*names], terms, **named)
    rounds.run()
    return rounds


class Scripted(Rounds):
    """Arms whose samples take times of their own: a tenth more in every next round."""

    SECONDS = {CANDIDATE: 1.0, "usual": 2.0, "other": 3.0, "slow": 11.0}  # noqa: RUF012
    most = 1

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        return self.SECONDS[name] * 1.1**self.number


class ColdFirst(Rounds):
    """Arms whose first sample takes longer."""

    FIRST = {CANDIDATE: 45e-6, "usual": 40e-6, "other": 90e-6, "slow": 400e-6}  # noqa: RUF012
    LATER = {CANDIDATE: 5.5e-6, "usual": 5e-6, "other": 7e-6, "slow": 300e-6}  # noqa: RUF012
    most = 1

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        return (self.LATER if warm else self.FIRST)[name]


@pytest.mark.parametrize("seldom", [[], ["usual"], ["usual", "other", "slow"]])
@pytest.mark.parametrize("name", ["offline", "server"])
def test_no_arm_is_left_out_for_a_cold_first_sample(name: str, seldom: list[str]) -> None:
    protocol = dataclasses.replace(brief(CUDA_PROTOCOLS[name]), halfwidth=-1.0)
    rounds = run(ColdFirst, protocol, ColdFirst.FIRST, seldom=seldom)
    timing = rounds.timing(0.0, 0.0)
    assert timing.reference == "usual" and timing.speedup.estimate == pytest.approx(5 / 5.5)
    assert {arm.name for arm in timing.baselines if arm.rounds > 1} == {"usual", "other"}


def test_a_round_in_parts_is_prepared_once_and_counts_once() -> None:
    class InParts(ColdFirst):
        """Twice as slow in every second part."""

        most = 32

        def __init__(self, *given: Any) -> None:
            self.events: list[tuple[object, ...]] = []
            super().__init__(*given)

        def parts(self, count: int) -> int:
            return min(4, count)

        def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:
            self.events.append(("begin", sorted(names), count))

        def end_round(self) -> None:
            self.events.append(("end",))

        def sample(self, name: str, count: int, warm: bool = True) -> float:
            part = sum(event[0] in self.LATER for event in self.events) // 2
            if self.number:
                self.events.append((name, count))
            return self.LATER[name] * (1 + part % 2)

    protocol = dataclasses.replace(CPU_PROTOCOLS["search"], halfwidth=-1.0)
    rounds = run(InParts, protocol, (CANDIDATE, "usual"))
    assert rounds.events[0] == ("begin", [], 0)
    for first in range(1, len(rounds.events), 10):
        begin, *samples, end = rounds.events[first : first + 10]
        assert begin == ("begin", [CANDIDATE, "usual"], 32) and end == ("end",)
        assert all(sorted(samples[i : i + 2]) == [(CANDIDATE, 8), ("usual", 8)] for i in range(0, 8, 2))
    timing, number = rounds.timing(0.0, 0.0), protocol.max_rounds
    assert timing.candidate.rounds == number and timing.candidate.launches == 32 * number
    ratio = timing.speedup
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((5 / 5.5,) * 3)
    assert timing.candidate.latency_us.estimate == pytest.approx(1.5 * 5.5), "half of the parts are twice as slow"


def test_no_arm_is_left_out_because_the_machine_was_busy_for_a_moment() -> None:
    class Busy(ColdFirst):
        taken = 0

        def sample(self, name: str, count: int, warm: bool = True) -> float:
            self.taken += name == "usual"
            return 2e-3 if name == "usual" and self.taken <= 4 else self.LATER[name]

    protocol = dataclasses.replace(brief(CPU_PROTOCOLS["offline"]), halfwidth=-1.0)
    rounds = run(Busy, protocol, (CANDIDATE, "usual", "other", "slow"))
    timing = rounds.timing(0.0, 0.0)
    assert timing.reference == "usual" and timing.speedup.estimate == pytest.approx(5 / 5.5)
    assert len(rounds.samples.of("slow")) == 1


def test_arms_that_are_sampled_seldom_are_paired_with_the_rounds_they_were_in() -> None:
    protocol = dataclasses.replace(brief(CPU_PROTOCOLS["offline"]), round_s=0, halfwidth=-1.0)
    rounds = run(Scripted, protocol, (CANDIDATE, "usual", "other"), seldom=["other"])
    found = {name: len(rounds.samples.of(name)) for name in rounds.arms}
    most = protocol.max_rounds
    assert found == {CANDIDATE: most, "usual": most, "other": -(-most // 2)}
    timing = rounds.timing(0.0, 0.0)
    assert timing.reference == "usual"
    for name, expected in (("usual", 2.0), ("other", 3.0)):
        interval = dict(timing.speedups)[name]
        assert (interval.low, interval.estimate, interval.high) == pytest.approx((expected,) * 3)


def test_an_arm_that_is_much_slower_is_timed_once_and_its_ratio_has_no_interval() -> None:
    protocol = dataclasses.replace(CPU_PROTOCOLS["offline"], round_s=0)
    rounds = run(Scripted, protocol, (CANDIDATE, "usual", "slow"))
    assert len(rounds.samples.of("slow")) == 1
    assert math.isinf(rounds.ratio("slow").low)
    assert math.isinf(rounds.ratio("slow").high)


def test_a_protocol_with_a_time_warms_up_and_measures_as_long_as_its_clock_says() -> None:
    taken: list[int] = []

    class Counted(ColdFirst):
        def sample(self, name: str, count: int, warm: bool = True) -> float:
            taken.append(self.number)
            return super().sample(name, count, warm)

    paper = CUDA_PROTOCOLS["paper"]
    rounds = run(Counted, paper, (CANDIDATE, "usual"), clock=ticking(0.5))
    passed = paper.measure_s / 0.5
    assert taken.count(0) >= 2 * (paper.warmup_s / 0.5 - 1), "rounds that warm up count for nothing"
    assert passed - 1 <= len(rounds.samples.of("usual")) <= passed + 1


def test_torchs_process_says_nothing_where_the_memory_of_an_interrupted_command_is_gone() -> None:
    read, write = os.pipe()
    message = {"op": "attach", "environment": {}, "task": "16x16x16", "path": "/proc/self/fd/999", "size": 4096}
    words = [*PROGRAM, WORKER, "1", str(write)]
    done = subprocess.run(words, input=json.dumps(message) + "\n", pass_fds=(write,), capture_output=True, text=True)
    os.close(write)
    with os.fdopen(read, "rb") as acknowledged:
        assert acknowledged.read() == b"R"
    assert done.returncode == 1 and not done.stderr
