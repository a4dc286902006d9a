"""Stress builds: a candidate's own text with delays around everything that orders threads.

A race hides where threads always meet in the same order. In a stress build one warp in eight sleeps for up to 2 us
before and after each barrier, wait, arrival, fence, asynchronous copy and atomic, one in 4,096 for up to 262 us, which
is longer than a wait that gives up would poll, and one block and one warp in eight begin up to 16 us late, so that they
meet in other orders; each seed gives others. Even seeds leave polls as they are: a delayed poll lasts as long as ten.
A correct kernel gives the same bits with all of them. Delays hold no branch and no call, so that wgmma stays
asynchronous.

A ring hides its faults too: a stage that is given back while it is still being read is overwritten only when the next
copy arrives, most of a microsecond later. So what a TMA load is about to overwrite is spoiled just before it is issued,
and what wgmma has been told to read is watched until a wait covers it (`in_flight`).

Placed by reading the text, with no help from it: around inline assembly of those instructions, and around statements
that call something named like them which the text does not define itself. Not covered: what macros spell beyond such a
statement, multicast loads, orders within a warp, and races so narrow that these delays do not open them.
"""

import re

from cuda_l2.build import in_flight, lexing
from cuda_l2.contract import parse_cuda
from cuda_l2.contract.cuda import ELEMENT_BYTES

_PRELUDE = """
static __device__ __forceinline__ unsigned cuda_l2_hash(unsigned place) {
  const unsigned warp = ((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x) / 32;
  unsigned h = SEEDu * 0x9E3779B9u ^ place * 0x85EBCA6Bu ^ warp << 4;
  h ^= blockIdx.x << 9 ^ blockIdx.y << 20 ^ blockIdx.z << 27;
  COUNT
  h = (h ^ h >> 15) * 0x27D4EB2Fu;
  h = (h ^ h >> 13) * 0x165667B1u;
  return h ^ h >> 16;
}
static __device__ __forceinline__ void cuda_l2_sleep(unsigned ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }
static __device__ __forceinline__ void cuda_l2_delay(unsigned place) {
  const unsigned h = cuda_l2_hash(place);
  cuda_l2_sleep(h >> 29 ? 0 : h & 511 ? h >> 18 : h >> 11);
}
static __device__ __forceinline__ void cuda_l2_late() {
  unsigned h = SEEDu * 0x9E3779B9u ^ blockIdx.x * 0x85EBCA6Bu ^ blockIdx.y << 12 ^ blockIdx.z << 24;
  h = (h ^ h >> 15) * 0x27D4EB2Fu;
  cuda_l2_sleep(h >> 29 ? 0 : h >> 15);
  h = cuda_l2_hash(~0u);
  cuda_l2_sleep(h >> 29 ? 0 : h >> 15);
}
static __device__ __forceinline__ void cuda_l2_spoil(unsigned at) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (unsigned i = 0; i < PIECES; i++)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + i * STEP + i % 8 * TURN), "r"(~0u) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
"""
_COUNT = "__shared__ unsigned calls[32]; h ^= calls[warp]++ * 0xC2B2AE35u;  // from whatever was there: passes differ"

_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\s*(?:(?:volatile|__volatile__)\s*)?\(")
_ORDERING_PTX = re.compile(
    r"(?<![\w.])(?:mbarrier|bar|barrier|fence|membar|griddepcontrol|red|atom|(?:st|cp)\.async|cp\.reduce)\b"
    r"|(?<![\w.])(?:wgmma\.wait_group|(?:ld|st)\.[\w.:]*(?:acquire|release|relaxed|volatile))"
)
_POLL = re.compile(r"(?<![\w.])(?:mbarrier\.(?:try|test)_wait|ld\.[\w.:]*(?:acquire|relaxed|volatile))")
_TENSOR_LOAD = re.compile(
    r"cp\.async\.bulk\.tensor\.\dd\.shared::(?:cluster|cta)\.global(?![\w.:]*multicast)[\w.:]*\s*\[%0\]"
)
_NO_OUTPUTS = re.compile(r"\s*:\s*:\s*\(")
_ADDRESS = re.compile(r'"r"\s*\(\Z')
_CALL = re.compile(r"(?<![\w.>:])(?:[A-Za-z_]\w*\s*(?:::|\.|->)\s*)*([A-Za-z_]\w*)\s*(?:<[^<>;(){}]*>)?\s*\(")
_ORDERING_NAME = re.compile(r"sync|wait|arrive|barrier|fence|commit|release|acquire|expect|^atomic", re.IGNORECASE)
_WGMMA_NAME = re.compile(r"wgmma|warpgroup|gmma", re.IGNORECASE)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)
_BRANCH = re.compile(r"\b(?:else|do)\Z")
_CONDITION = re.compile(r"\b(?:if|while|for|switch|constexpr)\s*\Z")
MAX_PIECES = 16
"""Most pieces of 16 bytes that are spoiled of what a load overwrites."""


