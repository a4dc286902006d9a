"""cuda-l2 doctor: what this machine has, what is missing, how to get it."""

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cuda_l2.measure.clock import CLOCK
from cuda_l2.system.errors import INSTALL_TORCH, UserError
from cuda_l2.system.text import counted

WATCHED_S = 0.5
"""How long it is looked at what other work takes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    good: None where the line adds to the one before. advice: shown where it is not good. needed: by the main job.
    """

    good: bool | None
    what: str
    found: str
    advice: str = ""
    needed: bool = False

    def __str__(self) -> str:
        mark = {True: "ok", False: "--", None: "  "}[self.good]
        advice = f"; {self.advice}" if self.advice and not self.good else ""
        return f"{mark}  {self.what:<16} {self.found}{advice}"


def command() -> None:
    """Say what this machine has, what is missing, and how to get it. Exits with 2 where the main job cannot run."""
    findings = [*_system(), *_cpu(), *_other_work(), *_sandbox(), *_gpu(), *_packages(), *_bytecode(), *_folders()]
    for finding in findings:
        print(finding)
    if any(finding.needed and not finding.good for finding in findings):
        sys.exit(2)


def _system() -> list[Finding]:
    name = platform.system()
    return [
        Finding(sys.version_info >= (3, 11), "Python", platform.python_version(), "3.11 or newer is needed"),
        Finding(name == "Linux", "system", f"{name} {platform.release()}", "candidates run on Linux only"),
    ]


def _cpu() -> Iterator[Finding]:
    from cuda_l2.machine.cpu import ceilings
    from cuda_l2.machine.cpu import target as cpu

    try:
        _, version = cpu.find_compiler()
    except UserError as error:
        yield Finding(False, "C compiler", str(error), "apt install gcc libc6-dev", needed=True)
        return
    yield Finding(True, "C compiler", version)
    try:
        target = cpu.detect()
        for dtype in ("float32", "bfloat16"):
            ceilings.again(target.cores, target.measured_as(dtype)[0])
        gflops, gbytes = target.ceilings()
        pairs = target.ceilings("bfloat16")[0] if target.multiplies_pairs("bfloat16") else 0.0
        doubt = target.ceilings_doubt() or target.ceilings_doubt("bfloat16")
    except UserError as error:
        yield Finding(False, "CPU", str(error), needed=True)
        return
    cores = counted(target.cores, "core")
    yield Finding(True, "CPU", f"{target.model}, {cores}, {target.vector_bits}-bit vectors")
    yield from _quota(target.cores)
    reached = f"{gflops:.0f} GFLOP/s fp32, {f'{pairs:.0f} bf16, ' if pairs else ''}{gbytes:.0f} GB/s from memory"
    yield Finding(not doubt, "measured peak", reached, doubt)


def _other_work() -> Iterator[Finding]:
    """What other programs take of the cores now; nothing where the system does not say."""
    from cuda_l2.measure.other_work import NOTICED_CORES, Others, OtherWork

    work, others = OtherWork(CLOCK), Others(CLOCK)
    CLOCK.sleep(WATCHED_S)
    if found := work.found():
        said = f"keeps {found.share:.0%} of {counted(found.of, 'core')} busy"
        said = "; ".join(filter(None, (said, others.busiest())))
        advice = "until that ends, timings on the CPU wait, or end without figures"
        yield Finding(found.cores < NOTICED_CORES, "other work", said, advice)


def _quota(threads: int) -> Iterator[Finding]:
    """The limit that a container or another control group sets on this process."""
    from cuda_l2.system import control_groups

    quota, counters = control_groups.cpu_quota(), control_groups.throttling()
    if quota is None:
        return
    found = f"{quota:g} of {counted(len(os.sched_getaffinity(0)), 'core')}, so kernels get {counted(threads, 'thread')}"
    yield Finding(True, "CPU quota", found)
    if counters and counters.periods:
        stopped = f"it stopped this container {counted(counters.periods, 'time')} so far, {counters.us / 1e6:.1f} s"
        yield Finding(None, "", f"{stopped} in all; timings need a quota that other work does not use up")


def _sandbox() -> Iterator[Finding]:
    from cuda_l2.system import sandbox

    kind, limits = sandbox.kind(), shutil.which("prlimit")
    missing = kind is sandbox.Kind.LIMITS
    yield Finding(not missing, "sandbox", str(kind), "apt install bubblewrap for a stronger one")
    if missing and not shutil.which("setpriv"):
        yield Finding(None, "", "user namespaces are no sandbox without setpriv: apt install util-linux")
    if kind is sandbox.Kind.NAMESPACES:
        yield Finding(None, "", "bubblewrap would be faster to start: apt install bubblewrap")
    yield Finding(bool(limits), "resource limits", limits or "no prlimit", "apt install util-linux")


