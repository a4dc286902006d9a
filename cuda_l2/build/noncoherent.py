"""Reads through the cache that need not see writes, of memory that the same kernel writes.

ld.global.nc (`__ldg`, a const __restrict__ pointer) is for memory that nobody writes as long as the kernel runs (PTX
ISA, ld.global.nc). Where blocks hand partial sums to one another the hardware nearly always gives the new ones, so that
no launch shows it. Refused is a read whose address comes from the one pointer parameter that an address written to
comes from. Addresses that come from several parameters, or from memory, are let through.
"""

import re

from cuda_l2.build import unpaired

_PARAMETER = re.compile(r"(?<![\w.])ld\.param\.[bsu]64\s+(%\w+),\s*\[([\w$]+)\]")
_MOVED = re.compile(
    r"(?<![\w.])(?:(?:mov|add|sub|selp|cvta(?:\.to)?\.global|mad\.lo)\.[bsu]64|mad\.wide\.[su]32)\s+(%\w+),\s*([^;]*);"
)
"""What pointers go through; what is multiplied or shifted on the way is an index, which comes from no pointer."""
_REGISTER = re.compile(r"%\w+")
_READ = re.compile(r"(?<![\w.])ld\.global(?:\.[\w:]+)*\.nc[\w.:]*\s[^;\[]*\[(%\w+)")
_WRITTEN = re.compile(r"(?<![\w.])(?:st|red|atom)(?!\.(?:shared|local|param|async))[\w.:]*\s[^;\[]*\[(%\w+)")


def refuse(ptx: str) -> str:
    """Why the PTX is refused, in one line; empty where it is not."""
    for body in unpaired.functions(ptx):
        read, written = set(_READ.findall(body)), set(_WRITTEN.findall(body))
        if read and written:
            bases = _bases(body)
            if {bases.get(each, "") for each in read} & {bases.get(each, "") for each in written} - {""}:
                return (
                    "reads by ld.global.nc (__ldg) through a pointer that it also writes through; that cache need not"
                    " see writes: use a plain load (__ldcg), or a workspace of its own for what is only read"
                )
    return ""


def _bases(body: str) -> dict[str, str]:
    """The parameter that each 64-bit register's address comes from; empty where several could be meant."""
    found = {register: {parameter} for register, parameter in _PARAMETER.findall(body)}
    moves = [(to, _REGISTER.findall(operands)) for to, operands in _MOVED.findall(body)]
    grown = True
    while grown:
        grown = False
        for to, operands in moves:
            bases = found.get(to, set()).union(*(found.get(each, ()) for each in operands))
            if bases != found.get(to, set()):
                found[to], grown = bases, True
    return {register: next(iter(bases)) for register, bases in found.items() if len(bases) == 1}
