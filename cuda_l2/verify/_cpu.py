"""CPU candidates: launches in the sandboxed worker on shared memory, in any of the slots that timed launches have."""

import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cuda_l2 import contract
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.arena import Arena, CandidateMemory
from cuda_l2.machine.cpu.worker import BEFORE, ROUND, Worker
from cuda_l2.records import Build, Candidate, Task, VerdictStatus
from cuda_l2.tasks.cases import Case, Cases
from cuda_l2.verify._base import CheckFailed, Outputs, require_written
from cuda_l2.verify._cpu_only import CpuOnly

LAUNCH_TIMEOUT_S = 5.0
TIGHT_SHARE = 0.25
LEAST_IN_A_ROW, ROW_S = 4, 1.0
"""A row of launches has one in every slot, of a kernel that is slow as many as take about so long."""
MET_S = 4e-3
"""How long launches that are made once before such a row may take."""
LEAST_APART, APART_S, APART_POWERS = 20, 1.0, 2
"""Launches in which threads begin their tasks apart: the least number, and seconds for more of them. A thread waits for
up to the time of all tasks divided by a power of two; the last one's exponent."""
ATOMIC = re.compile(r"__atomic_|__sync_|_Atomic\b|\batomic_")
LEAST_STEPS, MOST_STEPS, STEPS_BYTES = 2, 16, 1 << 28
"""Tasks of one parallel_for whose changes are looked at: at least and at most; and bytes of all looks, about."""
SLOWEST_GFLOPS, SLOWEST_GBYTES_PER_S = 0.2, 0.05
"""A launch slower than this is taken to hang."""
WROTE_OUTSIDE = "wrote outside its outputs and its workspace"


