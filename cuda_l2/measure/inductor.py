"""Settings for processes in which torch.compile makes kernels for a CPU."""

import functools
import platform
import subprocess

FLAGS = "-mavx2 -mfma -mf16c -mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8"
PROGRAM = b"""
#include <immintrin.h>
__m512i dot(__m512i a, __m512i b) { return _mm512_dpbusd_epi32(a, a, b); }
void tiles() { _tile_dpbssd(0, 1, 2); _tile_dpbf16ps(0, 1, 2); }
"""
"""A program that needs every kind that Inductor has of x86's vectors."""


@functools.cache
def environment(compiler: str = "g++") -> dict[str, str]:
    """Variables of Inductor's, whose C++ compiler is this one.

    Compilers run in the process itself, which is stopped where others are timed, not in its children, which would run
    on. Whether the compiler knows the processor's vectors is asked here: Inductor compiles PyTorch's headers for that,
    6 to 10 s of a first kernel's 11 to 14 in every fresh process. Which of them the processor has it goes on to ask.
    """
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if platform.machine() == "x86_64" and _knows_vectors(compiler):
        variables["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    return variables


def _knows_vectors(compiler: str) -> bool:
    """Its assembler too, which may be older."""
    command = [compiler, *FLAGS.split(), "-c", "-o", "/dev/null", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=PROGRAM, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
