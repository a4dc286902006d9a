"""Times by script in place of the clock's, for every timing on a CPU in this process.

All launches are made and all outputs are checked as ever; only the seconds a sample took are the script's, and limits of
time are guards against hangs. So no test depends on how busy the machine is.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_l2.build import cpu as cpu_build
from cuda_l2.build import cuda_compiler
from cuda_l2.machine.cpu import target, worker
from cuda_l2.measure.cpu_rounds import _CpuRounds
from cuda_l2.measure.rounds import CANDIDATE
from cuda_l2.records import Candidate
from cuda_l2.rigs.cpu import CpuBench
from cuda_l2.verify import _cpu as cpu_session

BASELINE_S = 3.0e-5
"""So short that a round has all the launches it may have."""
OTHERS = 1.1
"""Every further baseline takes this many times the one before it."""
SLOWEST, FASTEST = 2.0, 1.2
"""Candidates' seconds lie between these shares of a baseline's, by their text: no jump, no two alike."""
PEAK = Path(target.__file__).with_name("peak.c")
REAL = {"sample": _CpuRounds.sample, "most": _CpuRounds.most}
LIMITS = (
    *((cpu_build, "TIMEOUT_S"), (cuda_compiler, "TIMEOUT_S"), (cpu_session, "LAUNCH_TIMEOUT_S")),
    *((worker, "START_TIMEOUT_S"), (worker, "STOP_TIMEOUT_S")),
)
PATIENCE = 10.0
"""These limits are this many times the usual ones: other work may take the cores."""
FEW = 8
"""Launches of a sample, but for tests that ask for as many as lie side by side."""
_timed = {"now": CANDIDATE}
seconds_by_source: dict[str, float] = {}
"""Seconds of a launch of candidates that a test has scripted itself, by their text without space around it."""


def seconds_of(source: str) -> float:
    """Seconds of a launch of a candidate."""
    share = int(hashlib.sha256(source.encode(errors="replace")).hexdigest()[:8], 16) / 2**32
    return seconds_by_source.get(source.strip(), BASELINE_S * (FASTEST + (SLOWEST - FASTEST) * share))


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Let the script decide. replace: sets an attribute, as `setattr` does."""

    def sample(rounds: _CpuRounds, name: str, count: int, warm: bool = True) -> float:
        REAL["sample"](rounds, name, count, warm)
        if name == CANDIDATE:
            return seconds_of(_timed["now"])
        return BASELINE_S * OTHERS ** list(rounds.contestants).index(name)

    def ceilings(threads: int) -> tuple[float, float]:
        target.compiled(PEAK, "-O3", target.NATIVE, "-pthread")
        return 100.0 * threads, 20.0

    def remembering(time: Any) -> Any:
        def timed(bench: Any, candidate: Candidate, *arguments: Any, **named: Any) -> Any:
            _timed["now"] = candidate.source
            return time(bench, candidate, *arguments, **named)

        return timed

    def few(rounds: _CpuRounds) -> int:
        return min(REAL["most"].fget(rounds), FEW)

    for module, name in LIMITS:
        replace(module, name, PATIENCE * getattr(module, name))
    replace(_CpuRounds, "sample", sample)
    replace(_CpuRounds, "most", property(few))
    replace(target, "_ceilings", ceilings)
    replace(CpuBench, "time", remembering(CpuBench.time))
