"""A rig: one machine's build, verify and measure, set up once for many shapes."""

from typing import TYPE_CHECKING

from cuda_l2 import machine
from cuda_l2.measure.tuned import ADAPTIVE
from cuda_l2.rigs._base import Bench, Request, Rig

if TYPE_CHECKING:
    from cuda_l2.build.build_server import BuildServers


def open_rig(name: str = "auto", request: Request = Request(), builders: "BuildServers | None" = None) -> Rig:
    """The rig of a target: cpu, cuda, or auto for the GPU where there is one. UserError where it cannot be used.

    builders: a GPU's, if some are at work already; the rig closes them.
    """
    target = machine.detect(name)  # says what is missing, before anything that needs it is imported
    if target.name == "cuda":
        from cuda_l2.rigs.cuda import CudaRig  # noqa: PLC0415 - needs packages that CPU users need not have

        return CudaRig(request, builders)
    from cuda_l2.rigs.cpu import CpuRig  # noqa: PLC0415 - torch loads only where it is needed

    return CpuRig(request)


__all__ = ["ADAPTIVE", "Bench", "Request", "Rig", "open_rig"]
