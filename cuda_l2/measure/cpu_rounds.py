"""Times CPU candidates: operands and outputs of their own for every launch, both arms stopped between their turns."""

import contextlib
import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol as Interface

import numpy as np

from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.target import detect
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.operands import Operands
from cuda_l2.measure.other_work import OtherWork
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.quiet import Busy, Quiet
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Conditions, Timing, TimingStatus
from cuda_l2.system import process_tree
from cuda_l2.system.errors import UserError

SETTLE_S = {"passive": 0.0005, "active": 0.008}
"""Idle time before each timed run. Unless its wait policy is passive, OpenMP's threads in this process, which
checks outputs with torch, spin for milliseconds after their last work and would take a core from the arm."""
SAMPLES = 3
"""Counted up when what a sample on a CPU means is changed: figures from before do not stand beside those from after."""
PARTS = 3
"""Samples of an arm in a report's round where the slots hold fewer launches than would fill it: one of a small product
takes half a millisecond, and six pairs of processes with five each differed by a tenth."""
LEAST_LEFT = 0.5
"""Share of a sample's time that stays at least when what is no launch's is taken off."""
ENDURED = 8
"""Samples that one process of a candidate gives beside those that count, where each of these has a new one."""
OWN_BYTES, LAST_LEVEL_BYTES = 1 << 20, 32 << 20
"""A core's own cache and the shared one, where the system does not say."""
MOST_EVICTED = 256 << 20
"""More pushes nothing else out: a guest is told the size of its host's whole cache, and gets a part (docs/log.md)."""


class Contestant(Interface):
    """What a round asks of an arm: a candidate's worker or a baseline."""

    def prepare(self, slots: Sequence[int]) -> None: ...
    def run(self, timeout_s: float) -> float: ...
    def queued_s(self) -> float:
        """Seconds that its threads have waited for a core so far."""

    def stop(self) -> None:
        """Have its threads stop: none runs on, though one that has no core now takes the signal later."""

    def freeze(self) -> None:
        """The same; returns when every thread has stopped."""

    def thaw(self) -> None: ...
    def collect(self) -> Sequence[int]:
        """The slots of the last run that hold its results now."""


def measure_cpu(
    kernels: Mapping[str, Callable[[], Worker]],
    baselines: Sequence[Mapping[str, Contestant]],
    operands: Operands,
    terms: Terms,
    timeout_s: float,
) -> dict[str, Timing]:
    """Time candidates that were found correct side by side, or without one the baselines against the first of them.

    By name; without candidates under the name CANDIDATE. kernels: what opens a process of each. baselines: the same
    arms, once for each process that they run in; rounds go round these, and as many processes of each candidate. The
    reference is the strongest baseline of this run. A fault of one candidate ends the run for all. timeout_s: of a
    sample's launches.
    """
    start = terms.clock.now()
    names = list(kernels) or [CANDIDATE]
    # a search is too short to tell, and nobody reads its digits
    others = None if terms.protocol.selects else OtherWork(terms.clock)
    try:
        with contextlib.closing(_CpuRounds(operands, baselines, kernels, terms, timeout_s)) as run:
            run.run()
            empty_call_us = run.empty_call_us()
            other_work = others.found() if others else None
    except (Fault, WrongOutput) as error:
        return dict.fromkeys(names, failed(error, terms.protocol, start, terms.clock))
    except Busy as busy:
        reason = f"other work kept the cores busy ({busy}), so that no ratio would be true"
        seconds, conditions = terms.clock.now() - start, Conditions(waited_s=run.quiet.waited_s)
        timing = Timing(TimingStatus.BUSY, terms.protocol.name, reason=reason, seconds=seconds, conditions=conditions)
        return dict.fromkeys(names, timing)
    evicted = run.evicted.nbytes if terms.protocol.evict else None
    conditions = Conditions(
        evicted_bytes=evicted,
        other_work=other_work,
        waited_s=run.quiet.waited_s or None,
        pairs=len(baselines) if len(baselines) > 1 else None,
    )
    seconds = terms.clock.now() - start
    found = {name: run.timing(empty_call_us, seconds, name if kernels else "") for name in names}
    return {name: replace(timing, conditions=conditions) for name, timing in found.items()}


