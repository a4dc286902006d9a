"""The default kernel of a shape, without a search."""

import torch

from cuda_l2.build import cpu
from cuda_l2.families.cpu_gemm import FAMILY
from cuda_l2.library.kernel import Kernel
from cuda_l2.machine.cpu.target import CpuTarget
from cuda_l2.propose._base import FamilySpace
from cuda_l2.records import Gemm

GEMM = Gemm.parse("70x50x90:tn")


def default_kernel(gemm: Gemm, target: CpuTarget, threads: int = 2) -> Kernel:
    """It runs on this many threads, whatever the machine has."""
    values = list(FAMILY.default(gemm, target))
    values[[choice.name for choice in FAMILY.choices].index("THREADS")] = threads
    candidate = FamilySpace(FAMILY, gemm, target).render(tuple(values), "default")
    return Kernel(gemm, candidate, cpu.build(candidate, target), target.machine)


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of GEMM."""
    return torch.randn(70, 90).half(), torch.randn(50, 90).half().t()
