"""Barriers, waits, fences, phases and counts: threads that no longer meet as they must."""

import re
from collections.abc import Iterator

from mutation.operators._base import NOTHING, Edit, behind, drop, each, in_strings, matches, operator, rewrite
from mutation.source import Call, Source

GROUP = "synchronisation"
MOVABLE = (
    *("block-barrier", "warp-barrier", "named-sync", "wait", "arrive", "expect", "cluster-wait", "dependency-wait"),
    *("proxy-fence", "wgmma-wait", "wgmma-commit", "bulk-wait", "bulk-commit", "copy-wait", "copy-commit"),
)

drop("drop block barrier", GROUP, "block-barrier")
drop("drop warp barrier", GROUP, "warp-barrier")
drop("drop named barrier", GROUP, "named-sync", "named-arrive")
drop("drop mbarrier wait", GROUP, "wait")
drop("drop mbarrier arrive", GROUP, "arrive")
drop("drop mbarrier init", GROUP, "barrier-init")
drop("drop expect_tx", GROUP, "expect")
drop("drop cluster barrier", GROUP, "cluster-arrive", "cluster-wait")
drop("drop fence", GROUP, "init-fence", "proxy-fence", "wgmma-fence", "memory-fence")
drop("drop commit", GROUP, "wgmma-commit", "bulk-commit", "copy-commit")
drop("drop group wait", GROUP, "wgmma-wait", "bulk-wait", "copy-wait")
drop("drop griddepcontrol.wait", GROUP, "dependency-wait")


@operator("expect other bytes", GROUP)
def _expected(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("expect"):
        if len(call.arguments) >= 2:
            yield from behind(source, call.arguments[-1], "- 128", "+ 128", "/ 2")


@operator("wait for fewer groups", GROUP)
def _groups(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("wgmma-wait", "bulk-wait", "copy-wait"):
        span = call.template or (call.arguments[0] if call.arguments else None)
        if span:
            yield from behind(source, span, "+ 1")


@operator("flip phase", GROUP)
def _phase(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("wait"):
        if len(call.arguments) >= 2:
            yield from behind(source, call.arguments[1], "^ 1")
    for match in matches(source, r"\b(?:parity|phase)\w* \^= (1)\b|\b(?:parity|phase)\w* = ([01])\b"):
        group = 1 if match.group(1) else 2
        yield Edit(*match.span(group), "0" if match.group(group) == "1" else "1")


@operator("swap full and empty", GROUP)
def _rings(source: Source) -> Iterator[Edit]:
    other = {"full": "empty", "empty": "full"}
    for call in source.role_calls("wait", "arrive", "expect", "barrier-init"):
        match = re.compile(r"\b(full|empty)\b").search(source.text, call.start, call.end)
        if match:
            yield Edit(*match.span(), other[match.group()])
    yield from each(matches(source, r"\bbar = (full|empty)\b"), 1, lambda match: other[match[1]])


@operator("wait on another stage", GROUP)
def _stage(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("wait", "arrive", "expect"):
        match = re.compile(r"\b(?:full|empty) \+ (\w+) \* 8").search(source.text, call.start, call.end)
        if match:
            yield Edit(*match.span(1), f"({match.group(1)} ? 0 : 1)")
    yield from each(matches(source, r"\brelease\((\w+)\);"), 1, r"(\1 ? 0 : 1)")


@operator("other number of arrivals", GROUP)
def _arrivals(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("barrier-init"):
        if len(call.arguments) >= 2:
            yield from behind(source, call.arguments[1], "+ 1", "- 1")


@operator("other barrier or count of threads", GROUP)
def _named(source: Source) -> Iterator[Edit]:
    for call in source.role_calls("named-sync", "named-arrive"):
        if len(call.arguments) >= 2:
            yield from behind(source, call.arguments[0], "+ 1")
            yield from behind(source, call.arguments[1], "- 32")


@operator("move barrier earlier", GROUP)
def _earlier(source: Source) -> Iterator[Edit]:
    for call, block, index in _movable(source):
        if index > 0 and not _declares(source, block[index - 1]):
            target = block[index - 2][1] if index > 1 else source.code.rindex("{", 0, block[0][0]) + 1
            moved = f" {source.text[call.start : call.end]};"
            yield Edit(target, target, moved, ((call.start, call.end, NOTHING),))


@operator("move barrier later", GROUP)
def _later(source: Source) -> Iterator[Edit]:
    expects = {call.start for call in source.role_calls("expect")}  # the arrival comes with them: late is early enough
    for call, block, index in _movable(source):
        if index + 1 < len(block) and not _declares(source, block[index + 1]) and call.start not in expects:
            target = block[index + 1][1]
            moved = f" {source.text[call.start : call.end]};"
            yield Edit(call.start, call.end, NOTHING, ((target, target, moved),))


_ORDERED = r"\b(?:ld|red|atom)\.(acquire|release|acq_rel)\b"
rewrite("acquire or release to relaxed", GROUP, (_ORDERED, 1, "relaxed"), find=in_strings)
rewrite(
    *("believe what is polled", GROUP),
    (r"\b(?:ready|done|ok) &= ([^;]+);", 1, "true"),
    (r"\bwhile \((!?(?:ready|done|ok)|\w+ != [^;&]+?) &&", 1, "false"),
)


def _movable(source: Source) -> Iterator[tuple[Call, tuple[tuple[int, int], ...], int]]:
    """Barriers, waits and fences that stand as statements of their own, with their block and place in it."""
    for call in source.role_calls(*MOVABLE):
        found = source.siblings(call.start, call.end)
        if found:
            yield call, *found


def _declares(source: Source, span: tuple[int, int]) -> bool:
    """Whether a statement declares something that others may need, leaves, or is empty."""
    types = (
        r"(const|constexpr|int|u16|u32|u64|unsigned|float|bool|auto|half|Sum|char|extern|return|__shared__|uint\w*)\b"
    )
    text = source.code[slice(*span)].strip()
    return not text.strip(";") or bool(re.match(types, text))
