"""Baselines that own processes, kept for the tasks that were asked for last."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cuda_l2.records import Task


class _Closes(Protocol):
    def close(self) -> None: ...


Baselines = TypeVar("Baselines", bound=_Closes)


class KeptBaselines(Generic[Baselines]):
    """Baselines of the last few tasks that were asked for; those of older tasks are closed."""

    def __init__(self, open_baselines: Callable[[Task], Baselines], most: int) -> None:
        self._open, self._most = open_baselines, most
        self._kept: OrderedDict[str, Baselines] = OrderedDict()

    def get(self, task: Task) -> Baselines:
        if str(task) not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)[1].close()
            self._kept[str(task)] = self._open(task)
        self._kept.move_to_end(str(task))
        return self._kept[str(task)]

    def close(self) -> None:
        for baselines in self._kept.values():
            baselines.close()
        self._kept.clear()
