"""The CPU this process runs on: vector width, cores it may use, caches, compiler, measured ceilings."""

import functools
import math
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_l2.machine._base import Target
from cuda_l2.machine.cpu import ceilings
from cuda_l2.records import Task
from cuda_l2.system import control_groups, paths, sandbox
from cuda_l2.system.errors import UserError

CPUINFO = Path("/proc/cpuinfo")
EXTENSIONS = ("avx2", "avx_vnni", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "asimdhp", "sve", "sve2")
"""Vector extensions that kernels may be compiled for, as Linux names them."""
PEAK_IN_QUIET = "peak_in_quiet"
"""Entry of an environment: whether nothing interrupted the measuring of its peak, which may be higher otherwise."""
NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


@dataclass(frozen=True)
class CpuTarget(Target):
    """Cores that candidates may use. Construct with `detect`, or by hand to write schedules for another machine."""

    model: str
    cores: int
    vector_bits: int
    cache_bytes: tuple[int, int, int]  # first level (data), second, third; of one core, 0 where there is none
    compiler: str = ""  # path
    compiler_version: str = ""
    compiler_options: tuple[str, ...] = ()  # as in CC="gcc -m64"
    stepping: str = ""  # family, model and stepping, as in 25.1.1; what two processors of one name differ by
    extensions: tuple[str, ...] = ()  # of vectors

    name = "cpu"
    timed_as = "call after call, by turns with the libraries, on tensors at changing addresses; caches stay as they are"

    @property
    def machine(self) -> str:
        caches = "+".join(str(size >> 10) for size in self.cache_bytes)
        kind = f"{self.stepping}:{'+'.join(self.extensions)}:{caches}K:" if self.stepping else ""
        return f"cpu:{self.model}:{self.cores}x{self.vector_bits}:{kind}{self.compiler_version}"

    @property
    def compile_flags(self) -> tuple[str, ...]:
        return (
            *self.compiler_options,
            *("-O3", "-std=gnu11", NATIVE, "-ffp-contract=fast", "-fno-math-errno", "-fno-stack-protector", "-fPIC"),
            *("-fplt", "-shared", "-nostdlib", "-Wl,-z,noexecstack", "-Wl,-z,now"),
        )

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        first, second, third = (math.log2(size + 1) / 16 - 1 for size in self.cache_bytes)
        return math.log2(self.cores + 1) / 4, self.vector_bits / 512, first, second, third

    @property
    def unit(self) -> tuple[str, float]:
        return "GFLOP/s", 1.0

    def multiplies_pairs(self, dtype: str) -> bool:
        """Whether one instruction multiplies two pairs of such elements and adds both products to a sum in fp32."""
        return dtype == "bfloat16" and "avx512_bf16" in self.extensions and self.vector_bits == 512

    def ceilings(self, dtype: str = "") -> tuple[float, float]:
        """Measured GFLOP/s of multiply-adds in fp32, or of pairs of bf16, and GB/s of memory reads, on all cores."""
        return _ceilings(self.cores, *self.measured_as(dtype))

    def measured_as(self, dtype: str) -> tuple[str, str]:
        """Under which name ceilings are kept, and with which flags they are measured."""
        pairs = self.multiplies_pairs(dtype)
        return (f"{self.machine} pairs", f"{NATIVE} -DPAIRS") if pairs else (self.machine, NATIVE)

    def ceilings_doubt(self, dtype: str = "") -> str:
        quiet = ceilings.undisturbed(self.cores, self.measured_as(dtype)[0])
        return "" if quiet else "other work ran meanwhile: they may be higher"

    def bound_us(self, task: Task) -> float:
        gflops, gbytes = self.ceilings(task.dtype)
        return max(task.flops / gflops, task.bytes / gbytes) * 1e-3

    @property
    def cached_bytes(self) -> int:
        _, second, third = self.cache_bytes
        return max(self.cores * second, third)

    def environment(self) -> dict[str, Any]:
        gflops, gbytes = self.ceilings()
        return {
            "cpu": self.model,
            "cores": self.cores,
            "vector_bits": self.vector_bits,
            "cache_bytes": list(self.cache_bytes),
            "peak_gflops": gflops,
            "read_gbytes_per_s": gbytes,
            PEAK_IN_QUIET: not self.ceilings_doubt(),
            "compiler": self.compiler_version,
            "flags": " ".join(self.compile_flags),
            "sandbox": str(sandbox.kind()),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        }


def find_compiler() -> tuple[str, str]:
    """Path and version of the C compiler, or a UserError that says how to get one."""
    name, *_ = paths.compiler_command()
    path = shutil.which(name)
    if not path:
        raise UserError(f"no C compiler: {name!r} was not found; install gcc or clang, or set CC to one")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{path} does not answer to --version; set CC to gcc or clang")
    return path, done.stdout.splitlines()[0]


@functools.cache
def detect() -> CpuTarget:
    """This machine; UserError where it has no C compiler."""
    compiler, version = find_compiler()
    model, stepping, flags = _cpuinfo()
    return CpuTarget(
        model=model,
        cores=usable_cores(),
        vector_bits=_vector_bits(flags),
        cache_bytes=(_cache(1), _cache(2), _cache(3)),
        compiler=compiler,
        compiler_version=version,
        compiler_options=tuple(paths.compiler_command()[1:]),
        stepping=stepping,
        extensions=tuple(name for name in EXTENSIONS if name in flags),
    )


def separate_cores() -> list[int]:
    """The first logical CPU of each core among those that this process may use: no two share a core's units."""
    found: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(number)
        found.setdefault(siblings.strip(), number)
    return list(found.values())


def usable_cores() -> int:
    """Cores this process may use: affinity, cut by the quotas of its control groups."""
    cores, quota = len(os.sched_getaffinity(0)), control_groups.cpu_quota()
    return cores if quota is None else min(cores, max(1, math.floor(quota)))


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping."""
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    limits = [int(match.group(1)) << 10 if match else None, control_groups.free_memory_bytes()]
    return min((limit for limit in limits if limit is not None), default=1 << 62)


def _cpuinfo() -> tuple[str, str, frozenset[str]]:
    """The processor's name, its family, model and stepping, and what it can do."""
    text = CPUINFO.read_text()
    numbers = [
        re.search(rf"^{name}\s*:\s*(\w+)$", text, re.MULTILINE)
        for name in ("(?:cpu family|CPU implementer)", "(?:model|CPU part)", "(?:stepping|CPU revision)")
    ]
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    name = model.group(1).strip() if model else platform.machine()
    stepping = ".".join(number.group(1) for number in numbers if number)
    return name, stepping, frozenset(flags.group(1).split() if flags else ())


def _vector_bits(flags: frozenset[str]) -> int:
    if {"avx512f", "avx512vl", "avx512bw"} <= flags:
        return 512
    if {"avx2", "fma", "f16c"} <= flags:
        return 256
    return 128


def _cache(level: int) -> int:
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if int((index / "level").read_text()) == level and (index / "type").read_text().strip() != "Instruction":
                size = (index / "size").read_text().strip()
                return int(size.rstrip("KM")) << (20 if size.endswith("M") else 10)
        except (OSError, ValueError):
            continue
    return 0


@functools.cache
def _ceilings(threads: int, machine: str, flags: str) -> tuple[float, float]:
    found = ceilings.kept(threads, machine, flags)
    return found.gflops, found.gbytes_per_s
