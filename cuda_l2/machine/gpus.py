"""Which NVIDIA GPUs a process sees and what they are, found without torch, which takes seconds to load."""

import os
from pathlib import Path

from cuda_l2.system.errors import UserError

NO_DEVICE = "this machine has no NVIDIA driver or device; for one that has, there is pip install 'cuda-l2[cuda]'"


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU at all; whether it can be used is `machine.cuda.target.missing`'s to say."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def count() -> int:
    """Number of GPUs that the driver shows this process; 0 where there is no driver."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - CPU users need not have it
    except ImportError:
        return 0
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError:  # no driver is installed
        return 0
    if status != driver.CUresult.CUDA_SUCCESS:
        return 0
    status, found = driver.cuDeviceGetCount()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise UserError(f"the NVIDIA driver does not say how many GPUs there are: {status.name}")
    return int(found)


def architecture() -> str:
    """What the first GPU's code is compiled for, as in sm_90; empty where this process sees none."""
    if not count():
        return ""
    from cuda.bindings import driver  # noqa: PLC0415

    kinds = driver.CUdevice_attribute
    names = (kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    found = [driver.cuDeviceGetAttribute(name, 0) for name in names]
    known = all(status == driver.CUresult.CUDA_SUCCESS for status, _ in found)
    return "sm_" + "".join(str(value) for _, value in found) if known else ""


def visible() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES, each of which selects one GPU that this process sees."""
    present = count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(present)])[:present]
