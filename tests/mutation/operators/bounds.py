"""Loops and predicates: one element, row or step too many or too few."""

import re
from collections.abc import Iterator

from mutation.operators._base import Edit, aside, constant, matches, operator, plain_matches, rewrite, varies
from mutation.source import Source

GROUP = "bounds"
_CONDITION = r"(?P<left>[\w)\]>.]+) (?P<relation><=|>=|<|>) (?P<right>[\w(\-]+)"


@operator("relation off by equality", GROUP)
def _equality(source: Source) -> Iterator[Edit]:
    other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
    for match, fixed in _conditions(source):
        if not (fixed or _leaves_the_rest(source, match)):
            yield Edit(*match.span("relation"), other[match["relation"]])


@operator("bound one less or more", GROUP)
def _one(source: Source) -> Iterator[Edit]:
    for match, fixed in _conditions(source):
        for other in ("- 1", "+ 1"):
            if not ((fixed and other == "+ 1") or (other == "- 1" and _leaves_the_rest(source, match))):
                yield Edit(match.end("relation"), match.end("relation"), f" {other} +")


@operator("drop predicate", GROUP)
def _predicate(source: Source) -> Iterator[Edit]:
    for match in plain_matches(source, r"\bif \("):
        end = source.matching(match.end() - 1)
        inner = source.code[match.end() : end - 1]
        if "elect" in inner or constant(inner):
            continue
        yield Edit(match.end(), end - 1, "true")
        for part in re.finditer(r"(?:^|(?<=&& ))([^&|()]+?)(?= &&|$)", inner):
            if "&&" in inner and not constant(part.group()):
                yield Edit(match.end() + part.start(), match.end() + part.end(), "true")


@operator("drop guard of a load", GROUP)
def _guard(source: Source) -> Iterator[Edit]:
    for match in plain_matches(
        source, r"\binside = ([^;,]+);|\b(?:min|least)\(([^()]*(?:\([^()]*\)[^()]*)*), [^()]*\)"
    ):
        if match.group(1):
            yield Edit(*match.span(1), f"({match.group(1)}) | 8")
        elif not constant(match.group()):
            yield Edit(*match.span(), f"({match.group(2)})")


_FIRST = r"\bfor \((?:int|unsigned|u32|long long) \w+ = ([^;,]+);"
rewrite("loop starts late", GROUP, (_FIRST, 1, r"\1 + 1"), find=plain_matches)
_UP = r"\((\w+) \+ (?:[^()]+(?:\([^()]*\))? - 1|63|31|15|7)\) / "
rewrite("edge rounded down", GROUP, (_UP, 0, r"(\1) / "), where=varies)


def _leaves_the_rest(source: Source, match: re.Match[str]) -> bool:
    """Whether a loop over vectors takes one less, which loops over elements then take."""
    return source.plain and match["relation"] == "<=" and match["left"] in ("LANES", "VW", "NR")


def _conditions(source: Source) -> Iterator[tuple[re.Match[str], bool]]:
    """Relations that branches and loops depend on; fixed: a loop's, whose bound is known when it is compiled.

    Running such a loop once more leaves an array in registers, which compilers drop.
    """
    for match in matches(source, _CONDITION):
        position = match.start("relation")
        line = source.line_text(position)
        if aside(source, position) or not re.search(r"\b(if|for|while)\b|\?|&&|const bool", line):
            continue
        if not constant(match.group()):
            rest = re.split(r"[;?]|&&", source.code[match.start("right") : match.start("right") + 80])[0]
            in_loop = re.search(r"\bfor \([^)]*$", source.code[:position].split("\n")[-1])
            yield match, bool(in_loop) and constant(rest)
