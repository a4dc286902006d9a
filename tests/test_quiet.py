"""measure/quiet.py: rounds that other work disturbed do not count, and where none was quiet there is no ratio."""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scripted_times
from clocks import ticking
from conftest import honest_source
from made import timing, trial
from test_review import faked
from test_search import Listed

from cuda_l2.evaluator import Evaluator
from cuda_l2.library.saved import Reports
from cuda_l2.measure import cpu_rounds, quiet
from cuda_l2.measure.clock import Clock
from cuda_l2.measure.other_work import NOTICED_CORES
from cuda_l2.measure.protocols import SEARCH, SERVER
from cuda_l2.measure.quiet import CANARIES, Busy, Quiet
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms
from cuda_l2.optimizer import Result
from cuda_l2.records import BusyCores, Candidate, Gemm, Timing, TimingStatus
from cuda_l2.report.live import describe
from cuda_l2.report.tables import print_result, result_json
from cuda_l2.search import Progress, Scope, search
from cuda_l2.system import process_tree, steps

GEMM = Gemm(48, 32, 40)
BUSY = Timing(TimingStatus.BUSY, SEARCH.name, reason="other work")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Any:
    """What the machine says of itself."""
    says = SimpleNamespace(stolen_s=0.0, periods=0, others=0.0, canary_s=1e-4)
    monkeypatch.setattr(quiet, "stolen_s", lambda: says.stolen_s)
    monkeypatch.setattr(quiet, "_throttled", lambda: says.periods)
    monkeypatch.setattr(quiet, "_crowding", lambda: lambda core: 0.0)
    quiet._usual.cache_clear()
    monkeypatch.setattr(quiet, "OtherWork", lambda clock: SimpleNamespace(found=lambda: BusyCores(says.others, 2)))
    yield says
    quiet._usual.cache_clear()


def test_a_quiet_round_is_not_disturbed(machine: Any) -> None:
    watch = Quiet(ticking(), 1.0)
    watch.sampled(0.002, 0.0006)  # what waking its threads takes
    assert watch.disturbed() == ""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stolen_s": 1.0}, "the host of this virtual machine gave its cores to others"),
        ({"periods": 1}, "a control group's quota stopped"),
    ],
)
def test_what_a_host_or_a_quota_takes_disturbs(change: dict[str, Any], says: str, machine: Any) -> None:
    watch = Quiet(ticking(), 1.0)
    vars(machine).update(change)
    assert says in watch.disturbed()
    watch.begin()
    assert watch.disturbed() == "", "of this round alone"


def test_threads_that_wait_for_a_core_disturb(machine: Any) -> None:
    """Their waits are summed: a share of the sample's time would exceed 100 %."""
    watch = Quiet(ticking(), 1.0)
    watch.sampled(0.010, 0.004)
    assert watch.disturbed() == "threads together waited 4.0 ms for a core in a sample of 10.0 ms"


