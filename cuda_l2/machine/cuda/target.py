"""An NVIDIA GPU: what its driver says of it, and its measured ceilings."""

import functools
import importlib
import importlib.metadata
import math
import platform
from dataclasses import dataclass
from typing import Any

from cuda_l2.machine._base import Target
from cuda_l2.machine.gpus import NO_DEVICE, gpu_present
from cuda_l2.records import Task
from cuda_l2.system.errors import UserError

LEAST_CAPABILITY = (8, 0)
LEAST_DRIVER = 13000
"""CUDA version the driver must support: cubins of NVRTC 13.0 load on it."""
FAMILY_SPECIFIC = ((9, 0), (10, 0), (12, 0))
"""Capabilities compiled for with their own instructions (wgmma, tcgen05): architecture names that end in `a`."""


@dataclass(frozen=True)
class CudaTarget(Target):
    """One GPU. Construct with `detect`, or by hand to write and compile schedules for another machine."""

    model: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    shared_bytes: int  # a block may have at most, opted in
    memory_bytes: int
    driver: str = ""
    cores: int = 1  # of the host, for compiling

    name = "cuda"
    timed_as = (
        "launch after launch in a CUDA graph, by turns with the libraries, on tensors at changing addresses, of which"
        " the L2 keeps what fits; with a programmatic edge a launch may begin while the one before it ends"
    )

    @property
    def arch(self) -> str:
        """What the compiler is told, as in sm_90a."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability in FAMILY_SPECIFIC else "")

    @property
    def machine(self) -> str:
        return f"cuda:{self.model}:{self.arch}:{self.sms}:{self.driver}"

    def runs(self, arch: str) -> bool:
        """Whether a candidate that asks for this architecture runs here."""
        if arch.endswith("a"):
            return arch == self.arch
        return int(arch.removeprefix("sm_")) <= 10 * self.capability[0] + self.capability[1]

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        sizes = (self.shared_bytes, self.l2_bytes, self.memory_bytes)
        first, second, third = (math.log2(size + 1) / 16 - 1 for size in sizes)
        return math.log2(self.sms + 1) / 4, self.capability[0] / 10, first, second, third

    @property
    def unit(self) -> tuple[str, float]:
        return "TFLOP/s", 1000.0

    def ceilings(self, dtype: str = "") -> tuple[float, float]:
        """Measured TFLOP/s of fp16 matrix products with fp32 sums, and GB/s of device memory."""
        return _ceilings()

    def bound_us(self, task: Task) -> float:
        tflops, gbytes = self.ceilings()
        return max(task.flops / tflops * 1e-6, task.bytes / gbytes * 1e-3)

    @property
    def cached_bytes(self) -> int:
        return self.l2_bytes

    def facts(self) -> dict[str, Any]:
        limits = {"shared_bytes_of_a_block": self.shared_bytes, "registers_of_a_multiprocessor": 65536}
        return {**self.environment(), **limits}

    def environment(self) -> dict[str, Any]:
        tflops, gbytes = self.ceilings()
        return {
            "gpu": self.model,
            "arch": self.arch,
            "sms": self.sms,
            "l2_bytes": self.l2_bytes,
            "driver": self.driver,
            "peak_tflops": tflops,
            "memory_gbytes_per_s": gbytes,
            **{name: _version(package) for name, package in _PACKAGES.items()},
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
        }


_PACKAGES = {"nvrtc": "nvidia-cuda-nvrtc", "cublas": "nvidia-cublas", "cuda_core": "cuda-core"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def compile_only(arch: str) -> CudaTarget:
    """A target to compile for where no such GPU is present, as in sm_90a, on all cores of this machine."""
    from cuda_l2.machine.cpu.target import usable_cores  # noqa: PLC0415

    digits = arch.removeprefix("sm_").removesuffix("a")
    capability = (int(digits[:-1]), int(digits[-1]))
    shared = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10
    return CudaTarget(
        model=f"compile-only {arch}",
        capability=capability,
        sms=132,
        l2_bytes=50 << 20,
        shared_bytes=shared,
        memory_bytes=80 << 30,
        cores=usable_cores(),
    )


def missing() -> str:
    """Why no GPU can be used here, in one line; empty where one can."""
    try:
        for name in ("torch", "cuda.core", "cuda.pathfinder", "pynvml"):
            importlib.import_module(name)
        import torch  # noqa: PLC0415 - takes a second; only where a GPU is asked for
        from cuda.bindings import driver  # noqa: PLC0415
    except ImportError as error:
        return NO_DEVICE if not gpu_present() else f"{error.name} is not installed: pip install 'cuda-l2[cuda]'"
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:
        return f"the NVIDIA driver is not installed ({error})"
    if status != driver.CUresult.CUDA_SUCCESS:
        return f"the NVIDIA driver does not start ({status.name}); is a GPU present?"
    _, supported = driver.cuDriverGetVersion()
    if supported < LEAST_DRIVER:
        return (
            f"the NVIDIA driver supports CUDA {supported // 1000}.{supported % 1000 // 10},"
            f" {LEAST_DRIVER // 1000}.{LEAST_DRIVER % 1000 // 10} is needed: update the driver"
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} was built without CUDA: install a build with it"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name()} has capability {capability[0]}.{capability[1]}; no family serves it"
    return ""


@functools.cache
def detect() -> CudaTarget:
    """The GPU that torch calls the current one; UserError where there is none that can be used."""
    reason = missing()
    if reason:
        raise UserError(f"no GPU: {reason}")
    import torch  # noqa: PLC0415
    from cuda.bindings import driver  # noqa: PLC0415

    from cuda_l2.machine.cpu.target import usable_cores  # noqa: PLC0415

    properties = torch.cuda.get_device_properties(0)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    _, shared_bytes = driver.cuDeviceGetAttribute(attribute, 0)
    return CudaTarget(
        model=properties.name,
        capability=(properties.major, properties.minor),
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        shared_bytes=shared_bytes,
        memory_bytes=properties.total_memory,
        driver=_driver_version(),
        cores=usable_cores(),
    )


def _driver_version() -> str:
    import pynvml  # noqa: PLC0415

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return "unknown"
    return version if isinstance(version, str) else version.decode()


@functools.cache
def _ceilings() -> tuple[float, float]:
    import torch  # noqa: PLC0415

    def best_ms(work: Any, repeats: int) -> float:
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
        return min(times)

    size = 8192
    a, b, c = (torch.randn(size, size, device="cuda").half() for _ in range(3))
    tflops = 2 * size**3 / best_ms(functools.partial(torch.mm, a, b, out=c), 8) * 1e-9
    x, y = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    gbytes = 2 * x.numel() / best_ms(functools.partial(y.copy_, x), 8) * 1e-6
    return tflops, gbytes
