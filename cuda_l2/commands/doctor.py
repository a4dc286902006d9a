"""cuda-l2 doctor: what this machine has, what is missing, how to get it."""

import importlib.util
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cuda_l2.counted import counted
from cuda_l2.errors import UserError


def command() -> None:
    """Say what this machine has, what is missing, and how to get it. Exits with 2 where the main job cannot run."""
    from cuda_l2 import paths, sandbox
    from cuda_l2.targets import cpu

    fatal = False
    lines: list[tuple[str, str, str]] = []

    def line(good: bool, what: str, found: str, advice: str = "") -> None:
        lines.append(("ok" if good else "--", what, found + (f"; {advice}" if advice and not good else "")))

    line(sys.version_info >= (3, 11), "Python", platform.python_version(), "3.11 or newer is needed")
    line(
        platform.system() == "Linux",
        "system",
        f"{platform.system()} {platform.release()}",
        "candidates run on Linux only",
    )
    try:
        _, version = cpu.find_compiler()
        line(True, "C compiler", version)
    except UserError as error:
        fatal = True
        line(False, "C compiler", str(error), "apt install gcc libc6-dev")
    else:
        try:
            target = cpu.detect()
            gflops, gbytes = target.ceilings()
            line(True, "CPU", f"{target.model}, {counted(target.cores, 'core')}, {target.vector_bits}-bit vectors")
            line(True, "ceilings", f"{gflops:.0f} GFLOP/s fp32, {gbytes:.0f} GB/s from memory, measured")
        except UserError as error:
            fatal = True
            line(False, "CPU", str(error))
    kind = sandbox.kind()
    line(kind is not sandbox.Kind.LIMITS, "sandbox", str(kind), "apt install bubblewrap for a stronger one")
    if kind is sandbox.Kind.LIMITS and not shutil.which("setpriv"):
        lines.append(("  ", "", "user namespaces are no sandbox without setpriv: apt install util-linux"))
    if kind is sandbox.Kind.NAMESPACES:
        lines.append(("  ", "", "bubblewrap would be faster to start: apt install bubblewrap"))
    line(
        bool(shutil.which("prlimit")),
        "resource limits",
        shutil.which("prlimit") or "no prlimit",
        "apt install util-linux",
    )
    for good, what, found in _gpu():
        lines.append(("ok" if good else "--", what, found))
    for package, needed_for, source in (
        ("torch", "baselines and references", "torch"),
        ("optuna", "--policy tpe", "'cuda-l2[tpe]'"),
        ("openai", "--policy openai:NAME@URL", "'cuda-l2[llm]'"),
        ("transformers", "--policy hf:PATH_OR_ID", "'cuda-l2[llm]'"),
        ("bm25s", "cuda-l2 index", "'cuda-l2[llm]'"),
    ):
        present = importlib.util.find_spec(package) is not None
        fatal |= package == "torch" and not present
        line(present, package, "installed" if present else "missing", f"needed for {needed_for}: pip install {source}")
    for name, folder, setting in (
        ("cache", paths.cache_dir(), "CUDA_L2_CACHE"),
        ("archive", paths.default_archive().parent, "CUDA_L2_HOME"),
    ):
        parent = next(p for p in (folder, *folder.parents) if p.exists())
        try:
            with tempfile.TemporaryDirectory(dir=parent):
                free = shutil.disk_usage(parent).free
            line(free > 1 << 28, name, f"{folder}, {free / 2**30:.1f} GiB free", "at least 0.25 GiB is wanted")
        except OSError as error:
            fatal = True
            line(False, name, f"{folder} cannot be written: {error.strerror}", f"set {setting}")
    for mark, what, found in lines:
        print(f"{mark}  {what:<16} {found}")
    if fatal:
        sys.exit(2)


def _gpu() -> list[tuple[bool, str, str]]:
    """What the GPU target needs: whether it is there, and what was found or is missing."""
    from cuda_l2.targets import gpu_present

    if not gpu_present():
        return [(False, "GPU", "none: the CPU is the target")]
    from cuda_l2.execute import sanitizer
    from cuda_l2.measure import profile
    from cuda_l2.targets import cuda

    reason = cuda.missing()
    if reason:
        return [(False, "GPU", reason)]
    found = cuda.detect()
    tflops, gbytes = found.ceilings()
    memory = found.memory_bytes / 2**30
    return [
        (True, "GPU", f"{found.model}, {found.arch}, {found.sms} multiprocessors, {memory:.0f} GiB"),
        (True, "driver", found.driver),
        (True, "ceilings", f"{tflops:.0f} TFLOP/s fp16, {gbytes:.0f} GB/s from memory, measured"),
        *(_tool(name, find) for name, find in (("compute-sanitizer", sanitizer.find), ("ncu", profile.find))),
    ]


def _tool(name: str, find: Callable[[], Path]) -> tuple[bool, str, str]:
    try:
        return True, name, str(find())
    except UserError as error:
        return False, name, str(error)
