"""A candidate on the CPU that has a new process for every sample."""

from collections.abc import Callable, Sequence

from cuda_l2.machine.cpu.worker import Worker


class FreshWorker:
    """A candidate that has a new process for every sample. A context manager.

    forget: clears the memory that its processes share.
    """

    def __init__(self, open_worker: Callable[[], Worker], forget: Callable[[], None]) -> None:
        self._open, self._forget, self._worker = open_worker, forget, open_worker()

    def begin(self) -> None:
        """Start a new process: all that the candidate kept is gone."""
        self._worker.close()
        self._forget()
        self._worker = self._open()

    def prepare(self, slots: Sequence[int]) -> None:
        self._worker.prepare(slots)

    def run(self, timeout_s: float) -> float:
        return self._worker.run(timeout_s)

    def queued_s(self) -> float:
        return self._worker.queued_s()

    def collect(self) -> Sequence[int]:
        return self._worker.collect()

    def empty(self, timeout_s: float = 5.0) -> float:
        return self._worker.empty(timeout_s)

    def freeze(self) -> None:
        self._worker.freeze()

    def thaw(self) -> None:
        self._worker.thaw()

    def __enter__(self) -> "FreshWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
