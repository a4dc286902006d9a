"""Option values as users write them, times, members of an enum, lists; and the time now."""

import contextlib
import datetime
import enum
import numbers
import re
from typing import TypeVar

from cuda_l2.system.errors import UserError

E = TypeVar("E", bound=enum.StrEnum)

MOST_SHOWN = 60
"""Characters of a value in a message."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(given: object, what: str = "the budget") -> float:
    """`60`, `60s`, `2m`, `1.5h`, or a number of seconds, in seconds; UserError where it is not a positive time.

    what: for the message.
    """
    value = -1.0
    if isinstance(given, str):
        match = re.fullmatch(r"(-?[\d.]+)\s*(s|m|min|h)?", given.strip())
        with contextlib.suppress(ValueError):
            value = float(match.group(1)) * _UNITS[match.group(2) or ""] if match else -1.0
    elif isinstance(given, numbers.Real) and not isinstance(given, bool):
        value = float(given)
    if not value > 0:
        raise UserError(f"{what} must be a positive time, as in 60s or 2m, not {short(given)}")
    return value


def short(given: object) -> str:
    """A value for a message: what it is, cut where that is long."""
    text = " ".join(repr(given).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({type(given).__name__})"


def require(given: object, kinds: type | tuple[type, ...], what: str) -> None:
    """UserError unless a value is of one of these types. what: what it must be, as in `the seed must be a number`."""
    if not isinstance(given, kinds) or (isinstance(given, bool) and kinds is not bool):
        raise UserError(f"{what}, not {short(given)}")


def member(kind: type[E], text: str, what: str) -> E:
    """The member of an enum that a text names; UserError where there is none. what: the enum's members are."""
    try:
        return kind(text.strip())
    except ValueError:
        raise UserError(f"there is no {what} {text.strip()!r}; choose from {', '.join(kind)}") from None


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def listed(text: str) -> tuple[str, ...]:
    """The parts of a list with commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
