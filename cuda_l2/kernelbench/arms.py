"""A KernelBench file's own Model as the baselines of candidates under the launch contract: eager and torch.compile.

It is somebody else's Python, so each arm is a module in a sandboxed process, with memory of its own: what a slot of
the candidates' memory holds is copied there before the clock runs, the last result back after it. Every launch has its
own weights, as a candidate's has. Between parallel regions threads spin or sleep, whichever eager is faster with here:
small tasks take a third of the time with threads that spin, and fifty times as long where other work keeps a core.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cuda_l2.kernelbench.checkout import ForeignTask, foreign
from cuda_l2.kernelbench.opened import ForeignCase
from cuda_l2.kernelbench.process import LINE, Module, Resources
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.measure.baselines import torch_compile, torch_eager
from cuda_l2.measure.baselines._base import TorchBaseline
from cuda_l2.records import Task
from cuda_l2.system import process_tree
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.cases import Case

EAGER, COMPILED = torch_eager.EAGER.name, torch_compile.COMPILED.name
SPARE_ARENA_BYTES = 16 << 20
ROUNDS, SAMPLED, SETTLE_S = 9, 16, 0.01
"""Runs of eager with threads that spin and with threads that sleep; launches of each; idle time before it."""


class ModelBaselines:
    """The reference of one file's task, eager and compiled; processes start on first use.

    An arm that cannot run, or whose result is wrong, is left out with its reason; UserError where eager is.
    """

    def __init__(self, task: Task, threads: int) -> None:
        self.task, self._known, self._threads = task, foreign(task), threads
        self.arena: Arena | None = None
        self.left_out: dict[str, str] = {}
        self._case: ForeignCase | None = None
        self._arms: dict[str, ModelArm] = {}

    @property
    def conditions(self) -> dict[str, str]:
        """Fields of a timing's conditions that a reader of the times needs."""
        return {"torch_threads": "spin" if self._arms[EAGER].spins else "sleep"}

    def attach(self, arena: Arena, case: Case | None) -> None:
        """Use this arena from now on; every arm runs once, on this case."""
        assert isinstance(case, ForeignCase)
        self.arena = arena
        for name, arm in list(self._arms.items()):
            reason = arm.tried(arena, case)
            if reason:
                self._leave_out(name, arm, reason)
        self._case = case
        if not self._arms:
            self._open_eager(arena, case)

    def ready(self, *, compiles: bool) -> list[TorchBaseline]:
        """The baselines to time, the usual strongest first. compiles: with the compiled one: half a minute, once."""
        assert self.arena is not None and self._case is not None
        if compiles and COMPILED not in (*self._arms, *self.left_out):
            self._arms[COMPILED] = self._arm(COMPILED, self.arena, self._arms[EAGER].spins)
            reason = self._arms[COMPILED].tried(self.arena, self._case)
            if reason:
                self._leave_out(COMPILED, self._arms[COMPILED], reason)
        found = (torch_compile.COMPILED, torch_eager.EAGER)
        return [each for each in found if each.name in self._arms and (compiles or not each.compiled)]

    def _open_eager(self, arena: Arena, case: ForeignCase) -> None:
        """Keep the faster of two processes: one whose threads spin, one whose threads sleep."""
        with contextlib.ExitStack() as stack:
            both: list[ModelArm] = []
            for spins in (True, False):
                both.append(self._arm(EAGER, arena, spins))
                stack.callback(both[-1].close)
                reason = both[-1].tried(arena, case)
                if reason:
                    raise UserError(f"PyTorch cannot compute {self.task} on this machine: {reason}")
            samples = [[arm.sample(arena) for arm in both] for _ in range(ROUNDS)]
            medians = [statistics.median(column) for column in zip(*samples, strict=True)]
            stack.pop_all()
        chosen, other = both if medians[0] <= medians[1] else both[::-1]
        other.close()
        self._arms[EAGER] = chosen

    def _arm(self, name: str, arena: Arena, spins: bool) -> "ModelArm":
        return ModelArm(name, self._known, self.task, arena.slots, self._threads, spins)

    def _leave_out(self, name: str, arm: "ModelArm", reason: str) -> None:
        if name == EAGER:
            raise UserError(f"PyTorch cannot compute {self.task} on this machine: {reason}")
        self._arms.pop(name).close()
        self.left_out[name] = reason

    def arm(self, baseline: TorchBaseline) -> "ModelArm":
        return self._arms[baseline.name]

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()


class ModelArm:
    """One of them with a worker's verbs; only the last of its results is kept. slots: launches of a run, at most."""

    def __init__(self, name: str, known: ForeignTask, task: Task, slots: int, threads: int, spins: bool) -> None:
        self.spins = spins
        self._case: ForeignCase | None = None
        self._slots: list[int] = []
        limits = Resources("cpu", threads, known.file.effort.memory_bytes, 0, known.file.effort.timeout_s, spins)
        self._module = model_of(known, task, slots + 1, limits, compiled=name == COMPILED)
        self.queued_s, self.close = self._module.queued_s, self._module.close
        self.stop, self.thaw = self._module.freeze, self._module.thaw

    def tried(self, arena: Arena, case: ForeignCase) -> str:
        """Use an arena and a case of its task from now on; why it does not compute the case, empty where it does."""
        new, self._arena, self._case = self._case is None, arena, case
        arena.write(0, case.tensors)
        try:
            if new:
                self._module.load()
                self._module.make(0, case.initial)
                process_tree.give_way(self._module.pid)
            self._prepare([0])
            self._module.run()
        except Fault as fault:
            return fault.reason
        return case.violation(self._module.output(0))

    def sample(self, arena: Arena) -> float:
        """Seconds of a run of as many launches as may be, all alike, up to the most that a round has."""
        self.prepare([0] * min(arena.slots, SAMPLED))
        time.sleep(SETTLE_S)
        return self.run(0.0)

    def prepare(self, slots: Sequence[int]) -> None:
        with failing():
            self._prepare(slots)

    def _prepare(self, slots: Sequence[int]) -> None:
        assert self._case is not None
        self._slots = list(slots)
        self._module.prepare([self._case.call_of_its_own(self._arena.given(slot)) for slot in slots], {})

    def run(self, timeout_s: float) -> float:
        with failing():
            return self._module.run().run_s

    def collect(self) -> Sequence[int]:
        """Put the last result into its slot."""
        self._arena.poison_outputs(self._slots[-1:], self._module.output(len(self._slots) - 1))
        return self._slots[-1:]

    def freeze(self) -> None:
        self.stop()
        self._module.await_stopped()


def model_of(known: ForeignTask, task: Task, calls: int, limits: Resources, *, compiled: bool) -> Module:
    """A file's Model in a process with shared memory for a number of calls. limits: of all but that memory."""
    gaps = LINE * (len(task.inputs) + len(task.weights) + len(task.outputs))
    limits = replace(limits, arena_bytes=calls * (task.bytes + gaps) + SPARE_ARENA_BYTES)
    return Module(known.file.text.encode(), "Model", limits, compiled=compiled)


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """A baseline's faults are no candidate's."""
    try:
        yield
    except Fault as fault:
        raise UserError(f"the file's own Model fails where it is timed: {fault.reason}") from None
