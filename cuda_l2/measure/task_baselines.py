"""What PyTorch itself needs for a task of our own on the CPU: eager and torch.compile, timed interleaved.

All of it runs in a process of its own, as the baselines of matrix products do: OpenMP's threads spin there between
calls, which commands forbid their own process, and each has a core of its own. Candidates do not meet these arms yet.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from cuda_l2 import paths
from cuda_l2.errors import MachineError, UserError
from cuda_l2.measure.cpu_rounds import LAST_LEVEL_BYTES
from cuda_l2.measure.protocols import CPU_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import Rounds
from cuda_l2.records import Operation, Timing, from_json, to_json
from cuda_l2.targets.cpu import detect
from cuda_l2.tasks._base import Tensors, definition
from cuda_l2.tasks.tolerance import Bounds, bounds

EAGER, COMPILED = "torch eager", "torch.compile"
SET_BYTES = 32 << 20
"""Inputs of all launches of a round together take at most this, one launch more."""
MAX_SETS = 64
TIMEOUT_S = 600.0

Arm = Callable[..., tuple[torch.Tensor, ...]]


def time_baselines(task: Operation, protocol: str = "offline", seed: int = 0) -> Timing:
    """Eager and torch.compile; the latter stands where a candidate would, so the speedup is its own over eager.

    An arm that cannot run, or whose results are wrong, is left out; `conditions` says why. MachineError where the
    process ends.
    """
    if protocol not in CPU_PROTOCOLS:
        raise UserError(f"there is no protocol {protocol!r}; choose from {', '.join(CPU_PROTOCOLS)}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment |= {"OMP_PROC_BIND": "close", "TORCHINDUCTOR_CACHE_DIR": str(paths.cache_dir() / "inductor")}
    arguments = [sys.executable, "-P", "-m", __name__, str(task), protocol, str(seed), str(detect().cores)]
    try:
        done = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise MachineError(f"timing the baselines of {task} took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MachineError(f"timing the baselines of {task} ended with status {done.returncode}: {last}")
    return from_json(Timing, done.stdout.splitlines()[-1])


class TaskRounds(Rounds):
    """Arms in this process, each launch on inputs of its own; the last result of every sample is checked."""

    def __init__(
        self,
        arms: Mapping[str, Arm],
        sets: Sequence[Tensors],
        expected: Sequence[Sequence[Bounds]],
        protocol: Protocol,
        rng: np.random.Generator,
    ) -> None:
        super().__init__(list(arms), protocol, rng, subject=COMPILED if COMPILED in arms else EAGER)
        self.functions, self.sets, self.expected = arms, sets, expected
        self.evicted = (
            np.zeros(2 * (max(detect().cache_bytes) or LAST_LEVEL_BYTES), dtype=np.uint8) if protocol.evict else None
        )

    @property
    def most(self) -> int:
        return len(self.sets)

    def sample(self, name: str, count: int, warm: bool = True) -> float:
        function = self.functions[name]
        if warm:
            function(**self.sets[0])
        order = [int(index) for index in self.rng.permutation(len(self.sets))[:count]]
        if self.evicted is not None:
            self.evicted += 1
        if self.protocol.gap_s:
            time.sleep(float(self.rng.exponential(self.protocol.gap_s)))
        start = time.perf_counter()
        for index in order:
            results = function(**self.sets[index])
        seconds = (time.perf_counter() - start) / count
        if self.check_elements:
            _require_right(name, results, self.expected[order[-1]])
        return seconds


class Wrong(Exception):
    """A baseline's result is not within the task's tolerance."""


def _require_right(name: str, results: Sequence[torch.Tensor], expected: Sequence[Bounds]) -> None:
    for result, limit in zip(results, expected, strict=True):
        violation = limit.violation(result)
        if violation:
            raise Wrong(f"{name} {violation}")


def _time_here(task: Operation, protocol: Protocol, seed: int) -> Timing:
    start = time.perf_counter()
    rng = np.random.default_rng(seed)
    known = definition(task.name)
    function = known.bind(dict(task.sizes))
    count = max(1, min(MAX_SETS, SET_BYTES // max(1, task.bytes)))
    sets = [known.draw(task, seed + index) for index in range(count)]
    expected = [bounds(function, tensors) for tensors in sets]
    arms: dict[str, Arm] = {EAGER: function}
    left_out = ""
    compiled: Arm = torch.compile(function, dynamic=False)
    try:
        _require_right(COMPILED, compiled(**sets[0]), expected[0])
        arms[COMPILED] = compiled
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways
        left_out = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]
    run = TaskRounds(arms, sets, expected, protocol, rng)
    run.run()
    timing = run.timing(float("nan"), time.perf_counter() - start)
    timing.conditions.update({"left out": {COMPILED: left_out}} if left_out else {}, launches_with_own_inputs=count)
    return timing


def _main() -> None:
    """Arguments: task, protocol, seed, threads. Writes the timing as JSON."""
    text, protocol, seed, threads = sys.argv[1:]
    from cuda_l2 import tasks  # noqa: PLC0415

    torch.set_num_threads(int(threads))
    task = tasks.parse(text)
    assert isinstance(task, Operation)
    with torch.no_grad():
        print(to_json(_time_here(task, CPU_PROTOCOLS[protocol], int(seed))))


if __name__ == "__main__":
    _main()
