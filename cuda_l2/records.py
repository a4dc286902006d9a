"""The nouns of the loop: frozen records that cannot hold nonsense. Standard library only.

Every stage takes records and returns its own: propose -> Candidate, build -> Build,
verify -> Verdict, measure -> Timing; a Trial is all of it for one candidate.
"""

import enum
import hashlib
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from cuda_l2.system.record_json import from_json as from_json
from cuda_l2.system.record_json import to_json as to_json
from cuda_l2.task_records import DTYPE_BYTES as DTYPE_BYTES
from cuda_l2.task_records import SHORT_DTYPES as SHORT_DTYPES
from cuda_l2.task_records import Accumulate as Accumulate
from cuda_l2.task_records import Gemm as Gemm
from cuda_l2.task_records import Layout as Layout
from cuda_l2.task_records import Operation as Operation
from cuda_l2.task_records import Task as Task
from cuda_l2.task_records import Tensor as Tensor


@dataclass(frozen=True)
class Candidate:
    """One kernel's source text, launch contract in its leading comment. From here on nobody asks who wrote it."""

    source: str
    proposer: str = "user"
    schedule: tuple[tuple[str, int], ...] = ()
    family: str = ""  # whose schedule it is

    @cached_property
    def id(self) -> str:
        """Hash of the content, 16 hex digits."""
        return hashlib.sha256(self.source.encode(errors="surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval; infinite bounds where samples are too few to say."""

    estimate: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if math.isnan(self.estimate) or not self.low <= self.estimate <= self.high:
            raise ValueError(f"not an interval: {self.low} <= {self.estimate} <= {self.high}")

    @property
    def relative_halfwidth(self) -> float:
        return (self.high - self.low) / 2 / abs(self.estimate) if self.estimate else math.inf

    def text(self, form: str, unit: str = "") -> str:
        """The estimate, and its bounds where samples were enough, as in 1.02x [1.01, 1.03]."""
        known = math.isfinite(self.low) and math.isfinite(self.high)
        return f"{self.estimate:{form}}{unit}" + (f" [{self.low:{form}}, {self.high:{form}}]" if known else "")


class BuildStatus(enum.StrEnum):
    BUILT = "built"
    REFUSED = "refused"  # the text or the binary breaks a rule of the launch contract
    FAILED = "failed"  # the compiler said no, or every process that was given the candidate died
    TIMED_OUT = "timed-out"


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the assembler says of one CUDA kernel."""

    name: str
    registers: int  # a thread
    spill_bytes: int  # stores and loads together
    stack_bytes: int
    shared_bytes: int  # static
    parameter_bytes: int
    instructions: int  # machine instructions
    tensor_instructions: tuple[str, ...] = ()  # distinct opcodes that use the tensor cores, with their modifiers


@dataclass(frozen=True, slots=True)
class Build:
    """What compiling one candidate gave."""

    candidate_id: str
    status: BuildStatus
    reason: str = ""  # one line; empty when built
    log: str = ""  # the compiler's own words
    artifact: str = ""  # path of the shared library or cubin
    compiler: str = ""
    sandbox: str = ""
    seconds: float = 0.0
    kernels: tuple[KernelFacts, ...] = ()  # of CUDA candidates
    warnings: tuple[str, ...] = ()  # of the assembler

    def __post_init__(self) -> None:
        if (self.status is BuildStatus.BUILT) != bool(self.artifact):
            raise ValueError("a build has an artifact exactly when its status is built")
        if self.status is not BuildStatus.BUILT and not self.reason:
            raise ValueError("a failed build needs a reason")


class VerdictStatus(enum.StrEnum):
    CORRECT = "correct"
    INCORRECT = "incorrect"  # wrong numbers
    IMPRECISE = "imprecise"  # sums in less precision than the task allows
    UNHYGIENIC = "unhygienic"  # wrote where it must not, kept state, changed inputs, not repeatable
    FORBIDDEN = "forbidden"  # tried a system call outside the contract
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a matrix that came out wrong."""

    row: int
    column: int
    expected: float
    found: float
    matrix: str = "C"

    @property
    def place(self) -> str:
        return f"{self.matrix}[{self.row}, {self.column}]"

    def __str__(self) -> str:
        return f"{self.place} is {self.found:g}, expected {self.expected:g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate computes the task, and by which check it failed if not."""

    status: VerdictStatus
    check: str = ""  # the check that failed
    reason: str = ""
    element: Element | None = None
    passed: tuple[str, ...] = ()  # checks that passed before
    rms_error: float = math.nan  # against fp64
    max_error: float = math.nan
    max_allowed: float = math.nan  # largest bound on max_error that decided, of all inputs
    baseline_deviation: float = math.nan  # the paper's bound: largest difference among baselines, decides nothing
    notes: tuple[str, ...] = ()  # what a reader should know besides
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if (self.status is VerdictStatus.CORRECT) == bool(self.reason):
            raise ValueError("a verdict has a reason exactly when it is not correct")


class TimingStatus(enum.StrEnum):
    MEASURED = "measured"
    WRONG_OUTPUT = "wrong-output"  # a timed launch did not produce its own result
    FORBIDDEN = "forbidden"  # tried what the contract forbids
    UNHYGIENIC = "unhygienic"  # touched what is not its own
    CRASHED = "crashed"
    TIMED_OUT = "timed-out"
    UNSTABLE = "unstable"  # a jump in reward that a second measurement does not confirm
    SUSPECT = "suspect"  # a jump in reward that a checker model calls a cheat
    BUSY = "busy"  # other work had the cores all the time: nothing about the candidate


FOUND_WRONG = ("incorrect", "imprecise", "unhygienic", "forbidden", "crashed", "wrong-output")
"""A trial's status where the kernel is at fault; one that was timed out may have met a busy machine."""


class Trust(enum.StrEnum):
    """How far a trial can be believed, by what its candidate is."""

    A = "A"  # device code, or one C function, under the launch contract
    B = "B"  # host code that shares a process, judged from outside: no reward, no archive, no library


@dataclass(frozen=True, slots=True)
class Arm:
    """One contestant of a timing run."""

    name: str
    latency_us: Interval  # median of the rounds
    rounds: int
    launches: int  # launches timed in all


@dataclass(frozen=True, slots=True)
class BusyCores:
    """Cores that other work kept busy on average, of those that this process may use."""

    cores: float
    of: int

    @property
    def share(self) -> float:
        """The part of all these cores that was busy."""
        return self.cores / self.of


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a timing run met besides times. A field is None, or empty, where it was not measured."""

    sm_mhz: float | None = None  # medians over all arms
    sm_mhz_range: tuple[int, int] | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    limited_by: tuple[str, ...] | None = None  # what held the clock down
    clock_spread_of_arms: float | None = None  # how far apart two arms' SM clocks were, relative to the lower
    drifted: str = ""  # why the run should be repeated, in one line
    empty_us: dict[str, float] = field(default_factory=dict)  # an empty kernel's launch, by process
    host_call_to_done_us: dict[str, float] = field(default_factory=dict)  # by arm, of a single launch
    evicted_bytes: int | None = None  # written before every launch, so that caches hold nothing of it
    other_work: BusyCores | None = None
    waited_s: float | None = None  # for other programs to leave the cores alone
    pairs: int | None = None  # of processes, torch's and the candidate's, where intervals are over several of them
    left_out: dict[str, str] = field(default_factory=dict)  # baselines that cannot be timed, with reasons
    torch_threads: str = ""  # what they do between parallel regions: spin or sleep
    clocks: str = ""  # which clock times what, where arms differ
    conversation_us: dict[str, float] = field(default_factory=dict)  # taken off a baseline's samples, by its process

    STORED_AS: ClassVar = {"left_out": "left out", "torch_threads": "torch threads"}
    SPARSE: ClassVar = True


@dataclass(frozen=True, slots=True)
class Timing:
    """Interleaved times of the candidate and the baselines in one run."""

    status: TimingStatus
    protocol: str
    reason: str = ""
    candidate: Arm | None = None
    baselines: tuple[Arm, ...] = ()
    reference: str = ""  # the strongest baseline of this run
    speedup: Interval | None = None  # t_reference / t_candidate over paired rounds
    speedups: tuple[tuple[str, Interval], ...] = ()  # the same against every baseline
    among: tuple[tuple[str, str, Interval], ...] = ()  # t_first / t_second of two baselines over paired rounds
    max_difference: float = math.nan  # largest |fp32 reference - output| seen in timed outputs
    empty_call_us: float = math.nan  # the protocol's own cost of a call that does nothing
    seconds: float = 0.0
    conditions: Conditions = Conditions()

    def __post_init__(self) -> None:
        measured = self.status is TimingStatus.MEASURED
        if measured != (self.candidate is not None and self.speedup is not None):
            raise ValueError("a timing has figures exactly when it was measured")
        if measured == bool(self.reason):
            raise ValueError("a timing has a reason exactly when it was not measured")


class ReviewStatus(enum.StrEnum):
    CONFIRMED = "confirmed"  # measured again within 10 %
    LOWERED = "lowered"  # it was not: the slowest of three measurements counts
    UNSTABLE = "unstable"  # on fresh inputs, or a second device, it has other speeds than noise explains
    WRONG = "wrong"  # not correct on fresh inputs, or not on a second device
    SUSPECT = "suspect"  # a checker model calls it a cheat


@dataclass(frozen=True, slots=True)
class Review:
    """What a second look at a jump in reward found."""

    status: ReviewStatus
    jump: str  # what made it one
    speedups: tuple[Interval, ...]  # as first measured, then on fresh inputs
    elsewhere: str = ""  # what a second device found; empty where there is none
    checker: str = ""  # the model that was asked for its opinion
    opinion: str = ""  # in its words, or why there is none
    reason: str = ""  # why the candidate does not count; empty where it does

    def __post_init__(self) -> None:
        if self.counts == bool(self.reason):
            raise ValueError("a review has a reason exactly when the candidate does not count")

    @property
    def counts(self) -> bool:
        """Whether the candidate's timing stands."""
        return self.status in (ReviewStatus.CONFIRMED, ReviewStatus.LOWERED)


@dataclass(frozen=True)
class Trial:
    """What happened to one candidate on one task on one machine under one protocol."""

    task: Task
    candidate: Candidate
    machine: str  # the target's identity: trials compare only within one
    protocol: str
    build: Build
    verdict: Verdict | None = None
    timing: Timing | None = None
    reward: float = math.nan
    environment: dict[str, Any] = field(default_factory=dict)
    created: str = ""  # UTC, ISO 8601
    profile: dict[str, float] = field(default_factory=dict)  # of a profiler, on request; measure/profile.py names them
    review: Review | None = None  # of a jump in reward
    trust: Trust = Trust.A

    def __post_init__(self) -> None:
        if self.verdict and self.build.status is not BuildStatus.BUILT:
            raise ValueError("a candidate that was not built cannot have a verdict")
        if self.timing and (self.verdict is None or self.verdict.status is not VerdictStatus.CORRECT):
            raise ValueError("a candidate that is not correct cannot have a timing")
        if self.trust is Trust.B and not math.isnan(self.reward):
            raise ValueError("a trial of trust level B cannot have a reward")

    @property
    def speedup(self) -> float:
        """t_reference / t_candidate, 0 where there is none."""
        return self.timing.speedup.estimate if self.timing and self.timing.speedup else 0.0

    @property
    def reward_interval(self) -> Interval | None:
        """The reward with an interval from that of its speedup; None where it was not timed.

        Wider by half, so that those of eight equal kernels overlap pair by pair in 99 of 100 batches.
        """
        if math.isnan(self.reward) or not (self.timing and self.timing.speedup):
            return None
        ratio, wider = self.timing.speedup, 1.5
        below, above = wider * (ratio.estimate - ratio.low), wider * (ratio.high - ratio.estimate)
        return Interval(self.reward, self.reward - below, self.reward + above)

    @property
    def status(self) -> str:
        """The last stage's status: what became of it, in one word."""
        for record in (self.timing, self.verdict):
            if record is not None:
                return str(record.status)
        return str(self.build.status)

    @property
    def reason(self) -> str:
        """Why it failed, one line; empty when it did not."""
        for record in (self.timing, self.verdict):
            if record is not None:
                return record.reason
        return self.build.reason
