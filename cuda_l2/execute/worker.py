"""Runs a CPU candidate in a sandboxed process that is thrown away after any fault.

The parent (here) owns the clock, the inputs and the reference. The child is believed in nothing: an
acknowledgement only stops the clock, and what was computed is read from the arena.
"""

import os
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from cuda_l2 import sandbox
from cuda_l2.contract import CpuContract
from cuda_l2.execute.arena import Arena, Call
from cuda_l2.native import compiled
from cuda_l2.records import VerdictStatus

RUNNER = Path(__file__).with_name("runner.c")
START_TIMEOUT_S = 20.0
EXTRA_MEMORY_BYTES = 1 << 30


class Fault(Exception):
    """The worker's process crashed, hung or tried a forbidden system call; it is gone."""

    def __init__(self, status: VerdictStatus, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Worker:
    """One sandboxed process with one candidate loaded. A context manager."""

    def __init__(self, arena: Arena, artifact: Path, contract: CpuContract) -> None:
        self.arena = arena
        runner = compiled(RUNNER, "-pthread", "-ldl")
        self._folder = Path(tempfile.mkdtemp(prefix="cuda-l2-run-"))
        limits = sandbox.Limits(memory_bytes=arena.size + EXTRA_MEMORY_BYTES, file_bytes=1 << 20)
        command_read, self._command = os.pipe()
        self._ack, ack_write = os.pipe()
        arguments = [str(runner), str(artifact), contract.entry, str(contract.threads)]
        arguments += [str(arena.fd), str(command_read), str(ack_write)]
        try:
            self._process = sandbox.start(
                sandbox.wrap(arguments, self._folder, limits, reads=[artifact.parent, runner.parent]),
                pass_fds=(arena.fd, command_read, ack_write),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd=self._folder,
            )
        finally:
            os.close(command_read)
            os.close(ack_write)
        try:
            self._await(b"R", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def prepare(self, calls: list[Call], timeout_s: float) -> None:
        """Write the launches of the next run and warm up with the last of them."""
        self._table = self.arena.write_calls(calls)
        self._count = len(calls)
        self._send(self._table + 56 * (len(calls) - 1), 1)
        self._await(b"D", timeout_s)

    def run(self, timeout_s: float) -> float:
        """Run the prepared launches; the wall time in seconds by our clock, or Fault."""
        start = time.perf_counter()
        self._send(self._table, self._count)
        self._await(b"D", timeout_s)
        return time.perf_counter() - start

    def empty(self, timeout_s: float = 5.0) -> float:
        """The wall time in seconds of a run of no launches: what the protocol itself costs."""
        start = time.perf_counter()
        self._send(0, 0)
        self._await(b"D", timeout_s)
        return time.perf_counter() - start

    def launch(self, call: Call, timeout_s: float) -> None:
        """One launch, not timed."""
        self._send(self.arena.write_calls([call]), 1)
        self._await(b"D", timeout_s)

    def freeze(self) -> None:
        """Stop every thread of the candidate, so that outputs read now are those of the run."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        sandbox.kill(self._process)
        self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()
        for name in ("_command", "_ack"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            raise self._death() from None

    def _send(self, table: int, count: int) -> None:
        try:
            os.write(self._command, struct.pack("qq", table, count))
        except BrokenPipeError:
            raise self._death() from None

    def _await(self, expected: bytes, timeout_s: float) -> None:
        ready, _, _ = select.select([self._ack], [], [], timeout_s)
        if not ready:
            sandbox.kill(self._process)
            raise Fault(VerdictStatus.TIMED_OUT, f"did not finish within {timeout_s:.1f} s")
        answer = os.read(self._ack, 1)
        if answer == expected:
            return
        if answer == b"E":
            message = os.read(self._ack, 4096).decode(errors="replace").strip()
            raise Fault(VerdictStatus.CRASHED, f"the runner could not start: {message}")
        if answer:
            sandbox.kill(self._process)
            raise Fault(VerdictStatus.FORBIDDEN, f"wrote {answer!r} to the runner's acknowledgement pipe")
        raise self._death()

    def _death(self) -> Fault:
        """Why the process is gone, from its exit status."""
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            sandbox.kill(self._process)
            status = self._process.wait()
        number = -status if status < 0 else status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {status}"
        if name == "SIGSYS":
            return Fault(VerdictStatus.FORBIDDEN, "tried a system call that the runner does not allow")
        detail = self._process.stderr.read(2000).decode(errors="replace").strip() if self._process.stderr else ""
        return Fault(VerdictStatus.CRASHED, f"ended by {name}" + (f": {detail}" if detail else ""))
