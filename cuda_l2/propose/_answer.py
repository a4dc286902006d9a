"""Reads a model's answer: its algorithm design and its code. No text makes it raise."""

import enum
import itertools
import re
from dataclasses import dataclass

from cuda_l2.llm.thoughts import without_thoughts

_FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
_CONTRACT = re.compile(r"/\*\s*cuda-l2\b")
_QUOTED = re.compile(r"/\*|//[^\n]*|\"(?:\\.|[^\"\\\n])*+\"?|'(?:\\.|[^'\\\n])*+'?")
"""An unclosed quote matches too, to the end of its line, so that no part of it is searched again."""
_NAMES = re.compile(r"^\s*(?:entry|kernel)\s*=\s*[\"'](\w+)[\"']", re.MULTILINE)
_NO_CODE = re.compile(r"(ba|z)?sh|shell|console|te?xt|output|json|py(thon)?|makefile|diff|markdown|md", re.IGNORECASE)
"""Languages of blocks that are no part of a file."""
MAX_PIECES = 32
"""Blocks that one file may be split over."""
_HEADING = re.compile(r"^\W{0,8}(performance analysis|algorithm design|code)\W{0,4}$", re.MULTILINE | re.IGNORECASE)


class Fault(enum.StrEnum):
    """Why an answer gives no candidate."""

    NO_CODE = "without code"
    CUT_OFF = "cut off"


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a model's answer. Exactly one of `source` and `fault` is there."""

    design: str = ""
    source: str = ""
    fault: Fault | None = None

    def __post_init__(self) -> None:
        if bool(self.source) == (self.fault is not None):
            raise ValueError("an answer has a source exactly when it has no fault")


def parse_answer(text: str, finish: str = "stop") -> Answer:
    """The parts of an answer. finish: why the model stopped; `length` where it was cut off.

    The last whole file among several blocks of code counts: models correct themselves. A file in pieces is joined,
    from the block with its contract to the one that completes it. A block without a contract is taken where there is
    no better one: the build says what it lacks.
    """
    text = without_thoughts(text.replace("\r\n", "\n"))
    blocks, open_block = _blocks(text)
    design = _design(text)
    if open_block is not None and (finish == "length" or not _closed(open_block)):
        if not _file(blocks):
            return Answer(design, fault=Fault.CUT_OFF)
    elif open_block is not None:
        blocks.append(open_block)
    source = _source(blocks) if blocks else _unfenced(text)
    if not source.strip():
        return Answer(design, fault=Fault.CUT_OFF if finish == "length" else Fault.NO_CODE)
    if not blocks and finish == "length" and not _closed(source):
        return Answer(design, fault=Fault.CUT_OFF)
    if not blocks:
        source = source[: source.rfind("}") + 1]  # prose may follow
    return Answer(design, source=source.strip("\n") + "\n")


def _blocks(text: str) -> tuple[list[str], str | None]:
    """The fenced blocks, and the text of a block without a closing fence. Blocks of commands and the like come last."""
    blocks: list[str] = []
    others: list[str] = []
    opened: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        fence, info = match.group(1), match.group(2).strip()
        if opened is None:
            opened = match
        elif not info and fence[0] == opened.group(1)[0] and len(fence) >= len(opened.group(1)):
            block = text[opened.end() + 1 : match.start()]
            language = opened.group(2).split()
            is_code = not language or not _NO_CODE.fullmatch(language[0]) or _CONTRACT.search(block)
            (blocks if is_code else others).append(block)
            opened = None
    return blocks or others, text[opened.end() + 1 :] if opened else None


def _source(blocks: list[str]) -> str:
    if file := _file(blocks):
        return file
    starts = [i for i, block in enumerate(blocks) if _CONTRACT.search(block)]
    if not starts:
        return max(blocks, key=len)
    begun = [i for i in starts if "{" in blocks[i].partition("*/")[2]]
    return _from_contract(blocks[begun[-1]] if begun else "\n".join(blocks[starts[0] :]))


def _file(blocks: list[str]) -> str:
    """The last whole file, in one block or over several; empty where there is none."""
    starts = [i for i, block in enumerate(blocks) if _CONTRACT.search(block)]
    for start, end in reversed([*itertools.pairwise([*starts, len(blocks)])]):
        for stop in range(start + 1, min(end, start + MAX_PIECES) + 1):
            if _complete(file := _from_contract("\n".join(blocks[start:stop]))):
                return file
    if len(starts) == 1 and _complete(file := _from_contract("\n".join(blocks))):
        return file  # its contract comes after code
    return ""


def _complete(file: str) -> bool:
    """Whether a text that begins with a contract has the functions that it names, and no open brace."""
    comment, end, code = file.partition("*/")
    names = _NAMES.findall(comment) or ["gemm"]
    return bool(end) and "{" in code and all(re.search(rf"\b{name}\b", code) for name in names) and _closed(file)


def _from_contract(block: str) -> str:
    """The block with its contract first, as the contract must be."""
    match = _CONTRACT.search(block)
    if not match or not block[: match.start()].strip():
        return block.lstrip()
    comment, end, rest = block[match.start() :].partition("*/")
    return f"{comment}{end}\n{block[: match.start()]}{rest}"


def _unfenced(text: str) -> str:
    """A file given without fences, from its contract on; empty where there is none."""
    match = _CONTRACT.search(text)
    return text[match.start() :] if match and "}" in text[match.start() :] else ""


def _closed(source: str) -> bool:
    """Whether every comment and every brace outside of comments and strings is closed. Takes linear time."""
    depth, position = 0, 0
    while match := _QUOTED.search(source, position):
        depth += _depth(source[position : match.start()])
        position = match.end()
        if match.group() == "/*":
            end = source.find("*/", position)
            if end < 0:
                return False
            position = end + 2
    return depth + _depth(source[position:]) <= 0


def _depth(code: str) -> int:
    return code.count("{") - code.count("}")


def _design(text: str) -> str:
    """The section on the algorithm's design, where the answer has its heading."""
    matches = list(_HEADING.finditer(text))
    for i, match in enumerate(matches):
        if match.group(1).lower() == "algorithm design":
            end = matches[i + 1].start() if i + 1 < len(matches) else len(text)
            return text[match.end() : end].strip()
    return ""
