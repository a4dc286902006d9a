"""What a CPU candidate's text may say, checked before a compiler sees it and again on what it expands to.

A compiler's error message can leak a file, so includes and embeds are judged on the raw text. Assembly could
hold anything, so it is refused in every spelling; names glued together by macros show after preprocessing.
What slips through still meets the sandbox and the runner's system-call filter: these rules make refusals
early and their reasons clear. Every pattern here runs in linear time: the text is hostile.
"""

import re

from cuda_l2.build import lexing

HEADERS = frozenset(
    {"stdint.h", "stddef.h", "stdbool.h", "float.h", "limits.h", "immintrin.h", "arm_neon.h", "string.h"}
)
MAX_EXPANSION_BYTES = 8 << 20
ATTRIBUTES = frozenset(
    {"always_inline", "aligned", "vector_size", "may_alias", "noinline", "const", "pure", "unused", "packed", "hot"}
    | {"cold", "flatten", "nonnull", "returns_nonnull", "assume_aligned", "fallthrough"}
)
PRAGMAS = re.compile(r"\s*(GCC\s+(unroll|ivdep)|clang\s+loop|omp\s+simd|STDC\s+FP_CONTRACT)\b")

INSTRUCTIONS = {
    "reads a clock or a counter": "rdtscp? rdpmc rdpru rdpid",
    "enters the kernel": "syscall sysenter int int3 hvc smc svc",
    "is random": "rdrand rdseed",
    "waits, or runs by transactions": "umwait umonitor tpause mwaitx? monitorx? xbegin xtest wfe wfet",
    "changes what memory a thread may reach": "wrpkru wrfsbase wrgsbase swapgs",
    "reads a register of the system": "xgetbv rdpkru rdssp[dq]",
    "reads or changes the whole register of flags": "pushf[lqw]? popf[lqw]?",
    "reads or sets the modes and flags of arithmetic, which are the caller's": "v?stmxcsr v?ldmxcsr fn?stcw fldcw",
    "saves or restores registers that nobody clears between launches": (
        "fxsave(?:64)? fxrstor(?:64)? xsave[cs]?(?:opt)?(?:64)? xrstors?(?:64)?"
    ),
    "reads or sets the state of x87, which outlives a launch": "fn?stsw fn?stenv fldenv fn?save frstor fn?clex fn?init",
}
"""That a kernel has no use for, by what they do: intrinsics reach them without assembly."""
INTEGER_PRODUCTS = "v?pmaddwd v?pmaddubsw vpdp[bw][us][us]ds? [su]dot usdot sudot [su]mmla usmmla"
"""Integer dot products: with a scale a block of K, and sums in fp32 where numbers are unusual, no values tell them
from fp32 as surely as these names do."""
_INSTRUCTIONS = {
    what: re.compile(rf"^\s+({names.replace(' ', '|')})[lqw]?(?:\s|$)", re.M) for what, names in INSTRUCTIONS.items()
}
_INTEGER_PRODUCTS = re.compile(rf"^\s+({INTEGER_PRODUCTS.replace(' ', '|')})(?:\s|$)", re.M)
_THREAD_LOCAL = re.compile(r"@(tlsgd|tlsld|tlsdesc|gottpoff|tpoff|dtpoff)\b|:tls(desc|gd|ie)|:(tp|dtp)rel", re.I)
_SEGMENT = re.compile(r"%[fg]s:|\brd[fg]sbase")
_MMX = re.compile(r"%mm[0-7]")
_STACK_IS_CODE = re.compile(r'\.note\.GNU-stack,"[a-z]*x')
_SYSTEM_REGISTER = re.compile(r"^\s+(mrs\s+\w+, *(?!nzcv)\w+|msr\s+fp[cs]r\b)", re.M)

_ASSEMBLY = re.compile(r"\b(asm|__asm|__asm__)\b")
_FRAME = re.compile(
    r"\b__builtin_(?:return_address|frame_address|extract_return_addr|apply(?:_args)?|dwarf_cfa|stack_address)\b"
)
_STANDARD_ATTRIBUTE = re.compile(r"\[\s*\[")
_DIGRAPH = re.compile(r"<:|:>|<%|%>|%:")
_ATTRIBUTE = re.compile(r"\b__attribute(?:__)?\b\s*\(\s*\(")
_LINE_MARKER = re.compile(r'^# (\d+) "((?:[^"\\]|\\.)*)"(.*)')
_ENTERED = " 1"
"""What follows in the marker of a file that begins."""


