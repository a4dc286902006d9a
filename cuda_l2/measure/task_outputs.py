"""What timed launches of a task work on, and whether each of them gave its own result.

Every launch of a sample has a case of its own out of a pool, one more than there are slots, in random slots. A
candidate has a new process for every sample, in memory where nothing of earlier ones is left, and between its warm-up
and the clock everything is exchanged: what an earlier launch computed is of no use to any that counts.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from cuda_l2.machine.cpu.task_arena import TaskArena
from cuda_l2.machine.cpu.worker import Worker
from cuda_l2.measure.outputs import WrongOutput
from cuda_l2.records import Operation
from cuda_l2.tasks.cases import TaskCase, TaskCases


class TaskOperands:
    """The cases that lie in the arena's slots."""

    def __init__(self, arena: TaskArena, cases: TaskCases, rng: np.random.Generator) -> None:
        self.arena, self._cases, self._rng = arena, cases, rng
        self.workspace_bytes = 0
        """Of the candidate that is timed: garbage before every sample, as a process of its own would find it."""
        self._pool: list[TaskCase] = []
        self._current: list[TaskCase] = []

    @property
    def slots(self) -> int:
        return self.arena.slots

    def begin_warm_up(self) -> None:
        """One case, in the first slot, that none of the launches after it will meet."""
        self.refresh(1)

    def forget(self) -> None:
        """Before a candidate's process starts: nothing that an earlier one met, computed or wrote is left in memory."""
        self.arena.clear()
        self._current = []

    def refresh(self, count: int) -> None:
        """Other cases in the first slots than the last launch met there; outputs poisoned, workspace garbage."""
        while len(self._pool) < count + 1:
            self._pool.append(self._cases.timed(len(self._pool)))
        met = self._current[:1]
        free = [case for case in self._pool if not any(case is other for other in met)]
        self._current = [free[int(index)] for index in self._rng.permutation(len(free))[:count]]
        for slot, case in enumerate(self._current):
            self.arena.write(slot, case.tensors)
        self.arena.poison_outputs(range(count))
        self.arena.poison_workspace(self.workspace_bytes)

    def check(self, slots: Sequence[int], *, element_wise: bool) -> float:
        """Every launch's outputs within tolerance; the largest difference of one at random, or NaN."""
        for slot in slots:
            require_own_result(self._cases, self._current[slot], self._outputs(slot))
        if not element_wise:
            return float("nan")
        slot = int(self._rng.choice(np.asarray(slots)))
        return self._current[slot].largest_error(self._outputs(slot))

    def _outputs(self, slot: int) -> dict[str, torch.Tensor]:
        return {output.name: self.arena.output(slot, output) for output in self.arena.task.outputs}

    def require_untouched(self, count: int) -> None:
        """WrongOutput where a launch changed inputs or wrote outside outputs and workspace."""
        for slot, case in enumerate(self._current[:count]):
            if not self.arena.untouched(slot, case.tensors):
                raise WrongOutput("changed its inputs or weights in a timed round")
        if not self.arena.gaps_intact() or not self.arena.guards_intact():
            raise WrongOutput("wrote outside its outputs and its workspace in a timed round")


class FreshWorker:
    """A candidate that has a new process for every sample. A context manager.

    forget: clears the memory that its processes share.
    """

    def __init__(self, open_worker: Callable[[], Worker], forget: Callable[[], None]) -> None:
        self._open, self._forget, self._worker = open_worker, forget, open_worker()

    def begin(self) -> None:
        """All that the candidate kept is gone."""
        self._worker.close()
        self._forget()
        self._worker = self._open()

    def prepare(self, slots: Sequence[int]) -> None:
        self._worker.prepare(slots)

    def run(self, timeout_s: float) -> float:
        return self._worker.run(timeout_s)

    def collect(self) -> Sequence[int]:
        return self._worker.collect()

    def empty(self, timeout_s: float = 5.0) -> float:
        return self._worker.empty(timeout_s)

    def freeze(self) -> None:
        self._worker.freeze()

    def thaw(self) -> None:
        self._worker.thaw()

    def __enter__(self) -> "FreshWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()


def require_own_result(cases: TaskCases, case: TaskCase, found: Mapping[str, torch.Tensor]) -> None:
    """WrongOutput where a timed launch's outputs are not those of its case."""
    violation = why_not(cases, case, found)
    if violation:
        raise WrongOutput(f"a timed launch did not produce its own result: {violation}")


def why_not(cases: TaskCases, case: TaskCase, found: Mapping[str, torch.Tensor]) -> str:
    """Why outputs are not those of a case for timing, in one line; empty where they are."""
    return case.violation(found) and cases.exactly(case).violation(found)


def launches_that_fit(task: Operation, most_bytes: int, most: int) -> int:
    """How many launches may have tensors of their own at once."""
    return max(1, min(most, most_bytes // max(1, task.bytes)))
