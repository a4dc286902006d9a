"""Runs a CPU candidate in a sandboxed process that is thrown away after any fault.

The parent (here) owns the clock, the inputs and the reference. The child is believed in nothing: an
acknowledgement only stops the clock, and what was computed is read from the arena while the child is stopped.
Around timed runs it is stopped whenever the clock is not running, so that nothing can be computed off the clock.
"""

import contextlib
import functools
import os
import platform
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from elftools.elf.constants import P_FLAGS
from elftools.elf.elffile import ELFFile

from cuda_l2.contract import CpuContract
from cuda_l2.machine._base import Fault
from cuda_l2.machine.cpu.arena import ALIGN, CandidateMemory
from cuda_l2.records import VerdictStatus
from cuda_l2.system import process_tree, sandbox, scratch
from cuda_l2.system.closing import Closing
from cuda_l2.system.native import compiled

RUNNER = Path(__file__).with_name("runner.c")
ENDED = {
    4: (VerdictStatus.FORBIDDEN, "left parallel_for before all of its tasks were done"),
    5: (
        VerdictStatus.FORBIDDEN,
        "left rounding, flushing to zero or exceptions other than it found them, in the control register",
    ),
    6: (VerdictStatus.UNHYGIENIC, "writes to its inputs or weights, which are read-only"),
    7: (VerdictStatus.UNHYGIENIC, "reads or writes outside its tensors and its workspace, on a page with none of them"),
}
"""What the runner's exit status says."""
START_TIMEOUT_S = 60.0
READ, RED_ZONE = {"x86_64": "0", "aarch64": "63"}.get(platform.machine(), ""), 128
"""The number of the system call in which the runner waits; bytes below the stack's pointer that are in use."""
MAPPED = 3
"""Times that the runner maps the arena."""
EXTRA_MEMORY_BYTES = 1 << 30
MESSAGE_BYTES = 8
ROUND, BEFORE, BEHIND = 1, 2, 3
"""Where a launch in steps stops: at a parallel_for, before a task of it, behind that."""
MOST_STACK = 1 << 20
APART_UNIT = 1 << 16
"""One, as the runner has shares."""
PATIENCE = 10.0
"""Time by the clock, at most, for each second of a limit's second half: threads of its own wait for one another too."""
READ_AGAIN_S = 0.01
"""Least time between two looks at how long threads waited for a core."""
STOP_TIMEOUT_S = 60.0
"""For threads to take a signal, or a process to be gone: on a busy machine each gets a core late."""


