"""Torch's baselines on the CPU: a process of their own, addressed like a candidate's worker.

A matrix product is a task like any other; its baselines write C in place, so that every launch has its own result. A
baseline of another task returns new tensors, of which the last is kept. One that cannot run, or whose results are
wrong, is left out with its reason.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.measure import inductor
from cuda_l2.measure.baselines._base import TorchBaseline, baselines_of
from cuda_l2.measure.cpu_rounds import Contestant
from cuda_l2.records import Task
from cuda_l2.system import loading, paths, process_tree, variables
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.steps import step
from cuda_l2.tasks.cases import Case

WORKER = "cuda_l2.measure.torch_worker"
START_TIMEOUT_S = 120.0
COMPILE_TIMEOUT_S = 600.0
MOST_ANSWERED = 1 << 12
"""Bytes of an answer: a pipe takes it in one piece."""


class HostBaselines(Protocol):
    """Baselines of one task at a time on the CPU, in processes that share its arena."""

    arena: Arena | None
    left_out: dict[str, str]

    @property
    def conditions(self) -> Mapping[str, Any]: ...
    def attach(self, arena: Arena, case: Case | None) -> None: ...
    def ready(self, *, compiles: bool) -> list[TorchBaseline]: ...
    def arm(self, baseline: TorchBaseline) -> Contestant: ...
    def close(self) -> None: ...


class TorchBaselines(Closing):
    """One torch process that serves every baseline. A context manager; started at once, awaited on first use."""

    conditions: Mapping[str, Any] = {}
    """Fields of a timing's conditions that a reader of the times needs."""

    def __init__(self, threads: int) -> None:
        self._ack, ack_write = os.pipe()
        # torch at its best: threads that spin between calls, where commands make their own sleep, each on a core of
        # its own, as candidates' are; unbound it sometimes runs 40 % slower for a while
        environment = variables.clean(os.environ)
        self._process = subprocess.Popen(
            [*loading.PROGRAM, WORKER, str(threads), str(ack_write)],
            stdin=subprocess.PIPE,
            pass_fds=(ack_write,),
            env=environment | {"OMP_PROC_BIND": "close"},
            process_group=0,  # Ctrl-C is the parent's to handle
        )
        os.close(ack_write)
        self._started = False
        self.arena: Arena | None = None
        self.left_out: dict[str, str] = {}

    def attach(self, arena: Arena, case: Case | None = None) -> None:
        """Use this arena from now on. Every baseline runs once on the case, if there is one."""
        self.thaw()
        task, path = arena.task, f"/proc/{os.getpid()}/fd/{arena.fd}"
        self._message(op="attach", path=path, size=arena.size, task=str(task), environment=_inductor(task))
        self.arena, self.left_out = arena, {}
        if case is None:
            return
        found = self._all()
        for baseline in reversed(found):  # what compiles comes last
            arena.write(0, case.tensors)
            arena.poison_outputs([0])
            reason = self._try(baseline)
            for output, limit in zip(arena.task.outputs, case.bounds, strict=True):
                reason = reason or limit.violation(arena.tensor(0, output))
            if reason:
                self.left_out[baseline.name] = reason
        if len(self.left_out) == len(found):
            raise UserError(f"PyTorch cannot compute {task} on this machine: {self.left_out[found[-1].name]}")

    def ready(self, *, compiles: bool) -> list[TorchBaseline]:
        """The baselines to time, the usual strongest first; they were tried, so that compiling costs nothing more."""
        return [baseline for baseline in self._all() if baseline.name not in self.left_out]

    def arm(self, baseline: TorchBaseline) -> "TorchArm":
        return TorchArm(self, baseline)

    def prepare(self, baseline: TorchBaseline, slots: Sequence[int]) -> None:
        assert self.arena is not None
        self._message(op="prepare", arm=baseline.name, calls=[_offsets(self.arena, slot) for slot in slots])

    def run(self, timeout_s: float) -> float:
        """Run what was prepared; wall time in seconds."""
        start = time.perf_counter()
        self._write(b"\n")
        self._await(b"D", timeout_s)
        return time.perf_counter() - start

    def queued_s(self) -> float:
        """Seconds that the process's threads have waited for a core."""
        return process_tree.queued_s(self._process.pid)

    def collect(self) -> None:
        """Put the last result of a baseline that returns new tensors into its slot."""
        self._message(op="collect")

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def freeze(self) -> None:
        """Stop it; returns when every thread has stopped. OpenMP's that spin take the signal once they have a core."""
        self.stop()
        try:
            if process_tree.wait_stopped(self._process.pid, START_TIMEOUT_S):
                return
        except OSError:
            pass
        raise self._gone()

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        """To the process, which need not be a child of this one: it may serve those that are forked from its parent."""
        try:
            os.kill(self._process.pid, number)
        except ProcessLookupError:
            raise self._gone() from None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        os.close(self._ack)

    def _all(self) -> list[TorchBaseline]:
        """The baselines of the arena's task, in their rank."""
        assert self.arena is not None
        return [each for each in baselines_of(TorchBaseline, "cpu") if each.serves(self.arena.task)]

    def _try(self, baseline: TorchBaseline) -> str:
        """Why a baseline does not run on the first slot; empty where it does."""
        assert self.arena is not None
        what = "compiling the baseline" if baseline.compiled else "trying the baseline"
        with step(f"{what} {baseline.name}", COMPILE_TIMEOUT_S):
            self._send(op="try", arm=baseline.name, calls=[_offsets(self.arena, 0)])
            answer = self._answer(COMPILE_TIMEOUT_S)
        return answer[1:].decode(errors="replace") if answer[:1] == b"X" else ""

    def _message(self, **fields: object) -> None:
        self._send(**fields)
        self._await(b"D")

    def _send(self, **fields: object) -> None:
        if not self._started:
            with step("loading PyTorch for the baselines", START_TIMEOUT_S):
                self._await(b"R")
            self._started = True
            process_tree.give_way(self._process.pid)
        self._write(json.dumps(fields).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _await(self, expected: bytes, timeout_s: float = START_TIMEOUT_S) -> None:
        if self._answer(max(timeout_s, START_TIMEOUT_S)) != expected:
            raise self._gone()

    def _answer(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._ack], [], [], timeout_s)
        answer = os.read(self._ack, MOST_ANSWERED) if ready else b""
        if not answer:
            raise self._gone()
        return answer

    def _gone(self) -> UserError:
        return UserError("the process that runs torch's baselines ended or hangs; is memory short? try a smaller shape")


