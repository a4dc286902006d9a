"""What a CUDA candidate's machine code holds and may hold: read from the ELF, and from nvdisasm's text of its words.

Rules: the contract's kernels are there with the parameters it passes; no variable outlives a launch; nothing outside
the file is called; special registers come from a list; a launch with a programmatic edge waits. Facts: registers,
memory and tensor instructions of every kernel, for the stages after this one.

Sections and attributes are those of NVIDIA's CUDA ELF, sm_80 to sm_120. A function that was not inlined lies inside
the section of the kernel that calls it, so its instructions count as that kernel's.
"""

import io
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import Section, SymbolTableSection

from cuda_l2.build.cuda_rules import call_reason, variable_reason
from cuda_l2.contract.cuda import SCALARS, TENSOR_MAP_BYTES, CudaContract
from cuda_l2.records import KernelFacts
from cuda_l2.system.text import counted

WORD_BYTES = 16
"""Size of one machine instruction."""
MAX_UNUSED_BYTES = 1 << 20
"""Most bytes of variables that headers define and no code names; they cost memory only."""
SPECIAL_REGISTERS = re.compile(
    r"SR_(?:TID|CTAID|NTID|NCTAID)(?:\.[XYZ])?|SR_LANEID|SR_(?:EQ|LE|LT|GE|GT)MASK|SR_VIRT(?:ID|CFG|UALSMID)|SR_WARPID"
    r"|SR_SMEMSZ|SR_[SL]WIN(?:LO|HI|SZ)|SR_CgaCtaId|SR_CgaSize"
)
"""Place in the grid, the block, the warp and on the chip; sizes and windows of memory. No clock, counter or number."""
HIDDEN_CONSTANTS = {8: (0x30, 0x130), 9: (0x30, 0x190), 10: (0x140, 0x2E8), 12: (0x140, 0x2E8)}
"""Where the driver's own parameters hold the grid's number and the graph's, 8 bytes each, by major capability."""
_ARGUMENT_BYTES = {"pointer": 8, "tensor_map": TENSOR_MAP_BYTES} | {
    kind: struct.calcsize(code) for kind, code in SCALARS.items()
}
_INSTRUCTION_CALLS = "__cuda_syscall_cp_async_bulk"
"""How ptxas implements TMA instructions on sm_120; a source that spells it itself is refused for its PTX."""
_ENTRY_SECTION = ".nv.constant0."  # one a kernel: its parameters
_VARIABLE_SECTIONS = (".nv.global", ".data", ".bss")
_REGISTERS, _PARAMETERS, _PARAMETER = 0x2F, 0x0A, 0x17  # EIATTR_REGCOUNT, EIATTR_PARAM_CBANK, EIATTR_KPARAM_INFO
_LONG_PARAMETER = 0x45  # EIATTR_KPARAM_INFO_V2, of kernels with more than some 4 KiB of parameters
_WITH_LENGTH = 4  # EIFMT_SVAL

