"""What a machine is, and which of this computer's a target's name means."""

from typing import TYPE_CHECKING

from cuda_l2.machine.gpus import gpu_present as gpu_present
from cuda_l2.system.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.machine._base import Target


TARGETS = ("auto", "cpu", "cuda")


def chosen(name: str) -> str:
    """A target's name, where it is auto that of the GPU if there is one. UserError where there is no such target."""
    if name not in TARGETS:
        raise UserError(f"there is no target {name!r}; choose from {', '.join(TARGETS)}")
    if name == "auto":
        return "cuda" if gpu_present() else "cpu"
    return name


def detect(name: str = "auto") -> "Target":
    """This machine as a target: cpu, cuda, or auto for the GPU where there is one. UserError where it cannot be."""
    name = chosen(name)
    if name == "cuda":
        from cuda_l2.machine.cuda import target as cuda  # noqa: PLC0415 - loads torch

        return cuda.detect()
    from cuda_l2.machine.cpu import target as cpu  # noqa: PLC0415 - importing the package stays light

    return cpu.detect()