def stressed(source: str, seed: int, *, counts: bool = True) -> str:
    """The text with delays.

    counts: they differ from pass to pass of a loop, and operands of wgmma are watched, for 900 bytes of shared memory.
    """
    text = lexing.blank(source, lexing.CPP_TOKEN)
    text = _DIRECTIVE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    closing = _closing(text)
    opening = {place: begin for begin, place in closing.items()}
    defined = {m.group(1) for m in _CALL.finditer(text) if _next(text, closing.get(m.end() - 1)) == "{"}
    calls = [
        match
        for match in _CALL.finditer(text)
        if _ordering(match.group(1)) and match.group(1) not in defined and _statement(text, match.start(), opening)
    ]
    statements = [match for match in _ASM.finditer(text) if match.end() - 1 in closing]
    assembly = [match for match in statements if _ORDERING_PTX.search(source, match.end(), closing[match.end() - 1])]
    if seed % 2 == 0:
        assembly = [match for match in assembly if not _polls(source[match.end() : closing[match.end() - 1]])]
    size = _least_box(source)
    wrapped: list[tuple[int, int, str]] = []  # first character, behind the semicolon, what a tensor load overwrites
    for match in [*assembly, *calls]:
        end = closing.get(match.end() - 1)
        if end is not None and _next(text, end) == ";":
            address = _overwritten(source, text, match.end(), closing) if size and match in assembly else ""
            wrapped.append((match.start(), text.index(";", end) + 1, address))
    insertions = [
        (begin, f"{{ cuda_l2_delay({2 * i}); " + (f"cuda_l2_spoil({address}); " if address else ""))
        for i, (begin, _, address) in enumerate(wrapped)
    ]
    insertions += [(end, f" cuda_l2_delay({2 * i + 1}); }}") for i, (_, end, _) in enumerate(wrapped)]
    watched = _watched(source, text, statements, closing) if counts else []
    insertions += watched
    begins = " cuda_l2_late();" + (in_flight.BEGIN if watched else "")
    insertions += [(begin, begins) for begin in _bodies(text, closing)]
    prelude = (_PRELUDE + (in_flight.SOURCE.read_text() if watched else "")).replace("SEED", str(seed))
    prelude = prelude.replace("COUNT", _COUNT if counts else "")
    pieces = max(1, min(MAX_PIECES, size // 16))
    step = size // pieces // 16 * 16
    turn = 16 if step >= 128 else 0  # so that pieces lie in other parts of swizzled rows
    prelude = prelude.replace("PIECES", str(pieces)).replace("STEP", str(step)).replace("TURN", str(turn))
    insertions.append((source.index("*/") + 2, prelude))  # behind the contract
    for place, inserted in sorted(insertions, reverse=True):
        source = source[:place] + inserted + source[place:]
    return source


def _polls(assembly: str) -> bool:
    """Whether instructions look once for what another thread does; a loop of such looks has its delay once a wait."""
    return bool(_POLL.search(assembly)) and not re.search(r"\bbra\b", assembly)


def _watched(source: str, text: str, statements: list[re.Match[str]], closing: dict[int, int]) -> list[tuple[int, str]]:
    """What `in_flight` inserts in front of assembly statements, and behind them what closes it."""
    places = [(match.end() - 1, match.start()) for match in statements if _next(text, closing[match.end() - 1]) == ";"]
    found = in_flight.calls(source, places, closing)
    ends = {begin: text.index(";", closing[opens]) + 1 for opens, begin in places}
    return [(begin, f"{{ {call} ") for begin, call in found] + [(ends[begin], " }") for begin, _ in found]


def _least_box(source: str) -> int:
    """Bytes of shared memory that every tensor load overwrites, from where it begins; 0 where the text does not say."""
    sizes, terms = [], parse_cuda(source)
    outputs = [buffer.name for buffer in terms.interface.buffers if buffer.kind == "output"]
    for tensor_map in (each for each in terms.tensor_maps if each.tensor not in outputs):
        sides = [*zip(tensor_map.box, tensor_map.element_strides, strict=True)]
        if tensor_map.interleave != "none" or not all(side.isdigit() and step.isdigit() for side, step in sides):
            return 0
        size = ELEMENT_BYTES[tensor_map.dtype]
        for side, step in sides:
            size *= -(-int(side) // int(step))
        sizes.append(size)
    return min(sizes, default=0)


def _overwritten(source: str, text: str, inner: int, closing: dict[int, int]) -> str:
    """The address that an assembly statement's tensor load writes to, as the text spells it; empty where it is none."""
    template = lexing.literals(source[inner : closing[inner - 1]])[:1]
    operands = _NO_OUTPUTS.match(text, inner)  # strings are blank there
    if not template or not _TENSOR_LOAD.search(template[0]) or not operands:
        return ""
    if not _ADDRESS.search(source, inner, operands.end()):
        return ""
    address = text[operands.end() : closing[operands.end() - 1]].strip()
    return "" if in_flight.SIDE_EFFECT.search(address) else address


def _ordering(name: str) -> bool:
    """Whether what has this name orders threads, by its name; not what only delimits wgmma."""
    return bool(_ORDERING_NAME.search(name)) and (not _WGMMA_NAME.search(name) or "wait" in name.lower())


def _closing(text: str) -> dict[int, int]:
    """Where each parenthesis that opens is closed."""
    found, opened = {}, []
    for match in re.finditer(r"[()]", text):
        if match.group() == "(":
            opened.append(match.start())
        elif opened:
            found[opened.pop()] = match.start()
    return found


def _next(text: str, place: int | None) -> str:
    """The first character behind a place that is not blank."""
    match = re.compile(r"\S").search(text, place + 1) if place is not None else None
    return match.group() if match else ""


def _statement(text: str, start: int, opening: dict[int, int]) -> bool:
    """Whether a statement begins here."""
    before = start - 1
    while before >= 0 and text[before].isspace():
        before -= 1
    if before < 0 or text[before] in ";{}":
        return before >= 0
    word = (
        text[max(0, opening[before] - 20) : opening[before]]
        if before in opening
        else text[max(0, before - 9) : before + 1]
    )
    return bool(_CONDITION.search(word) if before in opening else _BRANCH.search(word))


def _bodies(text: str, closing: dict[int, int]) -> list[int]:
    """Where the bodies of kernels begin."""
    found = []
    for match in re.finditer(r"\b__global__\b", text):
        place = match.end()
        while place < len(text) and text[place] not in ";{":
            place = closing.get(place, place) + 1
        if text[place : place + 1] == "{":
            found.append(place + 1)
    return found
