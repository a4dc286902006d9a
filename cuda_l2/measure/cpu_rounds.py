"""Times CPU candidates: operands and outputs of their own for every launch, both arms stopped between their turns."""

import contextlib
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol as Interface

import numpy as np

from cuda_l2.machine.cpu.target import detect
from cuda_l2.machine.cpu.worker import Fault, Worker
from cuda_l2.measure.operands import Operands
from cuda_l2.measure.other_work import OtherWork
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.measure.rounds import CANDIDATE, Rounds, Terms, failed
from cuda_l2.records import Conditions, Timing
from cuda_l2.system.errors import UserError

SETTLE_S = {"passive": 0.0005, "active": 0.008}
"""Idle time before each timed run. Unless its wait policy is passive, OpenMP's threads in this process, which
checks outputs with torch, spin for milliseconds after their last work and would take a core from the arm."""
LAST_LEVEL_BYTES = 32 << 20  # where the system does not say
MOST_EVICTED = 256 << 20
"""More pushes nothing else out: a guest is told the size of its host's whole cache, and gets a part (docs/log.md)."""


class Contestant(Interface):
    """What a round asks of an arm: a candidate's worker or a baseline."""

    def prepare(self, slots: Sequence[int]) -> None: ...
    def run(self, timeout_s: float) -> float: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def collect(self) -> Sequence[int]:
        """The slots of the last run that hold its results now."""


def measure_cpu(
    open_candidate: Callable[[], Worker] | None,
    baselines: Mapping[str, Contestant],
    operands: Operands,
    terms: Terms,
    timeout_s: float,
) -> Timing:
    """Time one candidate that was found correct, or without one the baselines against the first of them.

    The reference is the strongest baseline of this run. timeout_s: of a sample's launches.
    """
    start = terms.clock.now()
    # a search is too short to tell, and nobody reads its digits
    others = None if terms.protocol.selects else OtherWork(terms.clock)
    try:
        with contextlib.closing(_CpuRounds(operands, baselines, open_candidate, terms, timeout_s)) as run:
            run.run()
            empty_call_us = run.empty_call_us()
    except (Fault, WrongOutput) as error:
        return failed(error, terms.protocol, start, terms.clock)
    timing = run.timing(empty_call_us, terms.clock.now() - start)
    evicted = run.evicted.nbytes if terms.protocol.evict else None
    return replace(timing, conditions=Conditions(evicted_bytes=evicted, other_work=others.found() if others else None))


class _CpuRounds(Rounds):
    """Baselines, and a candidate where one is opened: in a new process for every sample, if the operands ask for it."""

    def __init__(
        self,
        operands: Operands,
        baselines: Mapping[str, Contestant],
        open_candidate: Callable[[], Worker] | None,
        terms: Terms,
        timeout_s: float,
    ) -> None:
        names = [*baselines, CANDIDATE] if open_candidate else list(baselines)
        super().__init__(names, terms, subject=CANDIDATE if open_candidate else names[0])
        self.operands, self.timeout_s, self._open = operands, timeout_s, open_candidate
        self.contestants: dict[str, Contestant] = dict(baselines)
        self._worker: Worker | None = None
        evicted = min(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), MOST_EVICTED)
        self.evicted = np.zeros(evicted if self.protocol.evict else 0, dtype=np.uint8)
        if open_candidate:
            self.contestants[CANDIDATE] = self._worker = open_candidate()

    def run(self) -> None:
        if self._worker:
            self._worker.freeze()
        super().run()

    @property
    def most(self) -> int:
        return self.operands.slots

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        """Each of the launches has operands and an output of its own.

        The arm is stopped while operands change and until the clock starts; the warm-up met other operands.
        """
        if name == CANDIDATE:
            self._begin()
        arm = self.contestants[name]
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
        self.clock.sleep(SETTLE_S.get(os.environ.get("OMP_WAIT_POLICY", "").lower(), SETTLE_S["active"]) + gap)
        arm.thaw()
        seconds = arm.run(self.timeout_s) / count
        arm.freeze()
        try:
            difference = self.operands.check(arm.collect(), element_wise=self.check_elements)
            self.operands.require_untouched(count)
        except WrongOutput as wrong:
            if name == CANDIDATE:
                raise
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this machine sound?"
            ) from None
        if name == CANDIDATE and self.check_elements:
            self.differences[name] = max(self.differences.get(name, 0.0), difference)
        return seconds

    def empty_call_us(self) -> float:
        """Microseconds of a run of no launches, which all arms pay; NaN without a candidate."""
        if not self._worker:
            return float("nan")
        self._worker.thaw()
        return statistics.median(self._worker.empty() for _ in range(9)) * 1e6

    def close(self) -> None:
        if self._worker:
            self._worker.close()

    def _begin(self) -> None:
        """Before a sample of the candidate: where it has a new process for each, all that it kept is gone."""
        if self._open and self._worker and self.operands.fresh_processes:
            self._worker.close()
            self.operands.forget()
            self.contestants[CANDIDATE] = self._worker = self._open()
