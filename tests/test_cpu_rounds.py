"""measure/cpu_rounds.py: a report's rounds go round pairs of processes, one of which may be slow as long as it lives."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import scripted_times
from clocks import ticking
from conftest import honest_source
from test_measure import PAPER_IN_SHORT

from cuda_l2 import tasks
from cuda_l2.evaluator import Evaluator
from cuda_l2.measure.baselines.torch_cpu import Half
from cuda_l2.measure.cpu_rounds import PARTS, _CpuRounds
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.quiet import Busy
from cuda_l2.measure.rounds import CANDIDATE, LEAST_ROUNDS, Kernel, Limits, Terms
from cuda_l2.measure.sampler import Samples
from cuda_l2.measure.torch_baselines import TorchArm, TorchBaselines
from cuda_l2.optimizer import Result
from cuda_l2.propose._policy import default_candidates
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm
from cuda_l2.report.tables import print_result
from cuda_l2.rigs import cpu
from cuda_l2.search import Progress

GEMM = Gemm(48, 32, 40)
SLOW = 1.14
"""Times as long as others one process of torch's took (docs/log.md)."""
OFFLINE = CPU_PROTOCOLS["offline"]


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> int:
    """The pairs of a report, as users have them, each with a process of torch's."""
    monkeypatch.setattr(cpu, "PAIRS", LEAST_ROUNDS)
    monkeypatch.setattr(cpu, "TorchBaselines", TorchBaselines)
    return LEAST_ROUNDS


