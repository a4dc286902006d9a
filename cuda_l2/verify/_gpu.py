"""What sessions on a GPU do alike, whatever the candidate computes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.machine.cuda import sanitizer
from cuda_l2.machine.cuda.alone import Job
from cuda_l2.machine.cuda.device_arena import DeviceArena, Place
from cuda_l2.machine.cuda.segments import Segments
from cuda_l2.machine.cuda.worker import CudaWorkers
from cuda_l2.records import Build, BuildStatus, Candidate, VerdictStatus
from cuda_l2.verify._base import CheckFailed

LAUNCH_TIMEOUT_S = 2.0
PRODUCER_NS = 40_000
BESIDE_NS = 300_000
BACK_TO_BACK = 8
STRESS_S = 0.02
"""What delays may add to a launch."""
SANITIZER_TIMEOUT_S = 120.0
StressBuilds = Callable[[Candidate, Sequence[int], bool], Sequence[Build]]
"""Builds of a candidate with delays, one a seed; whether delays may differ from pass to pass, for shared memory."""
Sanitize = Callable[[sanitizer.Tool, Job, float], str]
"""What a tool of the sanitizer finds in a job within so many seconds, in one line; empty where nothing."""


@dataclass(frozen=True)
class Facilities:
    """What the sessions of one GPU share.

    patience: time limits are so many times the usual ones, where others have the GPU too.
    """

    workers: CudaWorkers
    sms: int
    stress_builds: StressBuilds
    patience: float = 1.0
    sanitize: Sanitize = sanitizer.findings


def delayed(stress_builds: Callable[[bool], Sequence[Build]], load: Callable[[Build], None]) -> list[Build]:
    """Builds with delays that can be launched, those whose delays differ from pass to pass if they can; else none."""
    for counted in (True, False):
        builds = stress_builds(counted)
        if all(build.status is BuildStatus.BUILT for build in builds):
            try:
                load(builds[0])
                return list(builds)
            except Fault as fault:
                if fault.status is not VerdictStatus.FORBIDDEN:
                    raise
    return []


class LoadedCandidate:
    """One candidate loaded in a worker. What sets `plan` and `places` binds it to memory with `use`."""

    plan: Plan
    places: dict[str, Place]

    def __init__(self, candidate: Candidate, build: Build, arena: DeviceArena, facilities: Facilities) -> None:
        self.candidate, self.build, self.sms = candidate, build, facilities.sms
        self._facilities, self._memory = facilities, arena
        self._segments = Segments(facilities.workers.helpers)
        self.worker = facilities.workers.get(arena)

    def use(self, build: Build) -> None:
        """Launch this build of the candidate from now on."""
        self.worker.load(Path(build.artifact), self.plan, [self.places])

    def limit_s(self, work_s: float) -> float:
        """The time limit of launches that may take so long."""
        return self._facilities.patience * (LAUNCH_TIMEOUT_S + work_s)

    def require_workspace(self, plan: Plan, where: str = "") -> None:
        """CheckFailed where the plan takes more workspace than there is. where: for which sizes, for the reason."""
        most = self._memory.workspace_bytes
        if plan.workspace_bytes > most:
            reason = f"asks for {plan.workspace_bytes} bytes of workspace{where}; at most {most >> 20} MiB"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)

    def sanitizes(self) -> bool:
        """Whether compute-sanitizer works on this machine; UserError where it is not installed.

        Who else runs it for this session has made sure.
        """
        return self._facilities.sanitize is not sanitizer.findings or sanitizer.works()

    def found_by(self, tool: sanitizer.Tool, job: Job) -> str:
        """What a tool of the sanitizer finds in a job, in one line; empty where nothing."""
        return self._facilities.sanitize(tool, job, self._facilities.patience * SANITIZER_TIMEOUT_S)

    def stressed(
        self, fill: Callable[[], None], seeds: Sequence[int], count: int, outputs: Sequence[Any], work_s: float, ns: int
    ) -> Iterator[int]:
        """Launches of builds with delays, one build a seed, beside load.

        Yields how many records hold the outputs of a launch each; at the end of a seed 0, and then the outputs are
        those of several launches with nothing between them. What cannot be built or launched with delays, for lack of
        registers or shared memory, is launched without them.

        fill: writes what a launch finds. outputs: as the worker takes them. work_s: what one launch may take; ns: how
        long other work lasts beside launches that take the usual time.
        """
        memory, places = self._memory, self.places
        scratch = [
            [places[w.name].buffer, places[w.name].offset, w.bytes] for w in self.plan.workspaces if not w.persistent
        ]
        kept: dict[str, Any] = {"outputs": outputs, "stride": memory.record_stride, "scratch": scratch}
        limit_s = self.limit_s(count * (work_s + STRESS_S))
        load: dict[str, Any] = {"occupied": 0.5, "ns": BESIDE_NS + ns}
        stress_builds = partial(self._facilities.stress_builds, self.candidate, seeds)
        for build in delayed(stress_builds, self.use) or [self.build]:
            self.use(build)
            for start in range(0, count, memory.records):
                batch = min(count - start, memory.records)
                fill()
                self.worker.call("record_loaded", limit_s, count=batch, **kept, **load)
                yield batch
            fill()
            self.worker.call("loaded_launches", limit_s, count=BACK_TO_BACK, **load)
            yield 0
        self.use(self.build)

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self._facilities.workers.renew()  # whatever failed may have left something behind
