"""A base for context managers that close themselves."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager whose end calls `close`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
