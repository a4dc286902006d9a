"""The budget of an optimisation: what it took, by a scripted clock, is what the plan said beforehand."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clocks import ticking

from cuda_l2.measure.clock import Clock
from cuda_l2.measure.protocols import CPU_PROTOCOLS, OFFLINE, PAPER, SERVER, Protocol
from cuda_l2.measure.quiet import Busy
from cuda_l2.measure.rounds import LEAST_ROUNDS, PATIENCE_S, Kernel, Limits, Rounds, Terms
from cuda_l2.optimizer import Optimizer
from cuda_l2.plan import FIRST, KERNEL_LAUNCHES, KERNEL_S, Plan, plan
from cuda_l2.records import (
    Build,
    BuildStatus,
    Candidate,
    Gemm,
    Task,
    Timing,
    TimingStatus,
    Verdict,
    VerdictStatus,
)
from cuda_l2.report.tables import print_result
from cuda_l2.rigs import Rig
from cuda_l2.rigs._base import Bench
from cuda_l2.settings import Settings

GEMM = Gemm(512, 512, 512)


@dataclass
class Script:
    """Seconds that a machine's steps take. quiet_at: when other work ends."""

    clock: Clock
    launch_s: float = 1.3e-3
    build_s: float = 0.5
    verify_s: float = 0.5
    prepare_s: float = 1.0
    queue_s: float = 0.0
    quiet_at: float = 0.0


class ScriptedRounds(Rounds):
    """The rounds of the product, whose samples only take time."""

    most = 32

    def __init__(self, script: Script, kernels: Sequence[str], terms: Terms) -> None:
        super().__init__(["library", *kernels], terms, subject=kernels[0], kernels=kernels)
        self._script = script

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        self.clock.sleep((count + warm) * self._script.launch_s + 0.008)
        return self._script.launch_s * (1.1 if name == "library" else 1.0)

    def disturbed(self) -> str:
        return "load" if self.clock.now() < self._script.quiet_at else ""

    def wait_for_quiet(self, why: str) -> None:
        until = self.ends if math.isfinite(self.ends) else self.clock.now() + PATIENCE_S
        while self.clock.now() < self._script.quiet_at:
            if self.clock.now() >= until:
                raise Busy(why)
            self.clock.sleep(0.25)


class ScriptedBench(Bench):
    def __init__(self, script: Script) -> None:
        self._script = script

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        self._script.clock.sleep(self._script.build_s * len(candidates) / 2)
        return iter([Build(candidate.id, BuildStatus.BUILT, artifact="kernel.so") for candidate in candidates])

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        self._script.clock.sleep(self._script.verify_s)
        return Verdict(VerdictStatus.CORRECT)

    def time_kernels(
        self, kernels: Mapping[str, Kernel], protocol: Protocol, limits: Limits = Limits()
    ) -> dict[str, Timing]:
        terms = Terms(protocol, np.random.default_rng(0), limits, self._script.clock)
        rounds = ScriptedRounds(self._script, list(kernels), terms)
        try:
            rounds.run()
        except Busy:
            return dict.fromkeys(kernels, Timing(TimingStatus.BUSY, protocol.name, reason="other work"))
        return {name: rounds.timing(math.nan, 0.0, name) for name in kernels}

    def renew(self) -> None: ...
    def close(self) -> None: ...


