"""One measurement of a world: the outcome of one schedule on one task as a flat record, and the stages' records."""

import math
from dataclasses import dataclass

from cuda_l2.records import (
    Arm,
    Build,
    BuildStatus,
    Interval,
    KernelFacts,
    Timing,
    TimingStatus,
    Trial,
    Verdict,
    VerdictStatus,
)

ARTIFACT = "recorded"
"""The artifact of a build that a world gives: there is none to run."""
BUILD, VERIFY, MEASURE = "build", "verify", "measure"
"""Stages, by which a status is told from the same word of another."""


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule's outcome on one task. Figures are NaN, or 0, where the last stage gave none."""

    task: str
    family: str
    schedule: tuple[int, ...]  # values in the order of the family's choices
    candidate: str  # id of the source that was measured
    tokens: int  # of that source, as equation 3 counts them
    stage: str  # the last one that was reached
    status: str  # of that stage
    reason: str = ""
    check: str = ""  # that failed
    latency_us: float = math.nan
    latency_low: float = math.nan
    latency_high: float = math.nan
    rounds: int = 0
    launches: int = 0
    reference: str = ""  # the strongest baseline of the run
    reference_us: float = math.nan
    speedup: float = math.nan
    speedup_low: float = math.nan
    speedup_high: float = math.nan
    max_difference: float = math.nan
    max_error: float = math.nan
    build_s: float = 0.0
    registers: int = 0  # the most of a kernel's thread
    spill_bytes: int = 0
    shared_bytes: int = 0  # static
    instructions: int = 0
    created: str = ""

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return self.task, self.family, self.schedule

    @property
    def measured(self) -> bool:
        return self.stage == MEASURE and self.status == TimingStatus.MEASURED

    @property
    def build(self) -> Build:
        if self.stage == BUILD:
            return Build(self.candidate, BuildStatus(self.status), self.reason, seconds=self.build_s)
        facts = KernelFacts("", self.registers, self.spill_bytes, 0, self.shared_bytes, 0, self.instructions)
        kernels = (facts,) if self.registers else ()
        return Build(self.candidate, BuildStatus.BUILT, artifact=ARTIFACT, seconds=self.build_s, kernels=kernels)

    @property
    def verdict(self) -> Verdict | None:
        """None where it was not built."""
        if self.stage == BUILD:
            return None
        if self.stage == VERIFY:
            return Verdict(VerdictStatus(self.status), self.check, self.reason, max_error=self.max_error)
        return Verdict(VerdictStatus.CORRECT, max_error=self.max_error)

    def timing(self, protocol: str) -> Timing | None:
        """Its times under the name of a protocol; None where it is not correct."""
        if self.stage != MEASURE:
            return None
        status = TimingStatus(self.status)
        if status is not TimingStatus.MEASURED:
            return Timing(status, protocol, self.reason)
        latency = Interval(self.latency_us, self.latency_low, self.latency_high)
        reference = Interval(self.reference_us, self.reference_us, self.reference_us)
        speedup = Interval(self.speedup, self.speedup_low, self.speedup_high)
        return Timing(
            status,
            protocol,
            candidate=Arm("candidate", latency, self.rounds, self.launches),
            baselines=(Arm(self.reference, reference, self.rounds, self.launches),),
            reference=self.reference,
            speedup=speedup,
            speedups=((self.reference, speedup),),
            max_difference=self.max_difference,
        )


def row_of(trial: Trial, tokens: int) -> Row:
    """The row of a trial whose candidate is a family's schedule. tokens: of its source."""
    build, verdict, timing = trial.build, trial.verdict, trial.timing
    stage = MEASURE if timing else VERIFY if verdict else BUILD
    figures: dict[str, float | str] = {}
    if timing and timing.candidate and timing.speedup:
        latency, speedup = timing.candidate.latency_us, timing.speedup
        strongest = next((arm for arm in timing.baselines if arm.name == timing.reference), timing.baselines[0])
        figures = {
            **{"latency_us": latency.estimate, "latency_low": latency.low, "latency_high": latency.high},
            **{"rounds": timing.candidate.rounds, "launches": timing.candidate.launches},
            **{"reference": timing.reference, "reference_us": strongest.latency_us.estimate},
            **{"speedup": speedup.estimate, "speedup_low": speedup.low, "speedup_high": speedup.high},
            "max_difference": timing.max_difference,
        }
    kernels = build.kernels
    return Row(
        task=str(trial.task),
        family=trial.candidate.family,
        schedule=tuple(value for _, value in trial.candidate.schedule),
        candidate=trial.candidate.id,
        tokens=tokens,
        stage=stage,
        status=trial.status,
        reason=trial.reason,
        check=verdict.check if verdict else "",
        max_error=verdict.max_error if verdict else math.nan,
        build_s=build.seconds,
        registers=max((kernel.registers for kernel in kernels), default=0),
        spill_bytes=sum(kernel.spill_bytes for kernel in kernels),
        shared_bytes=max((kernel.shared_bytes for kernel in kernels), default=0),
        instructions=sum(kernel.instructions for kernel in kernels),
        created=trial.created,
        **figures,  # type: ignore[arg-type]
    )