def test_known_work_that_takes_longer_disturbs(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def read() -> float:
        now[0] += machine.canary_s
        return now[0]

    watch = Quiet(SimpleNamespace(now=read, sleep=lambda seconds: None), 1.0)  # type: ignore[arg-type]
    for _ in range(CANARIES):
        watch.begin()
    machine.canary_s *= 2
    assert "known work took 2.0 times as long as before" in watch.disturbed()
    for _ in range(2 * CANARIES + 2):
        watch.begin()
    assert watch.disturbed() == "", "a clock that stays lower is no disturbance"


def test_a_core_that_something_shares_disturbs(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its vector work takes longer; on a core that is always shared that is what is usual."""
    took, asked = {4: 1.1, 6: 1.2}, list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 4})
    monkeypatch.setattr(quiet, "_exchange", lambda: lambda *cores: errno.EAGAIN)
    monkeypatch.setattr(quiet, "_crowding", lambda: lambda core: asked.append(core) or took[core])
    watch = Quiet(ticking(1e-9), 1.0)
    assert watch.disturbed() == "" and asked == [4, 6]
    took[6] *= 1.5
    watch.begin()
    assert watch.disturbed() == "vector work on a core took 1.5 times as long as before: something shares that core"
    took[6] /= 1.5
    watch.begin()
    assert watch.disturbed() == ""
    took[4] = 0.0  # a core that has gone
    watch.begin()
    assert watch.disturbed() == ""
    took[4] = 1.1 * 1.1
    watch.begin()
    assert watch.disturbed() == "", "so much it varies by itself"
    took[6] *= 1.5
    for _ in range(quiet.VALUES_KEPT):
        watch.begin()
        watch.disturbed()
    watch.begin()
    assert watch.disturbed() == ""


def test_the_ratio_of_vector_work_to_a_chain_is_taken_on_one_core() -> None:
    before = os.sched_getaffinity(0)
    for core in sorted(before)[:2]:
        assert 0 < quiet._crowding()(core) < 1000
    assert os.sched_getaffinity(0) == before
    assert quiet._crowding()(1023) == 0, "no such core"
    assert os.sched_getaffinity(0) == before


def test_cores_that_exchange_data_more_slowly_disturb(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, exchange_s = ticking(1e-9), [3e-4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    asked, error = [], [0]

    def exchange(here: int, there: int, count: int) -> int:
        asked.append((here, there))
        clock.sleep(exchange_s[0])
        return error[0]

    monkeypatch.setattr(quiet, "_exchange", lambda: exchange)
    assert Quiet(clock, 1.0).disturbed() == ""
    exchange_s[0] *= 4
    watch = Quiet(clock, 1.0)
    assert watch.disturbed() == "two cores took 4.0 times as long as before to exchange data"
    exchange_s[0] /= 4
    watch.begin()
    assert watch.disturbed() == "" and set(asked) == {(4, 6)}
    exchange_s[0], error[0] = 1e-9, errno.EAGAIN
    watch.begin()
    exchange_s[0], error[0] = 3e-4, 0
    assert watch.disturbed() == "", "an exchange that failed is none"
    exchange_s[0] *= 4
    for _ in range(quiet.VALUES_KEPT):
        watch.begin()
    assert watch.disturbed() == "", "a clock that stays lower is no disturbance"
    exchange_s[0], error[0] = 2e-2, errno.ETIMEDOUT
    watch.begin()
    assert "two cores took 16.7 times" in watch.disturbed()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4})
    asked.clear()
    watch.begin()
    assert watch.disturbed() == "" and not asked, "one core has none to exchange with"


def test_a_spell_as_long_as_a_timing_is_not_what_is_usual_after_a_search(machine: Any, monkeypatch) -> None:
    clock, exchange_s = ticking(1e-9), [3e-4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    monkeypatch.setattr(quiet, "_exchange", lambda: lambda *asked: clock.sleep(exchange_s[0]) or 0)
    watch = Quiet(clock, 1.0)
    for times, says in ((1.0, ""), (3.6, "3.6 times"), (2.6, "")):  # as of 110 ns, in a spell, and at most without one
        exchange_s[0] = 3e-4 * times
        for _ in range(100):  # rounds
            watch.begin()
            why = watch.disturbed()
            assert why == f"two cores took {says} as long as before to exchange data" if says else why == ""


def test_a_process_that_begins_in_a_spell_knows_what_was_usual_before(machine: Any, monkeypatch: Any) -> None:
    clock, exchange_s = ticking(1e-9), [3e-4]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 6})
    monkeypatch.setattr(quiet, "_exchange", lambda: lambda *asked: clock.sleep(exchange_s[0]) or 0)

    def looks(count: int, times: float) -> str:
        exchange_s[0] = 3e-4 * times
        watch = Quiet(clock, 1.0)
        for _ in range(count - 1):
            watch.begin()
        return watch._why

    def began() -> None:
        quiet._usual.cache_clear()  # as in a new process

    assert looks(quiet.VALUES_KEPT, 1.0) == ""
    began()
    assert looks(100, 4.0) == "two cores took 4.0 times as long as before to exchange data"
    began()
    assert looks(20, 1.0) == "" and looks(100, 4.0), "the spell is not over for good"
    refused = 0
    while refused < 10 and looks(100, 4.0):
        refused += 1
        began()
    assert 1 < refused < 10, "cores that stay far apart are no disturbance"
    began()
    assert looks(1, 4.0) == "" and looks(60, 1.0) == "" and looks(1, 4.0), "they are near again"
    (kept,) = (Path(os.environ["CUDA_L2_CACHE"]) / "exchanges").iterdir()
    assert len(kept.read_text()) < 10_000
    for damaged in ("", "nan", "[-1.0]", "[NaN]", "{}", "3", "[[]]", '["x"]', f"[{10**400}]", "[" * 100_000):
        kept.write_text(damaged)
        began()
        assert looks(1, 9.0) == "", "what is damaged counts for nothing"


def test_two_cores_exchange_a_line_and_this_thread_may_run_everywhere_again() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert quiet._exchange()(cores[0], cores[-1], 10) == 0
    assert sorted(os.sched_getaffinity(0)) == cores


def test_waiting_ends_with_quiet_or_with_patience(machine: Any) -> None:
    machine.others = 1.5
    with pytest.raises(Busy, match="a reason"):
        Quiet(ticking(), 1.0).wait("a reason")
    machine.others = 0.1
    clock = ticking()
    watch = Quiet(clock, 1.0)
    before = clock.now()
    watch.wait("a reason")
    assert 0.0 < watch.waited_s <= clock.now() - before
    with pytest.raises(Busy):
        Quiet(ticking(), 0.0).wait("no patience at all")


def test_a_wait_shows_what_share_of_all_cores_others_keep_busy_now(machine: Any, monkeypatch: Any) -> None:
    looks, shown = iter([1.5, 2.0, 0.1]), list[str]()

    def sleep(seconds: float) -> None:
        shown.append(steps.current().name)
        machine.others = next(looks)

    Quiet(Clock(ticking().now, sleep), 60.0).wait("a reason")
    said = "waiting until the cores are quiet"
    assert shown == [
        f"{said} (a reason)",
        f"{said} (other work keeps 75% of 2 cores busy)",
        f"{said} (other work keeps 100% of 2 cores busy)",
    ]


def test_who_took_the_cores_is_named(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.others, known = 1.0, os.getpid()
    assert known not in process_tree.seconds_of_others() and process_tree.name_of(1 << 22) == ""
    looks = iter([{1: 3.0, known: 5.0}, {1: 3.1, known: 5.9, 7: 9.0}])
    monkeypatch.setattr(process_tree, "seconds_of_others", lambda: next(looks))
    name = re.escape(process_tree.name_of(known))
    assert name
    with pytest.raises(Busy, match=rf"^a reason; process {known} \({name}\) took 0\.\d cores$"):
        Quiet(ticking(), 1.0).wait("a reason")
    looks = iter([{1: 3.0}, {1: 3.1}])
    with pytest.raises(Busy, match=r"^no patience$"):  # a tick of the kernel's clock in no time would be many cores
        Quiet(ticking(), 0.0).wait("no patience")


def test_a_host_is_suspected_where_no_program_of_this_machine_was_seen(machine: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(process_tree, "seconds_of_others", dict)
    why, unseen = "two cores took 4.6 times as long as before to exchange data", re.escape(quiet.UNSEEN)
    for seen in (0.1, 1.0):
        machine.others, watch = 0.1, Quiet(ticking(), 1.0)
        watch.wait(why)
        machine.others = seen
        with pytest.raises(Busy, match=rf"^{why}; {unseen}$" if seen < NOTICED_CORES else rf"^{why}$"):
            for _ in range(9):
                watch.wait(why)


def test_the_time_that_threads_wait_for_a_core_is_read_of_a_whole_tree() -> None:
    assert process_tree.queued_s(1 << 22) == 0.0, "no such process"
    before = process_tree.queued_s(os.getpid())
    assert before >= 0.0 and process_tree.queued_s(os.getpid()) >= before


class Spinning:
    """An arm of which one thread spins after a run, on a core that the judge takes; seconds by script.

    As Linux counts: what a thread waits is added once it has a core, which it needs to take a signal too.
    """

    def __init__(self, in_run_s: float) -> None:
        self.in_run_s, self.counted_s, self.waits_s, self.running = in_run_s, 0.0, 0.0, False

    def prepare(self, slots: Sequence[int]) -> None:
        self.waits_s = 0.012

    def run(self, timeout_s: float) -> float:
        assert self.running
        self.counted_s += self.waits_s + self.in_run_s
        self.waits_s = 0.012
        return 0.004

    def queued_s(self) -> float:
        return self.counted_s

    def stop(self) -> None:
        self.running = False

    def freeze(self) -> None:
        self.stop()
        self.counted_s, self.waits_s = self.counted_s + self.waits_s, 0.0

    def thaw(self) -> None:
        self.running = True

    def collect(self) -> Sequence[int]:
        return [0]


@pytest.mark.parametrize(
    ("in_run_s", "own_s", "says"), [(0.0, 0.0, ""), (0.002, 0.0, "waited 2.0 ms"), (0.0, 0.003, "waited 3.0 ms")]
)
def test_only_waits_while_a_sample_runs_count_those_of_the_judge_too(
    in_run_s, own_s, says, machine, monkeypatch
) -> None:
    arm, own = Spinning(in_run_s), iter([1.0, 1.0 + own_s])
    monkeypatch.setattr(process_tree, "own_queued_s", lambda: next(own))
    monkeypatch.setattr(cpu_rounds, "Quiet", Quiet)
    nothing = dict.fromkeys(("begin_warm_up", "refresh", "require_untouched"), lambda *given: None)
    read: list[int] = []
    arena = SimpleNamespace(read=read.append)
    operands = SimpleNamespace(slots=4, fresh_processes=False, check=lambda *given, **how: 0.0, arena=arena, **nothing)
    terms = Terms(SEARCH, np.random.default_rng(0), clock=ticking())
    rounds = cpu_rounds._CpuRounds(operands, [{"library": arm}], {}, terms, 60.0)
    assert scripted_times.REAL["sample"](rounds, "library", 2) == 0.002
    assert says in rounds.disturbed() and bool(says) == bool(rounds.disturbed())
    assert read == [2], "what its launches meet was brought into caches once"


@pytest.mark.parametrize("protocol", [SEARCH, SERVER])
def test_caches_of_every_core_are_pushed_out_where_the_protocol_says_so(protocol, machine, monkeypatch) -> None:
    wrote: dict[int, bool] = {}

    @contextlib.contextmanager
    def on_core(core: int) -> Iterator[None]:
        before = int(rounds.evicted.sum())
        yield
        wrote[core] = int(rounds.evicted.sum()) > before

    monkeypatch.setattr(cpu_rounds, "_on_core", on_core)
    terms = Terms(protocol, np.random.default_rng(0), clock=ticking())
    rounds = cpu_rounds._CpuRounds(SimpleNamespace(slots=4), [{"library": Spinning(0.0)}], {}, terms, 60.0)
    rounds._evict()
    assert wrote == dict.fromkeys(os.sched_getaffinity(0) if protocol.evict else (), True)
    assert rounds.evicted.all()


class Disturbed(Rounds):
    """Two arms, of which one suffers ten times as much in rounds that are disturbed."""

    most = 8

    def __init__(self, busy: Iterator[str], **terms: Any) -> None:
        self.busy, self.now, self.waits = busy, "", 0
        super().__init__([CANDIDATE, "library"], Terms(SEARCH, np.random.default_rng(0), clock=ticking(), **terms))

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        suffers = 10.0 if self.now and name == "library" else 1.0
        return suffers * (2e-3 if name == "library" else 1e-3)

    def begin_watch(self) -> None:
        self.now = next(self.busy, "")

    def disturbed(self) -> str:
        return self.now

    def wait_for_quiet(self, why: str) -> None:
        self.waits += 1
        if self.waits > 30:
            raise Busy(why)


def test_disturbed_rounds_are_taken_again() -> None:
    rounds = Disturbed(iter(["load", "load", "", "", "load", "", "load", "load"]))
    rounds.run()
    assert rounds.ratio("library").estimate == pytest.approx(2.0) and rounds.ratio("library").high < 2.1
    assert len(rounds.samples.of("library")) >= SEARCH.min_rounds and rounds.waits == 5
    assert rounds.launches[CANDIDATE] == rounds.launches["library"] > 0


def test_without_quiet_there_is_no_ratio_and_with_rounds_enough_they_count() -> None:
    with pytest.raises(Busy, match="load"):
        Disturbed(iter(["load"] * 1000)).run()
    with pytest.raises(Busy, match="load"):
        Disturbed(iter([""] * SEARCH.min_rounds + ["load"] * 1000)).run()  # of these one went before the rounds


@pytest.fixture
def busy_for(monkeypatch: pytest.MonkeyPatch) -> Any:
    """busy_for(count): other work has the cores in the first so many timings."""

    def script(count: int) -> None:
        left = [count]

        class Watch(scripted_times.AlwaysQuiet):
            def __init__(self, clock: object, patience_s: float) -> None:
                self.patience_s, self.why = patience_s, "threads waited for a core" if left[0] > 0 else ""
                left[0] -= 1

            def disturbed(self) -> str:
                return self.why

            def wait(self, why: str) -> None:
                raise Busy(why)

        monkeypatch.setattr(cpu_rounds, "Quiet", Watch)

    return script


def test_a_correct_kernel_that_could_not_be_timed_has_no_reward_and_is_tried_again(rig, archive, busy_for) -> None:
    busy_for(1)
    with Evaluator(GEMM, rig) as evaluator:
        first = search(evaluator, Listed([honest_source()]), archive, Scope(budget_s=3600, max_trials=1))
        assert evaluator.ends == math.inf
        (untimed,) = first.trials
        assert untimed.status == "busy" and untimed.verdict.status == "correct" and math.isnan(untimed.reward)
        assert untimed.reason == (
            "other work kept the cores busy (threads waited for a core), so that no ratio would be true"
        )
        assert first.best is None and first.untimed is untimed and not first.rejected and not archive.trials()
        second = search(evaluator, Listed([honest_source()]), archive, Scope(budget_s=3600, max_trials=1))
    assert second.best.status == "measured" and second.known == 0 and len(archive.trials()) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_candidate_waited_is_not_expected_of_the_next(rig, archive, monkeypatch, which) -> None:
    """One of the first candidate's two timings waits for most of the budget, and none after it: more of them fit."""
    waits, clock = [80.0, *[0.0] * which], ticking()

    class Watch(scripted_times.AlwaysQuiet):
        def __init__(self, *_: Any) -> None:
            self.waited_s = waits.pop() if waits else 0.0
            clock.sleep(self.waited_s)

    monkeypatch.setattr(cpu_rounds, "Quiet", Watch)
    with Evaluator(GEMM, rig, clock=clock) as evaluator:
        proposer = Listed([honest_source() + "\n" * number for number in range(3)])
        progress = search(evaluator, proposer, archive, Scope(budget_s=100.0))
    assert progress.proposed == progress.correct == 3 and progress.waited_s == 80.0
    if not which:  # the second of the two did not count
        assert [trial.timing.conditions.waited_s for trial in progress.trials] == [80.0, None, None]


def test_a_search_that_had_no_quiet_says_so(rig, archive, busy_for, capsys) -> None:
    busy_for(1000)
    with Evaluator(GEMM, rig) as evaluator:
        progress = search(evaluator, Listed([honest_source()]), archive, Scope(budget_s=3600, max_trials=1))
    assert progress.best is None and not archive.trials()
    result = Result(GEMM, rig.target, progress, Reports(), Path("kept.c"))
    print_result(result)
    said = " ".join(capsys.readouterr().out.split())
    why = "1 correct kernel, none timed: other work kept the cores busy"
    assert why in said and "search again when the machine is quiet" in said
    assert said.endswith("compared with nothing (cuda_l2.load makes it a kernel): kept.c")
    assert "no correct kernel" not in said and "no kernel wins" not in repr(result)
    assert why in repr(result) and repr(result).endswith("cuda_l2.load(result.source_path) gives the last one>")
    fields = json.loads(result_json(result))
    assert (fields["correct"], fields["timed"]) == (1, 0) and fields["why_no_win"].startswith(why)
    assert "1 kernel tried, 1 correct, none of them timed" in describe(progress)


def test_a_jump_that_cannot_be_measured_again_is_no_verdict(rig, monkeypatch) -> None:
    with Evaluator(GEMM, rig) as evaluator:
        faked(monkeypatch, evaluator, [9.0])
        verdict = evaluator._bench.verify  # of the first timing's candidate, and of fresh inputs
        monkeypatch.setattr(evaluator, "_on_fresh_inputs", lambda *given: (verdict(*given[:2]), BUSY))
        (trial,) = evaluator.evaluate([Candidate(honest_source())])
    assert trial.status == "busy" and trial.verdict.status == "correct" and trial.review is None


def test_a_figure_above_the_peak_is_told_as_an_error(rig, capsys) -> None:
    found = trial(honest_source(), machine=rig.target.machine, task=GEMM, timing=timing(1e-3, {"torch fp16": 1.0}))
    print_result(Result(GEMM, rig.target, Progress(best=found), {"offline": found}, None))
    said = " ".join(capsys.readouterr().out.split())
    assert "measured as this machine's peak: one of the two is wrong" in said and "% of the measured peak" not in said


def test_what_memory_gives_bounds_no_kernel_whose_tensors_a_cache_holds(rig, monkeypatch, capsys) -> None:
    monkeypatch.setattr(type(rig.target), "ceilings_doubt", lambda target, dtype="": "")
    monkeypatch.setattr(type(rig.target), "ceilings", lambda target, dtype="": (200.0, 20.0))
    monkeypatch.setattr(type(rig.target), "cached_bytes", 8 << 20)
    for shape, cached in (("1x512x512", True), ("1x32768x32768", False)):
        task = Gemm.parse(shape)
        us = 2 * rig.target.bound_us(task)
        found = trial(honest_source(), machine=rig.target.machine, task=task, timing=timing(us, {"torch fp16": us}))
        print_result(Result(task, rig.target, Progress(best=found), {"offline": found}, None))
        said = " ".join(capsys.readouterr().out.split())
        assert ("no kernel takes less than" in said) is not cached
        assert (f"a cache holds its tensors, which would take {us / 2:.1f} us from memory" in said) is cached


@pytest.mark.parametrize("doubt", ["", "other work ran meanwhile"])
def test_a_peak_that_was_measured_beside_other_work_is_no_bound(doubt, rig, monkeypatch, capsys) -> None:
    monkeypatch.setattr(type(rig.target), "ceilings_doubt", lambda target, dtype="": doubt)
    found = trial(honest_source(), machine=rig.target.machine, task=GEMM, timing=timing(10.0, {"torch fp16": 20.0}))
    print_result(Result(GEMM, rig.target, Progress(best=found), {"offline": found}, None))
    said = " ".join(capsys.readouterr().out.split())
    assert ("% of the measured peak" in said) is ("no kernel takes less than" in said) is (not doubt)
    assert ("other work ran while this machine's peak was measured" in said) is bool(doubt)
