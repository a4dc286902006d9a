"""What the candidate leaves to PyTorch's own operators is said, and forbidden where the user did not allow it.

PyTorch's profiler watches every thread, calls from C++ too; beside it stands what the candidate's own libraries import
of ATen, read here from their files. Both are what a file in that process says or leaves: one that detects the profiler
can hide from the first, one that looks functions up by name from the second. So program counters are sampled from
outside too, in runs like those that are timed: on the CPU what is inside PyTorch's libraries is seen there. Tensors are
made there as well, which is most of what a small task takes: a module that makes its results and computes nothing is
sampled beside the candidate, and what it spends inside PyTorch is taken off.
"""

import io
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from cuda_l2 import sandbox
from cuda_l2.audit._base import ModuleCheck, ModuleSession, require_right
from cuda_l2.audit.process import Call, Module
from cuda_l2.audit.samples import Samples
from cuda_l2.audit.symbols import functions
from cuda_l2.errors import UserError
from cuda_l2.execute.worker import Fault
from cuda_l2.records import VerdictStatus
from cuda_l2.tasks.kernelbench import Case, Tensors
from cuda_l2.verify._base import CheckFailed

SAMPLING_S, MOST_SAMPLING_S, LEAST_SAMPLES = 2.0, 12.0, 100
CALLS_SAMPLED, SAMPLED_BYTES = 32, 64 << 20
TOLD_SHARE, MOST_SHARE = 0.1, 0.3
"""Of computing time in PyTorch's libraries: said from the first on, forbidden beyond the second where no operator was
seen. Filling and copying do not count."""
_TORCH = re.compile(r"/lib(torch_cpu|torch_cuda\w*|torch|mkl\w*|dnnl|openblas\w*|cublas\w*|cudnn\w*)[\w.-]*\.so")
_WAITING = re.compile(r"/lib(gomp|c|m|pthread|stdc\+\+|python[\w.]*|torch_python|c10\w*)\.so|/python[\d.]*$|/ld-|^\[v")
"""Waiting, the interpreter, memory: of whoever called."""
EMPTY = """
import torch


class ModelNew:
    def __init__(self, *_, **__):
        pass

    def __call__(self, *inputs):
        for value in inputs:
            if isinstance(value, torch.Tensor):
                value.contiguous().data_ptr()
        return [RESULTS]
"""
LOADING_S = 60.0
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
"""Operators that make, move or look at tensors and compute nothing."""
_MAKING = rb"(11fill_kernel|11copy_kernel|18direct_copy_kernel|24reduced_float_copy_kernel)"
"""Functions that fill and copy, in the names of libtorch_cpu.so. Where it was stripped they count as work."""
_IMPORT = re.compile(r"_ZN2at4_ops(\d+)")


class Operators(ModuleCheck):
    name = "PyTorch's operators"
    order = 70

    def run(self, session: ModuleSession) -> None:
        case = session.cases.get("state 0", weights_seed=13)
        session.make(case, 13)
        weights = {key: case.tensors[name] for name, key in case.keys.items()}
        session.module.prepare([Call(case.task, case.tensors, case.numbers)], weights)
        watched = session.module.profile()
        require_right(case, session.module.output(), "where its operators are watched")
        computing = [name for name in watched.operators if name not in FREE]
        share = min(1.0, sum(watched.operators[name] for name in computing) / max(watched.total_us, 1e-3))
        imported = sorted(imports(session.module.folder) - FREE - set(computing))
        if computing:
            session.notes.append(f"leaves {share:.0%} of its time to PyTorch's own {_list(computing)}")
        if imported:
            session.notes.append(f"its library can call PyTorch's own {_list(imported)}")
        vendors = [name for name in watched.kernels if re.search(r"cublas|cudnn|cutlass|gemm|flash", name, re.I)]
        if vendors:
            session.notes.append(f"runs the kernels {', '.join(name[:60] for name in vendors[:4])}")
        if "all" in session.allowed:
            return
        forbidden = [name for name in (*computing, *imported) if name not in session.allowed]
        if forbidden:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"calls {_list(forbidden)}; allow them where that is meant")
        inside = _share_inside_torch(session, case, weights) if session.module.on_cpu else 0.0
        if inside >= TOLD_SHARE:
            session.notes.append(f"spends {inside:.0%} of its time inside PyTorch's libraries, seen from outside")
        if inside > MOST_SHARE and not session.allowed:
            raise CheckFailed(VerdictStatus.FORBIDDEN, f"{session.notes[-1]}, where no profiler watches")


@dataclass(frozen=True, slots=True)
class _Spent:
    """Microseconds of processor time a call: in PyTorch's libraries, and in other code that computes."""

    inside_us: float
    outside_us: float
    samples: int

    def share(self, free_us: float = 0.0) -> float:
        """Of what computes, what is inside PyTorch beyond what is free."""
        inside = max(0.0, self.inside_us - free_us)
        return inside / (inside + self.outside_us) if inside else 0.0


def _share_inside_torch(session: ModuleSession, case: Case, weights: Tensors) -> float:
    """Of the time of code that computes, what is in PyTorch's libraries and not for making results.

    Nothing where threads cannot be traced, or too few samples lie in code that computes.
    """
    spent = _spent(session.module, case, weights, MOST_SAMPLING_S)
    if spent.samples < LEAST_SAMPLES or spent.share() < TOLD_SHARE:
        return 0.0  # taking off only makes it less
    try:
        with session.beside(_making_results(case)) as empty:
            if failure := empty.load(LOADING_S):
                raise Fault(VerdictStatus.CRASHED, failure)
            empty.make(0, case.initial)
            return spent.share(_spent(empty, case, {}, SAMPLING_S).inside_us)
    except Fault as fault:  # no candidate's
        raise UserError(f"a module that computes nothing fails beside the candidate: {fault.reason}") from None


def _spent(module: Module, case: Case, weights: Mapping[str, torch.Tensor], most_s: float) -> _Spent:
    calls = max(1, min(CALLS_SAMPLED, SAMPLED_BYTES // max(1, case.task.bytes)))
    module.prepare([Call(case.task, case.tensors, case.numbers)] * calls, weights)
    sampled = module.sampled(SAMPLING_S, most_s, _enough)
    if not sampled or not sampled.counts:
        return _Spent(0.0, 0.0, 0)
    inside, outside = _computing(sampled.counts)
    us = sampled.cpu_s * 1e6 / sampled.counts.total() / sampled.calls
    return _Spent(inside * us, outside * us, inside + outside)


def _computing(counts: Samples) -> tuple[int, int]:
    """Samples of code that computes: in PyTorch's libraries, and elsewhere."""
    making = functions(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so", _MAKING)
    inside = outside = 0
    for (path, offset), count in counts.items():
        if _TORCH.search(path):
            inside += count if Path(path).name != "libtorch_cpu.so" or offset not in making else 0
        elif not _WAITING.search(path):
            outside += count
    return inside, outside


def _enough(counts: Samples) -> bool:
    return sum(_computing(counts)) >= LEAST_SAMPLES


def _making_results(case: Case) -> str:
    """A module that looks at its inputs and gives results in which nothing was written."""
    results = ", ".join(f"torch.empty({list(t.shape)}, dtype=torch.{t.dtype})" for t in case.task.outputs)
    return EMPTY.replace("RESULTS", results)


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"aten::{name}" for name in names[:8])


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
