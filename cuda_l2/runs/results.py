"""What a run over many items stores, and the records of a benchmark over many shapes.

A run has one append-only file of JSON lines, from which an interrupted one goes on. The first line is the header: the
machine and the settings, without which figures do not compare. Every other line is one record, written whole or not at
all; the last one of a key counts.
"""

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Generic, TypeVar
from typing import Protocol as Interface

from cuda_l2.machine.cpu.target import PEAK_IN_QUIET
from cuda_l2.records import Gemm, Interval, Layout, Timing, TimingStatus, Verdict, from_json, to_json
from cuda_l2.system import lines
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.lines import LinesFile


class Keyed(Interface):
    """A frozen dataclass that a line holds."""

    @property
    def key(self) -> Hashable:
        """The subject of the record: a later one of the same key takes its place."""


R = TypeVar("R", bound=Keyed)


@dataclass(frozen=True)
class Header:
    """What all lines of a file share."""

    machine: str
    environment: dict[str, Any]  # floats in it are measurements, which differ from run to run, as does PEAK_IN_QUIET
    settings: dict[str, Any]
    created: str = ""  # UTC, ISO 8601
    kind: str = "cuda-l2 results"  # of records
    version: int = 1

    def difference(self, other: "Header") -> str:
        """In what the other's figures would not compare with these, as 'driver 580.1, not 570.2'; empty if they do."""
        for ours, theirs in (
            ({"machine": self.machine}, {"machine": other.machine}),
            (_fixed(self.environment), _fixed(other.environment)),
            (self.settings, other.settings),
        ):
            for name in [*ours, *(name for name in theirs if name not in ours)]:
                if ours.get(name) != theirs.get(name):
                    return f"{name.replace('_', ' ')} {ours.get(name)}, not {theirs.get(name)}"
        return ""


class RunFile(Closing, Generic[R]):
    """The file, open for one run alone. A context manager."""

    record: type[R]
    """What its lines hold; a subclass says."""
    advice = "choose another place with --out, or --fresh to move it aside and begin anew"
    """What to do where the file cannot be gone on with."""

    def __init__(self, path: Path, header: Header, warn: Callable[[str], None] | None = None) -> None:
        """Open the file or begin it; UserError where it is another machine's, other settings', or in use."""
        self.path, self.header = path, from_json(Header, to_json(header))  # as it will be read
        self._warn = warn or (lambda text: print(f"cuda-l2: {text}", file=sys.stderr))
        self._found: dict[Hashable, R] = {}
        self._file = LinesFile(path, self._adopt, self._warn)
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    @property
    def records(self) -> list[R]:
        """The last of every key."""
        return list(self._found.values())

    def append(self, *records: R) -> None:
        """Store some; they are there after a kill once this returns; an interrupt waits until file and memory agree."""
        with _uninterrupted():
            self._file.append(*map(to_json, records))
            self._found |= {record.key: record for record in records}

    def close(self) -> None:
        self._file.close()

    def _read(self) -> None:
        if not self._file.lines:
            self._file.append(to_json(self.header))
        for number, line in enumerate(self._file.lines[1:], 2):
            try:
                record = from_json(self.record, line.decode())
            except (ValueError, TypeError, KeyError, AttributeError):
                self._warn(f"line {number} of {self.path} is damaged and left out: what it held is measured again")
                continue
            self._found.pop(record.key, None)
            self._found[record.key] = record

    def _adopt(self, line: bytes) -> None:
        """Take the header that is there, if this run's figures belong under it."""
        advice, fields, ours = self.advice, lines.parsed(line), self.header
        if not fields or fields.get("kind") != ours.kind:
            raise UserError(f"{self.path} does not begin as a file of {ours.kind}: {advice}")
        if fields.get("version") != ours.version:
            raise UserError(f"{self.path} has version {fields.get('version')}, not {ours.version}: {advice}")
        try:
            found = from_json(Header, line.decode())
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"the first line of {self.path} is damaged: {advice}") from None
        difference = found.difference(ours)
        if difference:
            raise UserError(f"{self.path} was measured with {difference}: {advice}")
        self.header = found


def _fixed(environment: dict[str, Any]) -> dict[str, Any]:
    """What does not vary from one run on a machine to the next."""
    fixed = {name: value for name, value in environment.items() if not isinstance(value, float)}
    fixed.pop(PEAK_IN_QUIET, None)
    return fixed


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until this ends. A mask would not do: another thread takes the signal, Python acts in this one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python interrupts the main thread alone
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting and callable(before):
            before(*waiting[0])


RESULTS, SUMMARY = "results.jsonl", "summary.md"
TABLES = CSV, PARQUET, ENVIRONMENT = "table.csv", "table.parquet", "environment.json"
MEASURED = "measured"
FAILED, SKIPPED, NO_KERNEL = "failed", "skipped", "no-kernel"
TRIED_AGAIN = (FAILED, SKIPPED, NO_KERNEL, str(TimingStatus.BUSY))
"""By the next run; other outcomes are a kernel's, and a wrong result once is a wrong kernel."""


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

    def pending(self, gemms: Sequence[Gemm], protocols: Sequence[str]) -> list[Gemm]:
        """Shapes of which something is not measured yet; what the machine failed at is tried again."""
        return [gemm for gemm in gemms if self.missing(gemm, protocols)]

    def missing(self, gemm: Gemm, protocols: Sequence[str]) -> list[str]:
        """Those of the protocols under which a shape is to be measured, or measured again."""
        found = {name: self.find(gemm, name) for name in protocols}
        return [name for name, measurement in found.items() if not measurement or measurement.status in TRIED_AGAIN]

    def find(self, gemm: Gemm, protocol: str) -> Measurement | None:
        return self._found.get((gemm, protocol))

    def take_over(self, path: Path) -> None:
        """Append what another run measured that is not measured here. UserError where it does not compare."""
        if not path.exists():
            raise UserError(f"{path} is not there: give the folder of another run")
        with ResultsFile(path, self.header, self._warn) as other:
            pairs = [(m, self.find(m.gemm, m.protocol)) for m in other.records]
        self.append(
            *(
                measurement
                for measurement, ours in pairs
                if not ours or (ours.status in TRIED_AGAIN and measurement.status not in TRIED_AGAIN)
            )
        )


def read_header(path: Path) -> Header | None:
    """The header of a run's file; None where a run was killed before it had one. UserError where it is damaged."""
    with path.open("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return None
    try:
        return from_json(Header, line.decode())
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"the first line of {path} is damaged: move the file elsewhere to measure anew") from None


def set_aside(folder: Path) -> None:
    """Rename what an earlier run left, all with the same number: results.jsonl becomes results-1.jsonl."""
    lines.set_aside(folder, RESULTS, SUMMARY, *TABLES)
