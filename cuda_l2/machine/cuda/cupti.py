"""When kernels of this process started and ended on the device, by CUPTI's activity records.

Light: no torch, no numpy. Works for launches by the driver, the runtime and CUDA graphs, made before or under a trace.
It is for single launches. Measured on one H200: while a trace runs every kernel of a graph takes 0.4 to 0.6 us longer,
and still 0.2 to 0.35 us once it has closed, for as long as CUPTI stays in the process; so what is timed by replays is
timed in a process that has not traced, or before it does. Times have steps of 32 ns.
"""

import contextlib
import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.system import native
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import MachineError, UserError
from cuda_l2.system.text import counted

SOURCE = Path(__file__).with_name("cupti_trace.c")
LIBRARY = "libcupti.so.13"
_FIRST_ROOM = 1024


class TraceError(MachineError):
    """CUPTI refused: most often another profiler has the process."""


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel's time on the device, in nanoseconds of CUPTI's clock."""

    name: str  # mangled
    start_ns: int
    end_ns: int


class _Span(ctypes.Structure):
    _fields_ = (
        ("start_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("graph_node", ctypes.c_uint64),
        ("correlation", ctypes.c_uint32),
        ("graph", ctypes.c_uint32),
        ("stream", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    )


class KernelTrace(Closing):
    """Records from construction until `close`. A context manager; one at a time in a process."""

    _running = False
    _attached = False

    def __init__(self) -> None:
        if KernelTrace._running:
            raise TraceError("a trace is already running in this process")
        self._helper = helper()
        self._open = False
        self._call("start", self._helper.trace_start())
        KernelTrace._running = KernelTrace._attached = self._open = True

    def clear(self) -> None:
        """Forget what has ended; wait for the device first."""
        self.spans()

    def spans(self) -> list[Span]:
        """Kernels that ended since the last call, by start; wait for the device first.

        TraceError where CUPTI lost some or gave no time.
        """
        self._call("flush", self._helper.trace_flush())
        room, lost = _FIRST_ROOM, ctypes.c_uint64()
        while True:
            out = (_Span * room)()
            found = self._helper.trace_take(out, room, ctypes.byref(lost))
            if found <= room:
                break
            room = 2 * found
        if lost.value:
            raise TraceError(f"CUPTI lost {counted(lost.value, 'record')}")
        if any(not 0 < span.start_ns <= span.end_ns for span in out[:found]):
            raise TraceError("CUPTI gave a kernel without times; wait for the device before asking")
        spans = [Span(span.name.decode(errors="replace"), span.start_ns, span.end_ns) for span in out[:found]]
        return sorted(spans, key=lambda span: span.start_ns)

    def span_s(self) -> float:
        """Seconds from the first kernel's start to the last one's end since the last call; TraceError for none."""
        spans = self.spans()
        if not spans:
            raise TraceError("CUPTI saw no kernel")
        return (max(span.end_ns for span in spans) - spans[0].start_ns) * 1e-9

    def close(self) -> None:
        """Stop recording; what was recorded is forgotten. Wait for the device first."""
        if not self._open:
            return
        KernelTrace._running = self._open = False
        self._call("stop", self._helper.trace_stop())
        with contextlib.suppress(TraceError):
            self.clear()

    @classmethod
    def detach(cls) -> None:
        """Have CUPTI leave the process, where it is there and no trace runs; the next trace brings it back."""
        if cls._attached and not cls._running:
            status = helper().trace_detach()
            if status:
                raise TraceError(f"CUPTI cannot leave the process: {helper().trace_error(status).decode()}")
            cls._attached = False

    def _call(self, what: str, status: int) -> None:
        if status:
            raise TraceError(f"CUPTI cannot {what} the trace: {self._helper.trace_error(status).decode()}")


@functools.cache
def helper() -> Any:
    """The compiled helper beside libcupti; UserError where a part is missing."""
    try:
        # by name first: torch may have loaded a copy already, and two in one process do not get along
        ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        try:
            ctypes.CDLL(str(_wheel() / LIBRARY), mode=ctypes.RTLD_GLOBAL)
        except OSError:
            raise UserError(f"{LIBRARY} was not found: pip install 'nvidia-cuda-cupti>=13,<14'") from None
    library = ctypes.CDLL(str(native.compiled(SOURCE, "-shared", "-fPIC", "-pthread")))
    for name in ("start", "stop", "flush", "detach"):
        getattr(library, f"trace_{name}").argtypes = ()
    library.trace_take.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    library.trace_take.restype = ctypes.c_size_t
    library.trace_error.argtypes = (ctypes.c_int,)
    library.trace_error.restype = ctypes.c_char_p
    return library


def _wheel() -> Path:
    """Where NVIDIA's wheels for CUDA 13 put their libraries, present or not."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) / "cu13" / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    return next((place for place in places if (place / LIBRARY).exists()), Path("nvidia/cu13/lib"))