class ScriptedRig(Rig):
    protocols = CPU_PROTOCOLS
    suffix = ".c"
    builds_disturb = True

    def __init__(self, script: Script, target: Any) -> None:
        self._script, self.target = script, target

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        self._script.clock.sleep(self._script.prepare_s)
        return ScriptedBench(self._script)

    def require_feasible(self, task: Task) -> None: ...
    def environment(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def optimized(rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """optimized(budget, **script): the result, the plan, and seconds that went by in all, by the scripted clock."""

    def run(budget_s: float, protocol: str = "standard", **scripted: float) -> Any:
        script = Script(ticking(1e-4), **scripted)

        @contextmanager
        def turn(gpu: str = "", **_: object) -> Iterator[float]:
            script.clock.sleep(script.queue_s)
            yield script.queue_s

        monkeypatch.setattr("cuda_l2.evaluator.machine_lock", turn)
        monkeypatch.setattr("cuda_l2.optimizer.open_rig", lambda *_: ScriptedRig(script, rig.target))
        settings = Settings(budget_s=budget_s, policy="random", protocol=protocol, archive=tmp_path / "archive.db")
        with Optimizer(settings, clock=script.clock) as optimizer:
            monkeypatch.setattr(type(optimizer.target), "bound_us", lambda *_: 1e6 * script.launch_s)
            planned, began = optimizer.plan(GEMM), script.clock.now()
            result = optimizer.optimize(GEMM)
        return result, planned, script.clock.now() - began

    return run


@pytest.mark.parametrize("budget_s", [10.0, 60.0])
@pytest.mark.parametrize(
    "script",
    [
        {},
        {"build_s": 2.0, "verify_s": 3.0},
        {"prepare_s": 6.0},
        {"quiet_at": 5.0},
        {"quiet_at": 25.0},
        {"quiet_at": math.inf},
    ],
    ids=str,
)
def test_a_budget_is_kept_within_15_percent_and_the_time_for_the_report(
    budget_s: float, script: dict[str, float], optimized: Any
) -> None:
    result, planned, took_s = optimized(budget_s, **script)
    assert not planned.late and planned.most_s == budget_s + planned.report_s
    assert result.search.ended <= 1.15 * budget_s, result.search
    assert took_s <= 1.15 * budget_s + planned.report_s
    assert bool(result.reports) == (script.get("quiet_at", 0.0) < math.inf), "also where quiet came after the search"
    assert result.source_path and result.source_path.exists(), "also of a kernel that was never timed"


def test_the_first_protocol_of_a_report_has_the_larger_share_of_its_time(optimized: Any, monkeypatch: Any) -> None:
    given_s: list[float] = []
    timed = ScriptedBench.time_kernels

    def watched(bench: Any, kernels: Any, protocol: Protocol, limits: Limits = Limits()) -> dict[str, Timing]:
        if protocol.name == "offline":
            given_s.append(limits.within_s)
        return timed(bench, kernels, protocol, limits)

    monkeypatch.setattr(ScriptedBench, "time_kernels", watched)
    for protocol in ("standard", "offline"):
        _, planned, took_s = optimized(10.0, protocol)
        assert took_s <= 1.15 * 10.0 + planned.report_s
    first_s, alone_s = given_s
    assert first_s == pytest.approx(FIRST * alone_s, rel=0.1) and alone_s > 0.55 * planned.report_s


def test_waiting_for_another_search_does_not_count(optimized: Any) -> None:
    result, planned, took_s = optimized(20.0, queue_s=7.0)
    assert result.search.queued_s >= 14.0 and set(result.reports) == {"offline", "server"}
    assert result.search.seconds <= 1.15 * 20.0
    assert took_s > 20.0 + planned.report_s, "others' turns come on top"


def test_a_budget_of_two_seconds_ends_within_a_stage_and_says_what_it_left_out(optimized: Any, capsys: Any) -> None:
    result, planned, took_s = optimized(2.0, verify_s=1.5)
    assert result.search.proposed == 1 and result.search.ended <= 2.0 + 1.5 + 1.0
    assert took_s <= planned.most_s
    print_result(result)
    assert "the time was up before" in " ".join(capsys.readouterr().out.split())


def test_a_shape_that_takes_longer_than_the_budget_says_so_beforehand(optimized: Any) -> None:
    heavy = {"launch_s": 0.09, "verify_s": 25.0, "prepare_s": 8.0}
    result, planned, took_s = optimized(6.0, **heavy)
    assert planned.late and "takes about 41 s, longer than the budget" in str(planned)
    assert result.reports and took_s <= planned.most_s


def test_the_words_of_a_plan() -> None:
    said = str(plan(60.0, 1.3e-3, 0, [OFFLINE, SERVER], on_cpu=True))
    assert said == "60 s to prepare and search, then at most 35 s to compare and report the best"
    one, both = (plan(60.0, 1.3e-3, 0, [protocol], on_cpu=True).report_s for protocol in (OFFLINE, PAPER))
    assert both >= 40.0 + one - 5.0
    unlimited = plan(60.0, 1e-6, 1 << 30, [OFFLINE], on_cpu=False)
    assert "sanitizers have no time limit" in str(unlimited) and unlimited.most_s == math.inf
    assert Plan(10.0, 30.0, 12.0).late and not Plan(10.0, 30.0, 10.5).late
    assert plan(60.0, 0.1, 0, [OFFLINE], on_cpu=True).kernel_s == pytest.approx(KERNEL_S + 0.1 * KERNEL_LAUNCHES)


def test_large_operands_take_time_to_check_however_few_flops_they_have() -> None:
    """As measured: 1x8192x8192 took 53 s for the first kernel and 101 s for a report that had no time left to time."""
    task = Gemm(1, 8192, 8192)
    large, small = (plan(8.0, 6.5e-3, size, [OFFLINE], on_cpu=True) for size in (task.bytes, 1 << 20))
    assert large.late and large.kernel_s == pytest.approx(53.0, rel=0.05) and large.report_s > 101.0
    assert not small.late
    assert plan(8.0, 6.5e-3, task.bytes, [OFFLINE], on_cpu=False).kernel_s < 8.0


def test_rounds_end_in_time_but_not_before_there_is_an_interval() -> None:
    for within_s, most in ((math.inf, OFFLINE.max_rounds), (1.0, OFFLINE.max_rounds - 1), (0.0, LEAST_ROUNDS)):
        script = Script(ticking(1e-4))
        terms = Terms(OFFLINE, np.random.default_rng(0), Limits(within_s=within_s), script.clock)
        rounds = ScriptedRounds(script, ["ours"], terms)
        rounds.run()
        assert LEAST_ROUNDS <= len(rounds.samples.of("ours")) <= most
        assert math.isfinite(rounds.ratio("library").low)
