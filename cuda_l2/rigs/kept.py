"""What tasks are timed beside: one set of baselines for all tasks of ours, one for each file of others."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from cuda_l2.records import Task
from cuda_l2.tasks.kinds import FileKind, file_kind


class _Closes(Protocol):
    def close(self) -> None: ...


B = TypeVar("B", bound=_Closes)


class KeptBaselines(Generic[B]):
    """Baselines by task. Those of files own processes; they are kept for the last few files that were asked for.

    own: of tasks of ours. of_file: opens those of a file's task.
    """

    def __init__(self, own: B, of_file: Callable[[FileKind, Task], Any], most: int) -> None:
        self._own, self._of_file, self._most = own, of_file, most
        self._kept: dict[str, B] = {}
        """The one that was asked for last comes last."""

    def of(self, task: Task) -> B:
        kind = file_kind(str(task))
        if kind is None:
            return self._own
        found = self._kept.pop(str(task), None)
        while found is None and len(self._kept) >= self._most:
            self._kept.pop(next(iter(self._kept))).close()
        self._kept[str(task)] = found or self._of_file(kind, task)
        return self._kept[str(task)]

    def close(self) -> None:
        for baselines in (*self._kept.values(), self._own):
            baselines.close()
        self._kept.clear()
