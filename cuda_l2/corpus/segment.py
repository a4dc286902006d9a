"""Cuts files by a language model: it reads numbered lines and answers with ranges of lines.

A piece is the file's lines, never text of the model's; they must be whole declarations of a useful size. Without a
usable answer the rules' pieces stand.
"""

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cuda_l2.build.lexing import CPP_TOKEN, blank
from cuda_l2.corpus.asking import Template, answers
from cuda_l2.corpus.snippets import MOST_CHARS, Snippet, countable, definitions, worth
from cuda_l2.corpus.windows import Listing, Window, hard_spans, windows
from cuda_l2.llm.client import Client
from cuda_l2.llm.exchanges import Exchange
from cuda_l2.llm.thoughts import without_thoughts
from cuda_l2.system.errors import UserError
from cuda_l2.system.text import fenced

TEMPLATE = "segment.md"
PURPOSE = "segment"
NONE = "NONE"
LEAST_TOKENS = 500
"""Least tokens of code in a window; fewer hold hardly a definition."""
MOST_DIGITS = 9
_RANGE = r"(?:lines?\s*)?L?\d+(?:\s*[-\u2013]\s*L?\d+)?"
_PIECE = re.compile(rf"(?:[-*\u2022]\s+)?({_RANGE}(?:\s*,\s*{_RANGE})*)\s*[.;]?", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_FENCE = re.compile(r"`{3,}\w*")
_OPENS, _CLOSES = "([{", ")]}"
_CONDITION = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|endif|else|elif\w*)\b", re.MULTILINE)
_NO_DEFINITION = {"if", "else", "for", "while", "do", "switch", "catch", "return", ""}

Ranges = tuple[tuple[int, int], ...]
"""First and last lines of a piece's parts, in order."""


@dataclass(frozen=True)
class File:
    """A cleaned file and the pieces that rules, or a model, cut."""

    name: str  # as a row's source
    text: str
    pieces: Sequence[Snippet]
    license: str = ""


