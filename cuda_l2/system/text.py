"""Numbers with their nouns, and text of others without invisible characters: terminals obey some, models read some."""

import re
import unicodedata

MAX_LINE = 300
MESSAGE_CHARS = 2_000
"""Limit of a message of a compiler or checker."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Zl", "Zp"}
"""Unicode categories: controls, formats, private use, surrogates, separators of lines."""


def plain(text: str) -> str:
    """The text without escape sequences, control and invisible characters; tabs and line ends stay."""
    text = _ESCAPE.sub("", text)
    return text.translate({ord(char): None for char in set(text) if _unseen(char)})


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: 1 shape, 2 shapes, 1,000 tokens. many: the plural where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def fenced(text: str, language: str = "", limit_chars: int = MESSAGE_CHARS) -> str:
    """A text of others between fences that it cannot close, without invisible characters, cut in its middle."""
    text = plain(text).strip("\n")
    if len(text) > limit_chars:
        head, tail = limit_chars * 3 // 4, limit_chars // 4
        text = f"{text[:head]}\n... {counted(len(text) - head - tail, 'character')} left out ...\n{text[-tail:]}"
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def line_of(error: BaseException) -> str:
    """An error in one line: its type and the first line of its message."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = f"{type(error).__name__}: {said}".strip()
    return "".join(char for char in line if char.isprintable())[:MAX_LINE]


def _unseen(char: str) -> bool:
    variation = "\ufe00" <= char <= "\ufe0f" or "\U000e0100" <= char <= "\U000e01ef"
    return char not in "\t\n" and (variation or unicodedata.category(char) in _UNSEEN)
