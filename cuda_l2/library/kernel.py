"""A verified CPU kernel as a callable on torch tensors, in this process; saved, loaded, exported."""

import ctypes
from collections.abc import Callable
from pathlib import Path

from cuda_l2 import contract
from cuda_l2.library import saved
from cuda_l2.library.product import Product
from cuda_l2.library.saved import Saved
from cuda_l2.records import Build, Candidate, Gemm


class Kernel(Product):
    """Calls a candidate's compiled code: C = A B.

    The code runs in this process with this process's rights: load only what was verified and whose author you
    trust as far as any native library's. A kernel does not change: a copy is the kernel itself, and a pickle holds
    its source.
    """

    def __init__(self, gemm: Gemm, candidate: Candidate, build: Build, machine: str = "") -> None:
        """machine: identity of the one on which the kernel was verified and timed."""
        self.candidate, self.artifact, self.machine = candidate, Path(build.artifact), machine
        terms = contract.parse_cpu(candidate.source)
        entry = ctypes.CDLL(str(self.artifact))[terms.entry]
        super().__init__(gemm, entry, terms.threads, terms.workspace_bytes(gemm))

    def save(self, path: Path | str) -> None:
        """Write the kernel's source, task, contract and hash as JSON; `cuda_l2.load` reads it."""
        saved.write(self._saved, Path(path))

    def export(self, folder: Path | str, name: str = "") -> Path:
        """Write a shared library and its C header; the library's path. name: of the C function and of both files."""
        return saved.export(self._saved, Path(folder), name)

    def __reduce__(self) -> tuple[Callable[[str], "Kernel"], tuple[str]]:
        return restore, (saved.to_text(self._saved),)

    def __copy__(self) -> "Kernel":
        return self

    def __deepcopy__(self, memo: object) -> "Kernel":
        return self

    def __repr__(self) -> str:
        return f"<Kernel {self.candidate.id} for {self.gemm}>"

    @property
    def _saved(self) -> Saved:
        return Saved(self.gemm, self.candidate, self.machine)


def load(name: Path | str, *, archive: Path | str | None = None) -> Kernel:
    """A kernel from the file that `Kernel.save` wrote, or the archive's best for a shape on this machine.

    name: a path, or a shape as in 512x512x512:tn. archive: its file, where it is not the default one. The source is
    compiled under the rules of the launch contract, and nothing else of the file runs. UserError where there is none.
    """
    return _built(saved.find(name, archive))


def restore(text: str) -> Kernel:
    """The kernel that a pickle holds as text; UserError where it cannot be built."""
    return _built(saved.from_text(text))


def _built(found: Saved) -> Kernel:
    return Kernel(found.gemm, found.candidate, saved.built(found), found.machine)
