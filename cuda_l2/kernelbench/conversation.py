"""The protocol between the judge and a module's process: messages, the turns of calls, and the faults in either.

The process is not believed: an answer is data, and whatever else it says, or does not say in time, is its Fault.
"""

import os
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from cuda_l2.kernelbench import runner
from cuda_l2.kernelbench.sandboxed import GONE, LATE, SandboxedPython
from cuda_l2.machine._base import Fault
from cuda_l2.records import VerdictStatus

SPIN_S, NAP_S = 0.001, 0.02
"""Time for which a counter is polled, yielding the core, before the process has to wake the judge; poll after that."""


class Conversation:
    """With one process, which answers within timeout_s. counters: of turns, in the memory that it shares."""

    def __init__(self, process: SandboxedPython, counters: memoryview, timeout_s: float) -> None:
        self._process, self._counters, self._timeout_s = process, counters, timeout_s

    def ask(self, message: Mapping[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        """Its answer to a message, which may take another time than usual."""
        return self._process.ask(message, timeout_s or self._timeout_s)

    def require(self, message: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Its answer; Fault where that is an error. what: that which fails then."""
        answer = self.ask(message)
        _raise_error(answer, what)
        return answer

    def send(self, message: Mapping[str, Any]) -> None:
        self._process.send(message)

    def await_run(self) -> tuple[float, float]:
        """When the launches of a run were done, and when their results were read, by our clock."""
        said = self._process.signal(self._timeout_s)
        done = time.perf_counter()
        if said == b"D":
            said = self._process.signal(self._timeout_s)
        collected = time.perf_counter()
        if said != b"C":
            self._raise_said(said)
        return done, collected

    def begin_turns(self) -> None:
        """Set the counters to 0, while the process is stopped."""
        for counter in range(len(self._counters)):
            self._counters[counter] = 0

    def show(self, number: int) -> None:
        """Let it begin a turn, whose inputs are there."""
        self._counters[runner.SHOWN] = number

    def await_turn(self, counter: int, number: int) -> None:
        """Wait until a counter of its has reached a number: on the core first, where a message would come too late."""
        start = time.perf_counter()
        while self._counters[counter] < number:
            os.sched_yield()
            if time.perf_counter() - start > SPIN_S:
                break
        else:
            return
        self._counters[runner.AWAITED] = 1
        while self._counters[counter] < number:
            said = self._heard(start)
            if said not in (b"", b"T"):
                self._raise_said(said)
        self._counters[runner.AWAITED] = 0

    def end_turns(self) -> None:
        """Read what it says at last, and what woke nobody before."""
        start, said = time.perf_counter(), b""
        while said in (b"", b"T"):
            said = self._heard(start)
        if said != b"C":
            self._raise_said(said)

    def _heard(self, start: float) -> bytes:
        """The next byte that it sends, if one comes soon; Fault once the time since then is up, whatever it sends."""
        said = self._process.signal(NAP_S) if time.perf_counter() - start < self._timeout_s else b""
        if time.perf_counter() - start > self._timeout_s:
            raise Fault(VerdictStatus.TIMED_OUT, LATE)
        return said

    def _raise_said(self, said: bytes) -> NoReturn:
        """Why a run did not end as it should."""
        if not said:
            raise Fault(VerdictStatus.TIMED_OUT, LATE)
        if said == b"X":
            answer = self._process.answer(self._timeout_s)
            if "refused" in answer:
                raise Fault(VerdictStatus.FORBIDDEN, one_line(answer["refused"]))
            _raise_error(answer, "its forward fails")
        raise Fault(VerdictStatus.CRASHED, GONE)


def _raise_error(answer: Mapping[str, Any], what: str) -> None:
    if "error" in answer:
        raise Fault(VerdictStatus.CRASHED, f"{what}: {one_line(answer['error'])}")


def one_line(said: object) -> str:
    """The process's words as one line of printable text."""
    return "".join(c for c in str(said) if c.isprintable())[: runner.MAX_REASON]
