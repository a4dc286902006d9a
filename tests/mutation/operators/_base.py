"""What operators are made of, and what several of them need to know of a source."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mutation.source import Source

NOTHING = "((void)0)"
Edits = Callable[[Source], "Iterator[Edit]"]
Found = Callable[[Source, str], Iterator[re.Match[str]]]
Text = str | Callable[[re.Match[str]], str]
"""What a part of a match becomes: a template, as `re.Match.expand` reads it, or a function of the match."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace text[start:end], and what else belongs to the same change."""

    start: int
    end: int
    replacement: str
    also: tuple[tuple[int, int, str], ...] = ()

    def apply(self, text: str) -> str:
        for start, end, replacement in sorted([(self.start, self.end, self.replacement), *self.also], reverse=True):
            text = text[:start] + replacement + text[end:]
        return text


@dataclass(frozen=True, slots=True)
class Operator:
    """A named kind of fault; every edit it yields is one mutant."""

    name: str
    group: str
    edits: Edits


OPERATORS: list[Operator] = []


def operator(name: str, group: str) -> Callable[[Edits], Edits]:
    """Register a function of a source as the operator of this name."""

    def register(edits: Edits) -> Edits:
        OPERATORS.append(Operator(name, group, edits))
        return edits

    return register


def matches(source: Source, pattern: str) -> Iterator[re.Match[str]]:
    """Matches in code behind the contract, outside helpers that wrap PTX."""
    for match in re.compile(pattern).finditer(source.code, source.contract_end):
        if not source.in_helper(match.start()):
            yield match


def plain_matches(source: Source, pattern: str) -> Iterator[re.Match[str]]:
    """The same on lines that become instructions of a kernel."""
    return (match for match in matches(source, pattern) if not aside(source, match.start()))


def in_strings(source: Source, pattern: str) -> Iterator[re.Match[str]]:
    """Matches in string literals behind the contract."""
    for start, end in source.strings():
        yield from re.compile(pattern).finditer(source.text, start, end)


def each(found: Iterable[re.Match[str]], part: int, *texts: Text) -> Iterator[Edit]:
    """Edits by which this group of each match becomes each of the texts."""
    for match in found:
        for text in texts:
            yield Edit(*match.span(part), match.expand(text) if isinstance(text, str) else text(match))


def behind(source: Source, span: tuple[int, int], *texts: str) -> Iterator[Edit]:
    """Edits that put each of the texts behind an expression, which gets brackets."""
    for text in texts:
        yield Edit(*span, f"({source.text[slice(*span)]}) {text}")


def aside(source: Source, position: int) -> bool:
    """Whether the line holds constants, assertions, what only bounds a wait, or what only a compiler sees."""
    line, following = source.line_text(position), source.line_text(source.text.find("\n", position) + 1)
    if re.search(r"\bpin\(", line + following):  # keeps reads of sums in their place, and is no instruction
        return True
    constants = (
        r"\s*(static_assert|constexpr|static constexpr|template|using|struct|while \(columns)|.*\b(SPINS|spins)\b"
    )
    return bool(re.match(constants, line))


def constant(text: str) -> bool:
    """Whether an expression names macros, template arguments and numbers alone."""
    return not re.search(r"\b(?!(?:true|false|static_cast|long)\b)[a-z]\w*\b(?!::)", text)


def functions(source: Source) -> tuple[str, ...]:
    """Names of all device functions and lambdas of the source."""
    device = re.findall(r"\b(?:DEV|DEVICE|__device__)\b[^;{}()]*?\b(\w+)\s*\(", source.code)
    static = re.findall(r"\b(?:INLINE|static(?: inline)?) \w+ \*?(\w+)\(", source.code) if source.plain else []
    return tuple(dict.fromkeys([*device, *static, *re.findall(r"\bauto (\w+) = \[", source.code)]))


def drop(name: str, group: str, *roles: str) -> None:
    """Register the operator that takes calls with these roles away."""

    @operator(name, group)
    def edits(source: Source) -> Iterator[Edit]:
        for call in source.role_calls(*roles):
            yield Edit(call.start, call.end, NOTHING)


def rewrite(
    name: str,
    group: str,
    *rules: tuple[str, int, *tuple[Text, ...]],
    find: Found = matches,
    where: Callable[[re.Match[str]], bool] = lambda match: True,
) -> None:
    """Register the operator whose rules are a pattern, the part of it that changes, and what that becomes."""

    @operator(name, group)
    def edits(source: Source) -> Iterator[Edit]:
        for pattern, part, *texts in rules:
            yield from each(filter(where, find(source, pattern)), part, *texts)


def varies(match: re.Match[str]) -> bool:
    """Whether the first group is not known when the source is compiled."""
    return not constant(match[1])
