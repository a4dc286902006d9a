"""The pack: compiled kernels with their recipes, hashes and evidence, in a folder of pack.json and kernels.bin.

Built from this package's sources, never taken from elsewhere. Reading checks the index's hash and, when a kernel is
first used, the kernel's: that tells damage, and proves nothing about who wrote the file.
"""

import contextlib
import functools
import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_l2.library.deploy.recipes import ARCH, FILES, Recipe
from cuda_l2.library.table import family_of, schedule_of, schedule_text
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.records import BuildStatus, Gemm
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import whole, write_text

FORMAT = "cuda-l2 pack, version 1"
INDEX, DATA = "pack.json", "kernels.bin"
CARRIED = Path(__file__).with_name("pack")
"""In a wheel."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One kernel in the index."""

    id: str  # of its source's code, contract.kernel_id
    dtype: str
    layout: str
    family: str
    schedule: str  # the compiled choices
    shape: str  # one that it serves
    shapes: int  # of the table, which it won
    proof: str  # what full verification said of its family, schedule and layout; empty where none was made
    sha256: str
    offset: int
    size: int  # compressed
    registers: int


class Pack:
    """An index that was read, and kernels on demand."""

    def __init__(self, folder: Path) -> None:
        """UserError where the index cannot be read or was changed."""
        self.folder = folder
        try:
            fields = json.loads((folder / INDEX).read_text())
            if fields.pop("sha256") != _digest(fields) or fields["format"] != FORMAT:
                raise ValueError("its hash is another")
            self.kernels = {kernel["id"]: Packed(**kernel) for kernel in fields["kernels"]}
            self.identity, self.compiler = _digest(fields)[:16], str(fields["compiler"])
            self.sources = str(fields["sources"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX} cannot be used: {error}; build it anew: cuda-l2 library build") from None

    def cubin(self, name: str) -> bytes:
        """A kernel's code; UserError where it was changed. KeyError where there is no such kernel."""
        kernel = self.kernels[name]
        try:
            with (self.folder / DATA).open("rb") as file:
                file.seek(kernel.offset)
                code = zlib.decompress(file.read(kernel.size))
        except (OSError, zlib.error) as error:
            raise UserError(f"kernel {name} of {self.folder} cannot be read: {error}; cuda-l2 library build") from None
        if hashlib.sha256(code).hexdigest() != kernel.sha256:
            raise UserError(f"kernel {name} of {self.folder} was changed: its hash is another; cuda-l2 library build")
        return code

    def verify(self) -> list[str]:
        """What is wrong with any kernel's code, one line each."""
        wrong = []
        for name in self.kernels:
            try:
                self.cubin(name)
            except UserError as error:
                wrong.append(str(error))
        return wrong


def built_folder() -> Path:
    """Where `build` puts a pack for this package's sources."""
    return paths.cache_dir() / "pack" / f"{ARCH}-{sources_digest()[:12]}"


@functools.cache
def installed() -> Pack | None:
    """The pack that was built here, else the wheel's; None where there is neither, UserError where one is damaged."""
    for folder in (built_folder(), CARRIED):
        if (folder / INDEX).exists():
            return Pack(folder)
    return None


@functools.cache
def sources_digest() -> str:
    """Changes with every file that a kernel's text comes from."""
    folder = paths.PACKAGE / "families"
    files = [*FILES, *sorted(path for path in folder.iterdir() if path.suffix in (".py", ".cu", ".cuh"))]
    return hashlib.sha256(b"\0".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)).hexdigest()


def build(wanted: Sequence[Recipe], folder: Path, progress: Callable[[int], None] = lambda done: None) -> Pack:
    """Compile every recipe under the rules for candidates and write the pack; UserError where one does not build.

    An interrupted build goes on from the cache of builds. progress: gets the number of kernels that are done.
    """
    from cuda_l2.build.build_server import BuildServers  # noqa: PLC0415 - a call of a kernel builds nothing
    from cuda_l2.build.cuda_compiler import toolchain  # noqa: PLC0415 - needs the extra [cuda]

    compiler, target = str(toolchain()), compile_only(ARCH)
    kernels: list[dict[str, Any]] = []
    with (
        contextlib.closing(BuildServers(target)) as servers,
        whole(folder / DATA, "set CUDA_L2_CACHE") as partial,
        partial.open("wb") as data,
    ):
        for recipe, made in zip(wanted, servers.build([each.candidate for each in wanted]), strict=True):
            if made.status is not BuildStatus.BUILT:
                raise UserError(f"{recipe.family} {schedule_text(recipe.schedule)} does not build: {made.reason}")
            code = Path(made.artifact).read_bytes()
            packed = zlib.compress(code, 9)
            kernel = Packed(
                *(recipe.id, recipe.gemm.dtype, str(recipe.gemm.layout), recipe.family),
                *(schedule_text(recipe.schedule), str(recipe.gemm), recipe.shapes, recipe.proof),
                *(hashlib.sha256(code).hexdigest(), data.tell(), len(packed)),
                max((kernel.registers for kernel in made.kernels), default=0),
            )
            data.write(packed)
            kernels.append(asdict(kernel))
            progress(len(kernels))
    fields = {"format": FORMAT, "arch": ARCH, "compiler": compiler, "sources": sources_digest(), "kernels": kernels}
    write_text(folder / INDEX, json.dumps({**fields, "sha256": _digest(fields)}, indent=0) + "\n", "set CUDA_L2_CACHE")
    installed.cache_clear()
    return Pack(folder)


def family_schedules(pack: Pack, gemm: Gemm) -> list[tuple[str, dict[str, int]]]:
    """The families and compiled choices of the pack for a shape's type and layout, each once."""
    found = {
        (kernel.family, kernel.schedule): None
        for kernel in pack.kernels.values()
        if kernel.dtype == gemm.dtype and kernel.layout == gemm.layout
    }
    return [(family_of(family).name, dict(schedule_of(text))) for family, text in found]


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
