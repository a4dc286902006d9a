"""Kernels of the user's own, taken as sources: compiled here under the rules, kept beside the choices that name them.

Compiled code is never taken. A kernel serves the shapes for which it was verified and timed on this machine.
"""

from collections.abc import Iterable
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.contract.cuda import CudaContract
from cuda_l2.library.deploy.pack import Pack, build
from cuda_l2.library.deploy.recipes import ARCH, Recipe
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import write_text

FAMILY = "imported"
"""The family that a choice of an imported kernel names."""
SOURCE = "source.cu"


def folder(name: str) -> Path:
    return paths.data_dir() / FAMILY / name


def keep(source: str, gemms: Iterable[Gemm]) -> str:
    """Compile a source and keep it; its kernel's id. UserError where the rules or its contract refuse it or a shape."""
    terms = read(source)
    for gemm in gemms:
        _require(terms, gemm)
    name, candidate = contract.kernel_id(source, terms), Candidate(source, FAMILY, (), FAMILY)
    first = next(iter(gemms))
    build([Recipe(name, FAMILY, (), first, candidate, 0, "")], folder(name))
    write_text(folder(name) / SOURCE, source, "set CUDA_L2_HOME")
    return name


def find(name: str) -> tuple[Candidate, Pack]:
    """A kept kernel and where its code lies; UserError where it is missing or was changed."""
    try:
        source = (folder(name) / SOURCE).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the imported kernel {name} cannot be read: {error}; import it again") from None
    if contract.kernel_id(source, read(source)) != name:
        raise UserError(f"the imported kernel {name} was changed; import it again")
    return Candidate(source, FAMILY, (), FAMILY), Pack(folder(name))


def read(source: str) -> CudaContract:
    """The contract of a source; UserError where it has none for a Hopper GPU's matrix products."""
    try:
        terms = contract.parse_cuda(source)
    except contract.ContractError as error:
        raise UserError(f"the source cannot be imported: {error}") from None
    if terms.constant:
        raise UserError(f"the source cannot be imported: it declares {', '.join(terms.constant)} constant")
    if not compile_only(ARCH).runs(terms.arch):
        raise UserError(f"the source cannot be imported: it is for {terms.arch}, and calls serve {ARCH}")
    return terms


def _require(terms: CudaContract, gemm: Gemm) -> None:
    try:
        plan = terms.plan(gemm, compile_only(ARCH).sms)
    except contract.ContractError as error:
        raise UserError(f"the source does not serve {gemm}: {error}") from None
    if any(launch.coresident for launch in plan.launches):
        raise UserError(
            "the source cannot be imported: its blocks wait for one another, and two such kernels at once"
            " on two streams would wait for ever"
        )
