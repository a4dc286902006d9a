"""Cuts a file into windows for a model: lines between declarations, within a number of tokens.

The includes and macros of the file's earlier lines precede a window's own lines, since its pieces may need them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cuda_l2.build.lexing import CPP_TOKEN, blank
from cuda_l2.corpus.snippets import MOST_CHARS, MOST_LINE_CHARS, countable, definitions, opens_body

HEAD_SHARE = 0.25
"""Share of a window's tokens for includes and macros."""
_NEEDED = re.compile(r"[ \t]*#[ \t]*(?:include|define)\b")
_MARK = re.compile(r"[{};]|\b(?:public|private|protected)\s*:|\n")


@dataclass(frozen=True, slots=True)
class Place:
    """The state of the text where a line begins."""

    depth: int  # braces open there
    in_body: bool  # of a function, an enum, a value
    in_declaration: bool  # after its beginning, before its body or semicolon

    @property
    def between(self) -> bool:
        """Whether a declaration may begin there."""
        return not (self.in_body or self.in_declaration)


class Listing:
    """A cleaned file by its lines, numbered from 1."""

    def __init__(self, text: str) -> None:
        self.text = text.rstrip("\n")
        self.lines = self.text.split("\n")

    @cached_property
    def bare(self) -> list[str]:
        """The lines with comments and strings blanked."""
        return blank(self.text, CPP_TOKEN).split("\n")

    @cached_property
    def places(self) -> list[Place]:
        """The place of each line, and of the end after the last."""
        return _places(countable(blank(self.text, CPP_TOKEN)))

    def numbered(self, numbers: "tuple[int, ...] | range") -> str:
        """The lines with their numbers, as a model reads them; dots stand for a gap."""
        shown, before = [], None
        for number in numbers:
            if before is not None and number != before + 1:
                shown.append("...")
            shown.append(_shown(number, self.lines[number - 1]))
            before = number
        return "\n".join(shown)


@dataclass(frozen=True, slots=True)
class Window:
    """Lines of one file that are shown together."""

    head: tuple[int, ...]  # includes and macros from before
    first: int
    last: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.head, *range(self.first, self.last + 1))

    def holds(self, first: int, last: int) -> bool:
        """Whether all these lines are shown."""
        return all(self.first <= number <= self.last or number in self.head for number in range(first, last + 1))


def windows(
    listing: Listing, spans: list[tuple[int, int]], tokens: int, count_tokens: Callable[[str], int]
) -> list[Window]:
    """Windows over spans of lines, each of at most about `tokens`; those without any definition are left out."""
    worth_asking = [found.line for found in definitions(listing.text)]
    followed = not listing.places[-1].depth
    found = []
    for start, end in spans:
        first = start
        while first <= end:
            head, left = _head(listing, first, int(HEAD_SHARE * tokens), count_tokens)
            last = _end(listing, first, end, tokens - int(HEAD_SHARE * tokens) + left, count_tokens)
            if not followed or any(first <= line <= last for line in worth_asking):
                found.append(Window(head, first, last))
            first = last + 1
    return found


def hard_spans(text: str) -> list[tuple[int, int]]:
    """The lines of a cleaned file that rules cut badly.

    All where kernels share what stands around them or where braces do not match, else types too long for one piece.
    """
    whole = definitions(text, enter=False)
    listing = Listing(text)
    if sum(found.kind == "kernel" for found in whole) > 1 or listing.places[-1].depth:
        return [(1, len(listing.lines))]
    return [(found.first, found.last) for found in whole if len(found.code) > MOST_CHARS]


def _head(
    listing: Listing, before: int, tokens: int, count_tokens: Callable[[str], int]
) -> tuple[tuple[int, ...], int]:
    """Numbers of the lines of includes and macros before a line, from the file's top, and the tokens left."""
    numbers: list[int] = []
    number = 1
    while number < before:
        if not _NEEDED.match(listing.bare[number - 1]):
            number += 1
            continue
        last = number
        while last < before - 1 and listing.lines[last - 1].endswith("\\"):
            last += 1
        used = sum(_tokens(listing, line, count_tokens) for line in range(number, last + 1))
        if used <= tokens:
            numbers += range(number, last + 1)
            tokens -= used
        number = last + 1
    return tuple(numbers), tokens


def _end(listing: Listing, first: int, end: int, tokens: int, count_tokens: Callable[[str], int]) -> int:
    """The last line of a window that begins here: as many as fit, or fewer where a better place to cut is."""
    last = first - 1
    while last < end and (last < first or tokens >= 0):
        last += 1
        tokens -= _tokens(listing, last, count_tokens)
    if tokens >= 0 or last == first:
        return last
    last -= 1  # the one that was too much

    def badness(line: int) -> tuple[bool, int, bool, int]:
        """Rank of a cut after a line: inside a declaration, its depth, after a comment of the next declaration."""
        place = listing.places[line]
        remark = bool(listing.lines[line - 1].strip()) and not listing.bare[line - 1].strip()
        return not place.between, place.depth, remark, -line

    return min(range((first + last + 1) // 2, last + 1), key=badness)


def _tokens(listing: Listing, number: int, count_tokens: Callable[[str], int]) -> int:
    return count_tokens(_shown(number, listing.lines[number - 1]) + "\n")


def _shown(number: int, line: str) -> str:
    return f"{number}|{line if len(line) <= MOST_LINE_CHARS else f'{line[:MOST_LINE_CHARS]} ...'}"


def _places(bare: str) -> list[Place]:
    """The place of each line of a blanked text without directives, and of its end."""
    places = [Place(0, False, False)]
    stack: list[bool] = []  # of each open brace: whether it is a body's
    last = 0  # where the declaration began
    for match in _MARK.finditer(bare):
        sign = match.group()
        if sign == "\n":
            in_body = bool(stack) and stack[-1]
            in_declaration = not in_body and bool(bare[last : match.start()].strip())
            places.append(Place(len(stack), in_body, in_declaration))
            continue
        if sign == "{":
            stack.append((bool(stack) and stack[-1]) or opens_body(bare[last : match.start()]))
        elif sign == "}" and stack:
            stack.pop()
        last = match.end()
    places.append(Place(len(stack), bool(stack) and stack[-1], bool(bare[last:].strip())))
    return places
