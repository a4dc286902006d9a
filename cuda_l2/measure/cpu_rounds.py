"""Times CPU candidates: operands and outputs of their own for every launch, both arms stopped between their turns."""

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol as Interface

import numpy as np

from cuda_l2.machine.cpu.target import detect
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.measure.other_work import OtherWork
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.quiet import Busy, Quiet
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Conditions, Timing, TimingStatus
from cuda_l2.system.errors import UserError

SETTLE_S = {"passive": 0.0005, "active": 0.008}
"""Idle time before each timed run. Unless its wait policy is passive, OpenMP's threads in this process, which
checks outputs with torch, spin for milliseconds after their last work and would take a core from the arm."""
LAST_LEVEL_BYTES = 32 << 20  # where the system does not say
MOST_EVICTED = 256 << 20
"""More pushes nothing else out: a guest is told the size of its host's whole cache, and gets a part (docs/log.md)."""


class Contestant(Interface):
    """What a round asks of an arm: a candidate's worker or a baseline."""

    def begin(self) -> None:
        """A sample begins."""

    def prepare(self, slots: Sequence[int]) -> None: ...
    def run(self, timeout_s: float) -> float: ...
    def queued_s(self) -> float:
        """Seconds that its threads have waited for a core so far."""

    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def collect(self) -> Sequence[int]:
        """The slots of the last run that hold its results now."""


class CandidateArm(Contestant, Interface):
    """A candidate's worker."""

    def empty(self, timeout_s: float = ...) -> float: ...


class TimedOperands(Interface):
    """What the launches of a sample work on."""

    @property
    def slots(self) -> int: ...
    def begin_warm_up(self) -> None:
        """Leave nothing in memory that a launch which does not count could keep for those that do."""

    def refresh(self, count: int) -> None:
        """Inputs in the first slots that nothing kept from before is of use for, and outputs poisoned."""

    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        """WrongOutput where a launch on these did not produce its own result; the largest difference of one or NaN."""

    def require_untouched(self, count: int) -> None:
        """WrongOutput where a launch on the first slots changed inputs or wrote outside its outputs."""


def measure_cpu(
    kernels: Mapping[str, Callable[[], AbstractContextManager[CandidateArm]]],
    baselines: Mapping[str, Contestant],
    operands: TimedOperands,
    terms: Terms,
    timeout_s: float,
) -> dict[str, Timing]:
    """Time candidates that were found correct side by side, or without one the baselines against the first of them.

    By name; without candidates under the name CANDIDATE. kernels: what opens the process of each. The reference is the
    strongest baseline of this run. A fault of one candidate ends the run for all. timeout_s: of a sample's launches.
    """
    start = terms.clock.now()
    names = list(kernels) or [CANDIDATE]
    # a search is too short to tell, and nobody reads its digits
    others = None if terms.protocol.selects else OtherWork(terms.clock)
    arms: dict[str, Contestant] = dict(baselines)
    empty_call_us = float("nan")
    try:
        with contextlib.ExitStack() as stack:
            workers: list[CandidateArm] = []
            for name, open_kernel in kernels.items():
                workers.append(stack.enter_context(open_kernel()))
                arms[name] = workers[-1]
                workers[-1].freeze()
            run = _CpuRounds(operands, arms, terms, timeout_s, list(kernels))
            run.run()
            if workers:
                workers[0].thaw()
                empty_call_us = statistics.median(workers[0].empty() for _ in range(9)) * 1e6
    except (Fault, WrongOutput) as error:
        return dict.fromkeys(names, failed(error, terms.protocol, start, terms.clock))
    except Busy as busy:
        reason = f"other work kept the cores busy ({busy}), so that no ratio would be true"
        seconds = terms.clock.now() - start
        return dict.fromkeys(names, Timing(TimingStatus.BUSY, terms.protocol.name, reason=reason, seconds=seconds))
    evicted = run.evicted.nbytes if terms.protocol.evict else None
    conditions = Conditions(evicted_bytes=evicted, other_work=others.found() if others else None)
    seconds = terms.clock.now() - start
    found = {name: run.timing(empty_call_us, seconds, name if kernels else "") for name in names}
    return {name: replace(timing, conditions=conditions) for name, timing in found.items()}


class _CpuRounds(Rounds):
    def __init__(
        self,
        operands: TimedOperands,
        contestants: dict[str, Contestant],
        terms: Terms,
        timeout_s: float,
        kernels: Sequence[str],
    ) -> None:
        subject = kernels[0] if kernels else next(iter(contestants))
        super().__init__(list(contestants), terms, subject=subject, kernels=kernels)
        self.quiet = Quiet(terms.clock, terms.patience_s)
        self.operands, self.contestants, self.timeout_s = operands, contestants, timeout_s
        evicted = min(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), MOST_EVICTED)
        self.evicted = np.zeros(evicted if self.protocol.evict else 0, dtype=np.uint8)

    @property
    def most(self) -> int:
        return self.operands.slots

    def begin_watch(self) -> None:
        self.quiet.begin()

    def disturbed(self) -> str:
        return self.quiet.disturbed()

    def wait_for_quiet(self, why: str) -> None:
        self.quiet.wait(why)

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        """Each of the launches has operands and an output of its own.

        The arm is stopped while operands change and until the clock starts; the warm-up met other operands.
        """
        arm = self.contestants[name]
        arm.begin()
        if warm:
            self.operands.begin_warm_up()
            arm.thaw()
            arm.prepare([0])
            arm.run(self.timeout_s)
        arm.freeze()
        self.operands.refresh(count)
        arm.prepare([int(slot) for slot in self.rng.permutation(count)])
        arm.freeze()
        self.evicted += 1
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        queued_s = arm.queued_s()
        self.clock.sleep(SETTLE_S.get(os.environ.get("OMP_WAIT_POLICY", "").lower(), SETTLE_S["active"]) + gap)
        arm.thaw()
        seconds = arm.run(self.timeout_s) / count
        arm.freeze()
        self.quiet.sampled(seconds * count, arm.queued_s() - queued_s)
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
        return seconds
