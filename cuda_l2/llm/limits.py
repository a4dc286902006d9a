"""Reads a server's limit on tokens out of the words in which it refuses a question that is too long."""

import re
from dataclasses import dataclass

_N = r"(\d[\d,]*\d)"
_WINDOW = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"context limit: {_N} \+ {_N} > {_N}",
        rf"(?:context|sequence|model)[ _]?(?:length|window|size|limit|len)\b[^\d.,;]{{0,40}}{_N}",
        rf"{_N} (?:tokens )?(?:maximum context|maximum$|maximum\b(?! value))",
        rf"n_ctx\W{{1,4}}{_N}",
        rf"max_new_tokens`? must be <= {_N}",
        rf"maximum number of (?:input )?tokens allowed\W{{1,3}}{_N}",
    )
]
_ANSWER = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"at most {_N} (?:completion|output) tokens",
        rf"max(?:_completion|_output)?_tokens`?'? must be (?:less than or equal to|at most|<=) [`']?{_N}",
        rf"valid range of max_tokens is \[\d+, ?{_N}\]",
        rf"{_N}, which is the maximum allowed number of output tokens",
    )
]
_TOO_LONG = re.compile(
    r"(context|prompt|input|sequence|tokens?\b).{0,60}(exceed|too (long|large|many)|longer than|larger than)"
    r"|(exceed|too long|too large).{0,60}(context|window|tokens)",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a refusal names, in tokens; both None where it says that a question is too long without a number."""

    window: int | None = None  # prompt and answer together
    answer: int | None = None


def limits_in(refusal: str) -> Limits | None:
    """None where the refusal is about something else."""
    answer = _first(_ANSWER, refusal)
    window = None if answer else _first(_WINDOW, refusal)
    if answer or (window and (_TOO_LONG.search(refusal) or "context" in refusal.lower() or "<=" in refusal)):
        return Limits(window, answer)
    return Limits() if _TOO_LONG.search(refusal) else None


def _first(patterns: list[re.Pattern[str]], text: str) -> int | None:
    found = next((match for pattern in patterns if (match := pattern.search(text))), None)
    return int(found.groups()[-1].replace(",", "")) if found else None
