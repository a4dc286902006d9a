"""Compiles the package's own C and C++ helpers, once per content, into the cache. Candidates have their own builds."""

import functools
import hashlib
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from cuda_l2.system import paths, scratch
from cuda_l2.system.errors import UserError


@functools.cache
def compiled(source: Path, *flags: str) -> Path:
    """The program or library that `source` compiles to; UserError where it cannot be compiled.

    Made again where it is damaged, or the source or a relative include changes.
    """
    cxx = source.suffix == ".cpp"
    compiler = [paths.cxx_name()] if cxx else paths.compiler_command()
    key = [_text(source), " ".join(flags).encode(), " ".join(compiler).encode(), _processor()]
    digest = hashlib.sha256(b"\0".join(key)).hexdigest()[:16]
    target = (paths.cache_dir() / "helpers").resolve() / f"{source.stem}-{digest}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.require_executable(target.parent)
        if scratch.is_whole(target):
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            out = Path(folder) / source.stem
            standard = "-std=c++17" if cxx else "-std=gnu11"
            command = [*compiler, "-O2", standard, str(source), "-o", str(out), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                said = next((line for line in lines if re.search("error: |failed: ", line)), lines[-1])
                kind = "C++" if cxx else "C"
                raise UserError(
                    f"the {kind} compiler cannot build {source.name}: {said}; `cuda-l2 doctor` says what is missing"
                )
            out.replace(target)
        scratch.seal(target)
    except OSError as error:
        if error.filename != compiler[0]:
            raise scratch.unwritable(error) from None
        wanted = "C++ compiler", "g++ or clang++", "CXX"
        kind, names, variable = wanted if cxx else ("C compiler", "gcc or clang", "CC")
        raise UserError(f"no {kind}: {compiler[0]!r} was not found; install {names}, or set {variable}") from None
    return target


@functools.cache
def _processor() -> bytes:
    """The processor's features, which -march=native depends on: machines may share a cache."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return (
        platform.machine().encode()
        + b"".join(line for line in lines if line.startswith((b"flags", b"Features")))[:9999]
    )


def _text(source: Path) -> bytes:
    text = source.read_bytes()
    for include in re.findall(rb'^#include "([^"]+)"', text, re.MULTILINE):
        text += _text(source.parent / include.decode())
    return text
