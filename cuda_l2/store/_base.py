"""Interface of an archive's database."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from cuda_l2.system.closing import Closing
from cuda_l2.system.place import Place
from cuda_l2.system.text import MAX_LINE

SCHEMA_VERSION = 1
"""Version of the tables in schema.py. Version 1 gained tables and changed none: older files open as they are."""
Mode: TypeAlias = Literal["make", "add", "read"]
"""make: an archive that is made where there is none. add: one that is there. read: the same, never written."""
Values: TypeAlias = Mapping[str, object]
Rows: TypeAlias = list[tuple[Any, ...]]
Step: TypeAlias = tuple[str, Values]
"""The name of a statement in statements.py, and its parameters."""


class StoreFault(Exception):
    """A statement could not be run. What earlier ones wrote is kept. The text is one line and holds no password."""

    def __str__(self) -> str:
        return " ".join(super().__str__().split())[:MAX_LINE]


def unreadable(number: int, error: Exception) -> str:
    """A line on a trial whose record cannot be read."""
    return f"trial {number}: its record cannot be read: {' '.join(str(error).split())[:MAX_LINE]}"


FOREIGN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a record raises where its text is damaged or another program's."""


class Database(Closing):
    """One connection, used by one thread. A context manager."""

    dialect: ClassVar[str]
    place: Place

    @abstractmethod
    def read(self, name: str, values: Values | None = None, *filters: str) -> Rows:
        """Rows of a statement. filters: columns that must equal their values, for statements that take them."""

    @abstractmethod
    def write(self, *steps: Step) -> Rows:
        """Run statements, all of them or none; rows of the last. Durable once this returns."""

    @abstractmethod
    def has(self, table: str) -> bool:
        """Whether there is such a table: an archive that is only read may be older than it."""

    @abstractmethod
    def damage(self) -> list[str]:
        """What the database itself finds wrong with its storage, a line each."""