def refuse_text(source: str) -> str:
    """Why the raw text is refused, in one line; empty where it is not."""
    joined, reason = lexing.joined(source)
    if reason:
        return reason
    text = lexing.blank(joined)
    if _DIGRAPH.search(text):
        return "digraphs are not allowed"
    reason = lexing.refuse_directives(lexing.blank(joined, strings=False), HEADERS, (), PRAGMAS)
    if reason:
        return reason
    if _ASSEMBLY.search(text):
        return "assembly is not allowed"
    return lexing.refuse_probes(text)


def refuse_expansion(expanded: str, source_name: str) -> str:
    """Why the preprocessed text is refused: only lines that come from the candidate's own file count."""
    own: list[str] = []
    ours = True
    for line in expanded.splitlines():
        marker = _LINE_MARKER.match(line)
        if marker:
            ours = marker.group(2).endswith(source_name)
        elif ours:
            own.append(line)
    for line in own:
        directive = re.match(r"\s*#\s*pragma(.*)", line)
        if directive and not PRAGMAS.match(directive.group(1)):
            return f"#pragma{directive.group(1)} is not allowed"
    text = lexing.blank("\n".join(own))
    if _ASSEMBLY.search(text):
        return "assembly is not allowed, also when macros spell it"
    if found := _FRAME.search(text):
        return f"{found.group()} is not allowed: a kernel has no use for its caller's place"
    if _STANDARD_ATTRIBUTE.search(text) or _DIGRAPH.search(text):
        return "[[attributes]] are not allowed; __attribute__((...)) is, for some"
    for match in _ATTRIBUTE.finditer(text):
        for name in _attribute_names(text, match.end()):
            if name.strip("_") not in ATTRIBUTES:
                return f"__attribute__(({name})) is not allowed"
    return ""


def refuse_assembly(assembly: str, *, product: bool) -> str:
    """Why what the compiler made of a source is refused: an instruction that a kernel has no use for.

    product: whether the source is one for matrix products, which are of fp16 or bf16.
    """
    if product and (found := _INTEGER_PRODUCTS.search(assembly)):
        return (
            f"the instruction {found.group(1)} is not allowed in a matrix product: sum in float, or in wider integers"
        )
    for what, pattern in _INSTRUCTIONS.items():
        if found := pattern.search(assembly):
            return f"the instruction {found.group(1)} is not allowed: it {what}"
    if _THREAD_LOCAL.search(assembly):
        return "thread-local variables are not allowed: they outlive a launch; use the stack, or workspace a task"
    if _SEGMENT.search(assembly):
        return "memory of the thread itself (%fs, %gs) is not allowed: it outlives a launch"
    if _MMX.search(assembly):
        return "the registers of MMX are those of x87, which a launch must leave empty; use vectors of 128 bits or more"
    if _STACK_IS_CODE.search(assembly):
        return (
            "the address of a nested function that uses variables around it needs code on the stack, which is not"
            " allowed; write a plain function and hand it a structure through parallel_for's context"
        )
    if found := _SYSTEM_REGISTER.search(assembly):
        return f"the instruction {found.group().strip()} is not allowed: it reads or sets a register of the system"
    return ""


def headers(expanded: str, source_name: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Names of the headers that the candidate's own file includes, in order, and all lines that come from headers."""
    names: list[str] = []
    lines: set[str] = set()
    ours = True
    for line in expanded.splitlines():
        marker = _LINE_MARKER.match(line)
        if marker:
            path = marker.group(2)
            if ours and marker.group(3).startswith(_ENTERED):
                names += [name for name in HEADERS if path.endswith(f"/{name}")]
            ours = path.endswith(source_name)
        elif not ours:
            lines.add(line.strip())
    return tuple(names), frozenset(lines)


def _attribute_names(text: str, position: int) -> list[str]:
    """The names in an attribute list that begins at `position`, arguments left out."""
    names, depth, word = [], 0, ""
    for character in text[position : position + 2000]:
        if depth == 0 and (character.isalnum() or character == "_"):
            word += character
            continue
        if word:
            names.append(word)
            word = ""
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            break
    return names
