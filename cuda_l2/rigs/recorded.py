"""A recorded machine: builds, verdicts and timings come from a world, so that the loop runs without the device."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cuda_l2.measure.protocols import CPU_PROTOCOLS, CUDA_PROTOCOLS, Protocol
from cuda_l2.measure.rounds import Kernel, Limits
from cuda_l2.records import Build, BuildStatus, Candidate, Task, Timing, Verdict
from cuda_l2.rigs._base import Bench, Request, Rig
from cuda_l2.system.errors import UserError
from cuda_l2.worlds.rows import Row
from cuda_l2.worlds.world import World

UNKNOWN = "the world holds no measurement of this schedule"


class RecordedRig(Rig):
    """The machine of a world. Every protocol gives the recorded times."""

    measures = False

    def __init__(self, world: World) -> None:
        self.world, self.target, self.request = world, world.target, Request()
        self.protocols = CPU_PROTOCOLS if world.head.kind == "cpu" else CUDA_PROTOCOLS

    def open(self, task: Task, seed: int, *, both_layouts: bool = False) -> Bench:
        self.require_feasible(task)
        return RecordedBench(self.world.by_task[str(task)])

    def require_feasible(self, task: Task) -> None:
        if str(task) not in self.world.by_task:
            raise UserError(f"{task} was not recorded; the world has {', '.join(sorted(self.world.by_task)[:5])} ...")

    def environment(self) -> dict[str, Any]:
        return self.world.head.environment

    def close(self) -> None:
        pass


class RecordedBench(Bench):
    """The stages of one task, looked up by family and schedule."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row.family, row.schedule): row for row in rows}

    def build(self, candidates: Sequence[Candidate]) -> Iterator[Build]:
        for candidate in candidates:
            row = self._row(candidate)
            yield (
                replace(row.build, candidate_id=candidate.id)
                if row
                else Build(candidate.id, BuildStatus.REFUSED, UNKNOWN)
            )

    def verify(self, candidate: Candidate, build: Build, *, full: bool = False) -> Verdict:
        verdict = self._known(candidate).verdict
        assert verdict is not None  # what was not built is not verified
        return verdict

    def time_kernels(
        self, kernels: Mapping[str, Kernel], protocol: Protocol, limits: Limits = Limits()
    ) -> dict[str, Timing]:
        found = {name: self._known(kernel.candidate).timing(protocol.name) for name, kernel in kernels.items()}
        return {name: timing for name, timing in found.items() if timing}

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _row(self, candidate: Candidate) -> Row | None:
        return self._rows.get((candidate.family, tuple(value for _, value in candidate.schedule)))

    def _known(self, candidate: Candidate) -> Row:
        row = self._row(candidate)
        assert row is not None  # what is unknown does not build
        return row
