"""Sums: not cleared, cut short, or kept in less precision than the class asks for."""

import re
from collections.abc import Iterator

from mutation.operators._base import Edit, matches, operator
from mutation.source import Source

GROUP = "accumulator"
_ROUNDED = """
static __device__ float rounded_to_fp16(float x) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
"""


@operator("sums not cleared", GROUP)
def _uncleared(source: Source) -> Iterator[Edit]:
    for match in matches(source, r"\((\w+(?: \| \w+)+)\) != 0"):
        yield Edit(*match.span(), "1")
    for match in matches(source, r"\b(?:float|Sums?|half|u32|double) \w+(?:\[[^\]=;]*\])*( = \{\});"):
        yield Edit(*match.span(1), "")
    for match in matches(source, r"\b\w*(?:acc|sum|share|own|out)\w*(?:\[[^\]]*\])+ = (0(?:\.0f?)?);"):
        yield Edit(*match.span(), match.group().replace("= " + match.group(1), "+= 0"))


@operator("sums cleared again", GROUP)
def _recleared(source: Source) -> Iterator[Edit]:
    for match in matches(source, r"\((\w+) \| (\w+(?: \| \w+)*)\) != 0"):
        yield Edit(*match.span(), f"({match.group(2)}) != 0")
        yield Edit(*match.span(), "0")


@operator("last step left out", GROUP)
def _short(source: Source) -> Iterator[Edit]:
    for match in matches(source, r"\b(?:steps|trips|chunks|k_tiles|iterations|share) = ([^,;]+)"):
        yield Edit(*match.span(1), f"{match.group(1)} - 1")


@operator("sum rounded to fp16", GROUP)
def _half_sum(source: Source) -> Iterator[Edit]:
    at = source.contract_end
    for match in matches(source, r"\b((?:own|out|sum|share|total|acc)\w*(?:\[[^;=]*?\])*) \+= ([^;]+);"):
        rounded = f"{match.group(1)} = rounded_to_fp16({match.group(1)} + {match.group(2)});"
        yield Edit(*match.span(), rounded, ((at, at, _ROUNDED),))
    for call in source.role_calls("multiply"):
        array = (
            re.match(r"(?:sums|acc)\w*(?:\[\w+\])*", source.text[slice(*call.arguments[0])]) if call.arguments else None
        )
        if array and source.code[call.end] == ";":
            rounding = f"; for (auto &sum : {array.group()}) sum = rounded_to_fp16(sum)"
            whole = f"{{ {source.text[call.start : call.end]}{rounding}; }}"
            yield Edit(call.start, call.end + 1, whole, ((at, at, _ROUNDED),))


@operator("other operand type", GROUP)
def _operand_type(source: Source) -> Iterator[Edit]:
    for start, end in source.strings():
        for match in re.finditer(r"mma\S*\.f32(\.f16\.f16)\b", source.text[start:end]):
            yield Edit(start + match.start(1), start + match.end(1), ".bf16.bf16")


@operator("result rounded otherwise", GROUP)
def _rounding(source: Source) -> Iterator[Edit]:
    for start, end in source.strings():
        for match in re.finditer(r"cvt\.(rn)\.f16", source.text[start:end]):
            yield Edit(start + match.start(1), start + match.end(1), "rz")
    for match in matches(source, r"\b__float2half(_rn)?(?=\()"):
        yield Edit(*match.span(), "__float2half_rz")
    for match in matches(source, r"\b__floats2half2_rn\((\w+), (\w+)\)"):
        yield Edit(
            *match.span(), f"__halves2half2(__float2half_rz({match.group(1)}), __float2half_rz({match.group(2)}))"
        )
