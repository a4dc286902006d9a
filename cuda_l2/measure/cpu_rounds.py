"""Times CPU candidates: operands and outputs of their own for every launch, both arms stopped between their turns."""

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol as Interface

import numpy as np

from cuda_l2 import contract
from cuda_l2.errors import UserError
from cuda_l2.execute.worker import Fault, Worker
from cuda_l2.measure.baselines import TorchBaselines
from cuda_l2.measure.outputs import Operands, WrongOutput, check_outputs
from cuda_l2.measure.protocols import Protocol
from cuda_l2.measure.rounds import CANDIDATE, Rounds
from cuda_l2.records import Build, Candidate, Timing, TimingStatus
from cuda_l2.targets.cpu import detect

SETTLE_S = {"passive": 0.0005, "active": 0.008}
"""Idle time before each timed run. Unless its wait policy is passive, OpenMP's threads in this process, which
checks outputs with torch, spin for milliseconds after their last work and would take a core from the arm."""
SLOWEST_GFLOPS = 0.2
LAST_LEVEL_BYTES = 32 << 20  # where the system does not say


class Contestant(Interface):
    """What a round asks of an arm: a candidate's worker or a baseline."""

    def prepare(self, slots: Sequence[int]) -> None: ...
    def run(self, timeout_s: float) -> float: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


def measure_cpu(
    candidate: Candidate | None,
    build: Build | None,
    baselines: TorchBaselines,
    operands: Operands,
    protocol: Protocol,
    *,
    names: Sequence[str] | None = None,
    beat: float = 0.0,
    rng: np.random.Generator,
) -> Timing:
    """Time one candidate that was found correct, or without one the baselines against the first of them.

    names: the baselines to run, all by default. The reference is the strongest of them in this run.
    beat: stop early once the speedup is surely below this; for searches, where a poor candidate needs no digits.
    """
    start = time.perf_counter()
    arena = operands.arena
    gemm = arena.gemm
    arms: dict[str, Contestant] = {name: baselines.arm(name) for name in names or baselines.names}
    empty_call_us = float("nan")
    try:
        with contextlib.ExitStack() as stack:
            worker: Worker | None = None
            if candidate and build:
                terms = contract.parse_cpu(candidate.source)
                arena.poison_workspace(terms.workspace_bytes(gemm.m, gemm.n, gemm.k))
                arms[CANDIDATE] = worker = stack.enter_context(Worker(arena, Path(build.artifact), terms))
                worker.freeze()
            run = _CpuRounds(operands, arms, protocol, rng, beat)
            run.run()
            if worker:
                worker.thaw()
                empty_call_us = statistics.median(worker.empty() for _ in range(9)) * 1e6
    except Fault as fault:
        status = TimingStatus(fault.status)  # a fault ends verification and timing under the same names
        return Timing(status, protocol.name, reason=fault.reason, seconds=time.perf_counter() - start)
    except WrongOutput as wrong:
        return Timing(TimingStatus.WRONG_OUTPUT, protocol.name, reason=str(wrong), seconds=time.perf_counter() - start)
    return run.timing(empty_call_us, time.perf_counter() - start)


class _CpuRounds(Rounds):
    def __init__(
        self,
        operands: Operands,
        contestants: dict[str, Contestant],
        protocol: Protocol,
        rng: np.random.Generator,
        beat: float,
    ) -> None:
        subject = CANDIDATE if CANDIDATE in contestants else next(iter(contestants))
        super().__init__(list(contestants), protocol, rng, beat=beat, subject=subject)
        self.operands, self.arena, self.contestants = operands, operands.arena, contestants
        self.timeout_s = 5.0 + 64 * self.arena.gemm.flops / SLOWEST_GFLOPS * 1e-9
        self.evicted = (
            np.zeros(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), dtype=np.uint8) if protocol.evict else None
        )

    @property
    def most(self) -> int:
        return self.arena.slots

    def run(self) -> None:
        self.operands.refresh(self.arena.slots)  # others may have used the arena since
        super().run()

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        """Each of the launches has operands and an output of its own.

        The arm is stopped while operands change and until the clock starts; the warm-up met other operands.
        """
        arm = self.contestants[name]
        if warm:
            arm.thaw()
            arm.prepare([0])
            arm.run(self.timeout_s)
        arm.freeze()
        self.operands.refresh(count)
        self.arena.poison_outputs(count)
        arm.prepare([int(slot) for slot in self.rng.permutation(count)])
        arm.freeze()
        if self.evicted is not None:
            self.evicted += 1
        gap = float(self.rng.exponential(self.protocol.gap_s)) if self.protocol.gap_s else 0.0
        time.sleep(SETTLE_S.get(os.environ.get("OMP_WAIT_POLICY", "").lower(), SETTLE_S["active"]) + gap)
        arm.thaw()
        seconds = arm.run(self.timeout_s) / count
        arm.freeze()
        try:
            difference = check_outputs(self.operands, count, element_wise=self.check_elements)
            self.operands.require_untouched(count)
        except WrongOutput as wrong:
            if name == CANDIDATE:
                raise
            raise UserError(
                f"the baseline {name} gave a wrong result ({wrong}); is the memory of this machine sound?"
            ) from None
        if name == CANDIDATE and self.check_elements:
            self.max_difference = max(self.max_difference, difference)
        return seconds
