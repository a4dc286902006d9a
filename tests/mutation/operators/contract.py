"""The launch contract: tensor maps, grid, memory, edges and arguments other than the kernel expects."""

import re
from collections.abc import Iterator
from itertools import pairwise

from mutation.operators._base import Edit, operator
from mutation.source import Source

GROUP = "contract"


@operator("box", GROUP)
def _box(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "box"):
        value = int(source.text[start:end])
        for other in (value // 2, value + 8):
            if 0 < other <= 256:
                yield Edit(start, end, str(other))


@operator("stride", GROUP)
def _stride(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "strides"):
        yield Edit(start, end, f'"{_bare(source, start, end)} + 16"')


@operator("dimension", GROUP)
def _dimension(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "dims"):
        for other in ("- 1", "+ 8"):
            yield Edit(start, end, f'"{_bare(source, start, end)} {other}"')


@operator("swizzle", GROUP)
def _swizzle(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'^swizzle = "(\w+)"$'):
        for other in ("none", "32B", "64B", "128B"):
            if other != match.group(1):
                yield Edit(*match.span(1), other)


@operator("fill beyond the edge", GROUP)
def _fill(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'^\[\[tensor_map\]\]\nname = "\w+"\ntensor = "[ab]"$'):
        yield Edit(match.end(), match.end(), '\nout_of_bounds = "nan"')


@operator("grid", GROUP)
def _grid(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "grid"):
        text = _bare(source, start, end)
        if text != "1":
            yield Edit(start, end, f'"{text} - 1"')


@operator("block", GROUP)
def _block(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "block"):
        for other in ("- 32", "+ 32"):
            yield Edit(start, end, f'"{_bare(source, start, end)} {other}"')


@operator("cluster", GROUP)
def _cluster(source: Source) -> Iterator[Edit]:
    for start, end in _elements(source, "cluster"):
        if _bare(source, start, end) != "1":
            yield Edit(start, end, "1")


@operator("shared memory", GROUP)
def _shared(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r"^shared_bytes = (\d+)$"):
        yield Edit(*match.span(1), str(int(match.group(1)) // 2))


@operator("workspace size", GROUP)
def _workspace(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'^bytes = "?([^"\n]+)"?$'):
        yield Edit(*match.span(), f'bytes = "({match.group(1)}) / 2"')


@operator("workspace fill or kind", GROUP)
def _kind(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r"^fill = (\w+)$"):
        yield Edit(*match.span(1), "1")
    for match in _contract(source, r'^kind = "persistent"\n(fill = \w+\n?)?'):
        yield Edit(*match.span(), "")


@operator("edge", GROUP)
def _edge(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'^edge = "plain"$'):
        yield Edit(*match.span(), 'edge = "programmatic"')


@operator("arguments", GROUP)
def _arguments(source: Source) -> Iterator[Edit]:
    for first, second in pairwise(_elements(source, "args")):
        one, two = source.text[slice(*first)], source.text[slice(*second)]
        if "\n" not in source.text[first[0] : second[1]]:
            yield Edit(*first, two, ((*second, one),))


@operator("table", GROUP)
def _table(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'^value = "([^"\n]+)"$'):
        yield Edit(*match.span(1), f"{match.group(1)} + 1")
        yield Edit(*match.span(1), re.sub(r"\bi\b", "(i / 2)", match.group(1)))


@operator("scalar", GROUP)
def _scalar(source: Source) -> Iterator[Edit]:
    for match in _contract(source, r'\{(u?int(?:32|64)) = "([^"}]+)"\}'):
        yield Edit(*match.span(), f'{{{match.group(1)} = "{match.group(2)} - 1"}}')


def _contract(source: Source, pattern: str) -> Iterator[re.Match[str]]:
    """Matches in the leading comment."""
    yield from re.compile(pattern, re.M).finditer(source.text, 0, source.contract_end)


def _elements(source: Source, field: str) -> Iterator[tuple[int, int]]:
    """The entries of every list of this name."""
    for match in _contract(source, rf"^{field} = \[(.*)\]$"):
        for element in re.finditer(r'"[^"]*"|\{[^}]*\}|-?\d+', match.group(1)):
            yield match.start(1) + element.start(), match.start(1) + element.end()


def _bare(source: Source, start: int, end: int) -> str:
    return source.text[start:end].strip('"')
