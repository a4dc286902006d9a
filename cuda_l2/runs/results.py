"""What a benchmark over many shapes gave: one line a shape and protocol, from which an interrupted run goes on."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cuda_l2.records import Gemm, Interval, Layout, Timing, Verdict
from cuda_l2.runs.run_file import RunFile
from cuda_l2.system import lines
from cuda_l2.system.errors import UserError

RESULTS, SUMMARY = "results.jsonl", "summary.md"
TABLES = CSV, PARQUET, ENVIRONMENT = "table.csv", "table.parquet", "environment.json"
MEASURED = "measured"


@dataclass(frozen=True)
class KernelFigures:
    """One of several kernels of a shape that were timed in one run."""

    layout: Layout  # in which it reads B
    dependent: bool  # launched as a programmatic dependent of the launch before
    kernel: str  # what was compiled, by hash
    family: str
    schedule: tuple[tuple[str, int], ...]
    selected_us: float  # its time in the run that chose it
    latency_us: Interval
    speedups: tuple[tuple[str, Interval], ...]  # over every baseline of the run
    max_difference: float = math.nan  # largest |fp32 reference - output| seen in its timed outputs


@dataclass(frozen=True)
class Measurement:
    """What became of one shape under one protocol."""

    gemm: Gemm
    protocol: str
    status: str  # 'measured', or the last stage's status, 'skipped', 'failed', 'no-kernel'
    reason: str = ""  # one line; empty when measured
    timing: Timing | None = None  # where there is no kernel its `candidate` is the usual strongest baseline
    kernel: str = ""  # the candidate's id; empty where only baselines were timed
    proposer: str = ""
    family: str = ""
    schedule: tuple[tuple[str, int], ...] = ()
    verdict: Verdict | None = None
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)  # what each baseline ran, as the rig describes it
    kernels: tuple[KernelFigures, ...] = ()  # from a library: all that were timed; `timing` is the first one's
    created: str = ""  # UTC, ISO 8601
    seconds: float = 0.0  # wall time, search included
    GONE: ClassVar = ("falls_back",)

    def __post_init__(self) -> None:
        if (self.status == MEASURED) != (self.timing is not None and self.timing.speedup is not None):
            raise ValueError("a measurement has figures exactly when it was measured")
        if (self.status == MEASURED) == bool(self.reason):
            raise ValueError("a measurement has a reason exactly when it has no figures")

    @property
    def key(self) -> tuple[Gemm, str]:
        return self.gemm, self.protocol


class ResultsFile(RunFile[Measurement]):
    """The measurements of a run, the last of every shape and protocol. A context manager."""

    record = Measurement

    def find(self, gemm: Gemm, protocol: str) -> Measurement | None:
        return self._found.get((gemm, protocol))

    def take_over(self, path: Path) -> None:
        """Append what another run measured that is not measured here. UserError where it does not compare."""
        if not path.exists():
            raise UserError(f"{path} is not there: give the folder of another run")
        with ResultsFile(path, self.header, self._warn) as other:
            pairs = [(m, self.find(m.gemm, m.protocol)) for m in other.records]
        for measurement, ours in pairs:
            if not ours or (ours.status != MEASURED and measurement.status == MEASURED):
                self.append(measurement)


def set_aside(folder: Path) -> None:
    """Rename what an earlier run left, all with the same number: results.jsonl becomes results-1.jsonl."""
    lines.set_aside(folder, RESULTS, SUMMARY, *TABLES)
