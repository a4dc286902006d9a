"""Where functions of a shared library lie in its file, by what their names contain."""

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

_SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("_", "u1"), ("at", "<u2"), ("value", "<u8"), ("size", "<u8")])
_FUNCTION = 2


class Functions:
    """Functions as ranges of offsets in the library's file. Empty where it was stripped."""

    def __init__(self, ranges: np.ndarray) -> None:
        """ranges: first offsets and those past the last ones, one row a function."""
        self.ranges = ranges[np.argsort(ranges[:, 0])]

    def __contains__(self, offset: int) -> bool:
        index = int(np.searchsorted(self.ranges[:, 0], offset, side="right")) - 1
        return index >= 0 and offset < int(self.ranges[index, 1])

    def __len__(self) -> int:
        return len(self.ranges)


@cache
def functions(library: Path, pattern: bytes) -> Functions:
    """The functions whose mangled names contain a regular expression. library: 64 bits, little-endian."""
    symbols, names, loaded = _table(library, ".symtab")
    starts = {names.rfind(b"\0", 0, match.start()) + 1 for match in re.finditer(pattern, names)}
    of_functions = symbols[(symbols["info"] & 15 == _FUNCTION) & (symbols["size"] > 0)]
    found = of_functions[np.isin(of_functions["name"], list(starts))]
    parts = [np.empty((0, 2), dtype=np.uint64)]
    for segment in loaded:
        inside = found[(found["value"] - segment["p_vaddr"]) < segment["p_filesz"]]  # unsigned: none below it
        first = inside["value"] - segment["p_vaddr"] + segment["p_offset"]
        parts.append(np.stack([first, first + inside["size"]], axis=1))
    return Functions(np.concatenate(parts))


def exported(library: Path, names: Collection[str]) -> dict[str, int]:
    """Where functions that a library exports begin in its file; those it does not are left out."""
    symbols, strings, loaded = _table(library, ".dynsym")
    found = {}
    for symbol in symbols[(symbols["info"] & 15 == _FUNCTION) & (symbols["at"] != 0)]:
        start, value = int(symbol["name"]), int(symbol["value"])
        name = strings[start : strings.find(b"\0", start)].decode(errors="replace")
        for segment in loaded if name in names else ():
            if 0 <= value - segment["p_vaddr"] < segment["p_filesz"]:
                found[name] = value - segment["p_vaddr"] + segment["p_offset"]
    return found


def _table(library: Path, name: str) -> tuple[np.ndarray, bytes, list[Any]]:
    """A table of symbols, their names, and the segments that are loaded; empty where there is none."""
    try:
        with library.open("rb") as file:
            elf = ELFFile(file)
            table = elf.get_section_by_name(name)
            if table is not None and elf.elfclass == 64:
                strings = elf.get_section(table["sh_link"])
                file.seek(table["sh_offset"])
                symbols = np.frombuffer(file.read(table["sh_size"]), dtype=_SYMBOL)
                file.seek(strings["sh_offset"])
                names = file.read(strings["sh_size"])
                return symbols, names, [segment.header for segment in elf.iter_segments("PT_LOAD")]
    except (OSError, ELFError):
        pass
    return np.empty(0, dtype=_SYMBOL), b"", []