class TorchArm:
    """One baseline with a worker's verbs."""

    def __init__(self, baselines: TorchBaselines, baseline: TorchBaseline) -> None:
        self._baselines, self._baseline = baselines, baseline
        # stopped between its turns: OpenMP's threads would spin into the next arm's time
        self.run, self.queued_s = baselines.run, baselines.queued_s
        self.stop, self.freeze, self.thaw = baselines.stop, baselines.freeze, baselines.thaw
        self._slots: Sequence[int] = ()

    def prepare(self, slots: Sequence[int]) -> None:
        self.thaw()
        self._baselines.prepare(self._baseline, slots)
        self._slots = slots

    def collect(self) -> Sequence[int]:
        """The slots that hold results: all, or the last one where a launch returns new tensors."""
        if self._baseline.in_place:
            return self._slots
        self.thaw()
        self._baselines.collect()
        self.freeze()
        return self._slots[-1:]


def _offsets(arena: Arena, slot: int) -> dict[str, int]:
    """Where every tensor of a slot begins, in bytes."""
    return {tensor.name: arena.offset(tensor.name, slot) for tensor in arena.task.tensors}


def _inductor(task: Task) -> dict[str, str]:
    """Variables for torch.compile, where a baseline of the task is compiled."""
    if not any(each.compiled and each.serves(task) for each in baselines_of(TorchBaseline, "cpu")):
        return {}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(paths.cache_dir() / "inductor")}
    cxx = {"CXX": paths.cxx_name()}  # Inductor takes no launcher before it
    return cache | cxx | inductor.environment(paths.cxx_name())
