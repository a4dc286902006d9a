"""Compiles the runtime's own CUDA kernels, once per content and architecture, into the cache."""

import hashlib
from pathlib import Path

from cuda_l2 import paths, scratch

SOURCE = Path(__file__).with_name("cuda_helpers.cu")


def compiled_helpers(arch: str) -> Path:
    """Path of the cubin for an architecture, as in sm_90a."""
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