def by_model(
    client: Client,
    files: Sequence[File],
    *,
    hard_only: bool,
    prompts: Path | None = None,
    on_answer: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[list[list[Snippet]], list[dict[str, Any]]]:
    """Each file's pieces: the model's where its answer is usable, else the rules'; and a record of every window.

    hard_only: ask about lines that rules cut badly alone. prompts: folder of the user's templates. UserError where a
    window is too small, or the model never answers.
    """
    template = Template(TEMPLATE, prompts)
    tokens = window_tokens(client, template)
    shown, texts = [], []
    for number, file in enumerate(files):
        for window, text in shown_windows(file, template, tokens, client.model.count_tokens, hard_only=hard_only):
            shown.append((number, window))
            texts.append(text)
    replies = dict(answers(client, PURPOSE, texts, lambda done: on_answer(done, len(texts))))
    pieces = [list(file.pieces) for file in files]
    lines = []
    listing, of = Listing(""), -1
    for i, (number, window) in enumerate(shown):
        if number != of:
            listing, of = Listing(files[number].text), number
        own = [piece for piece in pieces[number] if not piece.lines and window.first <= piece.line <= window.last]
        cut = _cut(listing, window, own, replies.get(i))
        pieces[number] = [piece for piece in pieces[number] if piece not in own] + cut.pieces
        lines.append(_line(files[number].name, window, cut, replies.get(i)))
    return [sorted(found, key=lambda piece: piece.line) for found in pieces], lines


def window_tokens(client: Client, template: Template) -> int:
    """Tokens of code that a prompt can hold; UserError where these are too few."""
    limit = client.prompt_tokens()
    tokens = limit - client.model.count_tokens(template.text)
    if tokens < LEAST_TOKENS:
        raise UserError(
            f"a prompt of {limit} tokens leaves {max(0, tokens)} for code beside the template, and {LEAST_TOKENS} are"
            " the least: raise --prompt-tokens, or take a model with a larger window"
        )
    return tokens


def shown_windows(
    file: File, template: Template, tokens: int, count_tokens: Callable[[str], int], *, hard_only: bool
) -> Iterator[tuple[Window, str]]:
    """The windows over a file with the prompts that show them."""
    listing = Listing(file.text)
    spans = hard_spans(file.text) if hard_only else [(1, len(listing.lines))]
    for window in windows(listing, spans, tokens, count_tokens) if spans else ():
        code = listing.numbered(window.numbers)
        places = {"source": file.name, "most_chars": str(MOST_CHARS), "code": fenced(code, "", len(code))}
        yield window, template.filled(places)


def read(answer: str, finish: str) -> list[Ranges] | None:
    """The pieces that an answer names, empty for none; None where it cannot be understood, or was cut off.

    Lines without a number are ignored; a line with a number must be a piece.
    """
    found: list[Ranges] = []
    none = False
    for line in without_thoughts(answer).split("\n"):
        text = line.strip()
        match = _PIECE.fullmatch(text)
        if match:
            parts = [_NUMBER.findall(part) for part in match.group(1).split(",")]
            found.append(tuple((int(part[0][:MOST_DIGITS]), int(part[-1][:MOST_DIGITS])) for part in parts))
        elif text.strip("`*.\"' ") == NONE:
            none = True
        elif _NUMBER.search(text) and not _FENCE.fullmatch(text):
            return None
    return found if bool(found) != none and finish != "length" else None


def piece(listing: Listing, window: Window, ranges: Ranges) -> Snippet | str:
    """The lines of these ranges as a snippet, or why they are none, in few words."""
    parts = _merged(listing, ranges)
    if not all(1 <= first <= last for first, last in ranges) or not parts:
        return "no such lines"
    if not all(window.holds(first, last) for first, last in parts):
        return "lines that were not shown"
    if not any(last >= window.first for _, last in parts):
        return "nothing but includes and macros from before"
    for first, last in parts:
        begin, end = listing.places[first - 1], listing.places[last]
        if not (begin.between and end.between and begin.depth == end.depth):
            return "a part of a declaration"
    texts = ["\n".join(listing.lines[first - 1 : last]) for first, last in parts]
    bare = [blank(text, CPP_TOKEN) for text in texts]
    if any(text.split("\n") != listing.bare[a - 1 : b] for text, (a, b) in zip(bare, parts, strict=True)):
        return "a part of a comment"
    code = "\n\n".join(textwrap.dedent(text) for text in texts) + "\n"
    if not _whole("\n".join(bare)):
        return "braces or #if that are not closed"
    if not worth(code):
        return "too long, too short, or a table"
    found = definitions(code)
    if not found or any(one.name in _NO_DEFINITION and one.kind == "function" for one in found):
        return "no definition"
    main = max(found, key=lambda one: (one.kind == "kernel", len(one.code)))
    lines = [number for a, b in parts for number in (0, *range(a, b + 1))][1:]
    return replace(main, code=code, line=lines[main.line - 1], first=parts[0][0], lines=tuple(lines))


@dataclass
class _Cut:
    """The outcome of one window."""

    outcome: str  # cut, none, unusable, unanswered
    pieces: list[Snippet]  # that stand in place of the rules'
    accepted: list[Ranges] = field(default_factory=list)
    refused: list[tuple[Ranges, str]] = field(default_factory=list)


def _cut(listing: Listing, window: Window, rules: Sequence[Snippet], exchange: Exchange | None) -> _Cut:
    """The window's pieces: the model's, and the rules' where the model's were refused."""
    if exchange is None:
        return _Cut("unanswered", list(rules))
    wanted = read(exchange.reply.text, exchange.reply.finish)
    if wanted is None:
        return _Cut("unusable", list(rules))
    if not wanted:
        return _Cut("none", [])
    cut = _Cut("cut", [])
    mains: set[int] = set()
    for ranges in wanted:
        found = piece(listing, window, ranges)
        if isinstance(found, Snippet) and found.line not in mains:
            cut.pieces.append(found)
            cut.accepted.append(ranges)
            mains.add(found.line)
        else:
            cut.refused.append((ranges, found if isinstance(found, str) else "a definition named before"))
    if not cut.pieces:
        return replace(cut, outcome="unusable", pieces=list(rules))
    covered = {number for found in cut.pieces for number in found.lines}
    for rule in rules:
        named = any(a <= rule.last and rule.first <= b for ranges, _ in cut.refused for a, b in ranges)
        if named and rule.line not in covered:
            cut.pieces.append(rule)
    return cut


def _merged(listing: Listing, ranges: Ranges) -> list[tuple[int, int]]:
    """The ranges in order, adjacent ones joined, without empty lines at their ends; empty where lines are missing."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if last > len(listing.lines):
            return []
        while first <= last and not listing.lines[first - 1].strip():
            first += 1
        while first <= last and not listing.lines[last - 1].strip():
            last -= 1
        if first > last:
            continue
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _whole(bare: str) -> bool:
    """Whether the braces and #ifs of a blanked text are balanced."""
    depth = 0
    for match in _CONDITION.finditer(bare):
        name = match.group(1)
        depth += name.startswith("if") - (name == "endif")
        if depth < 0 or (not depth and name.startswith("el")):
            return False
    open_: list[str] = []
    for sign in re.findall(r"[][(){}]", countable(bare)):
        if sign in _OPENS:
            open_.append(sign)
        elif not open_ or _OPENS.index(open_.pop()) != _CLOSES.index(sign):
            return False
    return not depth and not open_


def _line(source: str, window: Window, cut: _Cut, exchange: Exchange | None) -> dict[str, Any]:
    return {
        "source": source,
        "first": window.first,
        "last": window.last,
        "outcome": cut.outcome,
        "pieces": cut.accepted,
        "refused": cut.refused,
        "exchange": exchange.key if exchange else "",
    }
