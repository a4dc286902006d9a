"""What PyTorch itself needs for a task of our own on the CPU: eager and torch.compile, beside candidates.

They have a process of their own, as the baselines of matrix products do. An arm that cannot run, or whose results are
wrong, is left out with its reason.
"""

import os
import select
import struct
from collections.abc import Mapping, Sequence

from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.measure import inductor
from cuda_l2.measure.baselines import TorchArm, TorchBaselines
from cuda_l2.measure.task_worker import COMPILED, EAGER
from cuda_l2.records import Task
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.tasks.cases import Case

COMPILE_TIMEOUT_S = 600.0


class TaskBaselines(TorchBaselines):
    """One torch process that serves the baselines of every task."""

    names = (EAGER, COMPILED)
    program = ("-m", "cuda_l2.measure.task_worker")
    conditions: Mapping[str, str] = {}
    """What a reader of the times needs to know."""

    def __init__(self, threads: int) -> None:
        self.environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(paths.cache_dir() / "inductor"),
            **inductor.environment(paths.cxx_name()),
        }
        super().__init__(threads)
        self.task_arena: Arena | None = None
        self.left_out: dict[str, str] = {}

    def attach_task(self, arena: Arena, case: Case) -> None:
        """Use this arena from now on; every arm runs once, on this case."""
        self.thaw()
        self._attach(arena, task=str(arena.task))
        self.task_arena, self.left_out = arena, {}
        for name in self.names:
            arena.write(0, case.tensors)
            arena.poison_outputs([0])
            reason = self._try(name, arena)
            for output, limit in zip(arena.task.outputs, case.bounds, strict=True):
                reason = reason or limit.violation(arena.tensor(0, output))
            if reason:
                self.left_out[name] = reason
        if len(self.left_out) == len(self.names):
            raise UserError(f"PyTorch cannot compute {arena.task} on this machine: {self.left_out[EAGER]}")

    def ready(self, *, compiles: bool) -> list[str]:
        """The arms to time, the usual strongest first; both were tried, so that compiling costs nothing more."""
        return [name for name in reversed(self.names) if name not in self.left_out]

    def arm(self, name: str) -> TorchArm:
        return TaskArm(self, name)

    def prepare(self, name: str, slots: Sequence[int]) -> None:
        arena = self._arena
        given, outputs = _names(arena.task)
        calls = [[arena.offset(tensor, slot) for tensor in given] for slot in slots]
        last = [arena.offset(tensor, slots[-1]) for tensor in outputs]
        self._message(op="prepare", arm=name, calls=calls, last=last)

    def collect(self) -> None:
        """Put the last result into its slot."""
        self._message(op="collect")

    @property
    def _arena(self) -> Arena:
        assert self.task_arena is not None
        return self.task_arena

    def _try(self, name: str, arena: Arena) -> str:
        """Why an arm does not run; empty where it does."""
        given, outputs = ([arena.offset(tensor, 0) for tensor in names] for names in _names(arena.task))
        self._send(op="try", arm=name, given=given, outputs=outputs)
        answer = self._read(1, COMPILE_TIMEOUT_S)
        if answer == b"X":
            (length,) = struct.unpack("i", self._read(4, COMPILE_TIMEOUT_S))
            return self._read(length, COMPILE_TIMEOUT_S).decode(errors="replace")
        if answer != b"D":
            raise self._gone()
        return ""

    def _read(self, count: int, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._ack], [], [], timeout_s)
        data = os.read(self._ack, count) if ready else b""
        if len(data) != count:
            raise self._gone()
        return data


class TaskArm(TorchArm):
    """One baseline with a worker's verbs; only the last of its results is kept."""

    _baselines: TaskBaselines

    def collect(self) -> Sequence[int]:
        self._baselines.thaw()
        self._baselines.collect()
        self._baselines.freeze()
        return self._slots[-1:]


def _names(task: Task) -> tuple[list[str], list[str]]:
    """Of what the task is given, and of its outputs."""
    return [tensor.name for tensor in task.given], [tensor.name for tensor in task.outputs]
