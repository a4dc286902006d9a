"""Addresses and coordinates: strides, offsets, swizzles, descriptors, stages of a ring."""

import re
from collections.abc import Iterator
from itertools import pairwise

from mutation.operators._base import Edit, constant, each, functions, operator, plain_matches, rewrite, varies
from mutation.source import Call, Source

GROUP = "index"
_DESCRIPTOR = r"\b(DESC_HIGH = )([^;]+);|(desc_low\([^)]*\) \{ return )([^;]+);"


def _arithmetic(source: Source, symbols: str) -> Iterator[re.Match[str]]:
    """Operators between operands that are not all known when compiling."""
    for match in plain_matches(source, rf" ({symbols}) (?!=)"):
        near = source.code[max(0, match.start() - 24) : match.end() + 24].split(";")
        if not constant(" ".join(near)):
            yield match


rewrite("divide for remainder", GROUP, (r"[%/]", 1, lambda m: "/" if m[1] == "%" else "%"), find=_arithmetic)
rewrite(
    *("other factor", GROUP, (r" \* (\d+)\b", 1, lambda m: str(int(m[1]) // 2), lambda m: str(int(m[1]) * 2))),
    find=plain_matches,
    where=lambda match: int(match[1]) >= 2,
)
rewrite("minus for plus", GROUP, (r"\+", 1, "-"), find=_arithmetic)
_COORDINATE = r"\b(?:row|col|column|at|m|n|k|x|y)\w* = ([^,;=]+)[,;]"
rewrite("offset by eight", GROUP, (_COORDINATE, 1, r"\1 + 8"), find=plain_matches, where=varies)


@operator("swap neighbouring arguments", GROUP)
def _swap(source: Source) -> Iterator[Edit]:
    for call in _calls(source):
        for first, second in pairwise(call.arguments):
            one, two = source.text[slice(*first)].strip(), source.text[slice(*second)].strip()
            if one != two and all(re.search(r"row|col|\b[xyzrmnk]\b|k0|step|size", side) for side in (one, two)):
                yield Edit(*first, two, ((*second, one),))


_OTHER = {"m": "n", "n": "m", "k": "(k + 8)", "M": "N", "N": "M", "K": "(K + 8)"}
rewrite(
    *("other stride", GROUP),
    (r" \* ([mnkMNK])\b(?! \*)", 1, lambda match: _OTHER[match[1]]),
    (r" \* (?:\w+::)?(\w*(?:PITCH|WIDTH|BYTES|STRIDE))\b()", 2, " / 2"),
    find=plain_matches,
)


@operator("swizzle without xor", GROUP)
def _xor(source: Source) -> Iterator[Edit]:
    for match in plain_matches(source, r" (\^) "):
        if not re.search(r"parity|phase", source.line_text(match.start())):
            yield Edit(*match.span(1), "+ 0 *")
            yield Edit(*match.span(1), "+")


@operator("other mask or shift", GROUP)
def _mask(source: Source) -> Iterator[Edit]:
    for match in plain_matches(source, r" (>>|<<|&) (\d+)\b"):
        value = int(match.group(2))
        for other in (value >> 1, value << 1 | 1) if match.group(1) == "&" else (value - 1, value + 1):
            if other > 0:
                yield Edit(*match.span(2), str(other))


@operator("descriptor bits", GROUP)
def _descriptor(source: Source) -> Iterator[Edit]:
    for match in re.finditer(_DESCRIPTOR, source.code):
        group = 2 if match.group(2) else 4
        for number in re.finditer(r"(?<=>> )\d+|0x3ffff|\b1024|(?<=<< )30", match.group(group)):
            at = match.start(group)
            value = int(number.group(), 0)
            for other in (value // 2, value * 2):
                yield Edit(at + number.start(), at + number.end(), str(other))


@operator("ring one stage short or stuck", GROUP)
def _ring(source: Source) -> Iterator[Edit]:
    yield from each(plain_matches(source, r"\+\+\w+ == (\w+)"), 1, r"\1 - 1")
    yield from each(plain_matches(source, r"\b(\w+) \* \(?STAGE_BYTES"), 1, r"(\1 ? 0 : 1)")
    waits = [call.template for call in source.role_calls("copy-wait", "bulk-wait", "wgmma-wait") if call.template]
    for match in plain_matches(source, r"\bSTAGES - (\d)"):
        if not any(start <= match.start() < end for start, end in waits):  # to wait for more groups is no fault
            yield Edit(*match.span(1), str(int(match.group(1)) + 1))
    yield from each(plain_matches(source, r" \+ (STAGES)\b"), 1, "STAGES - 1")
    for match in plain_matches(source, r" \? (stage|ring) : (next|stage|ring)\b| \? (\w+) : stage \+ STAGE_BYTES"):
        group = 1 if match.group(1) else 3
        yield Edit(*match.span(group), match.group(2) or "stage")


def _calls(source: Source) -> Iterator[Call]:
    """Calls of the source's own functions; definitions left out."""
    for call in source.calls(*functions(source)):
        before = source.code[max(0, call.start - 60) : call.start].split("\n")[-1]
        if not re.search(r"\b(auto|void|int|bool|DEV|DEVICE|__device__)\s[^;{}]*$", before):
            yield call
