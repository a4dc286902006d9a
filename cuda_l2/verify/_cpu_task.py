"""CPU candidates for tasks: launches in the sandboxed worker."""

from pathlib import Path

from cuda_l2 import contract
from cuda_l2.machine.cpu.task_arena import TaskArena, TaskMemory
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.records import Build, Candidate, Operation, VerdictStatus
from cuda_l2.tasks.cases import TaskCase, TaskCases
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify.tasks._base import Outputs, TaskSession, require_written

LAUNCH_TIMEOUT_S = 5.0
SLOWEST_GFLOPS, SLOWEST_GBYTES_PER_S = 0.2, 0.05
"""A launch slower than this is taken to hang."""


class CpuTaskSession(TaskSession):
    """One candidate in its sandboxed worker on an arena, which is laid out for the sizes of each case."""

    def __init__(self, candidate: Candidate, build: Build, arena: TaskArena, cases: TaskCases) -> None:
        self.task, self.cases, self.arena = cases.task, cases, arena
        self.contract = contract.parse_cpu(candidate.source)
        arena.select(self.task)
        self._workspace_bytes(self.task)
        self.worker = Worker(TaskMemory(arena, self.contract), Path(build.artifact), self.contract)

    def _workspace_bytes(self, task: Operation) -> int:
        asked, most = self.contract.workspace_bytes(task), self.arena.workspace_bytes
        if asked > most:
            reason = f"asks for {asked} bytes of workspace for {task}; at most {most >> 20} MiB"
            raise CheckFailed(VerdictStatus.UNHYGIENIC, reason)
        return asked

    def require_served(self, task: Operation) -> None:
        self.contract.workspace_bytes(task)

    def launch(self, case: TaskCase, prefill: Outputs | None = None, *, keep: bool = False) -> Outputs:
        arena = self.arena
        if arena.task != case.task:
            arena.select(case.task)
            keep = False
        workspace_bytes = self._workspace_bytes(case.task)
        arena.write(0, case.tensors)
        arena.poison_outputs([0], prefill)
        if not keep:
            arena.poison_workspace(workspace_bytes)
        self.worker.launch(0, launch_timeout_s(case.task))
        if not arena.untouched(0, case.tensors):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs or weights")
        if not arena.gaps_intact() or not arena.guards_intact():
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "wrote outside its outputs and its workspace")
        found = {output.name: arena.output(0, output).clone() for output in case.task.outputs}
        for output in case.task.outputs:
            require_written(output, found[output.name])
        return found

    def __exit__(self, *_: object) -> None:
        self.worker.close()


def launch_timeout_s(task: Operation) -> float:
    """Seconds after which one launch is taken to hang."""
    return LAUNCH_TIMEOUT_S + task.flops / SLOWEST_GFLOPS * 1e-9 + task.bytes / SLOWEST_GBYTES_PER_S * 1e-9
