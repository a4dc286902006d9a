"""CPU candidates: launches in the sandboxed worker on shared memory, in any of the slots that timed launches have."""

from pathlib import Path

from cuda_l2 import contract
from cuda_l2.machine.cpu.arena import Arena, CandidateMemory
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.records import Build, Candidate, Task, VerdictStatus
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.verify._base import CheckFailed, Outputs, Session, require_written

LAUNCH_TIMEOUT_S = 5.0
SLOWEST_GFLOPS, SLOWEST_GBYTES_PER_S = 0.2, 0.05
"""A launch slower than this is taken to hang."""


class CpuSession(Session):
    """One candidate in its sandboxed worker on an arena, which is laid out for the sizes of each case."""

    def __init__(self, candidate: Candidate, build: Build, arena: Arena, cases: Cases) -> None:
        self.task, self.build, self.cases, self.arena = cases.task, build, cases, arena
        self.contract = contract.parse_cpu(candidate.source)
        arena.select(self.task)
        self._workspace_bytes(self.task)
        self._slot = 0
        self.worker = Worker(CandidateMemory(arena, self.contract), Path(build.artifact), self.contract)

    def _workspace_bytes(self, task: Task) -> int:
        asked, most = self.contract.workspace_bytes(task), self.arena.workspace_bytes
        if asked > most:
            reason = f"asks for {asked} bytes of workspace for {task}; at most {most >> 20} MiB"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)
        return asked

    def require_served(self, task: Task) -> None:
        self.contract.workspace_bytes(task)

    def launch(self, case: Case, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        arena, task = self.arena, case.task
        if arena.task != task:
            arena.select(task)
            keep = False
        workspace_bytes = self._workspace_bytes(task)
        if not keep:
            self._slot = int(self.cases.rng.integers(arena.slots))
            arena.poison_workspace(workspace_bytes)
        slot = self._slot
        arena.write(slot, case.tensors)
        arena.poison_outputs([slot], prefill)
        self.worker.launch(slot, launch_timeout_s(task))
        if not arena.untouched(slot, case.tensors):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs or weights")
        if not arena.gaps_intact() or not arena.guards_intact():
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "wrote outside its outputs and its workspace")
        found = {name: output.clone() for name, output in arena.outputs(slot).items()}
        for output in task.outputs:
            require_written(output, found[output.name])
        return found

    def __exit__(self, *_: object) -> None:
        self.worker.close()


def launch_timeout_s(task: Task, count: int = 1) -> float:
    """Seconds after which this many launches in a row are taken to hang."""
    return LAUNCH_TIMEOUT_S + count * (task.flops / SLOWEST_GFLOPS + task.bytes / SLOWEST_GBYTES_PER_S) * 1e-9
