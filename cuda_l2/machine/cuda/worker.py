"""Launches CUDA candidates in a process that keeps a warm context and is thrown away after any fault.

The parent (here) makes the memory, the inputs and the references, and gives a worker time limits: a kernel that hangs
ends with its process. Starting one takes most of a second, so the next is started before it is needed.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuda_l2.contract.cuda import Plan
from cuda_l2.machine import messages
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cuda.arena import CudaArena
from cuda_l2.machine.cuda.buffers import Place
from cuda_l2.machine.cuda.helpers import Helpers, compiled_helpers
from cuda_l2.machine.cuda.windows import buffer_name
from cuda_l2.records import Task, VerdictStatus, to_json
from cuda_l2.system import variables
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import MachineError, UserError

MAIN = "cuda_l2.machine.cuda.worker_main"
START_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 60.0
END_S = 60.0
"""A process that closed its end is gone within this time."""
MAX_MESSAGE_BYTES = 1 << 20
SLOWEST_GFLOPS, SLOWEST_PRODUCT_GFLOPS, SLOWEST_GBYTES_PER_S = 50.0, 200.0, 1.0
"""A launch that is slower than this is taken to hang."""


class CudaWorker(Closing):
    """One process with one CUDA context. A context manager."""

    def __init__(self, helpers: Path) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._channel, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MAIN, str(theirs.fileno()), str(helpers)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            env=variables.clean(os.environ) | {"CUDA_MODULE_LOADING": "EAGER"},
        )
        theirs.close()
        self._ready = False
        self.arena: CudaArena | None = None
        self.alive = True

    def attach(self, arena: CudaArena) -> None:
        """Use this arena's memory from now on."""
        if self.arena is not arena:
            sizes = {name: [buffer.size, buffer.grain] for name, buffer in arena.buffers.items()}
            given = [buffer_name(tensor) for tensor in arena.task.given]
            descriptors = [buffer.fd for buffer in arena.buffers.values()]
            self.call("attach", LOAD_TIMEOUT_S, descriptors, sizes=sizes, given=given)
            self.arena = arena

    def load(
        self, cubin: Path, plan: Plan, places: Sequence[dict[str, Place]], slot: int = 0, *, guarded: bool = False
    ) -> None:
        """Load a candidate and bind it to each set of places; Fault where it cannot be launched so.

        The first slot's takes the place of all that was loaded; the next slot's is loaded beside it. guarded: writing
        to inputs and weights faults.
        """
        plain = [{name: [place.buffer, place.offset] for name, place in each.items()} for each in places]
        terms: dict[str, Any] = {"plan": _plan_text(plan), "places": plain, "slot": slot, "guarded": guarded}
        self.call("load", LOAD_TIMEOUT_S, cubin=str(cubin), **terms)

    def call(self, op: str, timeout_s: float, descriptors: Sequence[int] = (), **arguments: Any) -> dict[str, Any]:
        """Send one message and wait for its answer; Fault where it crashes, hangs or breaks the contract.

        MachineError where the machine is at fault.
        """
        if not self._ready:
            try:
                self._receive(START_TIMEOUT_S)
            except Fault as fault:
                raise UserError(f"the process that runs candidates cannot start on this GPU: {fault}") from None
            self._ready = True
        try:
            socket.send_fds(self._channel, [json.dumps({"op": op, **arguments}).encode()], list(descriptors))
        except (BrokenPipeError, ConnectionResetError):
            raise self._dead("") from None
        answer = self._receive(timeout_s)
        if "refused" in answer:
            raise Fault(VerdictStatus.FORBIDDEN, answer["refused"])
        if "fault" in answer:
            raise self._dead(answer["fault"])
        if "machine" in answer:
            self._dead(answer["machine"])
            raise MachineError(answer["machine"])
        return answer

    def close(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        self._channel.close()
        if self._process.stderr:
            self._process.stderr.close()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        if not messages.wait(self._channel, timeout_s):
            self.alive = False
            self._process.kill()
            raise Fault(VerdictStatus.TIMED_OUT, f"did not finish within {timeout_s:.1f} s")
        try:
            data = self._channel.recv(MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._dead("")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _dead(self, reason: str) -> Fault | MachineError:
        """What ended the process, in one line; the process is ended where it is not."""
        self.alive = False
        try:
            status = self._process.wait(0 if reason else END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            status = 0
        if status == -signal.SIGKILL:
            return MachineError("a process that runs candidates was killed: is the host's memory short?")
        if not reason and self._process.stderr:
            reason = (self._process.stderr.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        if reason.startswith("MemoryError"):
            return MachineError("a process that runs candidates found no memory on the host")
        return Fault(VerdictStatus.CRASHED, reason or f"the worker ended with status {status}")


class CudaWorkers(Closing):
    """Workers that outlive candidates: those in use, and the next already starting. A context manager."""

    def __init__(self, arch: str) -> None:
        self._cubin = compiled_helpers(arch)
        self.helpers = Helpers(self._cubin)
        """The same kernels in this process's own context."""
        self._used: dict[bool, CudaWorker] = {}
        """By whether CUPTI was in the process: it slows what comes after it."""
        self._next = CudaWorker(self._cubin)

    def get(self, arena: CudaArena, *, traced: bool = False) -> CudaWorker:
        """A worker with no fault behind it, on this arena. traced: one for single launches, which CUPTI times."""
        worker = self._used.get(traced)
        if worker is None or not worker.alive:
            if worker:
                worker.close()
            worker, self._next = self._next, CudaWorker(self._cubin)
            self._used[traced] = worker
        worker.attach(arena)
        return worker

    def renew(self) -> None:
        """Throw the workers in use away: one ran something that failed, or a fresh process is asked for."""
        while self._used:
            self._used.popitem()[1].close()

    def detach(self) -> None:
        """Have no arena mapped: what a process maps stays taken, though its owner closed it."""
        for worker in self._used.values():
            if worker.alive and worker.arena is not None:
                with contextlib.suppress(Fault, MachineError):  # then it is dead, and has nothing
                    worker.call("attach", LOAD_TIMEOUT_S, sizes={}, given=[])
                worker.arena = None

    def close(self) -> None:
        self.renew()
        self._next.close()


@functools.lru_cache(maxsize=64)
def _plan_text(plan: Plan) -> str:
    return to_json(plan)


def slowest_s(task: Task) -> float:
    """Seconds after which one launch for a task is taken to hang, beside those that any may take."""
    gflops = SLOWEST_PRODUCT_GFLOPS if task.product else SLOWEST_GFLOPS
    return task.flops / gflops * 1e-9 + task.bytes / SLOWEST_GBYTES_PER_S * 1e-9
