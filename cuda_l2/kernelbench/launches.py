"""Who launches kernels in a process, seen from outside: breakpoints where CUDA's libraries are entered to launch one.

Nothing is asked of the process. A thread that comes by is stopped, and where it would return to says which library
calls, exactly. All threads of a tree of processes are traced, those that begin meanwhile too; at the end every byte is
what it was, and nobody is traced any more. What is changed meanwhile the process could find out, as that it is traced.

Not seen: launches from copies of these libraries under other names, and whose call a function in between passes on.
"""

import collections
import contextlib
import ctypes
import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cuda_l2.kernelbench.symbols import exported
from cuda_l2.kernelbench.tracing import (
    CONTINUE,
    COUNTER_OFFSET,
    DETACH,
    ENDED,
    INTERRUPT,
    STEP,
    STOP,
    STOPPING,
    WALL,
    block,
    blocked,
    event_message,
    executable,
    let_go_on,
    ptrace,
    registers,
    seize,
    set_registers,
    state,
    status_field,
    threads,
    tracer,
    word,
)
from cuda_l2.system import process_tree

FORK, VFORK, CLONE, EXEC = 1, 2, 3, 4  # events that a thread may be stopped by
OPTIONS = 1 << FORK | 1 << VFORK | 1 << CLONE | 1 << EXEC
PAUSE_S = 0.0001
TRAP = 1 << signal.SIGTRAP - 1
HALT_S = 10.0
"""What threads may take to stop; one in the kernel that takes longer does not come out before it stops."""
GRAPH = "GraphLaunch"
_RUNTIME = [f"cuda{name}{kind}" for name in ("LaunchKernel", "LaunchKernelExC", "LaunchCooperativeKernel", GRAPH)
            for kind in ("", "_ptsz")]  # fmt: skip
"""`__cudaLaunchKernel` jumps to one of these, so that it is seen there, with its own caller."""
_DRIVER = [f"cu{name}{kind}" for name in ("LaunchKernel", "LaunchKernelEx", "LaunchCooperativeKernel", GRAPH)
           for kind in ("", "_ptsz")]  # fmt: skip
_LIBRARIES = ((re.compile(r"/libcudart[\w.-]*\.so[\w.]*$"), _RUNTIME), (re.compile(r"/libcuda\.so[\w.]*$"), _DRIVER))
_DRIVER_VERSIONS = (11000, 11060, 12000, 12030, 12080, 13000)
"""Of CUDA: that are asked for an entry point, which may be another for each."""


@dataclass(frozen=True, slots=True)
class _Processor:
    breakpoint: bytes
    passed: int  # how far behind a breakpoint's start a thread stops
    landings: tuple[bytes, ...]  # first instructions that do nothing, behind which a thread may as well go on
    stack: int  # where among the registers the stack pointer is, at whose place the return address lies
    link: int  # or the return address itself


_PROCESSORS = {
    "x86_64": _Processor(b"\xcc", 1, (b"\xf3\x0f\x1e\xfa",), stack=152, link=0),
    "aarch64": _Processor(
        b"\x00\x00\x20\xd4", 0, (b"\x5f\x24\x03\xd5", b"\xdf\x24\x03\xd5", b"\x1f\x20\x03\xd5"), stack=0, link=240
    ),
}
_PROCESSOR = _PROCESSORS.get(platform.machine())

