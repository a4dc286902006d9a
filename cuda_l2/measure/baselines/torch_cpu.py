"""torch on the CPU on a matrix product: as it stands, and on operands widened to fp32, where CPUs are faster."""

from collections.abc import Collection
from typing import Any

from cuda_l2.measure.baselines._base import Function, TorchProduct
from cuda_l2.records import Gemm, Layout, Task

FP16_EXTENSIONS = ("avx512_fp16", "asimdhp")
MOST_SLOW_FLOPS = 1 << 32
"""Without arithmetic in fp16, where B is row-major, torch computes 1024^3 (2^31 operations) in 2 s, 2048^3 in 60."""
MOST_TRIED_FLOPS = 1 << 28
"""And one of 512^3 in 0.2 s, a hundred times as long as on widened operands: a search tries no larger one."""


class Preallocated(TorchProduct):
    """torch.mm on widened operands, in buffers that are allocated beforehand."""

    def usually_strongest(self, task: Task) -> bool:
        return True

    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415 - in the process that launches it

        a32, c32 = torch.empty(task.m, task.k), torch.empty(task.m, task.n)
        b32 = torch.empty(task.k, task.n) if task.layout is Layout.NN else torch.empty(task.n, task.k).t()

        def launch(a: Any, b: Any, c: Any) -> None:
            a32.copy_(a)
            b32.copy_(b)
            torch.mm(a32, b32, out=c32)
            c.copy_(c32)

        return launch


class Half(TorchProduct):
    """torch.matmul, 16-bit elements in and out."""

    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415

        return lambda a, b, c: torch.matmul(a, b, out=c)

    def slow(self, task: Gemm, extensions: Collection[str]) -> bool:
        row_major = task.layout is Layout.NN and task.n > 1
        return task.dtype == "float16" and row_major and not any(name in extensions for name in FP16_EXTENSIONS)


class Widened(TorchProduct):
    """torch.matmul on widened operands, one expression, conversions counted."""

    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415

        return lambda a, b, c: c.copy_(torch.matmul(a.float(), b.float()))


BASELINES = (Preallocated("torch widened, preallocated", 10), Half("torch fp16", 20), Widened("torch widened", 30))
