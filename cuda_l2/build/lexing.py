"""Reading a candidate's text before any compiler does: lines joined, comments and strings told apart, linear time.

What a rule sees must be what the compiler will see. So anything on which two readers could differ (trigraphs, raw
strings, quotes that no line closes) is refused rather than understood.
"""

import re
from collections.abc import Collection

MAX_SOURCE_BYTES = 1 << 18
_CONTROL = re.compile(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]")
_TRIGRAPH = re.compile(r"\?\?[=/'()!<>-]")
_RAW_STRING = re.compile(r'\b(?:u8|u|U|L)?R"')
_PROBES = re.compile(r"\b(__has_include|__has_include_next|__has_embed)\b")
_DATES = ("__DATE__", "__TIME__", "__TIMESTAMP__")
_HEADER = re.compile(r"\s*<(\w+(?:/\w+)*(?:\.\w+)?)>\s*")
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w*)(.*)$", re.MULTILINE)
DIRECTIVES = frozenset(
    {"include", "define", "undef", "if", "ifdef", "ifndef", "elif", "elifdef", "elifndef", "else", "endif", "pragma"}
    | {"error", "warning"}
)

# unterminated comments and strings end where the text or the line does, so no position is scanned twice
C_TOKEN = re.compile(r'/\*(?:[^*]|\*(?!/))*(?:\*/)?|//[^\n]*|"(?:\\[^\n]|[^"\\\n])*"?|\'(?:\\[^\n]|[^\'\\\n])*\'?')
"""Comments, strings and character constants of C."""
CPP_TOKEN = re.compile(r"[^\W\d]\w*|\.?[0-9](?:[eEpP][+-]|'?\w|\.)*|" + C_TOKEN.pattern)
"""The same of C++14 and later, and words and numbers: the quotes in 1'000'000 open nothing."""


def joined(source: str) -> tuple[str, str]:
    """The text with continued lines joined, and why it is refused, in one line; empty where it is not."""
    if len(source) > MAX_SOURCE_BYTES or len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
        return "", f"the source is larger than {MAX_SOURCE_BYTES >> 10} KiB"
    source = source.replace("\r\n", "\n")
    control = _CONTROL.search(source)
    if control:
        found = repr(control.group())
        return "", f"the source holds the character {found}; only printable ones, tabs and newlines are allowed"
    if _TRIGRAPH.search(source):
        return "", "trigraphs are not allowed"
    text = re.sub(r"\\[ \t]*\n", "", source)
    if _RAW_STRING.search(text):
        return "", "raw strings are not allowed"
    return text, ""


def blank(text: str, token: re.Pattern[str] = C_TOKEN, strings: bool = True) -> str:
    """The text with comments blanked, and strings and character constants too unless told not; lines are kept."""

    def replace(match: re.Match[str]) -> str:
        found = match.group()
        kept = not found.startswith(("/*", "//", '"', "'")) or (not strings and not found.startswith("/"))
        return found if kept else re.sub(r"[^\n]", " ", found)

    return token.sub(replace, text)


def directives(text: str) -> list[tuple[str, str]]:
    """Name and rest of every preprocessor directive in a text whose comments are blanked."""
    return [(match.group(1), match.group(2)) for match in _DIRECTIVE.finditer(text)]


def refuse_directives(text: str, headers: Collection[str], folders: tuple[str, ...], pragmas: re.Pattern[str]) -> str:
    """Why a text whose comments are blanked is refused: a header, a pragma or a directive that may not be there.

    folders: with their slash; every header in them may be included.
    """
    for name, rest in directives(text):
        if name == "include":
            header = _HEADER.fullmatch(rest)
            if not header or not (header.group(1) in headers or header.group(1).startswith(folders)):
                known = ", ".join([*sorted(headers), *(f"{folder}*" for folder in folders)])
                return f"#include{rest.rstrip()[:200]} is not allowed; the headers are {known}"
        elif name == "pragma" and not pragmas.match(rest):
            return f"#pragma{rest.rstrip()[:200]} is not allowed"
        elif name not in DIRECTIVES:
            return f"#{name or rest.strip()[:200]} is not allowed"
    return ""


def refuse_probes(text: str) -> str:
    """Why a blanked text is refused: it asks which files exist, or when it is compiled.

    Macros, of headers too, may join the pieces of a name, and NVRTC does not show what they spell.
    """
    if _PROBES.search(text):
        return "__has_include and __has_embed are not allowed"
    words = set(re.findall(r"\w+", text))
    for name in _DATES:
        pieces = "|".join(word for word in words if word in name)
        if re.fullmatch(f"(?:{pieces})+", name):
            return f"{name}, or its pieces, is not allowed: a kernel must be the same whenever it is compiled"
    return ""


def refuse_open_quotes(joined: str) -> str:
    """Why a C++ text is refused: a quote or comment that is not closed, where readers differ on what follows."""
    for match in CPP_TOKEN.finditer(joined):
        found = match.group()
        if found[0] in "\"'" and (len(found) == 1 or found[-1] != found[0]):
            return "a quote that is not closed on its line is not allowed"
        if found.startswith("/*") and (len(found) < 4 or not found.endswith("*/")):
            return "a comment that is not closed is not allowed"
    return ""


def literals(joined: str) -> list[str]:
    """The contents of C++ string literals, neighbours joined as the compiler joins them."""
    groups: list[str] = []
    end = -1
    for match in CPP_TOKEN.finditer(joined):
        found = match.group()
        if found.startswith(("/*", "//")):
            end = match.end() if not joined[max(end, 0) : match.start()].strip() and end >= 0 else -1
        elif found.startswith('"'):
            if end >= 0 and not joined[end : match.start()].strip():
                groups[-1] += found[1:-1]
            else:
                groups.append(found[1:-1])
            end = match.end()
        else:
            end = -1
    return groups