Counts = collections.Counter[tuple[str, str]]
"""Launches by the caller's mapped file, or what /proc calls the mapping, empty for code made in memory; and by the
function that was called. What CUDA's libraries call of one another is not among them."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    first: bytes  # what was there
    behind: int  # where to go on without it, bytes; 0 where it must be executed


class Launches:
    """Counts launches in a tree of processes while it runs. A context manager; everything is called by one thread.

    counts: without those that CUDA's libraries make of one another, which are in `within`. untraced: processes with
    threads that could not be traced. removed: processes that took breakpoints away.
    """

    def __init__(self, root: int, theirs: Path | None = None) -> None:
        """theirs: a folder that those processes write, whose libraries are not read."""
        self.root, self.counts, self.within = root, Counts(), Counts()
        self.untraced: set[int] = set()
        self.removed: set[int] = set()
        self._theirs = theirs
        self._threads: dict[int, int] = {}  # traced: the process of each
        self._stops: dict[int, int] = {}  # of threads that are stopped, and why
        self._entries: dict[int, dict[int, _Entry]] = {}  # of each process, by address
        self._files: dict[int, list[tuple[int, int, int, str]]] = {}
        self._children: set[int] = set()  # our own, whose end others wait for

    @property
    def able(self) -> bool:
        """Whether there are entry points that can be seen here."""
        return any(self._entries.values())

    def look(self) -> None:
        """Find entry points of libraries that were loaded since the last time."""
        if _PROCESSOR is None or COUNTER_OFFSET is None:
            return
        self._trace()
        self._halt()
        for pid in set(self._threads.values()):
            self._place(pid, self._found(pid))
        self._handle()

    def until(self, done: Callable[[], bool], seconds: float) -> None:
        """Count until something is done, but no longer than so many seconds."""
        end = time.perf_counter() + seconds
        while not done() and time.perf_counter() < end:
            if not self._poll():
                time.sleep(PAUSE_S)
            self._handle()

    def __enter__(self) -> "Launches":
        try:
            self.look()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._halt()
        for pid, entries in self._entries.items():
            for address, entry in entries.items():
                if self._is_there(pid, address):  # not where something else was mapped since
                    self._write(pid, address, entry.first)
        end = time.perf_counter() + HALT_S
        while self._threads and time.perf_counter() < end:
            for tid, status in list(self._stops.items()):
                self._detach(tid, status)
            self._poll()
            time.sleep(PAUSE_S if self._threads else 0)

    # Threads

    def _trace(self) -> None:
        """Every thread; one that begins meanwhile is traced as the one that began it, or found the next time."""
        fresh, end = True, time.perf_counter() + HALT_S
        while fresh and time.perf_counter() < end:
            fresh = False
            for pid in process_tree.processes(self.root):
                if _parent(pid) == os.getpid():
                    self._children.add(pid)
                for tid in threads(pid):
                    if tid not in self._threads and seize(tid, OPTIONS):
                        self._threads[tid], fresh = pid, True

    def _poll(self) -> bool:
        """See which threads have stopped since; whether any has."""
        before = len(self._stops)
        for tid in list(self._threads):
            if tid not in self._stops:
                self._see(tid)
        return len(self._stops) > before

    def _see(self, tid: int) -> None:
        """Why a thread is stopped, where it is; who it began, or that its process is another now."""
        ended = 0 if tid in self._children else os.WEXITED
        try:
            said = os.waitid(os.P_PID, tid, os.WSTOPPED | ended | os.WNOHANG | WALL)
        except ChildProcessError:
            self._threads.pop(tid, None)
            return
        if said is None:
            if tid in self._children and state(tid) in ENDED:
                self._threads.pop(tid)
            return
        if said.si_code in (os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED):
            self._threads.pop(tid, None)
            return
        self._stops[tid] = said.si_status
        pid, event = self._threads[tid], said.si_status >> 8
        if event in (FORK, VFORK, CLONE):
            self._adopt(event_message(tid), pid)
        elif event == EXEC:  # nothing of the old program is left, nor any other thread
            self._entries.pop(tid, None)
            self._files.pop(tid, None)
            for other in [other for other, of in self._threads.items() if of == tid and other != tid]:
                self._threads.pop(other)
                self._stops.pop(other, None)

    def _adopt(self, tid: int, parent: int) -> None:
        """A thread or a process that was begun, traced from its beginning; a process with all that it copied."""
        if tid and tid not in self._threads:
            pid = _group(tid) or tid
            self._threads[tid] = pid
            if pid != parent:
                self._entries[pid] = dict(self._entries.get(parent, {}))

    def _halt(self) -> None:
        """Stop every thread. One that waits in the kernel beyond our reach stops before it leaves it."""
        asked: set[int] = set()
        end = time.perf_counter() + HALT_S
        while time.perf_counter() < end:
            running = [tid for tid in self._threads if tid not in self._stops]
            for tid in running:
                if tid not in asked:
                    ptrace(INTERRUPT, tid)
                    asked.add(tid)
            self._poll()
            if all(state(tid) in ("D", *ENDED) for tid in self._threads if tid not in self._stops):
                return

    def _handle(self) -> None:
        """Let go on who is stopped, each as it should; who stops meanwhile is next, or threads in a loop had no end."""
        for tid, status in list(self._stops.items()):
            if tid in self._stops and (status != signal.SIGTRAP or not self._hit(tid)):
                let_go_on(tid, status)
            self._stops.pop(tid, None)  # last: where we are interrupted, it is known to be stopped

    def _detach(self, tid: int, status: int) -> None:
        number, event = status & 0xFF, status >> 8
        del self._stops[tid]
        if number == signal.SIGTRAP and not event and (found := self._at(tid)):
            address, _, values = found
            _go_to(tid, values, address)
            number = 0
        elif status_field(tid, "SigPnd", 16) & ~status_field(tid, "SigBlk", 16) & TRAP:
            # it met a breakpoint, and is to say so next
            ptrace(CONTINUE, tid, 0 if event else number)
            return
        if ptrace(DETACH, tid, 0 if event else number):
            del self._threads[tid]
        else:  # we were interrupted as it was let go on
            ptrace(INTERRUPT, tid)

    # Breakpoints

    def _found(self, pid: int) -> dict[int, str]:
        """Entry points in a process, by address; none in one that not every thread of is traced."""
        missed = [tid for tid in threads(pid) if tid not in self._threads and state(tid) not in ENDED]
        if missed:  # it would die there
            if any(tracer(tid) != threading.get_native_id() for tid in missed):  # not what just began
                self.untraced.add(pid)
            return {}
        self._files[pid] = list(executable(pid))
        found: dict[int, str] = {}
        for low, high, start, path in self._files[pid]:
            own = self._theirs is not None and Path(path).is_relative_to(self._theirs)
            for name, offset in _offsets(path) if _is_cuda(path) and not own else ():
                if low <= start + offset < high:
                    found.setdefault(start + offset, name)
        return found

    def _place(self, pid: int, found: dict[int, str]) -> None:
        assert _PROCESSOR
        entries = self._entries.setdefault(pid, {})
        for address, name in found.items():
            if address in entries:
                if not self._is_there(pid, address):
                    self.removed.add(pid)
                continue
            longest = max(len(code) for code in (_PROCESSOR.breakpoint, *_PROCESSOR.landings))
            code = self._read(pid, address, longest)
            behind = next((len(landing) for landing in _PROCESSOR.landings if code.startswith(landing)), 0)
            first = code[: len(_PROCESSOR.breakpoint)]
            if first == _PROCESSOR.breakpoint:  # by us, where a process shares another's memory until it is a program
                known = [others[address] for others in self._entries.values() if address in others]
                if known:
                    entries[address] = known[0]
                continue
            if len(code) == longest and self._write(pid, address, _PROCESSOR.breakpoint):
                entries[address] = _Entry(name, first, behind)

    def _at(self, tid: int) -> tuple[int, _Entry, bytearray] | None:
        """The entry point that a thread is stopped at, with its registers."""
        assert _PROCESSOR and COUNTER_OFFSET
        values = registers(tid)
        address = word(values, COUNTER_OFFSET) - _PROCESSOR.passed
        entry = self._entries.get(self._threads[tid], {}).get(address)
        return (address, entry, values) if entry else None

    def _hit(self, tid: int) -> bool:
        """Count where a thread comes by, and let it go on; False where it is stopped for something else."""
        found = self._at(tid)
        if not found:
            return False
        address, entry, values = found
        caller = self._caller(self._threads[tid], tid, values)
        (self.within if _is_cuda(caller) else self.counts)[caller, entry.name] += 1
        _go_to(tid, values, address + entry.behind)
        self._stops[tid] = 0  # stopped, and not at a breakpoint any more
        if entry.behind:
            ptrace(CONTINUE, tid)
        else:
            self._step(tid, address, entry)
        return True

    def _step(self, tid: int, address: int, entry: _Entry) -> None:
        """One instruction of a thread where the breakpoint was; nobody else runs meanwhile, and comes by unseen."""
        assert _PROCESSOR
        pid, number, halted = self._threads[tid], 0, False
        self._halt()
        self._write(pid, address, entry.first)
        taken = blocked(tid)
        block(tid, ~TRAP)  # what comes meanwhile waits
        end = time.perf_counter() + HALT_S
        while time.perf_counter() < end and ptrace(STEP, tid):
            self._stops.pop(tid, None)
            while tid in self._threads and tid not in self._stops and time.perf_counter() < end:
                self._see(tid)
            if tid not in self._stops:
                break
            status, self._stops[tid] = self._stops[tid], 0
            if status == signal.SIGTRAP:
                break
            halted = halted or (status >> 8 == STOP and status & 0xFF in STOPPING)
            number = number or (0 if status >> 8 else status)  # to stop, which comes when it goes on
        self._write(pid, address, _PROCESSOR.breakpoint)
        block(tid, taken)
        if halted:  # with its process: it is to stop again
            ptrace(INTERRUPT, tid)
        ptrace(CONTINUE, tid, number)

    def _caller(self, pid: int, tid: int, values: bytearray) -> str:
        assert _PROCESSOR
        back = word(values, _PROCESSOR.link)
        if _PROCESSOR.stack:
            back = word(_read(tid, word(values, _PROCESSOR.stack), 8), 0)
        for _ in range(2):
            for low, high, _start, path in self._files.get(pid, ()):
                if low <= back < high:
                    return path
            self._files[pid] = list(executable(pid))  # loaded meanwhile
        return ""

    def _is_there(self, pid: int, address: int) -> bool:
        assert _PROCESSOR
        code = _PROCESSOR.breakpoint
        return self._read(pid, address, len(code)) == code

    def _read(self, pid: int, address: int, count: int) -> bytes:
        return next((data for tid in self._of(pid) if (data := _read(tid, address, count))), b"")

    def _write(self, pid: int, address: int, data: bytes) -> bool:
        return any(_write(tid, address, data) for tid in self._of(pid))

    def _of(self, pid: int) -> Iterator[int]:
        return (tid for tid, of in self._threads.items() if of == pid)


def _is_cuda(path: str) -> bool:
    return any(pattern.search(path) for pattern, _ in _LIBRARIES)


@cache
def _offsets(path: str) -> tuple[tuple[str, int], ...]:
    """Of a library's entry points, names and where they are in its file. Once for a path: a driver is not replaced."""
    names = next(names for pattern, names in _LIBRARIES if pattern.search(path))
    found = list(exported(Path(path), names).items()) if Path(path).is_file() else []
    return (*found, *(_handed_out(Path(path).name) if names is _DRIVER else ()))