class CpuSession(CpuOnly):
    """One candidate in its sandboxed worker on an arena, which is laid out for the sizes of each case."""

    def __init__(self, candidate: Candidate, build: Build, arena: Arena, cases: Cases) -> None:
        self.task, self.build, self.cases, self.arena = cases.task, build, cases, arena
        self.contract = contract.parse_cpu(candidate.source)
        self._atomic = bool(ATOMIC.search(candidate.source))
        arena.select(self.task)
        self._workspace_bytes(self.task)
        self._slot = 0
        self._fastest_s = math.inf
        self._open()

    def _open(self) -> None:
        """A new process on the arena as it is laid out now."""
        self.worker = Worker(CandidateMemory(self.arena, self.contract), Path(self.build.artifact), self.contract)

    def _workspace_bytes(self, task: Task) -> int:
        asked, most = self.contract.workspace_bytes(task), self.arena.workspace_bytes
        self.require_room(task, asked, most)
        return asked

    def require_served(self, task: Task) -> None:
        self.contract.workspace_bytes(task)

    def launch(self, case: Case, prefill: Outputs | None = None, *, keep: bool = False, apart: float = 0.0) -> Outputs:
        """apart: as `Worker.run` has it."""
        arena, task = self.arena, case.task
        workspace_bytes = self._workspace_bytes(task)
        if arena.task != task:
            arena.select(task)
            self.worker.close()
            self._open()
            keep = False
        if not keep:
            # now and then the one whose tensors end where their page ends
            self._slot = int(self.cases.rng.integers(arena.slots)) if self.cases.rng.random() > TIGHT_SHARE else 0
            arena.poison_workspace(workspace_bytes)
            arena.guard(self._slot)
        slot = self._slot
        arena.write(slot, case.tensors)
        arena.poison_outputs([slot], prefill)
        reverse = not keep and bool(self.cases.rng.integers(2))
        start = time.perf_counter()
        try:
            self.worker.launch(slot, launch_timeout_s(task), reverse=reverse, again=keep, apart=apart)
            if task == self.task and not apart:
                self._fastest_s = min(self._fastest_s, time.perf_counter() - start)
        except Fault as fault:
            if not reverse or fault.status is not VerdictStatus.TIMED_OUT:
                raise
            reason = "with the last task of parallel_for first: no task may wait for another"
            raise Fault(fault.status, f"{fault.reason}, {reason}") from None
        if not arena.untouched(slot, case.tensors):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, "changed its inputs or weights")
        if not arena.gaps_intact(slot):
            raise CheckFailed(VerdictStatus.UNHYGIENIC, WROTE_OUTSIDE)
        found = self._outputs(slot)
        for output in task.outputs:
            require_written(output, found[output.name])
        return found

    def launch_on_one(self, case: Case) -> Outputs:
        a, b = (tensor.name for tensor in case.task.inputs)
        self.arena.at = {b: a}
        try:
            return self.launch(case)
        finally:
            self.arena.at = {}

    def launch_overtaken(self, case: Case, other: Case) -> Iterator[tuple[Case, Outputs]]:
        arena, rng = self.arena, self.cases.rng
        count = int(max(LEAST_IN_A_ROW, min(arena.slots, ROW_S / self._fastest_s)))
        slots = [int(slot) for slot in rng.permutation(arena.slots)[:count]]
        for slot in slots:
            arena.write(slot, case.tensors)
        # pages that nobody has met fault, and most stops would come as a launch begins
        if met := slots[: int(MET_S / self._fastest_s)]:
            self.worker.prepare(met)
            self.worker.run(launch_timeout_s(case.task, len(met)))
        arena.poison_outputs(slots)
        begun = len(slots)

        def overtake() -> None:
            nonlocal begun
            # the launch after one that has written nothing has not begun
            unwritten = [number for number, slot in enumerate(slots[:-1]) if arena.unwritten(slot)]
            begun = unwritten[0] + 1 if unwritten else len(slots)
            for slot in slots[begun:]:
                arena.write(slot, other.tensors)
            for slot in slots[max(0, begun - 2) : begun]:  # one of them runs: what it puts back is old then
                arena.guard(slot, other=True)

        self.worker.prepare(slots)
        first = slots[min(int(rng.integers(2)), len(slots) - 1)]
        self.worker.run_in_two(lambda: not arena.unwritten(first), overtake, launch_timeout_s(case.task, len(slots)))
        if not arena.gaps_intact():
            raise CheckFailed(VerdictStatus.UNHYGIENIC, WROTE_OUTSIDE)
        for number, slot in enumerate(slots):
            yield (case if number < begun else other), self._outputs(slot)

    def launch_apart(self, case: Case, count: int) -> Iterator[Outputs]:
        if self.contract.threads == 1:
            return
        for _ in range(max(LEAST_APART, min(count, int(APART_S / self._fastest_s)))):
            yield self.launch(case, keep=True, apart=2.0 ** -self.cases.rng.uniform(0, APART_POWERS))

    def tasks_collide(self, case: Case) -> str:
        if self.contract.threads == 1 or self._atomic:
            return ""
        arena, slot = self.arena, self._slot
        parts = {f"output {output.name}": arena.row(slot, output) for output in case.task.outputs}
        parts["the workspace"] = arena.workspace(self._workspace_bytes(case.task))
        size = sum(map(len, parts.values()))
        arena.write(slot, case.tensors)
        arena.poison_outputs([slot])
        before: dict[str, npt.NDArray[np.uint8]] = {}
        changed: dict[str, npt.NDArray[np.bool_]] = {}
        most = max(LEAST_STEPS, min(MOST_STEPS, STEPS_BYTES // max(1, size)))
        for what, frame in self.worker.steps(slot, most, launch_timeout_s(case.task)):
            if what == ROUND:
                changed = {}
                continue
            statics, stack = (np.frombuffer(held, dtype=np.uint8) for held in self.worker.held(frame))
            now = {name: part.copy() for name, part in parts.items()} | {
                "static variables": statics,
                "the stack": stack,
            }
            if what == BEFORE:
                before = now
                continue
            for name, part in now.items():
                new = part != before[name]
                if (new & changed.get(name, False)).any():
                    return name
                changed[name] = new | changed.get(name, False)
        return ""

    def renew(self) -> npt.NDArray[np.uint8]:
        self.worker.close()
        self._open()
        return np.frombuffer(self.worker.loaded(), dtype=np.uint8)

    def statics(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        statics, stack = (np.frombuffer(held, dtype=np.uint8) for held in self.worker.statics())
        return statics, stack

    def set_statics(self, statics: npt.NDArray[np.uint8], stack: npt.NDArray[np.uint8]) -> None:
        self.worker.set_statics(statics.tobytes(), stack.tobytes())

    def _outputs(self, slot: int) -> Outputs:
        return {name: output.clone() for name, output in self.arena.outputs(slot).items()}

    def __exit__(self, *_: object) -> None:
        self.worker.close()


def launch_timeout_s(task: Task, count: int = 1) -> float:
    """Seconds after which this many launches in a row are taken to hang."""
    return LAUNCH_TIMEOUT_S + count * (task.flops / SLOWEST_GFLOPS + task.bytes / SLOWEST_GBYTES_PER_S) * 1e-9