def test_a_process_of_torchs_that_is_slow_as_long_as_it_lives_is_seen_in_the_interval_alone(
    pairs: int, rig: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted, theirs, ours = _CpuRounds.sample, set(), set()

    def sample(rounds: _CpuRounds, name: str, count: int, warm: bool = True) -> float:
        seconds, arm = scripted(rounds, name, count, warm), rounds.contestants[name]
        if not isinstance(arm, TorchArm):
            ours.add(arm)
            return seconds
        theirs.add(arm._baselines)
        return seconds * (SLOW if arm._baselines is rig.baselines else 1.0)

    monkeypatch.setattr(_CpuRounds, "sample", sample)
    source = honest_source()
    true = scripted_times.BASELINE_S / scripted_times.seconds_of(source)
    with Evaluator(GEMM, rig) as evaluator:
        for name in ("offline", "server"):
            (trial,) = evaluator.evaluate([Candidate(source)], rig.protocols[name])
            timing = trial.timing
            assert timing is not None and timing.speedup is not None and timing.candidate is not None, trial.reason
            found = timing.speedup
            assert (found.estimate, found.low, found.high) == pytest.approx((true, true, SLOW * true))
            baseline_us = next(arm for arm in timing.baselines if arm.name == timing.reference).latency_us
            assert baseline_us.estimate == pytest.approx(1e6 * scripted_times.BASELINE_S)
            assert baseline_us.high == pytest.approx(SLOW * baseline_us.low)
            assert timing.conditions.pairs == pairs and timing.candidate.rounds >= 3 * pairs
        assert [each._process.poll() for each in theirs] == [None] * pairs, (
            "both protocols have the same ones of torch's"
        )
    print_result(Result(GEMM, rig.target, Progress(best=trial), {"server": trial}, None))
    said = " ".join(capsys.readouterr().out.split())
    assert "torch widened: on operands converted to fp32" in said
    assert "* the strongest baseline: the least time of those that read B" in said
    assert f"medians over {pairs} pairs of processes" in said and "need not be the quotients of the times" in said
    assert len(ours) == 2 * pairs, "and each has its own of the candidate"
    left = [each for each in theirs if each._process.poll() is None]
    assert left == [rig.baselines], "the others end with the report"


@pytest.mark.parametrize(
    ("task", "protocol"),
    [
        (str(GEMM), CPU_PROTOCOLS["search"]),
        (str(GEMM), PAPER_IN_SHORT),
        ("relu:rows=8,columns=32", OFFLINE),
    ],
    ids=["search", "paper", "task"],
)
def test_searches_the_papers_protocol_baselines_alone_and_tasks_have_one_process(
    pairs: int, task: str, protocol: Protocol, rig: Any
) -> None:
    known = tasks.parse(task)
    (candidate,) = default_candidates(known, rig.target)[:1]
    with Evaluator(known, rig) as evaluator:
        (trial,) = evaluator.evaluate([candidate], protocol)
        assert trial.timing is not None and trial.timing.conditions.pairs is None, trial.reason
        timing = evaluator._bench.time_baselines(OFFLINE)
        assert timing.speedup is not None and timing.conditions.pairs is None
        assert not evaluator._bench._others


def test_a_search_compares_with_the_strongest_beside_its_first_kernel(rig: Any, monkeypatch) -> None:
    monkeypatch.setattr(scripted_times, "OTHERS", 0.5)  # each baseline is faster than the one before it
    (first,) = default_candidates(GEMM, rig.target)[:1]
    second = Candidate(first.source + "/* another */\n")
    with Evaluator(GEMM, rig) as evaluator:
        for candidate, count in ((first, 4), (second, 1)):
            (trial,) = evaluator.evaluate([candidate], CPU_PROTOCOLS["search"])
            assert trial.timing is not None, trial.reason
            assert trial.timing.reference == "torch widened, one thread" and len(trial.timing.baselines) == count


@pytest.mark.parametrize(
    ("shape", "searched", "reported"),
    [
        ("512x512x512", True, True),
        ("1024x1024x1024", False, True),
        ("2048x2048x2048", False, False),
        ("4x8192x8192:tn", True, True),
        ("4096x4096x4096:tn", False, False),
        ("4096x4096x4096:bf16", True, True),
    ],
)
def test_fp16_without_its_arithmetic_is_timed_where_it_may_be_the_strongest(shape, searched, reported) -> None:
    half, gemm = Half("torch fp16", 20), Gemm.parse(shape)
    assert (half.slow_s(gemm, ("avx2",)) <= cpu.MOST_TRIED_S) is searched
    assert (half.slow_s(gemm, ("avx2",)) <= cpu.MOST_REPORTED_S) is reported
    assert half.slow_s(gemm, ("avx512_fp16",)) == 0


def test_a_search_tries_no_product_that_torch_computes_element_by_element(rig: Any, monkeypatch) -> None:
    monkeypatch.setattr(Half, "slow_s", lambda *_: 2 * cpu.MOST_TRIED_S)
    with Evaluator(GEMM, rig) as evaluator:
        (trial,) = evaluator.evaluate(default_candidates(GEMM, rig.target)[:1], CPU_PROTOCOLS["search"])
    assert trial.timing is not None, trial.reason
    names = [arm.name for arm in trial.timing.baselines]
    assert names == ["torch widened, preallocated", "torch widened", "torch widened, one thread"]


class Pairs(_CpuRounds):
    """Processes that are names; samples and what disturbs a round by script.

    taken: number of the round, arm's process, launches, of every sample. warmed: number of the round, process, slots.
    """

    def __init__(
        self,
        pairs: int,
        busy: Sequence[int] = (),
        patience: float = 1e9,
        slots: int = 4,
        protocol: Protocol = OFFLINE,
    ) -> None:
        self.busy, self.patience, self.closed = list(busy), patience, list[str]()
        self.taken: list[tuple[int, str, int]] = []
        self.warmed: list[tuple[int, str, list[int]]] = []
        opened = iter(range(pairs))

        def worker() -> Any:
            name = f"ours {next(opened)}"
            return SimpleNamespace(name=name, freeze=lambda: None, close=lambda: self.closed.append(name))

        baselines: Any = [
            {"torch": SimpleNamespace(name=f"torch {pair}", freeze=lambda: None)} for pair in range(pairs)
        ]
        terms = Terms(protocol, np.random.default_rng(0), clock=ticking())
        operands = SimpleNamespace(slots=slots, fresh_processes=False, require_bounds_kept=lambda: None)
        super().__init__(operands, baselines, {"ours": worker}, terms, 60.0)  # type: ignore[arg-type]

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        process = self.contestants[name]
        self.taken.append((self.number, process.name, count))  # type: ignore[attr-defined]
        return 2e-3 if name == "torch" else 1e-3

    def _warm_up(self, name: str, slots: Sequence[int]) -> None:
        self.warmed.append((self.number, self.contestants[name].name, list(slots)))  # type: ignore[attr-defined]

    def disturbed(self) -> str:
        return "load" if self.number and self.busy and self.number == self.busy[0] else ""

    def wait_for_quiet(self, why: str) -> None:
        self.busy.pop(0)
        self.patience -= 1
        if self.patience < 0:
            raise Busy(why)


def rounds_of(found: Pairs) -> Iterator[set[str]]:
    """The processes whose samples were taken in each round."""
    last = max(number for number, *_ in found.taken)
    return ({name for at, name, _ in found.taken if at == number} for number in range(1, last + 1))


def test_every_round_is_one_pairs_and_a_disturbed_one_is_the_same_pairs_again() -> None:
    found = Pairs(6, busy=[2, 2, 9])
    found.run()
    assert list(rounds_of(found)) == [
        {f"torch {number % 6}", f"ours {number % 6}"} for number in range(1, OFFLINE.min_rounds + 1)
    ], "equal ratios end the rounds at the first look"
    assert len(found.samples.of("ours")) == OFFLINE.min_rounds and not found.busy
    slots = list(range(found.most))
    assert found.warmed == [(at, f"{arm} {at % 6}", slots) for at in range(1, 7) for arm in ("torch", "ours")]
    found.close()
    assert sorted(found.closed) == [f"ours {pair}" for pair in range(6)]


def test_one_pair_is_as_before() -> None:
    found = Pairs(1)
    found.run()
    counting = [taken for taken in found.taken if taken[0]]
    assert len(counting) == 2 * PARTS * OFFLINE.min_rounds and found.taken[-1][0] == OFFLINE.min_rounds
    assert not found.warmed


@pytest.mark.parametrize(
    ("slots", "protocol", "samples", "launches"),
    [
        (4, OFFLINE, PARTS, 4),
        (7, replace(OFFLINE, round_s=0.006), 1, 6),  # of 1 ms each
        (2, CPU_PROTOCOLS["finalists"], 1, 2),
    ],
    ids=["few slots", "slots for all", "a choice"],
)
def test_a_reports_round_has_several_samples_where_slots_hold_too_few_launches(
    slots: int, protocol: Protocol, samples: int, launches: int
) -> None:
    found = Pairs(1, slots=slots, protocol=protocol)
    found.run()
    assert Counter(taken for taken in found.taken if taken[0] == 1) == {
        (1, name, launches): samples for name in ("torch 0", "ours 0")
    }
    assert found.launches["ours"] - 1 <= samples * launches * found.taken[-1][0] <= found.launches["ours"]


def test_without_quiet_a_ratio_needs_a_round_of_each_pair() -> None:
    with pytest.raises(Busy):
        Pairs(6, busy=[6], patience=0).run()
    found = Pairs(6, busy=[7], patience=0)
    found.run()
    assert len(found.samples.of("ours")) == 6
    assert found.ratio("torch").low == found.ratio("torch").high == pytest.approx(2.0)


def test_the_interval_over_pairs_covers_what_the_one_over_rounds_does_not() -> None:
    rng, runs, hits = np.random.default_rng(0), 1000, {1: 0, 6: 0}
    for _ in range(runs):
        biases = np.exp(rng.normal(0.0, 0.05, 6))
        for processes in hits:
            samples: Samples[str] = Samples(processes)
            for number in range(30):
                samples.add("ours", number, 1.0)
                samples.add("torch", number, float(biases[number % processes] * np.exp(rng.normal(0.0, 0.02))))
            found = samples.ratio("torch", "ours")
            hits[processes] += found.low <= 1.0 <= found.high
    assert hits[6] / runs > 0.94 and hits[1] / runs < 0.3
    samples.add("torch", 0, 99.0)
    assert samples.ratio("torch", "ours").high < 2.0, "the pair's median counts"
    samples.withdraw(0)
    assert samples.ratio("torch", "ours").low > 0.0, "a pair has other rounds"
    for number in range(6, 30, 6):
        samples.withdraw(number)
    assert samples.ratio("torch", "ours").low == -np.inf, "five pairs leave no 95 % interval"


def test_a_time_its_rank_and_the_ratio_of_one_sample_are_over_the_same_pairs() -> None:
    """Three of six pairs have many slow rounds, the others few fast ones: over all rounds alike the rank is another."""
    found = Pairs(6)
    for number in range(1, 37):
        slow = number % 6 < 3
        if slow or number <= 12:
            found.samples.add("ours", number, 2.0 if slow else 1.0)
            found.samples.add("torch", number, 1.0 if slow else 4.0)
            found.samples.add("other", number, 1.2)
    found.samples.add("crawling", 0, 90.0)
    found.references = ["torch", "other"]
    assert found.samples.interval("torch").estimate == 2.5 and found.reference() == "other"
    assert found.samples.ratio("crawling", "ours").estimate == 90.0 / found.samples.interval("ours").estimate == 60.0


class Told:
    """A process whose runs take the seconds given for the number of launches in a sample, which may be 0."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.asked = seconds, list[int]()
        self.queued_s, self.collect = lambda: 0.0, lambda: [0]
        self.stop = self.freeze = self.thaw = self.close = lambda: None

    def prepare(self, slots: Sequence[int]) -> None:
        self.asked.append(len(slots))

    def run(self, timeout_s: float) -> float:
        return self.seconds[self.asked[-1]]


def told(protocol: Protocol, *, slots: int = 2, fresh_processes: bool = False) -> _CpuRounds:
    """Rounds of samples of two launches: torch's take 400 us, ours 200, both 50 without a launch, torch's threads 40."""
    nothing = dict.fromkeys(("begin_warm_up", "refresh", "require_untouched", "forget"), lambda *given: None)
    arena = SimpleNamespace(read=lambda count: None)
    operands: Any = SimpleNamespace(
        slots=slots, fresh_processes=fresh_processes, check=lambda *given, **how: 0.0, arena=arena, **nothing
    )
    torch, ours = Told({0: 50e-6, 1: 290e-6, 2: 490e-6}), Told({0: 1e-9, 1: 1.0, 2: 250e-6})
    terms = Terms(protocol, np.random.default_rng(0), clock=ticking())
    rounds = _CpuRounds(operands, [{"torch": cast(Any, torch)}], {"ours": lambda: cast(Any, ours)}, terms, 60.0)
    rounds._renew("ours")
    count = rounds.count(10.0 if protocol.round_s else 1.0)
    rounds.parts(count)
    rounds.begin_round(["torch", "ours"], count)
    return rounds


def samples_of(rounds: _CpuRounds) -> dict[str, float]:
    return {name: scripted_times.REAL["sample"](rounds, name, 2) for name in ("torch", "ours")}


def test_waking_is_taken_off_and_no_candidate_is_asked_for_it(monkeypatch: Any) -> None:
    rounds, why, whole = told(OFFLINE), [""], {"torch": 245e-6, "ours": 125e-6}
    monkeypatch.setattr(rounds.quiet, "disturbed", lambda: why[0], raising=False)
    torch, ours = (cast(Told, rounds.contestants[name]) for name in ("torch", "ours"))
    rounds.begin_watch()
    assert samples_of(rounds) == pytest.approx(whole), "nothing is known of it yet"
    why[0] = "load"
    assert rounds.disturbed()
    rounds.begin_watch()
    assert samples_of(rounds) == pytest.approx(whole), "a round that is taken again tells nothing"
    why[0] = ""
    assert not rounds.disturbed()
    assert samples_of(rounds) == pytest.approx({"torch": 200e-6, "ours": 100e-6}), "threads of ours wake at our cost"
    assert torch.asked[-3:] == [2, 1, 0] and torch.asked.count(0) == 3 and ours.asked == [1, 2] * 3
    assert rounds.empty_call_us() == 0.0
    ours.seconds[2] = 80e-6
    assert samples_of(rounds)["ours"] == pytest.approx(20e-6), "half of a sample stays"


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        *((name, {}) for name in ("search", "finalists", "server", "paper")),
        ("offline", {"fresh_processes": True}),
        ("offline", {"slots": 20}),
    ],
    ids=str,
)
def test_other_samples_hold_all_that_they_take(name: str, terms: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(_CpuRounds, "most", scripted_times.REAL["most"])
    rounds = told(CPU_PROTOCOLS[name], **terms)
    for _ in range(2):
        rounds.begin_watch()
        assert samples_of(rounds) == pytest.approx({"torch": 245e-6, "ours": 125e-6})
        assert not rounds.disturbed()
    assert 0 not in cast(Told, rounds.contestants["torch"]).asked


def test_the_time_that_further_processes_took_to_start_is_part_of_the_limit(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, given = ticking(), list[Terms]()

    def slowly(bench: Any) -> list[Any]:
        clock.sleep(4.0)
        return []

    def measure(kernels: Any, baselines: Any, operands: Any, terms: Terms, timeout_s: float) -> dict[str, Any]:
        given.append(terms)
        return {}

    monkeypatch.setattr(cpu, "CLOCK", clock)
    monkeypatch.setattr(cpu.CpuBench, "_more_processes", slowly)
    monkeypatch.setattr(cpu, "measure_cpu", measure)
    kernels = {CANDIDATE: Kernel(Candidate(honest_source()), Build("", BuildStatus.BUILT, artifact="none"))}
    with rig.open(GEMM, 0) as bench:
        bench.time_kernels(kernels, OFFLINE, Limits(within_s=10.0))
        bench.time_kernels(kernels, OFFLINE)
        bench.time_kernels({}, OFFLINE, Limits(within_s=10.0))
    assert [terms.limits.within_s for terms in given] == [
        pytest.approx(6.0, abs=0.1),
        np.inf,
        pytest.approx(10.0, abs=0.1),
    ]
