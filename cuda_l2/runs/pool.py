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
from dataclasses import dataclass
from typing import Any, Protocol

from cuda_l2.runs.workers import TRIES, seen
from cuda_l2.system.closing import Closing
from cuda_l2.system.errors import UserError
from cuda_l2.system.line_process import LineProcess, packed, unpacked
from cuda_l2.system.text import plain

MAIN = "cuda_l2.runs.pool_worker"


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


class Pool(Closing):
    """A process for each GPU named, started with its first request. A context manager; its end ends the processes."""

    def __init__(self, gpus: Sequence[str], servant: Servant, say: Callable[[str], None], limit_s: float) -> None:
        """gpus: as CUDA_VISIBLE_DEVICES names them, each as often as it is to have processes.

        say: takes the lines that the processes say. limit_s: how long a request may take, without what its process
        waits for the GPU's lock; then the process hangs, and is killed.
        """
        self.count = self._serving = len(gpus)
        self._servant, self._say, self._limit_s, self._closed = packed(servant), say, limit_s, False
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._gpus, self._processes = list(gpus), dict[int, LineProcess]()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), daemon=True) for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, request: Any, complete: Callable[[Any], Any] = lambda request: request) -> "Future[Any]":
        """The answer, once a process has given it. UserError where one says so, or TRIES of them died of it.

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
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
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
            if deaths == TRIES - 1 and self._left_out(number):
                return
        if process := self._processes.pop(number, None):
            process.close()

    def _answered(self, order: _Order, number: int) -> bool:
        """Have a process answer; False where it ended before."""
        process, gpu = self._process(number), self._gpus[number]
        if process is None:
            order.future.set_exception(CancelledError())
            return True
        message = {"servant": self._servant, "request": packed(order.complete(order.request))}
        answer = process.ask(message, self._limit_s, lambda line: self._tell(f"GPU {gpu}: {line}"))
        if "answer" in answer:
            order.future.set_result(unpacked(answer["answer"]))
        elif "error" in answer:
            order.future.set_exception(UserError(answer["error"]))
        else:
            self._lost(number, order)
        return bool(answer)

    def _tell(self, line: str) -> None:
        """Say a line; a reader that has gone ends no request."""
        with contextlib.suppress(OSError):
            self._say(plain(line))

    def _left_out(self, number: int) -> bool:
        """Leave a process out, unless it is the last."""
        with self._lock:
            if self._closed or self._serving == 1:
                return False
            self._serving -= 1
        self._tell(f"GPU {self._gpus[number]}: left out, since one process after the other died on it")
        return True

    def _process(self, number: int) -> LineProcess | None:
        """The process of this number, started where there is none; None where the pool is closed."""
        with self._lock:
            if self._closed:
                return None
            if number not in self._processes:
                visible = seen(self._gpus[number], list(dict.fromkeys(self._gpus)))
                self._processes[number] = LineProcess(MAIN, variables={"CUDA_VISIBLE_DEVICES": visible})
            return self._processes[number]

    def _lost(self, number: int, order: _Order) -> None:
        """A process has ended before it answered."""
        gpu = self._gpus[number]
        with self._lock:
            process, closed = self._processes.pop(number), self._closed
        status = process.close()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        how = f"gave no answer for {self._limit_s:.0f} s" if process.late else how
        if closed:
            order.future.set_exception(CancelledError())
        elif order.given_out < TRIES:
            self._orders.put(order)
            self._tell(f"GPU {gpu}: its process {how}; what it had in flight is given out again")
        else:
            order.future.set_exception(UserError(f"{TRIES} processes died of one request, the last {how}"))
