"""PTX instructions whose other half is missing: copies that nothing waits for, releases that nothing acquires.

Such a kernel may give right results for years on one machine: copies tend to land in time, and ptxas makes nothing of
some fences. No launch shows it then, but the text does. What counts is that the other half stands somewhere; whether it
stands in the right place, the checks that launch must find. Two places count, since no launch has shown yet that
a fence was missing there: behind an mbarrier's initialisation, before the function's next bulk copy; and before a count
in global memory, where the function has fences at all and stores before it.

Rules after the PTX ISA: data movement (asynchronous copies, async proxy), mbarrier, memory consistency model. None for
wgmma: ptxas waits where a source does not, and its warnings are failures.
"""

import re
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*(?:[^*]|\*(?!/))*(?:\*/)?|//[^\n]*")
_ACCESS = re.compile(r"(?<![\w.%])(?:ld|st|red|atom|fence|membar)\.[\w.:]+")
_COUNT = re.compile(r"(?<![\w.%])(?:atom|red)\.(?![\w.:]*(?:shared|\.b?f(?:16|32|64)))")  # of global memory; no sums
_NARROW_FENCE = re.compile(r"(?<![\w.%])(?:membar\.cta|fence\.(?:acq_rel|sc)\.(?:cta|cluster))\b")
_WIDE_FENCE = re.compile(r"(?<![\w.%])(?:membar\.(?:gl|sys)|fence\.(?:acq_rel|sc)\.(?:gpu|sys))\b")
_SIGNAL = re.compile(  # what may tell another block, or the next launch, that data are there
    r"(?<![\w.%])(?:(?:atom|red)\.(?![\w.:]*shared)[\w.:]+|griddepcontrol\.launch_dependents\b"
    r"|st\.(?=[\w.:]*\b(?:volatile|relaxed|mmio|cg|wt)\b)(?![\w.:]*shared)[\w.:]+)"
)
_STORE = re.compile(  # of data to global memory
    r"(?<![\w.%])(?:(?:st|red)\.(?![\w.:]*(?:shared|local|param))|cp\.(?:reduce\.)?async\.bulk\.[\w.:]*bulk_group)"
)
_TICKET = re.compile(  # which number a count gives; adding 0 is a look
    r"(?<![\w.%])atom\.(?=[\w.:]*global)[\w.:]*\.(?:add|inc|dec)\b[\w.:]*\s+(%\w+),[^;]*,(?!\s*0\s*;)[^;,]+;"
)
_RELEASE = re.compile(r"(?<![\w.%])(?!fence\b)[a-z]\w*\.[\w.:]*\b(?:release|acq_rel)\b")
_LABEL = re.compile(r"^\s*(\$\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_BEFORE_MODIFIER = re.compile(r"\s+(?=\.[a-z])")
_WIDE = re.compile(r"\.(?:gpu|sys|gl)\b")  # scopes beyond a block and a cluster
_FUNCTION = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+|\.extern\s+)*\.(?:entry|func)\b", re.MULTILINE)
_INITIALISED = re.compile(
    r"(?<![\w.%])(?:(?P<init>mbarrier\.init)|(?P<fence>fence\.(?:mbarrier_init|proxy\.async))"
    r"|(?P<load>cp\.async\.bulk\.[\w.:]*complete_tx))\b"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Where `used` is found, `needed` must be too."""

    used: re.Pattern[str]
    needed: re.Pattern[str]
    reason: str


def _rule(used: str, needed: str, reason: str) -> Rule:
    return Rule(re.compile(rf"(?<![\w.%]){used}"), re.compile(rf"(?<![\w.%]){needed}"), reason)


_COPY = r"cp\.async\.c[ag]\b"
_BULK_LOAD = r"cp\.async\.bulk\.[\w.:]*complete_tx"
_BULK_STORE = r"cp\.(?:reduce\.)?async\.bulk\.[\w.:]*bulk_group"
_OTHER_BLOCKS = r"(?:st\.async\b|mapa\b|cp\.async\.bulk\.[\w.:]*multicast)"
RULES = (
    _rule(_COPY, r"cp\.async\.(?:wait_group|wait_all|mbarrier)\b", "cp.async copies, and nothing waits for them"),
    _rule(
        _COPY,
        r"cp\.async\.(?:commit_group|wait_all|mbarrier)\b",
        "cp.async copies without cp.async.commit_group: cp.async.wait_group does not wait for them",
    ),
    _rule(_BULK_LOAD, r"mbarrier\.(?:try|test)_wait\b", "bulk copies to shared memory, and no mbarrier is waited for"),
    _rule(
        _BULK_LOAD,
        r"fence\.(?:mbarrier_init|proxy\.async)\b",
        "bulk copies signal an mbarrier that is initialised without fence.mbarrier_init or fence.proxy.async",
    ),
    _rule(
        _BULK_STORE,
        r"cp\.async\.bulk\.commit_group\b",
        "bulk stores without cp.async.bulk.commit_group: nothing can wait for them",
    ),
    _rule(
        _BULK_STORE,
        r"cp\.async\.bulk\.wait_group(?:\.read)?\s+0\b",
        "bulk stores, and no cp.async.bulk.wait_group 0 for the last: a block must not end while they read its memory",
    ),
    _rule(
        _BULK_STORE,
        r"fence\.proxy\.async\b",
        "bulk stores without fence.proxy.async: they need not see what threads wrote to shared memory",
    ),
    _rule(
        _OTHER_BLOCKS,
        r"barrier\.cluster\.wait\b",
        "accesses to other blocks of a cluster, and no barrier.cluster.wait: they must have begun, and not have ended",
    ),
    _rule(
        r"barrier\.cluster\.arrive[\w.]*\.relaxed\b",
        r"(?:fence\.(?:mbarrier_init\.release\.cluster|(?:acq_rel|sc)\.(?:cluster|gpu|sys))|membar\.(?:gl|sys)"
        r"|barrier\.cluster\.arrive(?![\w.]*\.relaxed)|mbarrier\.arrive[\w.:]*\.release\.cluster)\b",
        "barrier.cluster.arrive.relaxed, and no fence: who meets there need not see what was written (arrive.release)",
    ),
)


def refuse(ptx: str) -> str:
    """What is begun and cannot be completed, in one line; empty where nothing is."""
    text = _COMMENT.sub(" ", ptx)
    instructions = _BEFORE_MODIFIER.sub("", text)
    for rule in RULES:
        if rule.used.search(instructions) and not rule.needed.search(instructions):
            return rule.reason
    for body in functions(ptx):
        unfenced = False
        for found in _INITIALISED.finditer(body):
            if found["load"] and unfenced:
                return "a bulk copy follows mbarrier.init without fence.mbarrier_init or fence.proxy.async between them"
            unfenced = bool(found["init"]) or (unfenced and not found["fence"])
        if ".func" not in text and _counts_before_fences(_BEFORE_MODIFIER.sub("", body)):
            return (
                "counts in global memory before the function's first fence: a block that sees the count need not see"
                " the data (__threadfence before the count too)"
            )
    wide = {access for access in _ACCESS.findall(instructions) if _WIDE.search(access)}
    both = any(re.search(r"^membar|\.(?:acq_rel|sc)\b", access) for access in wide)
    releases = both or any(".release" in access for access in wide)
    acquires = both or any(".acquire" in access for access in wide)
    if _NARROW_FENCE.search(instructions) and _COUNT.search(instructions) and not releases:
        return (
            "counts in global memory beside a fence for the thread's own block or cluster alone: a block that sees the"
            " count need not see the data (__threadfence)"
        )
    if releases and not acquires:
        return "a release that nothing acquires: who sees the flag need not see the data (ld.acquire or a fence)"
    if acquires and not releases:
        return "an acquire of what nothing releases: who sees the flag need not see the data (red.release or a fence)"
    return ""


def _counts_before_fences(body: str) -> bool:
    """Whether a function has fences, and all it tells others comes before the first, a count it looks at among it.

    Not where nothing is stored to global memory before that count in the text: it gives out places. Not where a branch
    behind the fence goes back to before a signal, nor where something releases by itself. A count whose old value
    nothing reads decides nothing, and adding 0 is a way to poll.
    """
    signals, fence = list(_SIGNAL.finditer(body)), _WIDE_FENCE.search(body)
    if not fence or not signals or signals[-1].start() > fence.start() or _RELEASE.search(body):
        return False
    labels = {label[1]: label.start() for label in _LABEL.finditer(body)}
    back = [labels.get(branch[1], len(body)) for branch in _BRANCH.finditer(body, fence.end())]
    looks = any(
        len(re.findall(rf"{re.escape(ticket[1])}\b", body)) > 1 and _STORE.search(body, 0, ticket.start())
        for ticket in _TICKET.finditer(body)
    )
    return looks and all(at > signals[-1].start() for at in back)


def functions(ptx: str) -> list[str]:
    """The text of each function, and what stands before the first one; without comments."""
    return _FUNCTION.split(_COMMENT.sub(" ", ptx))
