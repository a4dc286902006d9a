"""Which NVIDIA GPUs a process sees, found without torch, which takes a second or more to load."""

import os

from cuda_l2.system.errors import UserError


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


def visible() -> list[str]:
    """Values of CUDA_VISIBLE_DEVICES, each of which selects one GPU that this process sees."""
    present = count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(number) for number in range(present)])[:present]
