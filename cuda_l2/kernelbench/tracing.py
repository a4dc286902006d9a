"""Threads of other processes, traced: stopped, looked at, let go on. Needs ptrace, which some containers refuse."""

import contextlib
import ctypes
import os
import platform
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

SEIZE, INTERRUPT, LISTEN, CONTINUE, STEP, DETACH = 0x4206, 0x4207, 0x4208, 7, 9, 17
EVENT_MESSAGE, GETREGSET, SETREGSET, GETSIGMASK, SETSIGMASK = 0x4201, 0x4204, 0x4205, 0x420A, 0x420B
STOP = 128  # the event of a thread that was interrupted, or stopped with its process
STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
ENDED = ("Z", "X", "")
SIGNALS_BYTES = 8
NT_PRSTATUS = 1
COUNTER_OFFSET = {"x86_64": 128, "aarch64": 256}.get(platform.machine())
"""Of the program counter among a thread's registers, bytes; None on processors that we do not know."""
REGISTER_BYTES = 512
WALL = 0x40000000  # waitpid for threads of others

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Place(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def ptrace(request: int, tid: int, data: int = 0) -> bool:
    """Whether it could be done: a thread may be gone at any time."""
    return bool(_libc.ptrace(request, tid, None, data) == 0)


def seize(tid: int, options: int = 0) -> bool:
    """Whether we trace a thread now. One that did not stop when it was to be let go was traced all the time."""
    return ptrace(SEIZE, tid, options) or tracer(tid) == threading.get_native_id()


def tracer(tid: int) -> int:
    """The thread that traces another; 0 where none does."""
    return status_field(tid, "TracerPid")


def registers(tid: int) -> bytearray:
    """Of a thread that is stopped, as the kernel lays them out; empty where it is gone."""
    buffer = ctypes.create_string_buffer(REGISTER_BYTES)
    place = _Place(ctypes.addressof(buffer), REGISTER_BYTES)
    read = _libc.ptrace(GETREGSET, tid, NT_PRSTATUS, ctypes.addressof(place)) == 0
    return bytearray(buffer.raw[: place.length]) if read else bytearray()


def set_registers(tid: int, values: bytearray) -> None:
    buffer = ctypes.create_string_buffer(bytes(values), len(values))
    place = _Place(ctypes.addressof(buffer), len(values))
    _libc.ptrace(SETREGSET, tid, NT_PRSTATUS, ctypes.addressof(place))


def word(values: bytes | bytearray, offset: int) -> int:
    """Eight bytes as a number; 0 where there are none."""
    return int.from_bytes(values[offset : offset + 8], "little")


def blocked(tid: int) -> int:
    """Signals that a stopped thread does not take, a bit each."""
    signals = ctypes.c_ulong()
    _libc.ptrace(GETSIGMASK, tid, SIGNALS_BYTES, ctypes.addressof(signals))
    return signals.value


def block(tid: int, signals: int) -> None:
    given = ctypes.c_ulong(signals & (1 << 64) - 1)
    _libc.ptrace(SETSIGMASK, tid, SIGNALS_BYTES, ctypes.addressof(given))


def let_go_on(tid: int, status: int) -> None:
    """As it should: with the signal that it stopped for; who was stopped with its process stays so."""
    number, event = status & 0xFF, status >> 8
    if event == STOP and number in STOPPING:
        ptrace(LISTEN, tid)
    else:
        ptrace(CONTINUE, tid, 0 if event else number)


def event_message(tid: int) -> int:
    """What belongs to the event that a thread is stopped by: of one that began another, the other's number."""
    message = ctypes.c_ulong()
    _libc.ptrace(EVENT_MESSAGE, tid, None, ctypes.addressof(message))
    return message.value


def threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    except OSError:
        return []


def state(tid: int) -> str:
    """One letter, as the kernel gives it; empty where there is no such thread."""
    try:
        return Path(f"/proc/{tid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def status_field(tid: int, name: str, base: int = 10) -> int:
    """A number in a thread's status; 0 where there is none."""
    try:
        text = Path(f"/proc/{tid}/status").read_text(errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1], base) for line in text.splitlines() if line.startswith(f"{name}:")), 0)


def executable(pid: int) -> Iterator[tuple[int, int, int, str]]:
    """Of mappings with code: their first address, the one past the last, where the file's start would be, its path."""
    for line in _maps(pid):
        fields = line.split(maxsplit=5)
        if "x" in fields[1]:
            low, _, high = fields[0].partition("-")
            start = int(low, 16) - int(fields[2], 16)
            yield int(low, 16), int(high, 16), start, fields[5] if len(fields) > 5 else ""


def _maps(pid: int) -> list[str]:
    """Lines of its mappings, by the first thread that has them: one that ended has none, be it the process's first."""
    for tid in threads(pid):
        with contextlib.suppress(OSError):
            if text := Path(f"/proc/{tid}/maps").read_text(errors="replace"):
                return text.splitlines()
    return []
