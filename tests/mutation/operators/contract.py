"""The launch contract: tensor maps, grid, memory, edges and arguments other than the kernel expects."""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise

from mutation.operators._base import Edit, operator, rewrite
from mutation.source import Source

GROUP = "contract"


def _contract(source: Source, pattern: str) -> Iterator[re.Match[str]]:
    """Matches in the leading comment."""
    yield from re.compile(pattern, re.M).finditer(source.text, 0, source.contract_end)


def _elements(source: Source, field: str) -> Iterator[tuple[int, int]]:
    """The entries of every list of this name."""
    for match in _contract(source, rf"^{field} = \[(.*)\]$"):
        for element in re.finditer(r'"[^"]*"|\{[^}]*\}|-?\d+', match.group(1)):
            yield match.start(1) + element.start(), match.start(1) + element.end()


def _entries(name: str, field: str, others: Callable[[str], Iterable[str]]) -> None:
    """Register the operator that replaces each entry of the lists of a field. others: of an entry without quotes."""

    @operator(name, GROUP)
    def edits(source: Source) -> Iterator[Edit]:
        for start, end in _elements(source, field):
            for other in others(source.text[start:end].strip('"')):
                yield Edit(start, end, other)


rewritten = partial(rewrite, find=_contract)
_entries("box", "box", lambda text: [str(n) for n in (int(text) // 2, int(text) + 8) if 0 < n <= 256])
_entries("stride", "strides", lambda text: [f'"{text} + 16"'])
_entries("dimension", "dims", lambda text: [f'"{text} - 1"', f'"{text} + 8"'])
rewritten("swizzle", GROUP, (r'^swizzle = "(\w+)"$', 1, "none", "32B", "64B", "128B"))
_MAP = r'^\[\[tensor_map\]\]\nname = "\w+"\ntensor = "[ab]"()$'
rewritten("fill beyond the edge", GROUP, (_MAP, 1, r'\nout_of_bounds = "nan"'))
_entries("grid", "grid", lambda text: [f'"{text} - 1"'] if text != "1" else [])
_entries("block", "block", lambda text: [f'"{text} - 32"', f'"{text} + 32"'])
_entries("cluster", "cluster", lambda text: ["1"] if text != "1" else [])
rewritten("shared memory", GROUP, (r"^shared_bytes = (\d+)$", 1, lambda match: str(int(match[1]) // 2)))
rewritten("workspace size", GROUP, (r'^bytes = "?([^"\n]+)"?$', 0, r'bytes = "(\1) / 2"'))
_PERSISTENT = r'^kind = "persistent"\n(fill = \w+\n?)?'
rewritten("workspace fill or kind", GROUP, (r"^fill = (\w+)$", 1, "1"), (_PERSISTENT, 0, ""))
rewritten("edge", GROUP, (r'^edge = "plain"$', 0, 'edge = "programmatic"'))


@operator("arguments", GROUP)
def _arguments(source: Source) -> Iterator[Edit]:
    for first, second in pairwise(_elements(source, "args")):
        one, two = source.text[slice(*first)], source.text[slice(*second)]
        if "\n" not in source.text[first[0] : second[1]]:
            yield Edit(*first, two, ((*second, one),))


_VALUE = r'^value = "([^"\n]+)"$'
rewritten("table", GROUP, (_VALUE, 1, r"\1 + 1", lambda match: re.sub(r"\bi\b", "(i / 2)", match[1])))
rewritten("scalar", GROUP, (r'\{(u?int(?:32|64)) = "([^"}]+)"\}', 0, r'{\1 = "\2 - 1"}'))
