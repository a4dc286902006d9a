"""Processes that answer requests, one or more for each GPU of this machine.

    begin(request) --> queue --> a GPU's thread --line--> its process, `pool_worker` --line--> the future's result

What a process has in flight when it dies or hangs is given out again, to whoever is free first. A GPU whose processes
die one after the other, as where its memory is full, is left out while another one works.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cuda_l2.runs.workers import TRIES, seen
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import DeadlyError, UserError
from cuda_l2.system.line_process import LineProcess, packed, unpacked
from cuda_l2.system.text import plain

if TYPE_CHECKING:
    from cuda_l2.runs.pool_on_ray import RayProcess

MAIN = "cuda_l2.runs.pool_worker"
Start: TypeAlias = "Callable[[str], LineProcess | RayProcess]"
"""Starts the process of a GPU that has this value of CUDA_VISIBLE_DEVICES."""


def on_this_machine(visible: str) -> LineProcess:
    return LineProcess(MAIN, variables={"CUDA_VISIBLE_DEVICES": visible})


def on_ray(visible: str) -> "RayProcess":
    """On the cluster that this process is connected to, on the GPU that Ray gives it."""
    from cuda_l2.runs.pool_on_ray import RayProcess  # noqa: PLC0415

    del visible
    return RayProcess(MAIN)


class Servant(Protocol):
    """What the processes of a pool do. It is pickled, as requests and answers are."""

    def opened(self) -> AbstractContextManager[Callable[[Any], Any]]:
        """In a process: what it needs, and a function from a request to its answer. UserError is an answer too."""


@dataclass
class _Order:
    request: Any
    complete: Callable[[Any], Any]
    future: "Future[Any]"
    given_out: int = 0
    failed: bool = False
    """Whether one of its processes ended by a failure of the machine."""
    deadly: bool = False
    """Whether all processes that had it have died, so that none is left out for it."""
    left_out: list[int] = field(default_factory=list)
    """Numbers of processes that were left out when they died of it."""


class Pool(Closing):
    """A process for each GPU named, started with its first request. A context manager; its end ends the processes."""

    def __init__(
        self,
        gpus: Sequence[str],
        servant: Servant,
        say: Callable[[str], None],
        limit_s: float,
        start: Start = on_this_machine,
    ) -> None:
        """gpus: as CUDA_VISIBLE_DEVICES names them, each as often as it is to have processes.

        say: takes the lines that the processes say. limit_s: how long a request may take, without what its process
        waits for the GPU's lock; then the process hangs, and is killed.
        """
        self.count = self._serving = len(gpus)
        self._servant, self._say, self._limit_s, self._closed = packed(servant), say, limit_s, False
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._gpus, self._processes = list(gpus), dict[int, "LineProcess | RayProcess"]()
        self._process_on, self._threads = start, dict[int, threading.Thread]()
        self._completing = set[int]()
        """Numbers of processes for which a request is completed now."""
        self._lock = threading.Lock()
        for number in range(self.count):
            self._start(number)

    def _start(self, number: int) -> None:
        self._threads[number] = threading.Thread(target=self._serve, args=(number,), daemon=True)
        self._threads[number].start()

    def begin(self, request: Any, complete: Callable[[Any], Any] = lambda request: request) -> "Future[Any]":
        """The answer, once a process has given it. UserError where one says so, DeadlyError where TRIES of them die.

        complete: makes of the request what is sent, once a process is free: that one waits for it.
        """
        order = _Order(request, complete, Future())
        self._orders.put(order)
        return order.future

    def close(self) -> None:
        """End all processes, also in the middle of a request."""
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
            ending = [self._threads[number] for number in self._threads.keys() - self._completing]
        for _ in self._threads:
            self._orders.put(None)
        for thread in ending:  # the others wait for what takes its time, and then find the pool closed
            thread.join()

    def _serve(self, number: int) -> None:
        """Give out requests to one process until the pool is closed, or its GPU is left out."""
        deaths = 0  # since the last answer
        while (order := self._orders.get()) is not None:
            if not (order.given_out or order.future.set_running_or_notify_cancel()):
                continue
            order.given_out += 1
            try:
                answered = self._answered(order, number)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the answer gets it, else they wait for ever
                order.future.set_exception(error)
                continue
            deaths = 0 if answered else deaths + 1
            if deaths == TRIES - 1 and self._left_out(number, order):
                return
        if process := self._processes.pop(number, None):
            process.close()

    def _answered(self, order: _Order, number: int) -> bool:
        """Have a process answer; False where it ended before, and another is to answer."""
        request = self._completed(order, number)
        process, gpu = self._process(number), self._gpus[number]
        if process is None:
            order.future.set_exception(CancelledError())
            return True
        message = {"servant": self._servant, "request": packed(request)}
        answer = process.ask(message, self._limit_s, lambda line: self._tell(f"GPU {gpu}: {line}"))
        if "answer" in answer:
            order.future.set_result(unpacked(answer["answer"]))
        elif "error" in answer:
            order.future.set_exception(UserError(answer["error"]))
        else:
            return not self._lost(number, order, answer.get("failed", ""))
        return True

    def _completed(self, order: _Order, number: int) -> Any:
        with self._lock:
            if self._closed:
                return None
            self._completing.add(number)
        try:
            return order.complete(order.request)
        finally:
            with self._lock:
                self._completing.discard(number)

    def _tell(self, line: str) -> None:
        """Say a line; a reader that has gone ends no request."""
        with contextlib.suppress(OSError):
            self._say(plain(line))

    def _left_out(self, number: int, order: _Order) -> bool:
        """Leave a process out, unless it is the last. order: of which it died."""
        with self._lock:
            if self._closed or self._serving == 1 or order.deadly:
                return False
            self._serving -= 1
            order.left_out.append(number)
        gpu = self._gpus[number]
        what = f"one of its {self._gpus.count(gpu)} processes is " if self._gpus.count(gpu) > 1 else ""
        self._tell(f"GPU {gpu}: {what}left out, since one process after the other died on it")
        return True

    def _process(self, number: int) -> "LineProcess | RayProcess | None":
        """The process of this number, started where there is none; None where the pool is closed."""
        with self._lock:
            if self._closed:
                return None
            if number not in self._processes:
                self._processes[number] = self._process_on(seen(self._gpus[number], list(dict.fromkeys(self._gpus))))
            return self._processes[number]

    def _lost(self, number: int, order: _Order, failed: str) -> bool:
        """A process has ended before it answered; whether its order is given out again. failed: why, if it said so."""
        gpu = self._gpus[number]
        with self._lock:
            process = self._processes.pop(number)
        status = process.close()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        how = f"gave no answer for {self._limit_s:.0f} s" if process.late else how
        how = f"ended: {failed}" if failed else how
        order.failed = order.failed or bool(failed)
        with self._lock:
            closed, again = self._closed, order.given_out < TRIES
            if again and not closed:  # what is put here comes before the end of a pool that is closed later
                self._orders.put(order)
            elif not closed:
                self._take_back(order)
        if closed:
            order.future.set_exception(CancelledError())
            return False
        if again:
            self._tell(f"GPU {gpu}: its process {how}; what it had in flight is given out again")
            return True
        if order.failed:
            order.future.set_exception(UserError(f"{TRIES} processes ended, one after the other; the last {how}"))
        else:
            order.future.set_exception(
                DeadlyError(f"{TRIES} processes died of it, one after the other; the last {how}")
            )
        return False

    def _take_back(self, order: _Order) -> None:
        """Let processes work again that were left out for an order of which the others died too."""
        order.deadly = True
        for number in order.left_out:
            self._serving += 1
            self._start(number)