class Worker(Closing):
    """One sandboxed process with one candidate loaded. A context manager."""

    def __init__(self, memory: CandidateMemory, artifact: Path, contract: CpuContract) -> None:
        self._memory, self._artifact, arena = memory, artifact, memory.arena
        runner = compiled(RUNNER, "-pthread", "-ldl")
        self._folder = scratch.make_folder()
        limits = sandbox.Limits(memory_bytes=MAPPED * arena.size + EXTRA_MEMORY_BYTES, file_bytes=1 << 20)
        command_read, self._command = os.pipe()
        self._ack, ack_write = os.pipe()
        self._base = 0
        self._stack = 0, 0
        """Where the stack of a launch in steps was found last: to look costs milliseconds."""
        arguments = [str(runner), str(artifact), contract.entry, str(contract.threads)]
        arguments += [str(number) for number in memory.write_segments()]
        arguments += [str(arena.fd), str(command_read), str(ack_write)]
        arguments += [str(number) for number in memory.arguments]
        try:
            self._process = sandbox.start(
                sandbox.wrap(arguments, self._folder, limits, reads=[artifact.parent, runner.parent]),
                pass_fds=(arena.fd, command_read, ack_write),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=self._folder,
            )
        finally:
            os.close(command_read)
            os.close(ack_write)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def prepare(self, slots: Sequence[int], *, again: bool = False) -> None:
        """Write the launches of the next run; the worker must be frozen or idle.

        again: the arena lies where it lay in the run before; else at one of its places, drawn, half of the times high.
        """
        self._table, self._slots = self._memory.write_calls(slots), tuple(slots)
        if not again:
            self._base = secrets.choice((0, *range(MAPPED)))

    def run(self, timeout_s: float, *, reverse: bool = False, apart: float = 0.0) -> float:
        """Run the prepared launches; the wall time in seconds by our clock, or Fault.

        reverse: the pool begins with the last task of each parallel_for. apart: threads begin their first tasks of each
        up to this share of its time apart, at random.
        """
        nonce = secrets.token_bytes(MESSAGE_BYTES)
        start = time.perf_counter()
        self._begin(nonce, reverse=reverse, apart=apart)
        self._await(nonce, timeout_s)
        seconds = time.perf_counter() - start
        self._require_silent()
        return seconds

    def run_in_two(self, stop: Callable[[], bool], between: Callable[[], None], timeout_s: float) -> None:
        """Run the prepared launches, stopped once on the way: as soon as `stop` says so, `between` is called."""
        nonce, ends = secrets.token_bytes(MESSAGE_BYTES), time.perf_counter() + timeout_s
        self._begin(nonce)
        while not stop() and time.perf_counter() < ends and not select.select([self._ack], [], [], 0)[0]:
            pass
        self.freeze()
        between()
        self.thaw()
        self._await(nonce, timeout_s)
        self._require_silent()

    def _begin(self, nonce: bytes, *, reverse: bool = False, apart: float = 0.0) -> None:
        self._command_with(nonce, -1 if reverse else 1, int(apart * APART_UNIT))

    def _command_with(self, nonce: bytes, sign: int, share: int = 0, steps: int = 0) -> None:
        self._send(struct.pack("qqqqq", self._table, sign * len(self._slots), self._base, share, steps) + nonce)

    def steps(self, slot: int, tasks: int, timeout_s: float) -> Iterator[tuple[int, int]]:
        """One launch on one thread, which stops where a parallel_for begins, and before and behind some of its tasks.

        Yields ROUND, BEFORE or BEHIND, with the address above which the caller's stack lies. tasks: how many of each
        parallel_for at most, one after the other.
        """
        nonce = secrets.token_bytes(MESSAGE_BYTES)
        self.prepare([slot], again=True)
        self._command_with(nonce, 1, steps=tasks)
        while (message := self._read(timeout_s)) != nonce:
            (what,) = struct.unpack("q", bytes(a ^ b for a, b in zip(message, nonce, strict=True)))
            if what not in (ROUND, BEFORE, BEHIND):
                raise self._forbidden("acknowledged a command that it was not given")
            yield what, int.from_bytes(self._read(timeout_s), "little")
            self._send(bytes(MESSAGE_BYTES))
        self._require_silent()

    def held(self, frame: int) -> tuple[bytes, bytes]:
        """What the library's writable pages hold in a launch in steps, and the stack from an address on.

        Nothing where the system does not show them.
        """
        with contextlib.suppress(OSError), self._memory_of("rb") as memory:
            statics = b"".join(_part(memory, start, stop) for start, stop in self._library)
            start, stop = self._stack
            if not start <= frame < stop:
                start, stop = self._stack = self._writable_around(frame)
            return statics, _part(memory, frame, min(stop, frame + MOST_STACK))
        return b"", b""

    def _require_silent(self) -> None:
        if select.select([self._ack], [], [], 0)[0]:
            raise self._forbidden("acknowledged more than it was asked")

    def collect(self) -> Sequence[int]:
        """The slots of the last run, all of which hold its results."""
        return self._slots

    def queued_s(self) -> float:
        """Seconds that its threads have waited for a core."""
        return process_tree.queued_s(self._pid)

    def empty(self, timeout_s: float = 5.0) -> float:
        """The wall time in seconds of a run of no launches: what the protocol itself costs."""
        self.prepare([])
        return self.run(timeout_s)

    def launch(
        self, slot: int, timeout_s: float, *, reverse: bool = False, again: bool = False, apart: float = 0.0
    ) -> None:
        """One launch, not timed. again: as `prepare` has it; the rest as `run` has it."""
        self.prepare([slot], again=again)
        self.run(timeout_s, reverse=reverse, apart=apart)

    def loaded(self) -> bytes:
        """The library's writable pages. Nothing where the system does not show them."""
        with contextlib.suppress(OSError), self._memory_of("rb") as memory:
            return b"".join(_part(memory, start, stop) for start, stop in self._library)
        return b""

    def statics(self) -> tuple[bytes, bytes]:
        """The library's writable pages, and what launches left on the first thread's stack, between two runs.

        Nothing where the system does not show them.
        """
        with contextlib.suppress(OSError), self._memory_of("rb") as memory:
            parts = [_part(memory, start, stop) for start, stop in self._written]
            return b"".join(parts[:-1]), parts[-1]
        return b"", b""

    def set_statics(self, statics: bytes, stack: bytes) -> None:
        """Write back what `statics` returned."""
        held = statics + stack
        with self._memory_of("r+b") as memory:
            for start, stop in self._written:
                memory.seek(start)
                memory.write(held[: stop - start])
                held = held[stop - start :]

    def _memory_of(self, mode: str) -> BinaryIO:
        return cast(BinaryIO, Path(f"/proc/{self._pid}/mem").open(mode, buffering=0))

    @functools.cached_property
    def _written(self) -> list[tuple[int, int]]:
        """Addresses of the library's writable pages, and of the first thread's stack below the frame in which it waits.

        As far as the stack reaches when this is first asked for.
        """
        pointer = self._waits_at()
        start, stop = self._writable_around(pointer)
        return [*self._library, (start, pointer - RED_ZONE) if start < stop else (0, 0)]

    def _writable_around(self, address: int) -> tuple[int, int]:
        """Where the pages around it begin and end that can be written; the address twice if there are none."""
        maps = Path(f"/proc/{self._pid}/maps").read_text()
        spans = ((int(start, 16), int(stop, 16)) for start, stop in re.findall(r"^(\w+)-(\w+) rw", maps, re.MULTILINE))
        return next((span for span in spans if span[0] <= address < span[1]), (address, address))

    @functools.cached_property
    def _library(self) -> list[tuple[int, int]]:
        """Addresses of the library's writable pages."""
        maps = Path(f"/proc/{self._pid}/maps").read_text()
        return writable(maps, str(self._artifact), self._segments)

    def _waits_at(self) -> int:
        """The first thread's stack pointer while it waits for a command; 0 where the system does not show it.

        Fault if it does not wait.
        """
        ends = time.monotonic() + STOP_TIMEOUT_S
        while READ:
            try:
                call = Path(f"/proc/{self._pid}/syscall").read_text().split()
            except OSError:
                break
            if call[0] == READ:
                return int(call[-2], 16)
            if time.monotonic() > ends:
                raise self._forbidden("does not wait for its next launch")
        return 0

    @functools.cached_property
    def _segments(self) -> list[tuple[int, int]]:
        """Pages of the library that are loaded writable, from where it lies in memory on."""
        with self._artifact.open("rb") as file:
            loaded = [segment.header for segment in ELFFile(file).iter_segments("PT_LOAD")]
        written = [(each.p_vaddr, each.p_vaddr + each.p_memsz) for each in loaded if each.p_flags & P_FLAGS.PF_W]
        return [(start // ALIGN * ALIGN, -(-stop // ALIGN) * ALIGN) for start, stop in written]

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def freeze(self) -> None:
        """Stop the candidate; returns when every thread has stopped, so that outputs read now are those of the run."""
        self.stop()
        try:
            stopped = process_tree.wait_stopped(self._pid, STOP_TIMEOUT_S)
        except OSError:
            raise self._death() from None
        if not stopped:
            raise self._forbidden("does not stop")

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        sandbox.kill(self._process)
        self._process.wait()
        for name in ("_command", "_ack"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        """Wait until the candidate is loaded, and find its process, which may be a grandchild of the sandbox."""
        answer = self._read(START_TIMEOUT_S)
        if answer[:1] == b"E":
            message = b""
            while select.select([self._ack], [], [], 1.0)[0] and len(message) < 1000:
                part = os.read(self._ack, 1000)
                if not part:
                    break
                message += part
            raise Fault(VerdictStatus.CRASHED, f"did not load: {message.decode(errors='replace').strip()}")
        if answer[:1] != b"R":
            raise self._forbidden("wrote to the acknowledgement pipe while it was loaded")
        self._pid = process_tree.processes(self._process.pid)[-1]  # each starts one child
        process_tree.give_way(self._process.pid)
        try:
            self._group = os.getpgid(self._pid)  # not the sandbox's own where that starts a session
        except ProcessLookupError:
            raise self._death() from None

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._group, number)
        except ProcessLookupError:
            raise self._death() from None

    def _forbidden(self, what: str) -> Fault:
        sandbox.kill(self._process)
        return Fault(VerdictStatus.FORBIDDEN, what)

    def _send(self, command: bytes) -> None:
        try:
            os.write(self._command, command)
        except BrokenPipeError:
            raise self._death() from None

    def _await(self, nonce: bytes, timeout_s: float) -> None:
        if self._read(timeout_s) != nonce:
            raise self._forbidden("acknowledged a command that it was not given")

    def _read(self, timeout_s: float) -> bytes:
        """One message from the candidate, or Fault at the time limit.

        In the second half of it time for which a thread waits for a core does not count, up to a share: other work has
        the cores.
        """
        message, halfway_s = b"", 0.0
        deadline = time.monotonic() + timeout_s / 2
        while len(message) < MESSAGE_BYTES:
            ready, _, _ = select.select([self._ack], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                queues_s = process_tree.queues_s(self._process.pid)
                if not halfway_s:
                    halfway_s, before_s = time.monotonic(), queues_s
                waited_s = max((queues_s[thread] - before_s.get(thread, 0.0) for thread in queues_s), default=0.0)
                passed_s = time.monotonic() - halfway_s
                left_s = timeout_s / 2 - max(passed_s - waited_s, passed_s / PATIENCE)
                if left_s > 0.0:
                    deadline = time.monotonic() + max(left_s, READ_AGAIN_S)
                    continue
                sandbox.kill(self._process)
                raise Fault(VerdictStatus.TIMED_OUT, f"did not finish within {timeout_s:.1f} s")
            part = os.read(self._ack, MESSAGE_BYTES - len(message))
            if not part:
                raise self._death()
            message += part
        return message

    def _death(self) -> Fault:
        """Why the process is gone, from its exit status."""
        try:
            status = self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sandbox.kill(self._process)
            status = self._process.wait()
        number = -status if status < 0 else status - 128
        name = signal.Signals(number).name if number in set(signal.Signals) else f"exit status {status}"
        if status in ENDED:
            return Fault(*ENDED[status])
        if name == "SIGSYS":
            return Fault(VerdictStatus.FORBIDDEN, "tried a system call that the runner does not allow")
        return Fault(VerdictStatus.CRASHED, f"ended by {name}")


def _part(memory: BinaryIO, start: int, stop: int) -> bytes:
    memory.seek(start)
    return memory.read(stop - start)


def writable(maps: str, library: str, segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Addresses of a library's pages that are writable in a process, by its /proc/PID/maps.

    segments: where the library says that it is written, from its beginning on. What lies right behind may be anybody's.
    """
    mapped: list[tuple[int, int, bool]] = []
    base = -1
    for line in maps.splitlines():
        span, access, *rest = line.split(maxsplit=5)
        start, stop = (int(place, 16) for place in span.split("-"))
        mapped.append((start, stop, access.startswith("rw")))
        if base < 0 and rest[3:] == [library]:
            base = start
    spans = [
        (max(start, base + first), min(stop, base + last))
        for first, last in segments
        for start, stop, written in mapped
        if written
    ]
    return [(start, stop) for start, stop in spans if start < stop]
