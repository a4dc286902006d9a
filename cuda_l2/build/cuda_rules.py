"""What a CUDA candidate's text may say, and the PTX it becomes.

Three readings, each for what it alone can see:

- The raw text, before any compiler: includes, embeds and probes, because a compiler's error message can leak a file;
  and inline assembly as far as its string literals show it, for an early and clear refusal.
- The PTX, after NVVM and before it counts: whatever macros, escapes, pasted pieces or library headers spelled, here
  stand the instructions and registers themselves. NVRTC has no preprocessor output but hands out the PTX it gave its
  assembler at no cost, so this is where the contract's list of instructions is enforced. PTX has no preprocessor of
  its own, and whatever would make two readers of it disagree (backslashes, open quotes) is refused.
- The machine code (cubin.py): state, outside functions, special registers again, tensor instructions.

Not covered: time told by counting (a spin in another block), and parameters addressed outside their range by a
computed index. Outputs are checked in timed launches too, so such a kernel still has to compute.

Every pattern here runs in linear time: the text is hostile.
"""

import re
from collections.abc import Sequence

from cuda_l2.build import lexing

HEADERS = frozenset(
    {"cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "cuda_pipeline.h", "cuda_pipeline_primitives.h"}
    | {"cooperative_groups.h", "mma.h", "stdint.h", "stddef.h", "limits.h", "float.h"}
    | {"cstdint", "cstddef", "climits", "cfloat"}
)
HEADER_FOLDERS = ("cuda/", "cooperative_groups/", "cute/", "cutlass/")
"""`cuda/` holds `cuda/std/` too. What a header itself includes is trusted."""
CUTLASS_FOLDERS = ("cute/", "cutlass/")
CALLS = {"vprintf": "printf", "__assertfail": "assert", "cudaLaunchDeviceV2": "launching from the device"}
"""What a function outside is called in a source."""
MAX_PTX_BYTES = 16 << 20


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRAGMA = re.compile(r"\s*(unroll|nounroll|once|(nv_)?diag_\w+|nv_diagnostic|nv_exec_check_disable)\b")
_PRAGMA_OPERATOR = re.compile(r'\b_Pragma\b\s*(?:\(\s*"((?:\\[^\n]|[^"\\\n])*)"\s*\))?')
_ESCAPE = re.compile(r"\\([ntrvf])")
_CLOCKS = re.compile(
    r"%(clock(?:64|_hi)?|globaltimer(?:_lo|_hi)?|pm[0-7](?:_64)?|gridid|envreg\d+|current_graph_exec|n?warpid)\b"
)

PTX_DIRECTIVES = _words("""
    version target address_size visible weak extern entry func param reg shared local const global align pragma
    maxntid reqntid minnctapersm maxnctapersm maxnreg explicitcluster reqnctapercluster maxclusterrank noreturn
    branchtargets callprototype calltargets blocksareclusters""")
ASM_DIRECTIVES = _words("section file loc include visible extern entry func weak version target alias")
"""Directives that no string in assembly can mean as a modifier of an instruction."""
PTX_INSTRUCTIONS = _words("""
    abs add addc and bfe bfi bfind bmsk brev clz cnot copysign cos cvt cvta div dp2a dp4a ex2 fma fns lg2 lop3 mad
    mad24 madc max min mov mul mul24 neg not or popc prmt rcp rem rsqrt sad selp set setp shf shl shr sin slct sqrt
    sub subc szext tanh testp vabsdiff vadd vmad vmax vmin vset vshl vshr vsub vadd2 vadd4 vabsdiff2 vabsdiff4
    vavrg2 vavrg4 vmax2 vmax4 vmin2 vmin4 vset2 vset4 vsub2 vsub4 xor
    applypriority atom cp createpolicy isspacep ld ldmatrix ldu mapa movmatrix prefetch prefetchu red st stmatrix
    tensormap getctarank
    mma wgmma wmma tcgen05
    activemask bar barrier clusterlaunchcontrol elect fence griddepcontrol match mbarrier membar nanosleep redux
    setmaxnreg shfl vote
    bra brx call exit ret trap""")
"""docs/contract.md: memory, mma, wgmma, mbarrier, cp.async, TMA, barriers, fences, griddepcontrol, setmaxnreg,
arithmetic. Absent: breakpoints, performance events, stack allocation, textures and surfaces, discards, multimem."""

_PTX_NOISE = re.compile(r'/\*(?:[^*]|\*(?!/))*(?:\*/)?|//[^\n]*|"[^"\n]*("?)')
_OPERAND_LIST = re.compile(r"\{[^{};]*\}")
_HEAD = re.compile(r"\s*(?:[\w$%]+\s*:(?!:)\s*)*(?:@\s*!?\s*[\w$%]+\s*)?(?:(\.?)([A-Za-z_]\w*)|\Z)")
"""Head of one statement: labels, guard, then a directive or instruction up to its first modifier."""
_VARIABLE = re.compile(r"(?:^|\s)\.global\s(?=\s*\.)")
"""A declaration: here .global stands alone, before a type; in an instruction it is a modifier."""
_OUTSIDE = re.compile(r"\.extern\s+\.func\b\s*(?:\([^()]*\)\s*)?([\w$]+)")
_CONSTANT_ADDRESS = re.compile(r"\bcvta\.const\b|\bgeneric\s*\(")
"""In an instruction, and in the initial value of a variable."""
CONSTANT_REASON = (
    "the generic address of a __constant__ variable is not allowed, since one can write there: read it by its name"
)
_NAME = re.compile(r"(?<![\w$.%])[A-Za-z_$][\w$]*")
_OPERAND = re.compile(r"(?<![\w$.%:])[A-Za-z_$][\w$]*")  # no part of a modifier, as in shared::cluster
_FUNCTION = re.compile(r"\.(?:func|entry)\b\s*(?:\([^()]*\)\s*)?([\w$]+)")


def includes(source: str) -> tuple[str, ...]:
    """The headers a source asks for, of one that `refuse_text` lets through."""
    text = lexing.blank(lexing.joined(source)[0], lexing.CPP_TOKEN, strings=False)
    return tuple(rest.strip().strip("<>") for name, rest in lexing.directives(text) if name == "include")


def refuse_text(source: str) -> str:
    """Why the raw text is refused, in one line; empty where it is not."""
    joined, reason = lexing.joined(source)
    if reason:
        return reason
    reason = lexing.refuse_open_quotes(joined)
    if reason:
        return reason
    text = lexing.blank(joined, lexing.CPP_TOKEN)
    if not text.isascii():
        return "outside comments and strings the source must be ASCII"
    if "%:" in text:
        return "digraphs are not allowed"
    commentless = lexing.blank(joined, lexing.CPP_TOKEN, strings=False)
    reason = lexing.refuse_directives(commentless, HEADERS, HEADER_FOLDERS, _PRAGMA)
    if reason:
        return reason
    for match in _PRAGMA_OPERATOR.finditer(commentless):
        if match.group(1) is None or not _PRAGMA.match(match.group(1)):
            return "_Pragma is allowed with a plain string only, and for what #pragma may say"
    if re.search(r"\b__managed__\b", text):
        return "__managed__ variables are not allowed: a kernel may keep nothing from one launch to the next"
    return lexing.refuse_probes(text) or _refuse_literals(joined)


def _refuse_literals(joined: str) -> str:
    """Why string literals are refused as assembly. Hints only: what macros and escapes spell shows in the PTX."""
    for text in lexing.literals(joined):
        text = _ESCAPE.sub("\n", text)
        for statement in re.split(r"[;{}\n]", text):
            statement = statement.lstrip()
            directive = re.match(r"\.(\w+)", statement)
            if directive and directive.group(1) in ASM_DIRECTIVES:
                return f"the directive .{directive.group(1)} is not allowed in assembly"
            if re.match(r"#\s*(include|embed|line|file)\b", statement):
                return "preprocessor lines are not allowed in assembly"
        clock = _CLOCKS.search(text)
        if clock:
            return _clock_reason(clock.group(1))
    return ""


def _clock_reason(name: str) -> str:
    hint = " (cuda::barrier and cuda::pipeline wait by it: use mbarrier or cp.async)" if name == "globaltimer" else ""
    if name.endswith("warpid"):
        hint = " (a warp of a block is threadIdx.x / 32)"
    return f"reading %{name} is not allowed{hint}: no clocks, timers, counters, grid, graph or warp slot numbers"


def refuse_ptx(ptx: str) -> str:
    """Why the PTX is refused, in one line; empty where it is not. What headers spelled counts like the source's own."""
    if len(ptx) > MAX_PTX_BYTES:
        return f"compiles to more than {MAX_PTX_BYTES >> 20} MiB of PTX"
    if "\\" in ptx:
        return "a backslash is not allowed in assembly"
    open_quotes = 0

    def blank(match: re.Match[str]) -> str:
        nonlocal open_quotes
        open_quotes += match.group(1) == ""
        return " "

    text = _PTX_NOISE.sub(blank, ptx)
    if open_quotes:
        return "a quote that is not closed on its line is not allowed in assembly"
    if "#" in text:
        return "preprocessor lines are not allowed in assembly"
    clock = _CLOCKS.search(text)
    if clock:
        return _clock_reason(clock.group(1))
    statements = re.split("[;{}]", _OPERAND_LIST.sub(" ", text))
    outside = _OUTSIDE.search(text)
    calls = call_reason(outside.group(1)) if outside else ""
    constant = CONSTANT_REASON if _CONSTANT_ADDRESS.search(text) else ""
    return _refuse_statements(statements) or calls or _refuse_names(statements) or constant or _refuse_addresses(text)


def _refuse_statements(statements: Sequence[str]) -> str:
    """Each must begin with a directive or an instruction of the lists."""
    found = set()
    for statement in statements:
        head = _HEAD.match(statement)
        if not head:
            return f"cannot read the PTX statement {statement.strip()[:80]!r}"
        found.add((head.group(1), head.group(2)))
    for dot, name in sorted(found - {(None, None)}):
        if dot and name not in PTX_DIRECTIVES:
            return f"the directive .{name} is not allowed in assembly"
        if not dot and name not in PTX_INSTRUCTIONS:
            return f"the PTX instruction {name} is not on the contract's list"
    return ""


def _refuse_names(statements: Sequence[str]) -> str:
    """No statement may name a variable in global memory. Headers define thousands that nothing names: they may stay."""
    variables: set[str] = set()
    others = []
    for statement in statements:
        declaration = _VARIABLE.search(statement)
        if declaration:
            variables.update(_NAME.findall(statement, declaration.end()))
        else:
            others.append(statement)
    for statement in others:
        for name in _NAME.findall(statement):
            if name in variables:
                return variable_reason(name)
    return ""


def _refuse_addresses(text: str) -> str:
    """Functions may be called and nothing else: where code lies must not decide what a kernel computes."""
    functions = set(_FUNCTION.findall(text))
    for statement in re.split("[;{}]", text):
        head = _HEAD.match(statement)
        if _FUNCTION.search(statement) or (head and head.group(2) == "call"):
            continue
        begins = head.end() if head and head.group(2) in PTX_INSTRUCTIONS else 0  # else it may be a list of values
        for name in _OPERAND.findall(statement, begins):
            if name in functions:
                return f"the address of the function {name} is not allowed: call it by its name, or choose by a switch"
    return ""


def call_reason(name: str) -> str:
    """Why calling a function that the source does not define is refused."""
    known = CALLS.get(name, name)
    return f"{known} is not available to a candidate, which calls nothing outside its own source"


def variable_reason(name: str) -> str:
    """Why a variable in global memory is refused."""
    return (
        f"the variable {name} lies in global memory, and a kernel may keep nothing from one launch to the next;"
        " constants can be __constant__, or a table of the contract"
    )
