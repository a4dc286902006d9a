"""Option values as users write them, times, members of an enum, lists; and the time now."""

import datetime
import enum
import re
from typing import TypeVar

from cuda_l2.system.errors import UserError

E = TypeVar("E", bound=enum.StrEnum)

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """`60`, `60s`, `2m`, `1.5h` in seconds; UserError where it is not a positive time."""
    match = re.fullmatch(r"(-?[\d.]+)\s*(s|m|min|h)?", text.strip())
    try:
        value = float(match.group(1)) * _UNITS[match.group(2) or ""] if match else -1.0
    except ValueError:
        value = -1.0
    if not value > 0:
        raise UserError(f"the budget must be a positive time, as in 60s or 2m, not {text!r}")
    return value


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
