"""Environment variables that change how fast libraries run, and environments without them.

A variable of the user's shell that slows torch or cuBLAS would turn into a speedup of a candidate. Every process that
runs an arm, baseline or candidate, starts without them; what was stripped is part of a run's environment.
"""

import os
import platform
from collections.abc import Mapping

PREFIXES = (
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "TORCH", "PYTORCH_", "TRITON_"),
    *("OMP_", "KMP_", "GOMP_", "CUBLAS_", "CUBLASLT_", "NVIDIA_TF32", "CUDA_LAUNCH_BLOCKING"),
)
FOLDERS = ("_DIR", "_HOME", "_PATH")
"""Where libraries keep or find files, which changes no time of a warmed-up launch."""
KEPT = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}
"""Training needs them; no timed launch allocates memory from the driver."""
if platform.machine() == "x86_64":
    # Some virtual machines hide instructions of a processor that OpenBLAS knows by its model: without this variable
    # the import of numpy ends in SIGILL. On x86 torch multiplies by MKL and oneDNN, so that it slows no arm.
    KEPT |= {"OPENBLAS_CORETYPE"}
OWN = {"OMP_WAIT_POLICY": "passive"}
"""Variables of this process: checks run between timings, and OpenMP's threads must sleep when they are done."""

_stripped: dict[str, str] = {}


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that runs an arm."""
    return {name: value for name, value in environment.items() if not _slows(name)}


def clean_process() -> None:
    """Strip this process's own environment, before torch loads, and set what is OWN."""
    for name in [name for name in os.environ if _slows(name)]:
        _stripped[name] = os.environ.pop(name)
    os.environ.update(OWN)


def given() -> dict[str, str]:
    """The environment that the user's shell gave: a command of ours strips and records it as this one did."""
    return {name: value for name, value in os.environ.items() if OWN.get(name) != value} | _stripped


def recorded(*, own_process: bool = False) -> dict[str, str]:
    """Entries of a run's environment, as in "MKL_NUM_THREADS=1"; none where the shell had no such variable.

    own_process: arms run in this process too, so that what it still has is in force, as where a program that set it
    calls the library.
    """
    left = {name: value for name, value in os.environ.items() if _slows(name) and OWN.get(name) != value}
    stripped = _stripped | ({} if own_process else left)
    found = {"stripped_variables": stripped, "variables": left if own_process else {}}
    return {
        entry: ", ".join(f"{name}={value}" for name, value in sorted(variables.items()))
        for entry, variables in found.items()
        if variables
    }


def _slows(name: str) -> bool:
    return name.startswith(PREFIXES) and not name.endswith(FOLDERS) and name not in KEPT
