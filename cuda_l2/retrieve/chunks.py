"""Cuts code into pieces of one subject, and into words that a search can match."""

import itertools
import re
from dataclasses import dataclass

LEAST_LINES, MOST_LINES = 24, 80
MOST_CHARS = 6_000
_LEADING_COMMENT = re.compile(r"\s*(?:/\*.*?\*/|(?://[^\n]*\n\s*)+)", re.DOTALL)
_LICENCE = re.compile(r"copyright|licen[cs]e|all rights reserved|SPDX", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|\d+[A-Za-z]+\d*")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


@dataclass(frozen=True, slots=True)
class Chunk:
    line: int  # where it begins, from 1
    text: str


def chunks(text: str) -> list[Chunk]:
    """Pieces of some tens of lines, cut at blank lines where there are any; licences left out."""
    line = 1
    while match := _LEADING_COMMENT.match(text):
        if not _LICENCE.search(match.group()):
            break
        line += match.group().count("\n")
        text = text[match.end() :]
    found: list[Chunk] = []
    piece: list[str] = []
    start, size = line, 0

    def close() -> None:
        body = "\n".join(piece).strip("\n")
        if body.strip():
            skipped = next(i for i, part in enumerate(piece) if part.strip())
            found.append(Chunk(start + skipped, body))

    for number, content in enumerate(text.split("\n"), line):
        content = content.rstrip()[:MOST_CHARS]
        full = len(piece) >= MOST_LINES or size + len(content) > MOST_CHARS
        if piece and (full or (len(piece) >= LEAST_LINES and not content)):
            close()
            piece, start, size = [], number, 0
        piece.append(content)
        size += len(content) + 1
    close()
    return found


def words(text: str) -> list[str]:
    """Identifiers whole and in their parts, lower case: SM90_TMA_LOAD gives itself, sm, 90, tma, load."""
    found: list[str] = []
    for word in _WORD.findall(text):
        whole = word.strip("_").lower()
        if len(whole) > 1:
            found.append(whole)
        parts = [part.lower() for part in _PART.findall(word)]
        if len(parts) > 1:
            found.extend(part for part in parts if len(part) > 1)
            # sm and 90 are one thing in CUDA's names
            found.extend(a + b for a, b in itertools.pairwise(parts) if b.isdigit())
    return found
