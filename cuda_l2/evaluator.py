"""build -> verify -> measure -> reward for the candidates of one task: the stages put together once.

The same object serves the search, `cuda-l2 check`, and `cuda_l2.evaluate` as a reward function.
"""

import datetime
import importlib.metadata
import math
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cuda_l2.build.cpu import build_all
from cuda_l2.errors import UserError
from cuda_l2.execute.arena import Arena, operand_bytes
from cuda_l2.execute.lock import machine_lock
from cuda_l2.measure import measure
from cuda_l2.measure.baselines import PREALLOCATED, TorchBaselines
from cuda_l2.measure.outputs import Operands
from cuda_l2.measure.protocols import SEARCH, Protocol
from cuda_l2.records import Build, BuildStatus, Candidate, Gemm, Timing, Trial, Verdict, VerdictStatus
from cuda_l2.reward import RewardSettings, count_tokens, reward
from cuda_l2.targets.cpu import CpuTarget, available_memory_bytes
from cuda_l2.verify import Cases, verify

SLOT_BYTES = 32 << 20
"""Operands of all launches of a timed round together, and their outputs, take at most this, one launch more."""
MAX_SLOTS = 128
WORKSPACE_BYTES, WORKSPACE_BYTES_A_CORE = 64 << 20, 4 << 20
JUMP = 3.0
"""A speedup above this, or above twice the best so far, is timed again before it is believed."""
JUMP_AGREEMENT = 0.10
POOR = 0.9
"""A searched candidate surely below this share of the best is not timed any longer."""


class Evaluator:
    """Everything one task needs, set up once. A context manager.

    seed: of inputs; drawn afresh if not given, so that no candidate can know them.
    """

    def __init__(
        self,
        gemm: Gemm,
        target: CpuTarget,
        baselines: TorchBaselines,
        *,
        seed: int | None = None,
        rewards: RewardSettings = RewardSettings(),
    ) -> None:
        require_memory(gemm)
        self.gemm, self.target, self.baselines, self.rewards = gemm, target, baselines, rewards
        seed = secrets.randbits(48) if seed is None else seed
        self._rng = np.random.default_rng(seed)
        slots = max(1, min(MAX_SLOTS, SLOT_BYTES // max(operand_bytes(gemm), 2 * gemm.m * gemm.n)))
        workspace = WORKSPACE_BYTES + WORKSPACE_BYTES_A_CORE * target.cores + 8 * gemm.m * gemm.n
        self._arena = Arena(gemm, slots=slots, workspace_bytes=workspace)
        self._cases = Cases(gemm, seed)
        self._operands: Operands | None = None
        self._environment: dict[str, Any] = {}
        self.best_speedup = 0.0
        self.stage_seconds = {"build": 0.0, "verify": 0.0, "measure": 0.0}

    def build(self, candidates: Sequence[Candidate]) -> list[Build]:
        """Build several candidates at once."""
        start = time.perf_counter()
        with machine_lock():  # compilers would disturb another search's clock
            builds = build_all(candidates, self.target)
        self.stage_seconds["build"] += time.perf_counter() - start
        return builds

    def judge(self, candidate: Candidate, build: Build, protocol: Protocol = SEARCH) -> Trial:
        """Verify and time one built candidate, and reward it."""
        verdict: Verdict | None = None
        timing: Timing | None = None
        with machine_lock():
            if build.status is BuildStatus.BUILT:
                start = time.perf_counter()
                verdict = verify(candidate, build, self._arena, self._cases)
                self.stage_seconds["verify"] += time.perf_counter() - start
            if verdict and verdict.status is VerdictStatus.CORRECT:
                start = time.perf_counter()
                timing = self._confirmed(candidate, build, protocol)
                self.stage_seconds["measure"] += time.perf_counter() - start
        if timing and timing.speedup:
            self.best_speedup = max(self.best_speedup, timing.speedup.estimate)
        tokens = count_tokens(candidate.source) if timing else 0
        return Trial(
            task=self.gemm,
            candidate=candidate,
            machine=self.target.machine,
            protocol=protocol.name,
            build=build,
            verdict=verdict,
            timing=timing,
            reward=reward(build.status, verdict, timing, tokens, self.rewards),
            environment=self.environment,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )

    def evaluate(self, candidates: Sequence[Candidate], protocol: Protocol = SEARCH) -> list[Trial]:
        """Trials of several candidates, in order."""
        builds = self.build(candidates)
        return [self.judge(candidate, build, protocol) for candidate, build in zip(candidates, builds, strict=True)]

    def time(self, candidate: Candidate, build: Build, protocol: Protocol) -> Timing:
        """Time a candidate already found correct, against all baselines; in searches against the usual strongest."""
        if self.baselines.arena is not self._arena:
            self.baselines.attach(self._arena)
        if self._operands is None:
            self._operands = Operands(self._arena, self._rng)
        return measure(
            candidate,
            build,
            self.baselines,
            self._operands,
            protocol,
            names=(PREALLOCATED,) if protocol.selects else None,
            beat=POOR * self.best_speedup if protocol.selects else 0.0,
            rng=self._rng,
        )

    @property
    def environment(self) -> dict[str, Any]:
        if not self._environment:
            self._environment = self.target.environment() | {
                "torch": importlib.metadata.version("torch"),
                "torch_threads": self.target.cores,
                "cuda_l2": importlib.metadata.version("cuda-l2"),
            }
        return self._environment

    def close(self) -> None:
        self._arena.close()

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _confirmed(self, candidate: Candidate, build: Build, protocol: Protocol) -> Timing:
        """A timing; one that jumps is taken again in a fresh process and must agree, or the lower one counts."""
        timing = self.time(candidate, build, protocol)
        jump = min(JUMP, max(1.0, 2 * self.best_speedup)) if self.best_speedup else JUMP
        if timing.speedup is None or timing.speedup.estimate <= jump:
            return timing
        again = self.time(candidate, build, protocol)
        if again.speedup is None:
            return again
        first, second = timing.speedup.estimate, again.speedup.estimate
        if math.isclose(first, second, rel_tol=JUMP_AGREEMENT):
            return timing
        return min((timing, again), key=lambda t: t.speedup.estimate if t.speedup else math.inf)


def require_memory(gemm: Gemm) -> None:
    """UserError where the shape cannot be checked and timed in the memory that is free."""
    # arena, private copies in fp16 and fp32, baselines' buffers, references in fp64
    need = 30 * (gemm.m * gemm.k + gemm.k * gemm.n) + 60 * gemm.m * gemm.n + WORKSPACE_BYTES
    available = available_memory_bytes()
    if need > available:
        raise UserError(
            f"{gemm} needs about {need / 2**30:.1f} GiB of memory to check and time,"
            f" {available / 2**30:.1f} GiB are free; choose a smaller shape"
        )
