"""Times by script in place of the clock's, for every timing on a CPU in this process.

All launches are made and all outputs are checked as ever; only the seconds a sample took are the script's. So no test
depends on how busy the machine is.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from cuda_l2.machine.cpu import target
from cuda_l2.machine.cpu.ceilings import PROGRAM
from cuda_l2.measure import cpu_rounds
from cuda_l2.measure.cpu_rounds import _CpuRounds
from cuda_l2.measure.rounds import Kernel
from cuda_l2.records import Timing
from cuda_l2.report import live
from cuda_l2.rigs import cpu as cpu_rig
from cuda_l2.rigs.cpu import CpuBench
from cuda_l2.system.native import compiled
from cuda_l2.verify import _cpu

BASELINE_S = 3.0e-5
"""So short that a round has all the launches it may have."""
OTHERS = 1.1
"""Every further baseline takes this many times the one before it."""
SLOWEST, FASTEST = 2.0, 1.2
"""Candidates' seconds lie between these shares of a baseline's, by their text: no jump, no two alike."""
REAL: dict[str, Any] = {
    "sample": _CpuRounds.sample,
    "most": _CpuRounds.most,
    "time_kernels": CpuBench.time_kernels,
}
NEVER_S = 1e6
"""No line of progress comes because time goes by: how long a command took is not for tests to see."""
FEW = 8
"""Launches of a sample, but for tests that ask for as many as lie side by side."""
_timed: dict[str, str] = {}
"""Sources of the kernels that are timed now, by name."""
seconds_by_source: dict[str, float] = {}
"""Seconds of a launch of candidates that a test has scripted itself, by their text without space around it."""


class AlwaysQuiet:
    """Whether other work has the cores is no business of tests."""

    waited_s = 0.0

    def __init__(self, *_: object) -> None: ...
    def begin(self) -> None: ...
    def sampled(self, *_: float) -> None: ...
    def wait(self, why: str) -> None: ...
    def disturbed(self) -> str:
        return ""


def seconds_of(source: str) -> float:
    """Seconds of a launch of a candidate."""
    share = int(hashlib.sha256(source.encode(errors="replace")).hexdigest()[:8], 16) / 2**32
    return seconds_by_source.get(source.strip(), BASELINE_S * (FASTEST + (SLOWEST - FASTEST) * share))


def install(replace: Callable[[Any, str, Any], None]) -> None:
    """Let the script decide. replace: sets an attribute, as `setattr` does."""

    def sample(rounds: _CpuRounds, name: str, count: int, warm: bool = True) -> float:
        REAL["sample"](rounds, name, count, warm)
        if name in rounds.kernels:
            return seconds_of(_timed[name])
        return BASELINE_S * OTHERS ** list(rounds.contestants).index(name)

    def ceilings(threads: int, machine: str, flags: str) -> tuple[float, float]:
        compiled(PROGRAM, "-O3", target.NATIVE, "-pthread")
        return 100.0 * threads, 20.0

    def time_kernels(bench: CpuBench, kernels: Mapping[str, Kernel], *terms: Any) -> dict[str, Timing]:
        _timed.clear()
        _timed.update({name: kernel.candidate.source for name, kernel in kernels.items()})
        found: dict[str, Timing] = REAL["time_kernels"](bench, kernels, *terms)
        return found

    def few(rounds: _CpuRounds) -> int:
        return min(REAL["most"].fget(rounds), FEW)

    replace(live, "TICK_S", NEVER_S)
    replace(cpu_rounds, "Quiet", AlwaysQuiet)
    replace(cpu_rig, "PAIRS", 1)  # a process of torch's takes a second to start; tests of several ask for them
    replace(cpu_rounds, "MOST_EVICTED", 1 << 20)  # scripted seconds do not depend on what the caches hold
    replace(_cpu, "ROW_S", math.inf)  # in every slot, however long a launch takes here
    replace(_CpuRounds, "sample", sample)
    replace(_CpuRounds, "most", property(few))
    replace(target, "_ceilings", ceilings)
    replace(CpuBench, "time_kernels", time_kernels)
