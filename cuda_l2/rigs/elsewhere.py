"""Judges a candidate on another GPU of the machine, in a process that sees that GPU alone."""

import json
import math
import subprocess
import tempfile
from pathlib import Path

from cuda_l2.records import Candidate, Interval, Task
from cuda_l2.rigs._base import Elsewhere
from cuda_l2.system import variables
from cuda_l2.system.paths import CLI

TIMEOUT_S = 600.0
"""Limit of a process that finds its GPU, tunes cuBLASLt, verifies and times once."""


def judge_on(device: str, task: Task, candidate: Candidate, protocol: str, target: str = "cuda") -> Elsewhere:
    """The outcome of `cuda-l2 check` in a process that sees that GPU alone. Takes the machine's lock."""
    name = f"GPU {device}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "candidate"
        file.write_text(candidate.source)
        command = [*CLI, "check", str(file), str(task), "--protocol", protocol]
        try:
            done = subprocess.run(
                [*command, "--target", target, "--json"],
                env=variables.given() | {"CUDA_VISIBLE_DEVICES": device},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            (trial,) = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            return Elsewhere(name, "", "timed-out", f"no answer within {TIMEOUT_S:.0f} s")
        except ValueError:
            said = done.stderr.strip().splitlines()
            return Elsewhere(name, "", "failed", said[-1][:300] if said else f"status {done.returncode}")
    last = trial["timing"] or trial["verdict"] or trial["build"]
    speedup = last.get("speedup")
    if speedup:
        # too few rounds for an interval: infinite bounds, which JSON has not
        low, high = speedup["low"], speedup["high"]
        speedup = Interval(speedup["estimate"], -math.inf if low is None else low, math.inf if high is None else high)
    return Elsewhere(name, trial["machine"], last["status"], last["reason"], speedup)