def _packages() -> Iterator[Finding]:
    torch = importlib.util.find_spec("torch") is not None
    yield Finding(torch, "torch", "installed" if torch else "missing", f"needed: {INSTALL_TORCH}", needed=True)
    for package, needed_for, extra in (
        ("optuna", "--policy tpe", "tpe"),
        ("openai", "--policy openai:NAME@URL", "llm"),
        ("transformers", "--policy hf:PATH_OR_ID", "llm"),
        ("bm25s", "cuda-l2 index", "llm"),
        ("mcp", "cuda-l2 mcp", "mcp"),
        ("matplotlib", "cuda-l2 report, optimize --page", "report"),
        ("uvicorn", "cuda-l2 watch", "report"),
        ("psycopg", "--archive postgresql://...", "postgres"),
        ("sklearn", "--policy boosted, cuda-l2 compare", "worlds"),
        ("trl", "cuda-l2 train", "train"),
        ("gguf", "models in GGUF files", "gguf"),
        ("ray", "--workers ray", "ray"),
    ):
        present = importlib.util.find_spec(package) is not None
        # of this Python, whichever pip the shell has: another would look for a package of our name in its index
        advice = f"needed for {needed_for}: {sys.executable} -m pip install 'cuda-l2[{extra}]'"
        yield Finding(present, package, "installed" if present else "missing", advice)


def _bytecode() -> Iterator[Finding]:
    """Whether torch's bytecode is there: without it every process in a sandbox compiles torch's Python anew."""
    spec = importlib.util.find_spec("torch")
    if not spec or not spec.origin:
        return
    folder = Path(spec.origin).parent
    late = folder / "_dynamo" / "__init__.py"  # so that importing torch does not hide it
    if late.exists() and not Path(importlib.util.cache_from_source(str(late))).exists():
        advice = f"each process in a sandbox compiles it anew: {sys.executable} -m compileall -q {folder}"
        yield Finding(False, "torch's bytecode", "missing, as some installers leave it", advice)


def _folders() -> Iterator[Finding]:
    from cuda_l2.system import paths, scratch

    for name, folder, setting in (
        ("cache", paths.cache_dir(), "CUDA_L2_CACHE"),
        ("archive", paths.default_archive().parent, "CUDA_L2_HOME"),
    ):
        parent = next(p for p in (folder, *folder.parents) if p.exists())
        try:
            with tempfile.TemporaryDirectory(dir=parent):
                free = shutil.disk_usage(parent).free
            if name == "cache":
                scratch.require_executable(parent)
        except OSError as error:
            yield Finding(False, name, f"{folder} cannot be written: {error.strerror}", f"set {setting}", needed=True)
        except UserError as error:
            yield Finding(False, name, str(error), needed=True)
        else:
            yield Finding(free > 1 << 28, name, f"{folder}, {free / 2**30:.1f} GiB free", "at least 0.25 GiB is wanted")


def _gpu() -> list[Finding]:
    """The GPU, its driver and its tools."""
    from cuda_l2.machine import gpu_present

    if not gpu_present():
        return [Finding(False, "GPU", "none: the CPU is the target")]
    from cuda_l2.machine.cuda import sanitizer
    from cuda_l2.machine.cuda import target as cuda
    from cuda_l2.measure import profile

    reason = cuda.missing()
    if reason:
        return [Finding(False, "GPU", reason)]
    found = cuda.detect()
    tflops, gbytes = found.ceilings()
    memory = found.memory_bytes / 2**30
    return [
        Finding(True, "GPU", f"{found.model}, {found.arch}, {found.sms} multiprocessors, {memory:.0f} GiB"),
        Finding(True, "driver", found.driver),
        Finding(True, "measured peak", f"{tflops:.0f} TFLOP/s fp16, {gbytes:.0f} GB/s from memory"),
        *(_tool(name, find) for name, find in (("compute-sanitizer", sanitizer.find), ("ncu", profile.find))),
    ]


def _tool(name: str, find: Callable[[], Path]) -> Finding:
    try:
        return Finding(True, name, str(find()))
    except UserError as error:
        return Finding(False, name, str(error))