class _CpuRounds(Rounds):
    """Baselines, and candidates if any: each in a new process for every sample, if the operands ask for it.

    With the baselines in several processes each round is one pair's: a process of theirs and one of every candidate,
    which are stopped in all other rounds.
    """

    def __init__(
        self,
        operands: Operands,
        baselines: Sequence[Mapping[str, Contestant]],
        kernels: Mapping[str, Callable[[], Worker]],
        terms: Terms,
        timeout_s: float,
    ) -> None:
        names, pairs = [*baselines[0], *kernels], len(baselines)
        super().__init__(names, terms, subject=next(iter(kernels), names[0]), kernels=tuple(kernels), processes=pairs)
        self.operands, self.timeout_s, self._open = operands, timeout_s, kernels
        self._pairs: list[tuple[dict[str, Contestant], dict[str, Worker]]] = [(dict(each), {}) for each in baselines]
        self._warm = {0} if pairs == 1 else set[int]()
        """The pairs that have launched what a sample of the rounds does."""
        self._exact = bool(self.protocol.round_s) and not self.protocol.selects and not operands.fresh_processes
        """Whether these are a report's back-to-back launches of a product."""
        self._starter = ""
        """The baseline whose process tells what starting a sample takes; none where nothing is taken off."""
        self._starts: list[tuple[float, float]] = []
        self._new_starts: list[tuple[float, float]] = []
        """Seconds that waking torch's process and its threads takes, and a sample without launches there: in rounds
        that stand, and since the last of these."""
        self._choose(0)
        self.quiet = Quiet(terms.clock, terms.patience_s)
        evicted = min(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), MOST_EVICTED)
        self.evicted = np.zeros(evicted if self.protocol.evict else 0, dtype=np.uint8)

    def run(self) -> None:
        for pair in range(len(self._pairs)):
            self._choose(pair)
            for name in self._open:
                self._renew(name)
                self._workers[name].freeze()
        super().run()
        if self.protocol.fresh:  # what gives way after many launches would not have had them in one round
            self.number = 0
            for name in [name for name in self.kernels for _ in range(ENDURED)]:
                self.sample(name, self._count)

    @property
    def most(self) -> int:
        return self.operands.slots

    def count(self, wanted: float) -> int:
        if not self._exact or wanted <= self.most:
            return super().count(wanted)
        return self.most * PARTS

    def parts(self, count: int) -> int:
        return PARTS if count > self.most else 1

    def begin_round(self, names: Collection[str] = (), count: int = 0) -> None:
        pair = self.number % len(self._pairs)
        self._choose(pair)
        if count > self.most and not self._starter:
            self._starter = next((name for name in names if name not in self.kernels), "")
        if names and pair not in self._warm:
            self._warm.add(pair)
            for name in names:
                self._warm_up(name, range(min(count, self.most)))
                self.contestants[name].freeze()
                if name in self.kernels:
                    self.operands.require_bounds_kept()

    def begin_watch(self) -> None:
        self._new_starts = []
        self.quiet.begin()

    def disturbed(self) -> str:
        why = self.quiet.disturbed()
        if not why:
            self._starts += self._new_starts
        return why

    def wait_for_quiet(self, why: str) -> None:
        self.quiet.wait(why)

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        """Each of the launches has operands and an output of its own.

        The arm is stopped while operands change and until the clock starts; the warm-up met other operands. Waking a
        process and its answer are no part of a launch: `_taken_off_s`.
        """
        if name in self.kernels and (self.operands.fresh_processes or (self.protocol.fresh and self.number)):
            self._renew(name)
        arm = self.contestants[name]
        if warm:
            self.operands.begin_warm_up()
            self._warm_up(name, [0])
        arm.freeze()
        self.operands.refresh(count)
        arm.prepare([int(slot) for slot in self.rng.permutation(count)])
        arm.freeze()
        self._evict()
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        queued_s = arm.queued_s()  # of threads that wait for nothing now
        self.clock.sleep(_settle_s() + gap)
        if not self.protocol.evict:
            self.operands.arena.read(count)  # the checks before the sample have left it in memory for some launches
        queued_s += process_tree.own_queued_s()  # this thread's wait for a core would be in the sample too
        seconds = self._run_stopped(arm)
        arm.stop()  # what its threads wait from here on is not the sample's
        self.quiet.sampled(seconds, process_tree.own_queued_s() + arm.queued_s() - queued_s)
        arm.freeze()
        try:
            difference = self.operands.check(arm.collect(), element_wise=self.check_elements)
            self.operands.require_untouched(count)
        except WrongOutput as wrong:
            if name in self.kernels:
                raise
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this machine sound?"
            ) from None
        if name in self.kernels and self.check_elements:
            self.differences[name] = max(self.differences.get(name, 0.0), difference)
        if name == self._starter and count > 1:
            first_s = self._again_s(arm, [0])
            self._new_starts.append((first_s - (seconds - first_s) / (count - 1), self._again_s(arm, [])))
        return max(seconds - self._taken_off_s(name), LEAST_LEFT * seconds) / count

    def _run_stopped(self, arm: Contestant) -> float:
        """Seconds of a run of what was prepared, from its process being stopped to its answer."""
        arm.thaw()
        # its first thread's, which sleeps as soon as it has answered; others of an arm spin for a while on theirs and
        # would hold up the one that reads the clock
        with _on_core(min(os.sched_getaffinity(0))):
            return arm.run(self.timeout_s)

    def _again_s(self, arm: Contestant, slots: Sequence[int]) -> float:
        """Seconds of a sample of these launches, or of none, whose results are not looked at."""
        arm.prepare(slots)
        arm.freeze()
        self.clock.sleep(_settle_s())
        seconds = self._run_stopped(arm)
        arm.freeze()
        return seconds

    def _taken_off_s(self, name: str) -> float:
        """Seconds of an arm's sample that are no launches'.

        What a candidate's threads take to wake stays in: its own process alone could tell.
        """
        of_arm = [none_s if name in self.kernels else max(0.0, wake_s) for wake_s, none_s in self._starts]
        return statistics.median(of_arm) if of_arm else 0.0

    def _warm_up(self, name: str, slots: Sequence[int]) -> None:
        """Launches that do not count; a process's first ones map the slots' memory and start its threads."""
        arm = self.contestants[name]
        arm.thaw()
        arm.prepare(slots)
        arm.run(self.timeout_s)

    def _evict(self) -> None:
        """Push out what lies in any core's own caches, then in the one that they share.

        What one core writes does not push out what lies in another's.
        """
        for core in sorted(os.sched_getaffinity(0)) if self.evicted.size else ():
            with _on_core(core):
                self.evicted[: 2 * (detect().cache_bytes[1] or OWN_BYTES)] += 1
        self.evicted += 1

    def empty_call_us(self) -> float:
        """Microseconds of a run of no launches that all times hold: 0 where taken off, NaN without a candidate."""
        worker = next(iter(self._workers.values()), None)
        if not worker:
            return float("nan")
        if self._starts:
            return 0.0
        worker.thaw()
        return statistics.median(worker.empty() for _ in range(9)) * 1e6

    def close(self) -> None:
        for _, workers in self._pairs:
            for worker in workers.values():
                worker.close()

    def _choose(self, pair: int) -> None:
        """Let samples come from the processes of a pair."""
        self.contestants, self._workers = self._pairs[pair]

    def _renew(self, name: str) -> None:
        """Give a candidate a new process: all that an old one kept is gone."""
        if name in self._workers:
            self._workers.pop(name).close()
            self.operands.forget()
        self.contestants[name] = self._workers[name] = self._open[name]()


def _settle_s() -> float:
    """Idle time before a timed run."""
    return SETTLE_S.get(os.environ.get("OMP_WAIT_POLICY", "").lower(), SETTLE_S["active"])


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keep this thread on a core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
