"""K in parts: which part a block takes, where it leaves its sums, who adds them, what is restored."""

import re
from collections.abc import Iterator

from mutation.operators._base import NOTHING, Edit, constant, matches, operator
from mutation.source import Source

GROUP = "split"
_WORDS = r"\b(parts?|box|inbox|counters?|count|slot|unit|share|extra|own|owner|peer|CK|SL|SPLIT_K|WARPS_K)\b"


@operator("wrong part of K", GROUP)
def _part(source: Source) -> Iterator[Edit]:
    for match in matches(source, r"\b(?:part|slice|k0|first) = ([^,;]+)"):
        if not constant(match.group(1)) and re.search(_WORDS + r"|\bpart\b|\bshare\b", match.group()):
            yield Edit(*match.span(1), f"{match.group(1)} + 1")


@operator("drop a part", GROUP)
def _drop_part(source: Source) -> Iterator[Edit]:
    for match in matches(
        source, r"\bfor \(int \w+ = (0); \w+ < [^;]*\b(?:CK|SL|SPLIT_K|WARPS_K|splits?|parts)\b[^;]*;"
    ):
        yield Edit(*match.span(1), "1")
    for match in matches(source, r"\b(?:own|out|sum|share|total)\w*(?:\[[^;=]*?\])* (\+=) "):
        yield Edit(*match.span(1), "=")


@operator("wrong place in the workspace", GROUP)
def _place(source: Source) -> Iterator[Edit]:
    for match in matches(source, r"\b(?:slot|unit|box|in|w|src|dst|count|part|tile) = ([^,;]+)[,;]"):
        if re.search(_WORDS, match.group()) and not constant(match.group(1)):
            yield Edit(*match.span(1), f"{match.group(1)} + 4")
    for match in matches(source, r"\? 1 : 0\)"):
        yield Edit(*match.span(), "? 0 : 0)")
    for match in matches(source, r"\b(?:warp\.k|other|part) \* (?:SUMS|SHARE|size)\b"):
        yield Edit(match.start(), match.end(), "0")


@operator("workspace not restored", GROUP)
def _restored(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("relaxed-store"):
        if re.search(r"fill|EMPTY|zero|\bz\b", source.text[call.start : call.end]):
            yield Edit(call.start, call.end, NOTHING)
    for match in matches(source, r"\bcount\w*(?:\[[^\]]*\])? = 0(?=;)"):
        yield Edit(*match.span(), NOTHING)


@operator("drop exchange", GROUP)
def _unsent(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("relaxed-store", "remote-store"):
        yield Edit(call.start, call.end, NOTHING)
