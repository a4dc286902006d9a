"""A candidate's source as mutation operators see it: calls, statements, blocks, and which helper issues which PTX.

No compiler's front end: text with comments, strings and directives blanked, matching brackets, and names of helpers
found by the PTX in their bodies. That suffices for sources formatted as this project's families are.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_BLANKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|^[ \t]*#(?:[^\n\\]|\\.|\\\n)*', re.S | re.M
)
_MACRO = re.compile(r"#[ \t]*define \w+(?:\([^()]*\))?|//[^\n]*|/\*.*?\*/|\\\n", re.S)
_STRESS = re.compile(r"^#ifdef STRESS$.*?^#(?:else|endif)", re.S | re.M)
_HELPER = re.compile(r"(?:\bDEV\b|\bDEVICE\b|\b__device__\b)[^;{}()]*?\b(\w+)\s*\(")
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_CONTROL = re.compile(r"\s*(if|for|while|do|else|switch|return)\b")

ROLES = {
    "wait": r"mbarrier\.(try|test)_wait",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "arrive": r"mbarrier\.arrive\.(?!expect)",
    "barrier-init": r"mbarrier\.init",
    "named-sync": r"\b(bar|barrier)\.(cta\.)?sync|\bbar\.sync",
    "named-arrive": r"\b(bar|barrier)\.(cta\.)?arrive",
    "cluster-arrive": r"barrier\.cluster\.arrive",
    "cluster-wait": r"barrier\.cluster\.wait",
    "init-fence": r"fence\.mbarrier_init",
    "proxy-fence": r"fence\.proxy\.async",
    "wgmma-fence": r"wgmma\.fence",
    "wgmma-commit": r"wgmma\.commit_group",
    "wgmma-wait": r"wgmma\.wait_group",
    "bulk-commit": r"cp\.async\.bulk\.commit_group",
    "bulk-wait": r"cp\.async\.bulk\.wait_group",
    "copy-commit": r"cp\.async\.commit_group",
    "copy-wait": r"cp\.async\.wait_(group|all)",
    "dependency-wait": r"griddepcontrol\.wait",
    "bulk-load": r"cp\.async\.bulk\.tensor\.\dd\.shared",
    "bulk-store": r"cp\.async\.bulk\.tensor\.\dd\.global",
    "copy": r"cp\.async\.c[ag]\.shared",
    "stmatrix": r"stmatrix\.sync",
    "ldmatrix": r"ldmatrix\.sync",
    "remote-store": r"st\.async",
    "relaxed-store": r"st\.(relaxed|release|volatile)",
    "relaxed-load": r"ld\.(relaxed|acquire|volatile)",
    "multiply": r"\b(wg)?mma(_async)?\.(sync|mma_async)|wgmma\.mma_async|\bmma\.sync",
}
"""What a helper does, by a pattern of the PTX it holds."""
BUILTINS = {
    "block-barrier": ("__syncthreads",),
    "warp-barrier": ("__syncwarp",),
    "memory-fence": ("__threadfence", "__threadfence_block"),
    "copy-wait": ("__pipeline_wait_prior",),
    "copy-commit": ("__pipeline_commit",),
}


@dataclass(frozen=True, slots=True)
class Call:
    """`name<template>(arguments)`; positions in the text, `end` behind the closing bracket."""

    name: str
    start: int
    end: int
    arguments: tuple[tuple[int, int], ...]
    template: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Helper:
    """A device function that wraps PTX: from its declaration's start to behind its body."""

    name: str
    start: int
    end: int
    roles: frozenset[str]


