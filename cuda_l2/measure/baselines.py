"""The baselines of the CPU target: torch in a process of its own, addressed like a candidate's worker."""

import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from cuda_l2.machine.cpu.arena import Arena
from cuda_l2.system.errors import UserError


class Memory(Protocol):
    """What is shared with the process."""

    @property
    def size(self) -> int: ...
    @property
    def fd(self) -> int: ...


WORKER = Path(__file__).with_name("torch_worker.py")
HALF = "torch fp16"
WIDENED = "torch widened"
PREALLOCATED = "torch widened, preallocated"
START_TIMEOUT_S = 120.0


class TorchBaselines:
    """One torch process that serves every baseline. A context manager; started at once, awaited on first use."""

    names: tuple[str, ...] = (HALF, WIDENED, PREALLOCATED)
    program: tuple[str, ...] = (str(WORKER),)
    environment: Mapping[str, str] = {}
    """Of the process, beside ours."""

    def __init__(self, threads: int) -> None:
        self._ack, ack_write = os.pipe()
        # torch at its best: threads that spin between calls, where commands make their own sleep, each on a core of
        # its own, as candidates' are; unbound it sometimes runs 40 % slower for a while
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        environment |= {"OMP_PROC_BIND": "close", **self.environment}
        self._process = subprocess.Popen(
            [sys.executable, "-P", *self.program, str(threads), str(ack_write)],
            stdin=subprocess.PIPE,
            pass_fds=(ack_write,),
            env=environment,
            process_group=0,  # Ctrl-C is the parent's to handle; see sandbox.start for why not a session
        )
        os.close(ack_write)
        self._started = False
        self.arena: Arena | None = None

    def attach(self, arena: Arena) -> None:
        """Use this arena from now on."""
        self.thaw()
        layout = "tn" if arena.task.inputs[1].column_major else "nn"
        self._attach(arena, **dict(arena.task.sizes), layout=layout)
        self.arena = arena

    def arm(self, name: str) -> "TorchArm":
        return TorchArm(self, name)

    def prepare(self, name: str, slots: Sequence[int]) -> None:
        assert self.arena is not None
        self._message(op="prepare", arm=name, calls=[self.arena.offsets(slot) for slot in slots])

    def run(self, timeout_s: float) -> float:
        """Run what was prepared; wall time in seconds."""
        start = time.perf_counter()
        self._write(struct.pack("i", 0))
        self._await(b"D", timeout_s)
        return time.perf_counter() - start

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        os.close(self._ack)

    def __enter__(self) -> "TorchBaselines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attach(self, memory: Memory, **fields: object) -> None:
        path = f"/proc/{os.getpid()}/fd/{memory.fd}"
        self._message(op="attach", path=path, size=memory.size, **fields)

    def _message(self, **fields: object) -> None:
        self._send(**fields)
        self._await(b"D")

    def _send(self, **fields: object) -> None:
        if not self._started:
            self._await(b"R")
            self._started = True
        data = json.dumps(fields).encode()
        self._write(struct.pack("i", len(data)) + data)

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _await(self, expected: bytes, timeout_s: float = START_TIMEOUT_S) -> None:
        ready, _, _ = select.select([self._ack], [], [], max(timeout_s, START_TIMEOUT_S))
        if not ready or os.read(self._ack, 1) != expected:
            raise self._gone()

    def _gone(self) -> UserError:
        return UserError("the process that runs torch's baselines ended or hangs; is memory short? try a smaller shape")


class TorchArm:
    """One baseline with a worker's verbs."""

    def __init__(self, baselines: TorchBaselines, name: str) -> None:
        self._baselines, self.name = baselines, name
        self._slots: Sequence[int] = ()

    def begin(self) -> None:
        """One process serves every sample."""

    def prepare(self, slots: Sequence[int]) -> None:
        self._baselines.thaw()
        self._baselines.prepare(self.name, slots)
        self._slots = slots

    def collect(self) -> Sequence[int]:
        return self._slots

    def run(self, timeout_s: float) -> float:
        return self._baselines.run(timeout_s)

    def freeze(self) -> None:
        """Stop the process: OpenMP's threads would spin into the next arm's time."""
        self._baselines.freeze()

    def thaw(self) -> None:
        self._baselines.thaw()
