"""K in parts: which part a block takes, where it leaves its sums, who adds them, what is restored."""

import re
from collections.abc import Iterator

from mutation.operators._base import NOTHING, Edit, drop, each, matches, operator, rewrite, varies
from mutation.source import Source

GROUP = "split"
_WORDS = r"\b(parts?|box|inbox|counters?|count|slot|unit|share|extra|own|owner|peer|CK|SL|SPLIT_K|WARPS_K)\b"


_LOOP = r"\bfor \(int \w+ = (0); \w+ < [^;]*\b(?:CK|SL|SPLIT_K|WARPS_K|splits?|parts)\b[^;]*;"
_SUM = r"\b(?:own|out|sum|share|total)\w*(?:\[[^;=]*?\])* (\+=) "
rewrite(
    *("wrong part of K", GROUP, (r"\b(?:part|slice|k0|first) = ([^,;]+)", 1, r"\1 + 1")),
    where=lambda match: varies(match) and bool(re.search(_WORDS, match[0])),
)
rewrite("drop a part", GROUP, (_LOOP, 1, "1"), (_SUM, 1, "="))


@operator("wrong place in the workspace", GROUP)
def _place(source: Source) -> Iterator[Edit]:
    places = matches(source, r"\b(?:slot|unit|box|in|w|src|dst|count|part|tile) = ([^,;]+)[,;]")
    yield from each((match for match in places if re.search(_WORDS, match[0]) and varies(match)), 1, r"\1 + 4")
    yield from each(matches(source, r"\? 1 : 0\)"), 0, "? 0 : 0)")
    yield from each(matches(source, r"\b(?:warp\.k|other|part) \* (?:SUMS|SHARE|size)\b"), 0, "0")


@operator("workspace not restored", GROUP)
def _restored(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("relaxed-store"):
        if re.search(r"fill|EMPTY|zero|\bz\b", source.text[call.start : call.end]):
            yield Edit(call.start, call.end, NOTHING)
    yield from each(matches(source, r"\bcount\w*(?:\[[^\]]*\])? = 0(?=;)"), 0, NOTHING)


drop("drop exchange", GROUP, "relaxed-store", "remote-store")
