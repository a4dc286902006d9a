"""A base for context managers that close themselves."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """A context manager whose end calls `close`. Where an error ends it, that error is the one raised."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as second:  # after a fault on a GPU nothing can be given back
            if error is None:
                raise
            error.add_note(f"then, while closing: {second}")
