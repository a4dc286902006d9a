"""A rig: one machine's build, verify and measure, set up once for many shapes."""

from cuda_l2.errors import UserError
from cuda_l2.rigs._base import ADAPTIVE, Bench, Rig


def chosen(name: str) -> str:
    """A target's name, where it is auto that of the GPU if there is one."""
    if name == "auto":
        return "cuda" if gpu_present() else "cpu"
    return name


def open_rig(name: str = "auto") -> Rig:
    """The rig of a target: cpu, cuda, or auto for the GPU where there is one. UserError where it cannot be used."""
    name = chosen(name)
    if name == "cuda":
        from cuda_l2.targets import cuda  # noqa: PLC0415

        cuda.detect()  # says what is missing, before anything that needs it is imported
        from cuda_l2.rigs.cuda import CudaRig  # noqa: PLC0415 - needs packages that CPU users need not have

        return CudaRig()
    if name == "cpu":
        from cuda_l2.rigs.cpu import CpuRig  # noqa: PLC0415 - torch loads only where it is needed

        return CpuRig()
    raise UserError(f"there is no target {name!r}; choose auto, cpu or cuda")


def gpu_present() -> bool:
    """Whether there is an NVIDIA GPU at all; whether it can be used is `targets.cuda.missing`'s to say."""
    from pathlib import Path  # noqa: PLC0415

    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


__all__ = ["ADAPTIVE", "Bench", "Rig", "chosen", "gpu_present", "open_rig"]
