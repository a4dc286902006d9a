"""What a CPU candidate's shared library may hold: nothing that runs at load, nothing from outside but memory copies."""

import re
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

EXTERNAL = frozenset({"memcpy", "memmove", "memset", "memcmp"})
RUNS_AT_LOAD = ("DT_INIT", "DT_INIT_ARRAY", "DT_PREINIT_ARRAY", "DT_FINI", "DT_FINI_ARRAY")
RELOCATED_BY_CODE = {"EM_X86_64": 37, "EM_AARCH64": 1032}
"""IRELATIVE relocations: the loader calls a function of the library to resolve them."""
FOR_CALLS = {"EM_X86_64": 7, "EM_AARCH64": 1026}
"""JUMP_SLOT relocations, which the linker makes of calls alone; -fplt keeps compilers from other calls."""
MAX_STATIC_BYTES = 64 << 20
_CONVERTS = re.compile(r"__(extend|trunc|fix|float)\w*[hbsdxt]f")
_EXECUTABLE, _WRITABLE = 1, 2


def refuse_binary(library: Path, entry: str) -> str:
    """Why the library is refused, in one line; empty where it is not."""
    try:
        with library.open("rb") as file:
            return _refuse(ELFFile(file), entry)
    except (ELFError, OSError) as error:
        return f"the compiled library cannot be read: {error}"


def _refuse(elf: ELFFile, entry: str) -> str:
    dynamic = elf.get_section_by_name(".dynamic")
    symbols = elf.get_section_by_name(".dynsym")
    if not isinstance(dynamic, DynamicSection) or not isinstance(symbols, SymbolTableSection):
        return "the compiled file is not a shared library"
    tags = {tag.entry.d_tag for tag in dynamic.iter_tags()}
    for tag in RUNS_AT_LOAD:
        if tag in tags:
            return "code that runs when the library loads (a constructor or destructor) is not allowed"
    if "DT_NEEDED" in tags:
        return "the library may not need other libraries"
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection):
            for relocation in section.iter_relocations():
                if relocation["r_info_type"] == RELOCATED_BY_CODE.get(elf["e_machine"]):
                    return "indirect functions, which resolve when the library loads, are not allowed"
                symbol = symbols.get_symbol(relocation["r_info_sym"])
                called = relocation["r_info_type"] == FOR_CALLS.get(elf["e_machine"])
                if symbol.name in EXTERNAL and symbol["st_shndx"] == "SHN_UNDEF" and not called:
                    return f"the address of {symbol.name} is not allowed: call it by its name"
    exported = False
    for symbol in symbols.iter_symbols():
        if symbol["st_info"]["type"] in ("STT_GNU_IFUNC", "STT_LOOS"):
            return "indirect functions, which resolve when the library loads, are not allowed"
        if not symbol.name:
            continue
        if symbol["st_shndx"] == "SHN_UNDEF" and _CONVERTS.match(symbol.name):
            return (
                f"a conversion needs the compiler's {symbol.name}, which is not available to a candidate; go through"
                " float, in a function that is not inlined where the compiler joins the steps"
            )
        if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name not in EXTERNAL:
            return f"{symbol.name} is not available to a candidate; only {', '.join(sorted(EXTERNAL))} are"
        exported |= (
            symbol.name == entry and symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["type"] == "STT_FUNC"
        )
    if not exported:
        return f"the source defines no function {entry}"
    for segment in elf.iter_segments():
        flags = segment["p_flags"]
        if segment["p_type"] == "PT_LOAD" and flags & _EXECUTABLE and flags & _WRITABLE:
            return "memory that is both writable and executable is not allowed"
        if segment["p_type"] == "PT_LOAD" and segment["p_memsz"] > MAX_STATIC_BYTES:
            return f"static data larger than {MAX_STATIC_BYTES >> 20} MiB is not allowed; ask for workspace instead"
        if segment["p_type"] == "PT_GNU_STACK" and flags & _EXECUTABLE:
            return "an executable stack is not allowed"
    return ""
