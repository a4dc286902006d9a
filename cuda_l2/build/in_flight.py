"""Watches what wgmma reads: operands in shared memory must stay as they are until a wait covers the instruction.

wgmma is asynchronous: it may read its operands at any time between its issue and the wgmma.wait_group that covers its
group (PTX ISA, asynchronous warpgroup instructions). Hardware reads them soon, so that a stage which is handed back
too early does no harm there. In a watched build a warpgroup keeps a few words of one operand when it issues a wgmma,
and looks at them again where the wait begins that covers it: for words that have changed meanwhile it accesses what is
no memory, which ends the launch.

A wait by one warp of a warpgroup covers the others' instructions too: what it has waited for may be overwritten before
they wait. One instruction is watched at a time, the next as soon as it is covered, by 16 warps a block at most.
Straight-line code, so that wgmma stays asynchronous. Seen is inline assembly in the candidate's own text.
"""

import re
from pathlib import Path

from cuda_l2.build import lexing

SOURCE = Path(__file__).with_name("in_flight.cuh")
BEGIN = " cuda_l2_watch();"
"""Where the bodies of kernels begin."""

_MULTIPLY = re.compile(r"wgmma\.mma_async\b")
_COMMIT = re.compile(r"wgmma\.commit_group\b")
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(%\d+|\d+)\s*;")
_OPERAND = re.compile(r'"(l|n)"\s*\(')
SIDE_EFFECT = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")


def calls(source: str, assembly: list[tuple[int, int]], closing: dict[int, int]) -> list[tuple[int, str]]:
    """What to call in front of which assembly statements.

    assembly: where each one's parenthesis opens, and where the statement begins; closing: where parentheses close.
    Empty where a part of what wgmma needs cannot be told from the text: then nothing can be said of any.
    """
    found: list[tuple[int, str]] = []
    kinds = set()
    for opens, begin in assembly:
        inner = source[opens + 1 : closing[opens]]
        template = next(iter(lexing.literals(inner)), "")
        if len(_MULTIPLY.findall(template)) == 1:
            descriptors = _operands(source, opens, closing, "l")
            if not descriptors or any(SIDE_EFFECT.search(each) for each in descriptors):
                return []
            found.append((begin, f"cuda_l2_issued({descriptors[0]}, {descriptors[-1]});"))
            kinds.add("multiply")
        elif _MULTIPLY.search(template):
            return []
        if _COMMIT.search(template):
            found.append((begin, "cuda_l2_committed();"))
            kinds.add("commit")
        if wait := _WAIT.search(template):
            number = wait[1]
            if number.startswith("%"):
                constants = _operands(source, opens, closing, "n")
                if number != "%0" or len(constants) != 1:
                    return []
                (number,) = constants
            found.append((begin, f"cuda_l2_waits({number});"))
            kinds.add("wait")
    return found if len(kinds) == 3 else []


def _operands(source: str, opens: int, closing: dict[int, int], constraint: str) -> list[str]:
    """The expressions of an assembly statement's operands of one constraint, in order."""
    return [
        source[match.end() : closing[match.end() - 1]].strip()
        for match in _OPERAND.finditer(source, opens, closing[opens])
        if match[1] == constraint and match.end() - 1 in closing
    ]
