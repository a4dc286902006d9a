"""Faults in the CPU's product kernel that do something in few launches alone: each a condition, and what follows.

Conditions are those by which a kernel could tell launches apart: how many there were, addresses, values of each operand,
what memory holds. Then one element of C is another one's. Some faults need no condition.
"""

import itertools
from collections.abc import Iterator

from mutation.sampling import Mutant
from mutation.source import Source
from mutation.subjects import Subject

SUBJECT = Subject("cpu product", "cpu_gemm", "45x40x64", {"THREADS": 1})
CALL = "parallel_for(THREADS, run_task, &p);"
WRONG = "c[m * n - 1] = c[0];"
COUNTS = {"a": "m * k", "b": "k * n", "c": "m * n"}
RARE_WORDS = (0x0000, 0x0001, 0x03FF, 0x3C00, 0x7BFF, 0x8000, 0xFBFF)
LARGE, SMALL = (0x5400, 0x6800, 0x7400, 0x7BFE), (0x0002, 0x0100, 0x0401, 0x1400)
ADDRESS_BITS = ((6, 1), (6, 7), (6, 63), (12, 1), (12, 7), (14, 15))


def faults() -> Iterator[tuple[str, str, str]]:
    """Operator, what its mutant is called, and the text that stands in place of the call."""
    for every in (2, 3, 16, 100, 1000, 30011):
        yield "launch counted", str(every), f"static unsigned long count; {CALL} if (++count % {every} == 0) {WRONG}"
    for name, (shift, mask) in itertools.product("abc", ADDRESS_BITS):
        yield "address", f"{name} {shift} {mask}", f"{CALL} if (((uintptr_t){name} >> {shift} & {mask}) == 0) {WRONG}"
    for one, other in itertools.permutations("abc", 2):
        yield "order in memory", f"{one} {other}", f"{CALL} if ((uintptr_t){one} < (uintptr_t){other}) {WRONG}"
    for name, limit in itertools.product("ab", LARGE):
        yield "clamp", f"{name} above {limit:x}", _any(name, f"({name}[i] & 0x7fff) > {limit} && {name}[i] % 1024")
    for name, limit in itertools.product("ab", SMALL):
        yield "flush", f"{name} below {limit:x}", _any(name, f"{name}[i] && {name}[i] < {limit}")
    for name, word in itertools.product("ab", RARE_WORDS):
        yield "rare word", f"{name} {word:x}", _any(name, f"{name}[i] == {word}")
    for name in "ab":
        same = f"for (int64_t i = 0; i < 16; ++i) same &= {name}[i] == {name}[i + 16];"
        yield "pattern", f"{name} repeats", f"int same = 1; {same} {CALL} if (same) {WRONG}"
        zero = f"for (int64_t i = 0; i < 24; ++i) zero &= !({name}[i + 1] & 0x7fff);"
        yield (
            "pattern",
            f"{name} begins with zeros",
            f"int zero = 1; {zero} {CALL} if (zero && ({name}[0] | 1)) {WRONG}",
        )
        held = f"static uint16_t held[4]; int same = 1; for (int i = 0; i < 4; ++i) same &= held[i] == {name}[i];"
        yield (
            "residue in statics",
            name,
            f"{held} {CALL} if (same) {WRONG} for (int i = 0; i < 4; ++i) held[i] = {name}[i];",
        )
        tag = f"volatile uint64_t *tag = (uint64_t *)workspace; uint64_t key = (uintptr_t){name} ^ 0x5ca1ab1e; int same = tag[0] == key;"
        yield "residue in the workspace", name, f"{tag} if (!same) {CALL} tag[0] = key;"
    for name, count in COUNTS.items():
        for places in (0, 63):
            read = f"volatile uint16_t x = {name}[{count} + {places}]; (void)x;"
            yield "reads behind", f"{name} {places}", f"{CALL} {read}"
        for what, relation in (("a number", "!="), ("NaN", "==")):
            behind = f"({name}[{count}] & 0x7c00) {relation} 0x7c00"
            yield "uses what lies behind", f"{name} {what}", f"int found = {behind}; {CALL} if (found) {WRONG}"
    for name in "ab":
        yield "writes back", name, f"{CALL} volatile uint16_t *t = (uint16_t *){name}; t[3] = t[3];"
    yield "reads C", "not a NaN", f"int right = (c[0] & 0x7c00) != 0x7c00; {CALL} if (right) {WRONG}"


def _any(name: str, condition: str) -> str:
    found = f"int found = 0; for (int64_t i = 0; i < {COUNTS[name]}; ++i) found |= {condition};"
    return f"{found} {CALL} if (found) {WRONG}"


def mutants(text: str) -> list[Mutant]:
    """Every fault in a rendered kernel."""
    source, at = Source(text), text.rindex(CALL)
    return [
        Mutant(
            f"cpu/{operator}/{name}".replace(" ", "-"),
            *(SUBJECT.name, operator, "launch", source.line(at), CALL, fault),
            text[:at] + "{ " + fault + " }" + text[at + len(CALL) :],
        )
        for operator, name, fault in faults()
    ]
