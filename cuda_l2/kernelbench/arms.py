"""A KernelBench file's own Model as the baselines of candidates under the launch contract: eager and torch.compile.

It is somebody else's Python, so each arm is a module in a sandboxed process, with memory of its own: what a slot of
the candidates' memory holds is copied there before the clock runs, the last result back after it. Every launch has its
own weights, as a candidate's has. Between parallel regions threads spin or sleep, whichever eager is faster with here:
small tasks take a third of the time with threads that spin, and fifty times as long where other work keeps a core.
"""

import contextlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from cuda_l2.kernelbench.cases import ForeignCase
from cuda_l2.kernelbench.checkout import ForeignTask, foreign
from cuda_l2.kernelbench.opened import Tensors
from cuda_l2.kernelbench.process import LINE, Call, Module, Resources
from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.machine.cpu.worker import Fault
from cuda_l2.measure.task_worker import COMPILED, EAGER
from cuda_l2.records import Task
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.cases import Case

LOAD_TIMEOUT_S = 600.0
SPARE_ARENA_BYTES = 16 << 20
ROUNDS, SAMPLED, SETTLE_S = 9, 16, 0.01
"""Of eager runs with threads that spin and that sleep; launches of each; idle time before it."""


class _Closes(Protocol):
    def close(self) -> None: ...


Baselines = TypeVar("Baselines", bound=_Closes)


class ModelBaselines:
    """The reference of one file's task, eager and compiled; processes start on first use.

    An arm that cannot run, or whose result is wrong, is left out with its reason; UserError where eager is.
    """

    names = (EAGER, COMPILED)

    def __init__(self, task: Task, threads: int) -> None:
        self.task, self._known, self._threads = task, foreign(task), threads
        self.task_arena: Arena | None = None
        self.left_out: dict[str, str] = {}
        self._case: ForeignCase | None = None
        self._arms: dict[str, ModelArm] = {}

    @property
    def conditions(self) -> dict[str, str]:
        """What a reader of the times needs to know."""
        return {"torch threads": "spin" if self._arms[EAGER].spins else "sleep"}

    def attach_task(self, arena: Arena, case: Case) -> None:
        """Use this arena from now on; every arm runs once, on this case."""
        assert isinstance(case, ForeignCase)
        self.task_arena = arena
        for name, arm in list(self._arms.items()):
            reason = arm.tried(arena, case)
            if reason:
                self._leave_out(name, arm, reason)
        self._case = case
        if not self._arms:
            self._open_eager(arena, case)

    def ready(self, *, compiles: bool) -> list[str]:
        """The arms to time, the usual strongest first. compiles: with the compiled one: half a minute, once."""
        assert self.task_arena is not None and self._case is not None
        if compiles and COMPILED not in (*self._arms, *self.left_out):
            self._arms[COMPILED] = self._arm(COMPILED, self.task_arena, self._arms[EAGER].spins)
            reason = self._arms[COMPILED].tried(self.task_arena, self._case)
            if reason:
                self._leave_out(COMPILED, self._arms[COMPILED], reason)
        return [name for name in reversed(self.names) if name in self._arms and (compiles or name == EAGER)]

    def _open_eager(self, arena: Arena, case: ForeignCase) -> None:
        """Of one whose threads spin and one whose sleep, the faster."""
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

    def arm(self, name: str) -> "ModelArm":
        return self._arms[name]

    def close(self) -> None:
        for arm in self._arms.values():
            arm.close()


class ModelArm:
    """One of them with a worker's verbs; only the last of its results is kept. slots: launches of a run, at most."""

    def __init__(self, name: str, known: ForeignTask, task: Task, slots: int, threads: int, spins: bool) -> None:
        effort, self.spins = known.file.effort, spins
        self._case: ForeignCase | None = None
        self._slots: list[int] = []
        resources = Resources(
            device="cpu",
            threads=threads,
            memory_bytes=effort.memory_bytes,
            arena_bytes=shared_bytes(task, slots + 1),
            timeout_s=effort.timeout_s,
            spins=spins,
        )
        self._module = Module(known.text.encode(), "Model", resources, compiled=name == COMPILED)

    def tried(self, arena: Arena, case: ForeignCase) -> str:
        """Use an arena and a case of its task from now on; why it does not compute the case, empty where it does."""
        new, self._arena, self._case = self._case is None, arena, case
        arena.write(0, case.tensors)
        try:
            if new:
                failure = self._module.load(LOAD_TIMEOUT_S)
                if failure:
                    return failure
                self._module.make(0, case.initial)
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

    def begin(self) -> None:
        """One process serves every sample."""

    def prepare(self, slots: Sequence[int]) -> None:
        with failing():
            self._prepare(slots)

    def _prepare(self, slots: Sequence[int]) -> None:
        assert self._case is not None
        self._slots = list(slots)
        self._module.prepare([call_of(self._case, self._arena.given(slot)) for slot in slots], {})

    def run(self, timeout_s: float) -> float:
        with failing():
            return self._module.run().run_s

    def collect(self) -> Sequence[int]:
        """Put the last result into its slot."""
        self._arena.poison_outputs(self._slots[-1:], self._module.output(len(self._slots) - 1))
        return self._slots[-1:]

    def freeze(self) -> None:
        self._module.freeze()

    def thaw(self) -> None:
        self._module.thaw()

    def close(self) -> None:
        self._module.close()


def call_of(case: ForeignCase, given: Tensors) -> Call:
    """A launch on tensors like a case's, with weights of its own."""
    weights = {key: given[name] for name, key in case.keys.items()}
    return Call(case.task, given, case.numbers, weights)


def shared_bytes(task: Task, calls: int) -> int:
    """Of memory that a module's process needs for so many of them."""
    gaps = LINE * (len(task.inputs) + len(task.weights) + len(task.outputs))
    return calls * (task.bytes + gaps) + SPARE_ARENA_BYTES


class KeptBaselines(Generic[Baselines]):
    """Those of the tasks that were asked for last; the others are closed."""

    def __init__(self, open_baselines: Callable[[Task], Baselines], most: int) -> None:
        self._open, self._most = open_baselines, most
        self._kept: OrderedDict[str, Baselines] = OrderedDict()

    def get(self, task: Task) -> Baselines:
        if str(task) not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)[1].close()
            self._kept[str(task)] = self._open(task)
        self._kept.move_to_end(str(task))
        return self._kept[str(task)]

    def close(self) -> None:
        for baselines in self._kept.values():
            baselines.close()
        self._kept.clear()


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """A baseline's faults are no candidate's."""
    try:
        yield
    except Fault as fault:
        raise UserError(f"the file's own Model fails where it is timed: {fault.reason}") from None
