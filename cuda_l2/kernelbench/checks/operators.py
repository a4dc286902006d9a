"""Work left to PyTorch's own operators is reported, and forbidden where the user did not allow the operator.

Self-reported: PyTorch's profiler runs in the module's own process, so a file that detects it can hide from it. What the
file's libraries import of ATen is read from outside, but a library can look functions up by name instead.

The check runs before the timing on a CPU, and after it, on the timed instance, everywhere: on a GPU the profiler brings
CUPTI into the process, where it may take time at every launch.
"""

import io
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from cuda_l2.kernelbench._base import ModuleCheck, ModuleSession
from cuda_l2.kernelbench.process import Profile
from cuda_l2.kernelbench.rounds import TIMED_WEIGHTS
from cuda_l2.machine._base import Fault
from cuda_l2.records import VerdictStatus
from cuda_l2.system import sandbox
from cuda_l2.verify._base import CheckFailed, require_right

ALL = "all"
COMPILER = "torch.compile"
MAX_LIBRARIES = 16
MAX_FOLDERS = 1000
MAX_LIBRARY_BYTES = 64 << 20
FREE = set(
    re.findall(
        r"\w+",
        """
        empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero_ ones
        ones_like new_ones full full_like new_full fill_ copy_ clone contiguous to _to_copy cuda cpu detach
        detach_ alias lift lift_fresh view _unsafe_view reshape _reshape_alias view_as reshape_as as_strided
        as_strided_ flatten unflatten squeeze squeeze_ unsqueeze unsqueeze_ t transpose permute movedim
        swapaxes mT expand expand_as slice select narrow split chunk unbind unsafe_split split_with_sizes
        diagonal resize_ set_ size stride numel is_contiguous data_ptr item _local_scalar_dense is_nonzero
        record_stream pin_memory is_pinned result_type resolve_conj resolve_neg requires_grad_ scalar_tensor
        is_same_size sym_size sym_numel sym_stride storage_offset data set_data
        """,
    )
)
"""Operators that make, move or view tensors and compute nothing."""
_IMPORT = re.compile(r"_ZN2at4_ops(\d+)")
_VENDORS = re.compile(r"cublas|cudnn|cutlass|gemm|flash", re.I)


class Operators(ModuleCheck):
    name = "PyTorch's operators"
    order = 70
    late = True

    def run(self, session: ModuleSession) -> None:
        try:
            profile = _profile(session)
        except Fault as fault:
            if ALL not in session.allowed or not session.timed:
                raise
            session.note(f"its operators were not seen: {fault.reason}")
            return
        operators, share = computing_operators(profile)
        imported = sorted(imports(session.module.folder) - FREE - set(profile.operators))
        if operators:
            session.note(f"leaves {share:.0%} of its time to PyTorch's own {listed(operators)} (self-reported)")
        if imported:
            session.note(f"its library can call PyTorch's own {listed(imported)}")
        if profile.compiled:
            session.note(f"leaves kernels to {COMPILER} (self-reported)")
        if vendors := [name[:60] for name in profile.kernels if _VENDORS.search(name)]:
            session.note(f"runs the kernels {', '.join(vendors[:4])} (self-reported)")
        called = [*operators, *([COMPILER] if profile.compiled else []), *imported]
        forbidden = [name for name in called if not {name, ALL} & session.allowed]
        if forbidden:
            reason = f"calls {listed(forbidden)}; allow them with --pytorch where that is meant"
            raise CheckFailed(VerdictStatus.FORBIDDEN, reason)


def _profile(session: ModuleSession) -> Profile:
    """Profile of one call, whose result is right. The instance that was timed stays; before, a new one is made."""
    case = session.cases.drawn("timed", weights=TIMED_WEIGHTS)
    if not session.timed:
        session.make(case)
    session.module.prepare([case.call()], session.weights_of(case))
    profile = session.module.profile()
    require_right(case, session.module.output(), "under PyTorch's profiler")
    return profile


def computing_operators(profile: Profile) -> tuple[list[str], float]:
    """PyTorch's operators that compute, and their share of the time."""
    names = [name for name in profile.operators if name not in FREE]
    return names, min(1.0, sum(profile.operators[name] for name in names) / max(profile.total_us, 1e-3))


def listed(names: Sequence[str]) -> str:
    return ", ".join(name if name == COMPILER else f"aten::{name}" for name in names[:8])


def _libraries(folder: Path) -> Iterator[Path]:
    """Shared libraries below a folder that the file filled; no link is followed, not even the folder itself."""
    if folder.is_symlink():
        return
    for at, _, names in itertools.islice(os.walk(folder), MAX_FOLDERS):
        paths = (Path(at) / name for name in names if name.endswith(".so"))
        yield from (path for path in paths if not path.is_symlink())


def imports(folder: Path) -> set[str]:
    """Names of the ATen operators that shared libraries in a folder import."""
    found: set[str] = set()
    for path in itertools.islice(_libraries(folder / "extensions"), MAX_LIBRARIES):
        data = sandbox.read_left(path, MAX_LIBRARY_BYTES)
        try:
            found |= _imports_of(data or b"")
        except Exception:  # noqa: BLE001 - the file under judgement wrote the library: a reader may raise anything
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
