"""Sums: not cleared, cut short, or kept in less precision than the class asks for."""

import re
from collections.abc import Iterator

from mutation.operators._base import Edit, each, in_strings, matches, operator, rewrite
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


rewrite(
    *("sums not cleared", GROUP),
    (r"\((\w+(?: \| \w+)+)\) != 0", 0, "1"),
    (r"\b(?:float|Sums?|half|u32|double) \w+(?:\[[^\]=;]*\])*( = \{\});", 1, ""),
    (r"\b(\w*(?:acc|sum|share|own|out)\w*(?:\[[^\]]*\])+ )= 0(?:\.0f?)?;", 0, r"\1+= 0;"),
    (r"\b(?:sums|some|total|most)\[\w+\] = (every\([^;]*|START);", 1, "every(1)"),
)
rewrite("sums cleared again", GROUP, (r"\((\w+) \| (\w+(?: \| \w+)*)\) != 0", 0, r"(\2) != 0", "0"))
rewrite("last step left out", GROUP, (r"\b(?:steps|trips|chunks|k_tiles|iterations|share) = ([^,;]+)", 1, r"\1 - 1"))


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
    yield from each(in_strings(source, r"mma\S*\.f32(\.f16\.f16)\b"), 1, ".bf16.bf16")
    by_macro = re.compile(r'mma\S*\.f32\." (\w+) "\.f32')
    yield from each(by_macro.finditer(source.text, source.contract_end), 1, '"bf16.bf16"')


@operator("result rounded otherwise", GROUP)
def _rounding(source: Source) -> Iterator[Edit]:
    yield from each(in_strings(source, r"cvt\.(rn)\.f16"), 1, "rz")
    yield from each(matches(source, r"\b__float2half(_rn)?(?=\()"), 0, "__float2half_rz")
    pairs = matches(source, r"\b__floats2half2_rn\((\w+), (\w+)\)")
    yield from each(pairs, 0, r"__halves2half2(__float2half_rz(\1), __float2half_rz(\2))")