@cache
def _handed_out(file_name: str) -> tuple[tuple[str, int], ...]:
    """Entry points that the driver gives who asks it, as runtimes linked into libraries do; by the
    machine's own, where it is the same file.
    """
    found: dict[tuple[str, int], None] = {}
    with contextlib.suppress(OSError, AttributeError):
        ask = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
        ask.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        mapped = [each for each in executable(os.getpid()) if Path(each[3]).name == file_name]
        for name in ("LaunchKernel", "LaunchKernelEx", "LaunchCooperativeKernel", GRAPH):
            for version in _DRIVER_VERSIONS:
                for flags in (0, 1, 2):  # the default, legacy, and a stream for each thread
                    at, status = ctypes.c_void_p(), ctypes.c_int()
                    given = ctypes.byref(at), version, flags, ctypes.byref(status)
                    if ask(f"cu{name}".encode(), *given) == 0 and at.value:
                        for low, high, start, _path in mapped:
                            if low <= at.value < high:
                                found[f"cu{name}", at.value - start] = None
    return tuple(found)


def _go_to(tid: int, values: bytearray, address: int) -> None:
    assert COUNTER_OFFSET
    values[COUNTER_OFFSET : COUNTER_OFFSET + 8] = address.to_bytes(8, "little")
    set_registers(tid, values)


def _read(tid: int, address: int, count: int) -> bytes:
    try:
        with Path(f"/proc/{tid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(count)
    except (OSError, ValueError, OverflowError):
        return b""


def _write(tid: int, address: int, data: bytes) -> bool:
    """Also where the process itself may not write, as its tracer may."""
    try:
        with Path(f"/proc/{tid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(address)
            return memory.write(data) == len(data)
    except (OSError, ValueError, OverflowError):
        return False


def _parent(pid: int) -> int:
    return status_field(pid, "PPid")


def _group(tid: int) -> int:
    """The process of a thread."""
    return status_field(tid, "Tgid")
