"""From sums to C: stores left out or shifted, lanes and fragments mixed up."""

import re
from collections.abc import Iterator

from mutation.operators._base import NOTHING, Edit, each, functions, operator, plain_matches
from mutation.source import Source

GROUP = "epilogue"


@operator("drop store", GROUP)
def _drop_store(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("bulk-store", "stmatrix"):
        yield Edit(call.start, call.end, NOTHING)
    names = [name for name in functions(source) if source.plain and re.match(r"store|put|set|write|narrow$", name)]
    for call in source.calls(*names):
        if source.code[call.end] == ";":
            yield Edit(call.start, call.end, NOTHING)
    for match in plain_matches(source, r"(?<=[ )])\*(?:reinterpret_cast<|static_cast<|\()[^;]*? = [^;=][^;]*(?=;)"):
        if not re.search(
            r"\breturn\b|\bconst\b[^;]*$", source.code[source.code.rfind(";", 0, match.start()) : match.start()]
        ):
            yield Edit(*match.span(), NOTHING)
    stores = plain_matches(source, r"(?<=[ )])(?:at|C|c|out|to|p|tile)\[[^;=]*?\] = (?!=)[^;]+(?=;)")
    yield from each(stores, 0, NOTHING)


@operator("drop last store", GROUP)
def _drop_last(source: Source) -> Iterator[Edit]:
    for match in plain_matches(source, r"\bfor \("):
        end = source.matching(match.end() - 1)
        body = source.code[end : end + 400].split("for (")[0]
        bound = re.compile(r"; \w+ < ([^;]+);").search(source.code, match.start(), end)
        if bound and re.search(r"\b(store\w*|stmatrix\w*|tma_store)\b|\b(at|to|out|c)\[", body):
            yield Edit(*bound.span(1), f"({bound.group(1)}) - 1")


@operator("store elsewhere", GROUP)
def _elsewhere(source: Source) -> Iterator[Edit]:
    names = [name for name in functions(source) if re.search(r"store|stmatrix", name)]
    for call in source.calls(*names):
        before = source.code[max(0, call.start - 60) : call.start].split("\n")[-1]
        if re.search(r"\b(void|DEV|DEVICE)\b", before):
            continue
        for start, end in call.arguments:
            text = source.text[start:end]
            if re.search(r"row|col|stage|buf|\bat\b|\bout\b", text) and not text.startswith("&"):
                yield Edit(start, end, f"{text} + 8")
    for match in plain_matches(source, r"\b(?:out|c|C|to) \+ (?:\(u64\)|static_cast<long long>\()?\w+"):
        if "bar_" not in source.line_text(match.start()):
            yield Edit(match.start(), match.start(), "1 + ")


@operator("wrong lane", GROUP)
def _lanes(source: Source) -> Iterator[Edit]:
    for match in plain_matches(source, r"\b(?:warp\.)?(?:lane|quad|group|quarter)\b(?= [&%>/*+]| ==|[\]),;])"):
        if re.search(r"= $|\bint $", source.code[match.start() - 5 : match.start()]) or "const int" in match.group():
            continue
        for bit in _bits(source.code[match.end() : match.end() + 6]):
            yield Edit(*match.span(), f"({match.group()} ^ {bit})")


@operator("wrong sum of a thread", GROUP)
def _fragments(source: Source) -> Iterator[Edit]:
    pairs = plain_matches(source, r"\b(?:pair|value|sum_of)\((\w+(?:\[[^\]]*\])*), ([^;]*?)\)(?=[,);])")
    yield from each(pairs, 2, r"(\2) ^ 1")
    for match in plain_matches(source, r"\bpack\((\w+\[[^;]*?\]), (\w+\[[^;]*?\])\)"):
        yield Edit(*match.span(1), match.group(2), ((*match.span(2), match.group(1)),))


def _bits(following: str) -> tuple[int, ...]:
    """Bits that matter to what follows a lane's number: a shift or a division drops the lower ones."""
    dropped = re.match(r" (>>|/) (\d+)", following)
    if not dropped:
        return (1, 2)
    number = int(dropped.group(2))
    return (1 << number if dropped.group(1) == ">>" else number,)
