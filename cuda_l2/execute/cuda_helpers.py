"""The runtime's own CUDA kernels (cuda_helpers.cu): compiled once per content and architecture into the cache."""

import functools
import hashlib
from pathlib import Path

from cuda.bindings import driver

from cuda_l2 import paths, scratch
from cuda_l2.execute.cuda_driver import Graph, check

SOURCE = Path(__file__).with_name("cuda_helpers.cu")
EMPTY_LAUNCHES = 64


class Helpers:
    """The kernels for one architecture, as in sm_90a."""

    def __init__(self, arch: str) -> None:
        self.path = _compiled(arch)

    def empty_s(self) -> float:
        """Device seconds of an empty kernel among many in a graph, launched by this process."""
        return min(self._empties.time()[0] for _ in range(5)) / EMPTY_LAUNCHES

    @functools.cached_property
    def _empties(self) -> Graph:
        module = check("cuModuleLoadData", driver.cuModuleLoadData(self.path.read_bytes()))
        function = check("cuModuleGetFunction", driver.cuModuleGetFunction(module, b"empty"))
        flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING

        def enqueue(stream: int) -> None:
            for _ in range(EMPTY_LAUNCHES):
                check("empty", driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, driver.CUstream(stream), 0, 0))

        return Graph(int(check("cuStreamCreate", driver.cuStreamCreate(flag))), enqueue)


def _compiled(arch: str) -> Path:
    """Path of the cubin."""
    from cuda.core import Program, ProgramOptions  # noqa: PLC0415 - loads NVRTC

    text = SOURCE.read_text()
    target = paths.cache_dir() / "helpers" / f"cuda-{arch}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.cubin"
    if not target.exists():
        code = Program(text, "c++", ProgramOptions(arch=arch, std="c++17")).compile("cubin").code
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            folder = scratch.make_folder()
            (folder / "helpers.cubin").write_bytes(bytes(code))
            (folder / "helpers.cubin").rename(target)
            folder.rmdir()
        except OSError as error:
            raise scratch.unwritable(error) from None
    return target