_TENSOR = re.compile(r"[A-Z0-9]*MMA(?:\.|\Z)")
_OPCODE = re.compile(r"(?:@!?U?P\w+ )?([A-Z]\S*) ?(.*)")
_REGISTER_READ = re.compile(r"\bSR_\w+(?:\.\w+)?")
_CONSTANT = re.compile(r"\bc\[0x([04])\]\[(?:U?RZ|(U?R\d+))?\+?(?:0x([0-9a-f]+))?\]")  # bank, register, offset
_ENTRY = re.compile(r"^ptxas info +: Compiling entry function '([^']+)' for ")
_FRAME = re.compile(r"^ptxas +\. +(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"^ptxas info +: Used \d+ registers.*, (\d+) bytes smem")
_WARNING = re.compile(r"^ptxas (?:warning|info) +: (?:\(C\d+\)|.*Potential Performance Loss).*|^ptxas warning .*")
_SLOW = re.compile(r"Potential Performance Loss|is injected in")


class CubinError(ValueError):
    """The file is not a cubin as this module knows them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry of a cubin."""

    name: str
    words: tuple[bytes, ...]  # its machine instructions
    registers: int
    parameter_base: int  # offset in constant bank 0
    parameter_bytes: int
    parameters: tuple[int, ...]  # bytes of each, in order


@dataclass(frozen=True, slots=True)
class Cubin:
    """What the rules need of the file."""

    kernels: tuple[Kernel, ...]
    addresses: Mapping[int, str]
    """Offset in constant bank 4 to the variable or function whose address the loader puts there."""
    named: tuple[str, ...]  # variables whose address stands anywhere else
    variable_bytes: int  # of writable memory that lasts from launch to launch
    outside: tuple[str, ...]  # functions that are not in the file


def read(data: bytes) -> Cubin:
    """Take a cubin apart; CubinError where it cannot be."""
    try:
        return _read(ELFFile(io.BytesIO(data)))
    except (ELFError, struct.error, KeyError) as error:
        raise CubinError(f"the compiled code cannot be read: {error!r}") from None


def _read(elf: ELFFile) -> Cubin:
    sections = {section.name: section for section in elf.iter_sections()}
    symbols = sections[".symtab"]
    if elf["e_machine"] != "EM_CUDA" or not isinstance(symbols, SymbolTableSection):
        raise CubinError("the compiled code is not for an NVIDIA GPU")
    pairs = [struct.unpack("<II", value) for kind, value in _attributes(sections[".nv.info"]) if kind == _REGISTERS]
    registers = {symbols.get_symbol(index).name: count for index, count in pairs}
    names = sorted(name.removeprefix(_ENTRY_SECTION) for name in sections if name.startswith(_ENTRY_SECTION))
    kernels = tuple(_kernel(name, sections, registers[name]) for name in names)

    variables = {i for i, section in enumerate(elf.iter_sections()) if section.name.startswith(_VARIABLE_SECTIONS)}
    addresses, named = {}, set()
    for section in sections.values():
        if isinstance(section, RelocationSection) and ".debug" not in section.name:
            for offset, index in _relocations(section):
                symbol = symbols.get_symbol(index)
                if symbol["st_shndx"] in variables:
                    if section.name.endswith(".nv.constant4"):
                        addresses[offset] = symbol.name
                    else:
                        named.add(symbol.name)
    # name, type and binding, other, section, value, size; section 0 of what is not in the file
    undefined = [i for i, entry in enumerate(struct.iter_unpack("<IBBHQQ", symbols.data())) if entry[3] == 0]
    outside = (symbols.get_symbol(i).name for i in undefined)
    return Cubin(
        kernels,
        addresses,
        tuple(sorted(named)),
        sum(elf.get_section(i)["sh_size"] for i in variables),
        tuple(name for name in outside if name and not name.startswith((".nv.", _INSTRUCTION_CALLS))),
    )


def _kernel(name: str, sections: Mapping[str, Section], registers: int) -> Kernel:
    code = sections[f".text.{name}"].data()
    attributes = list(_attributes(sections[f".nv.info.{name}"]))
    none = sections[_ENTRY_SECTION + name]["sh_size"], 0
    base, size = next((struct.unpack("<4xHH", value) for kind, value in attributes if kind == _PARAMETERS), none)
    parameters = [struct.unpack("<4xHHI", value) for kind, value in attributes if kind in (_PARAMETER, _LONG_PARAMETER)]
    shift = 0 if any(kind == _LONG_PARAMETER for kind, _ in attributes) else 18  # below the size lie flags
    words = tuple(code[i : i + WORD_BYTES] for i in range(0, len(code), WORD_BYTES))
    return Kernel(name, words, registers, base, size, tuple(flags >> shift for _, _, flags in sorted(parameters)))


def _attributes(section: Section) -> Iterator[tuple[int, bytes]]:
    """Kind and value of every attribute: format, kind, then two bytes of value or a length and so many bytes."""
    data, position = section.data(), 0
    while position < len(data):
        layout, kind, value = struct.unpack_from("<BBH", data, position)
        position += 4
        length = value if layout == _WITH_LENGTH else 0
        yield kind, data[position : position + length]
        position += length


def _relocations(section: RelocationSection) -> Iterator[tuple[int, int]]:
    """Offset and symbol of every relocation. Read here: CuTe leaves thousands, and pyelftools takes its time."""
    layout = "<QQ8x" if section.is_RELA() else "<QQ"
    for offset, info in struct.iter_unpack(layout, section.data()):
        yield offset, info >> 32


def refuse(cubin: Cubin, sass: Mapping[bytes, str], contract: CudaContract, capability: int) -> str:
    """Why the machine code is refused, in one line; empty where it is not. sass: the text of each word."""
    names = [kernel.name for kernel in cubin.kernels]
    for launch in contract.launches:
        if launch.kernel not in names:
            has = ", ".join(names) or "none"
            return f'the source defines no extern "C" __global__ function {launch.kernel}; it has {has}'
    if cubin.outside:
        return call_reason(cubin.outside[0])
    if cubin.named:
        return variable_reason(cubin.named[0])
    if cubin.variable_bytes > MAX_UNUSED_BYTES:
        return (
            f"variables of {cubin.variable_bytes >> 10} KiB in global memory are not allowed, though no code names them"
        )
    for kernel in cubin.kernels:
        reason = _refuse_words(cubin, kernel, sass, HIDDEN_CONSTANTS.get(capability, ()))
        if reason:
            return reason
    kernels = {kernel.name: kernel for kernel in cubin.kernels}
    for number, launch in enumerate(contract.launches, 1):
        kernel = kernels[launch.kernel]
        reason = _refuse_parameters(kernel, [argument.kind for argument in launch.arguments])
        if reason:
            return f"launch {number}: {reason}"
        if launch.programmatic and not any(_opcode(sass[word]) == "ACQBULK" for word in set(kernel.words)):
            return f"launch {number} has a programmatic edge, but {kernel.name} never executes griddepcontrol.wait"
    return ""


def _refuse_words(cubin: Cubin, kernel: Kernel, sass: Mapping[bytes, str], hidden: Sequence[int]) -> str:
    for word in dict.fromkeys(kernel.words):
        text = sass[word]
        for register in _REGISTER_READ.findall(text):
            if not SPECIAL_REGISTERS.fullmatch(register):
                return f"{kernel.name} reads {register}: no clocks, timers, counters or grid numbers are allowed"
        for bank, index, constant in _CONSTANT.findall(text):
            offset = int(constant or "0", 16)
            if bank == "4":  # with a register's offset, the PTX alone tells whose address it is
                if not index and offset in cubin.addresses:
                    return variable_reason(cubin.addresses[offset])
                continue
            beyond = offset >= kernel.parameter_base + kernel.parameter_bytes and not index
            if beyond or any(start <= offset < start + 8 for start in hidden):
                return f"{kernel.name} reads the launch's constant {offset:#x}, which is none of its parameters"
    return ""


def _refuse_parameters(kernel: Kernel, kinds: Sequence[str]) -> str:
    if len(kinds) != len(kernel.parameters):
        return f"{kernel.name} takes {counted(len(kernel.parameters), 'parameter')}, the contract passes {len(kinds)}"
    for position, (kind, size) in enumerate(zip(kinds, kernel.parameters, strict=True), 1):
        if kind != "table" and size != _ARGUMENT_BYTES[kind]:
            passed = f"the contract passes {kind} of {_ARGUMENT_BYTES[kind]}"
            return f"parameter {position} of {kernel.name} has {counted(size, 'byte')}, {passed}"
    return ""


def facts(cubin: Cubin, sass: Mapping[bytes, str], log: str) -> tuple[KernelFacts, ...]:
    """Facts of every kernel; spills, stack and static shared memory as the assembler's log says."""
    frames = _frames(log)
    return tuple(
        KernelFacts(
            name=kernel.name,
            registers=kernel.registers,
            parameter_bytes=kernel.parameter_bytes,
            instructions=sum(_opcode(sass[word]) != "NOP" for word in kernel.words),
            tensor_instructions=_tensor_instructions({sass[word] for word in kernel.words}),
            **frames.get(kernel.name, {"stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0}),
        )
        for kernel in cubin.kernels
    )


def _frames(log: str) -> dict[str, dict[str, int]]:
    """Frame of every kernel, with functions it calls. A later report replaces an earlier: the assembler speaks last."""
    frames: dict[str, dict[str, int]] = {}
    frame: dict[str, int] = {}
    for line in log.splitlines():
        if match := _ENTRY.match(line):
            frame = frames[match.group(1)] = {"stack_bytes": 0, "spill_bytes": 0, "shared_bytes": 0}
        elif frame and (match := _FRAME.match(line)):
            frame["stack_bytes"] += int(match.group(1))
            frame["spill_bytes"] += int(match.group(2)) + int(match.group(3))
        elif frame and (match := _SHARED.match(line)):
            frame["shared_bytes"] = int(match.group(1))
    return frames


def warnings(log: str) -> tuple[str, ...]:
    """What the assembler warns of, each once."""
    return tuple(dict.fromkeys(line.strip() for line in log.splitlines() if _WARNING.match(line)))


def refuse_warnings(lines: Sequence[str]) -> str:
    """The first warning that counts as a failure: wgmma that the assembler had to serialise, setmaxnreg it ignored."""
    return next((line for line in lines if _SLOW.search(line)), "")


def _opcode(text: str) -> str:
    match = _OPCODE.match(text)
    return match.group(1) if match else ""


def _tensor_instructions(texts: Iterable[str]) -> tuple[str, ...]:
    """Not those whose result goes nowhere: ptxas ends a serialised wgmma with an HGMMA into RZ."""
    matches = filter(None, map(_OPCODE.match, texts))
    found = {match.group(1) for match in matches if not match.group(2).startswith("RZ,")}
    return tuple(sorted(filter(_TENSOR.match, found)))