class Source:
    """One candidate's text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.contract_end = text.index("*/") + 2
        """Behind the leading comment, which holds the contract."""
        head = text[: self.contract_end]
        self.plain = "[[buffer]]" in head or 'target = "cpu"' in head
        """Whether it is of a family for CPUs or for tasks: bodies of macros and static functions are code there too."""

    @cached_property
    def code(self) -> str:
        """The text with comments, strings, directives and what stress builds alone hold blanked; positions are kept."""
        code = _BLANKED.sub(self._blank, self.text)
        for match in _STRESS.finditer(self.text):
            code = code[: match.start()] + _spaces(match.group()) + code[match.end() :]
        return code

    def _blank(self, match: re.Match[str]) -> str:
        """Spaces, but for the body of a macro that is code."""
        if self.plain and re.match(r"[ \t]*#[ \t]*define", match.group()):
            return _MACRO.sub(lambda part: _spaces(part.group()), match.group())
        return _spaces(match.group())

    @cached_property
    def helpers(self) -> tuple[Helper, ...]:
        """Device functions that hold PTX, kernels left out."""
        found = []
        for match in _HELPER.finditer(self.code):
            close = self.matching(match.end() - 1)
            opening = re.compile(r"\s*\{").match(self.code, close)
            if not opening or "__global__" in match.group():
                continue
            end = self.matching(opening.end() - 1)
            ptx = " ".join(re.findall(r'"((?:\\.|[^"\\])*)"', self.text[opening.end() : end]))
            roles = frozenset(role for role, pattern in ROLES.items() if re.search(pattern, ptx))
            if "asm" in self.code[opening.end() : end] and end - opening.end() < 2500:
                found.append(Helper(match.group(1), match.start(), end, roles))
        return tuple(found)

    def named(self, role: str) -> tuple[str, ...]:
        """Functions with a role."""
        helpers = {helper.name for helper in self.helpers if role in helper.roles}
        return (*sorted(helpers), *BUILTINS.get(role, ()))

    def calls(self, *names: str) -> Iterator[Call]:
        """Calls of these functions, in order; not their definitions, and not calls inside helpers."""
        if not names:
            return
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b(<[^;(){{}}]*?>)?\(")
        for match in pattern.finditer(self.code, self.contract_end):
            if self.in_helper(match.start()):
                continue
            end = self.matching(match.end() - 1)
            template = match.span(2) if match.group(2) else None
            inner = self._split(match.end(), end - 1)
            yield Call(match.group(1), match.start(), end, inner, template and (template[0] + 1, template[1] - 1))

    def role_calls(self, *roles: str) -> Iterator[Call]:
        """Calls with any of these roles, written out asm statements included, in order."""
        names = sorted({name for role in roles for name in self.named(role)})
        yield from sorted([*self.calls(*names), *self._assembly(roles)], key=lambda call: call.start)

    def in_helper(self, position: int) -> bool:
        return any(helper.start <= position < helper.end for helper in self.helpers)

    def matching(self, opening: int) -> int:
        """The position behind the bracket that closes the one at `opening`."""
        bracket = self.code[opening]
        closing, depth = _CLOSING[bracket], 0
        for position in range(opening, len(self.code)):
            character = self.code[position]
            depth += (character == bracket) - (character == closing)
            if depth == 0:
                return position + 1
        raise ValueError(f"no {closing} for the {bracket} at {opening}")

    @cached_property
    def blocks(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The statements of every block outside helpers: spans from first character to behind the last."""
        found = []
        for match in re.finditer(r"\{", self.code[self.contract_end :]):
            opening = match.start() + self.contract_end
            before = self.code[:opening].rstrip()
            if not self.in_helper(opening) and re.search(r"(\)|\belse|\bdo|[;{}])$", before):
                found.append(tuple(self._statements(opening + 1, self.matching(opening) - 1)))
        return tuple(found)

    def siblings(self, start: int, end: int) -> tuple[tuple[tuple[int, int], ...], int] | None:
        """The block whose statement is exactly text[start:end] and its semicolon, and its index there."""
        for block in self.blocks:
            for index, (first, last) in enumerate(block):
                if first == start and self.code[end:last].strip() == ";":
                    return block, index
        return None

    def line(self, position: int) -> int:
        """The number of the line, from 1."""
        return self.text.count("\n", 0, position) + 1

    def line_text(self, position: int) -> str:
        start = self.text.rfind("\n", 0, position) + 1
        end = self.text.find("\n", position)
        return self.text[start : end if end >= 0 else len(self.text)]

    def strings(self) -> Iterator[tuple[int, int]]:
        """String literals behind the contract, quotes included."""
        for match in _BLANKED.finditer(self.text, self.contract_end):
            if match.group().startswith('"'):
                yield match.span()

    def _assembly(self, roles: tuple[str, ...]) -> Iterator[Call]:
        """asm statements outside helpers whose PTX has one of the roles and gives no result."""
        for match in re.finditer(r"\basm volatile\s*\(", self.code[self.contract_end :]):
            opening = self.contract_end + match.end() - 1
            start, end = self.contract_end + match.start(), self.matching(opening)
            if self.in_helper(start) or not re.match(r"\s*(::|:\s*:|$)", self.code[opening + 1 : end - 1]):
                continue
            ptx = " ".join(re.findall(r'"((?:\\.|[^"\\])*)"', self.text[opening:end]))
            if any(re.search(ROLES[role], ptx) for role in roles if role in ROLES):
                yield Call("asm", start, end, ())

    def _split(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Spans between the commas of an argument list."""
        spans, depth, first = [], 0, start
        for position in range(start, end):
            character = self.code[position]
            depth += (character in "([{") - (character in ")]}")
            if character == "," and depth == 0:
                spans.append((first, position))
                first = position + 1
        if self.code[first:end].strip():
            spans.append((first, end))
        return tuple((a + len(self.text[a:b]) - len(self.text[a:b].lstrip()), b) for a, b in spans)

    def _statements(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        position = start
        while position < end:
            if self.code[position].isspace():
                position += 1
                continue
            stop = min(self._statement_end(position, end), end)
            yield position, stop
            position = stop

    def _statement_end(self, position: int, limit: int) -> int:
        """Behind the statement that begins at `position` (or, white space skipped, soon behind it)."""
        while position < limit and self.code[position].isspace():
            position += 1
        if position >= limit:
            return limit
        if self.code[position] == "{":
            return self.matching(position)
        control = _CONTROL.match(self.code, position)
        keyword = control.group(1) if control and control.start(1) == position else ""
        if keyword in ("if", "for", "while", "switch"):
            end = self._statement_end(self.matching(self.code.index("(", position)), limit)
            alternative = re.compile(r"\s*else\b").match(self.code, end)
            return self._statement_end(alternative.end(), limit) if keyword == "if" and alternative else end
        if keyword == "do":
            end = self._statement_end(position + 2, limit)
            return self.code.index(";", end) + 1
        while position < limit:
            character = self.code[position]
            if character in _CLOSING:
                position = self.matching(position)
                continue
            position += 1
            if character == ";":
                return position
        return limit


def _spaces(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)
