"""Settings for processes in which torch.compile makes kernels for a CPU."""

import functools
import platform
import subprocess

VECTORS = "-mavx2 -mfma -mf16c -mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx512vnni -mamx-tile -mamx-bf16 -mamx-int8"


@functools.cache
def environment(compiler: str = "g++") -> dict[str, str]:
    """Variables of Inductor's, whose C++ compiler is this one.

    Compilers run in the process itself, which is stopped where others are timed, not in its children, which would run
    on. Whether the compiler knows the processor's vectors is asked here: Inductor compiles PyTorch's headers for that,
    6 to 9 s of a first kernel's 11 to 14 in every fresh process. Which of them the processor has it goes on to ask.
    """
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if platform.machine() == "x86_64" and _accepts(compiler, VECTORS.split()):
        variables["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    return variables


def _accepts(compiler: str, flags: list[str]) -> bool:
    command = [compiler, *flags, "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(command, input=b"#include <immintrin.h>\n", capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0
