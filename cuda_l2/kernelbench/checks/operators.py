"""What the candidate leaves to PyTorch's own operators is said, and forbidden where the user did not allow it.

PyTorch tells of every thread's operators, calls from C++ too; beside it stands what the candidate's own libraries
import of ATen, read here from their files. Both are what a file in that process says or leaves: one that detects who
watches can hide from the first, one that looks functions up by name from the second. So an onlooker looks from outside
too.
"""

import io
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession, require_right
from cuda_l2.kernelbench.onlooker import COMPILER, FREE, calls_sampled, left_to_pytorch, listed, what_is_left
from cuda_l2.kernelbench.process import Call
from cuda_l2.system import sandbox

MAX_LIBRARIES = 16
MAX_FOLDERS = 1000
MAX_LIBRARY_BYTES = 64 << 20
_IMPORT = re.compile(r"_ZN2at4_ops(\d+)")


class Operators(ModuleCheck):
    name = "PyTorch's operators"
    order = 70

    def run(self, session: ModuleSession) -> None:
        case = session.cases.get("state 0", weights_seed=13)
        session.make(case, 13)
        session.module.prepare([Call(case.task, case.tensors, case.numbers)], session.weights_of(case))
        watched = session.onlooker.watched()
        require_right(case, session.module.output(), "where its operators are watched")
        imported = sorted(imports(session.module.folder) - FREE - set(watched.operators))
        if session.module.on_cpu:
            session.notes += what_is_left(watched)
        if imported:
            session.notes.append(f"its library can call PyTorch's own {listed(imported)}")
        if watched.compiled:
            session.notes.append(f"leaves kernels to {COMPILER}")
        session.onlooker.require_allowed([*left_to_pytorch(watched), *imported])
        if session.module.on_cpu and "all" not in session.allowed:
            session.module.prepare(calls_sampled(case), {})
            session.onlooker.sample()
        told = session.onlooker.require_own_work()
        session.notes.extend([told] if told else [])


def _libraries(folder: Path) -> Iterator[Path]:
    """Shared libraries below a folder that somebody else filled: no link is followed, least of all the folder's own."""
    if folder.is_symlink():
        return
    for at, _, names in itertools.islice(os.walk(folder), MAX_FOLDERS):
        paths = (Path(at) / name for name in names if name.endswith(".so"))
        yield from (path for path in paths if not path.is_symlink())


def imports(folder: Path) -> set[str]:
    """ATen's operators that shared libraries in a folder import, by name."""
    found: set[str] = set()
    for path in itertools.islice(_libraries(folder / "extensions"), MAX_LIBRARIES):
        data = sandbox.read_left(path, MAX_LIBRARY_BYTES)
        try:
            found |= _imports_of(data or b"")
        except Exception:  # noqa: BLE001 - somebody else's code wrote the file: what it makes a reader raise is its fault
            found.add("an_unreadable_library")
    return found


def _imports_of(data: bytes) -> set[str]:
    section = ELFFile(io.BytesIO(data)).get_section_by_name(".dynsym")
    names = set()
    for symbol in section.iter_symbols() if isinstance(section, SymbolTableSection) else ():
        match = _IMPORT.match(symbol.name)
        if match and symbol["st_shndx"] == "SHN_UNDEF":
            names.add(symbol.name[match.end() :][: int(match.group(1))])
    return names


CHECK = Operators()
