"""Cleans a source file and cuts it into definitions by rules: kernels, functions, templates, types, macros.

The rules read braces and the text before them, comments and strings apart; there is no parser of C++. Code that the
rules cannot follow (braces that differ between branches of #if, bodies that never end) is left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cuda_l2.build.lexing import CPP_TOKEN, blank

LEAST_LINES, LEAST_CHARS = 3, 80
MOST_CHARS = 12_000
MOST_LINE_CHARS, MOST_SIGNATURE = 400, 400
"""Longer lines are tables, or written by programs; longer signatures are cut."""
MOST_NUMBERS = 0.5
"""Share of numbers among a snippet's words and numbers above which it is a table."""
PAIRS = (("{", "}"), ("(", ")"))
_COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*\*/|(?://[^\n]*(?:\n[ \t]*(?=//))?)+")
_LICENCE = re.compile(
    r"copyright|licen[cs]ed? (?:under|agreement)|all rights reserved|SPDX-|redistribution and use", re.I
)
_LICENCES = (
    ("proprietary, NVIDIA", re.compile(r"LicenseRef-NvidiaProprietary|NVIDIA.{0,400}proprietary", re.I | re.S)),
    ("Apache-2.0 WITH LLVM-exception", re.compile(r"Apache License.{0,60}LLVM Exceptions", re.I | re.S)),
    ("Apache-2.0", re.compile(r"Apache License", re.I)),
    ("BSD-3-Clause", re.compile(r"BSD[- ]3|Redistribution and use in source and binary forms", re.I)),
    ("MIT", re.compile(r"\bMIT License|Permission is hereby granted, free of charge", re.I)),
    ("MPL-2.0", re.compile(r"Mozilla Public License", re.I)),
    ("LGPL", re.compile(r"Lesser General Public License", re.I)),
    ("GPL", re.compile(r"General Public License", re.I)),
)
_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+()-]+(?:[ \t]+(?:WITH|OR|AND)[ \t]+[\w.+()-]+)*)")
_RULER = re.compile(r"^[ \t]*(?://|/?\*)[-=*/_#~+ \t]{8,}\n", re.MULTILINE)
_MAIL = re.compile(r"<?[\w.+-]+@[\w-]+(?:\.[\w-]+)+>?")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufeff\ufffd]")
_GUARD = re.compile(
    r"\s*#[ \t]*ifndef[ \t]+(\w+)[^\n]*\n\s*#[ \t]*define[ \t]+\1[ \t]*\n(.*)#[ \t]*endif[^\n]*\s*", re.S
)
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE | re.DOTALL)
_TRANSPARENT = re.compile(r"(?:\bnamespace\b[^(){};=]*|\bextern\s*)\Z")
_TYPE = re.compile(r"\b(?:struct|class|union)\b")
_TYPE_NAME = re.compile(
    r"\b(?:struct|class|union)\s+(?:(?:[A-Z_][A-Z0-9_]*|__\w+__|\w+\s*\([^()]*\))\s+)*([A-Za-z_]\w*)"
)
_NAMESPACE_MACRO = re.compile(r"^[ \t]*[A-Z_][A-Z0-9_]*NAMESPACE[A-Z0-9_]*(?:\([^()\n]*\))?[ \t]*$", re.MULTILINE)
_STRINGIFIED = re.compile(r"(?:\bconst\s+auto\s+\w+\s*=\s*(?:\w+\s*\+\s*)*)?\bjiterator_\w+\s*\(")
"""ATen keeps kernels that are compiled at run time as arguments of these."""
_TEMPLATE = re.compile(r"\s*(?:[A-Z_][A-Z0-9_]*(?:\s*\([^()]*\))?\s+)*template\s*<")
_DATA = re.compile(r"\benum\b|=\s*\Z")
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|[^\s\w(]+)")
_PARENTHESES = re.compile(r"\([^()]*\)")
_ASSIGNMENT = re.compile(r"(?<![=!<>])=(?!=)")
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*\)")
_BRACES = re.compile(r"[{}]")
_STOP = re.compile(r"[{};]|\b(?:public|private|protected)\s*:")
_AFTER_BODY = re.compile(r"\s*([,{;]?)(?:[\w:<>\s]*?)(?=([({]?))")
_SIGN = re.compile(r"[][(){};]")
_GLOBAL = re.compile(r"\b(?:__global__|CUTLASS_GLOBAL|\w*KERNEL_ATTRIBUTES)\b")
_CALLED_OF_TYPES = re.compile(r"\b(?:__align__|alignas|__attribute__|decltype)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_CALLED = re.compile(r"(operator\s*(?:[^\s\w(]{1,3}|\(\)|[\w:* ]+?)|~?[A-Za-z_]\w*)\s*(?:<[^()]*>)?\s*(?=\()")
_NO_NAMES = {
    *("decltype", "noexcept", "requires", "defined"),
    *("__launch_bounds__", "__align__", "alignas", "__attribute__"),
}
_WORDS = re.compile(r"[A-Za-z_]\w*|\d[\w.']*")


@dataclass(frozen=True, slots=True)
class Snippet:
    """One definition with the comment before it."""

    kind: str  # kernel, template, function, type, macro
    name: str
    signature: str  # what stands before the body, on one line
    comment: str  # its words alone
    code: str
    line: int  # of the definition in the cleaned file, from 1
    first: int = 1  # the line where the code begins, with the comment
    lines: tuple[int, ...] = ()  # of a model's piece: each line's number in the cleaned file, 0 between its parts

    @property
    def cut_by(self) -> str:
        """model or rules."""
        return "model" if self.lines else "rules"

    @property
    def last(self) -> int:
        """The line where a piece that rules cut ends."""
        return self.first + self.code.strip("\n").count("\n")


def licence(text: str, otherwise: str) -> str:
    """The licence that a file's first comments name, else `otherwise`."""
    head = "\n".join(match.group() for match in _COMMENT.finditer(text[:8000]))
    named = _SPDX.search(head)
    if named and "LicenseRef" not in named.group(1):
        return named.group(1)
    return next((name for name, pattern in _LICENCES if pattern.search(head)), otherwise)


def clean(text: str) -> str:
    """The file without licences, include guards, rulers of punctuation, addresses of people, invisible characters."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    text = _COMMENT.sub(lambda match: "" if _LICENCE.search(match.group()) else match.group(), text)
    text = _RULER.sub("", text)
    text = _COMMENT.sub(lambda match: _MAIL.sub("", match.group()), text)
    lead = re.match(r"(?:\s|/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*\n)*", text)
    start = lead.end() if lead else 0
    guarded = _GUARD.fullmatch(text[start:])
    if guarded:
        text = text[:start] + guarded.group(2)
    text = re.sub(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def snippets(text: str) -> list[Snippet]:
    """The definitions of a cleaned file that are worth reading, in their order."""
    return [snippet for snippet in definitions(text) if worth(snippet.code)]


def definitions(text: str, *, enter: bool = True) -> list[Snippet]:
    """All definitions of a cleaned file, in their order. enter: types over MOST_CHARS give their members instead."""
    bare = blank(text, CPP_TOKEN)
    most = MOST_CHARS if enter else len(text)
    found = [*_macros(text, bare), *_definitions(text, countable(bare), 0, len(text), most)]
    return sorted(found, key=lambda snippet: snippet.line)


def words_of(comment: str) -> str:
    """A comment's words without its marks, decorations and Doxygen's commands, on one line."""
    lines = []
    for line in comment.split("\n"):
        line = re.sub(r"^[ \t]*(?:/\*+<?!?|//[/!]*<?|\*+/?)|\*+/\s*$", "", line)
        line = re.sub(r"[@\\](?:brief|details|short|b|c|p|ref)\b\s*", "", line)
        line = re.sub(r"[@\\](t?param)(?:\[\w+(?:,\w+)*\])?\s+(\w+)", r"\2:", line)
        line = re.sub(r"[@\\](returns?|tparam|note|pre|post)\b", r"\1", line)
        if not re.fullmatch(r"[\s\W]*", line):
            lines.append(line.strip())
    return " ".join(" ".join(lines).split())


def countable(bare: str) -> str:
    """The blanked text without directives, and with one branch of each #if whose branches leave something open."""
    directives = [(m.start(), m.end(), m.group(1)) for m in _DIRECTIVE.finditer(bare)]
    without = _DIRECTIVE.sub(_spaces, bare)
    text = list(_STRINGIFIED.sub(_spaces, _NAMESPACE_MACRO.sub(_spaces, without)))
    stack: list[list[tuple[int, int]]] = []  # of each open #if: its branches so far, the last still open
    for start, end, name in directives:
        if name in ("if", "ifdef", "ifndef"):
            stack.append([(end, end)])
        elif name in ("else", "elif", "elifdef", "elifndef") and stack:
            stack[-1][-1] = (stack[-1][-1][0], start)
            stack[-1].append((end, end))
        elif name == "endif" and stack:
            branches = stack.pop()
            branches[-1] = (branches[-1][0], start)
            if any(
                text[a:b].count(opening) != text[a:b].count(closing) for a, b in branches for opening, closing in PAIRS
            ):
                for a, b in branches[1:]:
                    text[a:b] = [c if c == "\n" else " " for c in text[a:b]]
    return "".join(text)


def _spaces(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def _definitions(text: str, bare: str, start: int, end: int, most: int) -> Iterator[Snippet]:
    """The definitions between two positions; namespaces and types of over `most` characters are entered."""
    last = position = start
    while match := _STOP.search(bare, position, end):
        position = match.end()
        if match.group() != "{":
            last = position
            continue
        head = bare[last : match.start()]
        if _TRANSPARENT.search(head.rstrip()):
            last = position
            continue
        declared = _without_parentheses(head)
        if "(" in declared:  # the brace is of a value in an argument
            position = max(position, _pair_end(bare, match.start(), end))
            continue
        if _ASSIGNMENT.search(declared):  # of an alias or a variable
            last = position = _statement_end(bare, match.start(), end)
            continue
        close = _body_end(bare, match.start(), end)
        if close < 0:
            return
        begin = last + len(head) - len(head.lstrip())
        snippet = _snippet(text, bare, last, begin, match.start(), close)
        if snippet is not None and len(snippet.code) > most and is_type(head):
            yield from _definitions(text, bare, match.end(), close - 1, most)
        elif snippet is not None:
            yield snippet
        last = position = close


def _body_end(bare: str, brace: int, end: int) -> int:
    """Where the definition ends whose first brace is here; -1 where it does not."""
    while True:
        position = _pair_end(bare, brace, end)
        if position < 0:
            return -1
        after = _AFTER_BODY.match(bare, position, end)
        if after and after.group(1) == "{":  # a constructor's list of initialisers came before the body
            brace = after.start(1)
        elif after and after.group(1) == ",":
            brace = bare.find("{", after.end(1), end)
            if brace < 0:
                return -1
        elif after and after.group(1) == ";":
            return after.end(1)
        else:
            return position


def _without_parentheses(head: str) -> str:
    """The declaration before a brace without closed parentheses and their content."""
    _, declared = _apart(" ".join(head.split()))
    declared = _OPERATOR.sub("", declared)
    while (shorter := _PARENTHESES.sub("", declared)) != declared:
        declared = shorter
    return declared


def opens_body(head: str) -> bool:
    """Whether a brace after this opens a function's body, a value or an enum: neither a namespace nor a type."""
    return not (_TRANSPARENT.search(head.rstrip()) or is_type(head))


def is_type(head: str) -> bool:
    """Whether the text before a brace declares a type and no function."""
    _, declared = _apart(" ".join(head.split()))
    return "(" not in _CALLED_OF_TYPES.sub("", declared) and bool(_TYPE.search(declared))


def _statement_end(bare: str, brace: int, end: int) -> int:
    """The position after the semicolon of this brace's statement, or of the closing bracket around it."""
    depth = 0
    for match in _SIGN.finditer(bare, brace, end):
        sign = match.group()
        depth += (sign in "([{") - (sign in ")]}")
        if sign == ";" and not depth:
            return match.end()
        if depth < 0:
            return match.start()
    return end


def _pair_end(bare: str, brace: int, end: int) -> int:
    """The position after the brace that closes this one, -1 where none does."""
    depth = 0
    for match in _BRACES.finditer(bare, brace, end):
        depth += 1 if match.group() == "{" else -1
        if not depth:
            return match.end()
    return -1


def _snippet(text: str, bare: str, last: int, begin: int, brace: int, close: int) -> Snippet | None:
    head = " ".join(bare[begin:brace].split())
    if not head or _DATA.search(head):
        return None
    template, declared = _apart(head)
    function = "(" in _CALLED_OF_TYPES.sub("", declared)
    if function:
        kind = "kernel" if _GLOBAL.search(declared) else "template" if template else "function"
    elif _TYPE.search(declared):
        kind = "template" if template else "type"
    else:
        return None
    comment = _comment_before(text, last, begin)
    code = _dedented(text[begin - len(comment) : close])
    line = text.count("\n", 0, begin) + 1
    first = line - comment.count("\n")
    signature = head if len(head) <= MOST_SIGNATURE else head[: MOST_SIGNATURE - 3] + "..."
    return Snippet(kind, _name(declared, function), signature, words_of(comment), code, line, first)


def _apart(head: str) -> tuple[str, str]:
    """The `template <...>` before a declaration, and the declaration."""
    end = 0
    while match := _TEMPLATE.match(head, end):
        depth, end = 1, match.end()
        while depth and end < len(head):
            depth += {"<": 1, ">": -1}.get(head[end], 0) if head[end - 1] not in "-=<" or head[end] == "<" else 0
            end += 1
    return head[:end], head[end:]


def _name(declared: str, function: bool) -> str:
    if function:
        for match in _CALLED.finditer(_LAUNCH_BOUNDS.sub("", declared)):
            name = match.group(1)
            if name not in _NO_NAMES and not name.startswith(("_CCCL_", "_LIBCUDACXX_")):
                return " ".join(name.split())
        return ""
    named = _TYPE_NAME.search(declared)
    return named.group(1) if named else ""


def _comment_before(text: str, last: int, begin: int) -> str:
    """The comment that ends where the definition begins, and the space between; empty where a blank line parts them."""
    between = text[last:begin]
    comments = list(_COMMENT.finditer(between))
    if not comments:
        return ""
    gap = between[comments[-1].end() :]
    if gap.strip() or gap.count("\n") > 1:
        return ""
    start = comments[-1].start()
    if between[:start].strip(" \t") and "\n" not in between[:start].rpartition(";")[2] and last:
        return ""  # it stands on the line of what came before
    return between[start:]


def _macros(text: str, bare: str) -> Iterator[Snippet]:
    """Macros of several lines."""
    for match in _DIRECTIVE.finditer(bare):
        code = text[match.start() : match.end()]
        if match.group(1) == "define" and code.count("\n") >= LEAST_LINES:
            named = re.match(r"\s*#\s*define\s+(\w+(?:\([^()]*\))?)", code)
            if named:
                line = text.count("\n", 0, match.start()) + 1
                yield Snippet("macro", named.group(1).partition("(")[0], named.group(1), "", code, line, line)


def _dedented(code: str) -> str:
    """The code moved left by what its least indented lines after the first have, so that members stand alone."""
    first, *rest = code.split("\n")
    depth = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first, *(line[depth:] if line.strip() else "" for line in rest)]).strip("\n") + "\n"


def worth(code: str) -> bool:
    """Whether a snippet has a useful size and is no table."""
    lines = code.strip().split("\n")
    if len(lines) < LEAST_LINES or not LEAST_CHARS <= len(code) <= MOST_CHARS:
        return False
    if max(map(len, lines)) > MOST_LINE_CHARS:
        return False
    words = _WORDS.findall(blank(code, CPP_TOKEN))
    numbers = sum(word[0].isdigit() for word in words)
    return bool(words) and numbers <= MOST_NUMBERS * len(words)
