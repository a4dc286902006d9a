"""torch on the CPU on a matrix product: as it stands, and on operands widened to fp32, where CPUs are faster."""

from collections.abc import Collection
from typing import Any

from cuda_l2.measure.baselines._base import Function, TorchProduct
from cuda_l2.records import Gemm, Layout, Task

FP16_EXTENSIONS = ("avx512_fp16", "asimdhp")
SLOW_NS, SLOW_TN_NS = 2.0, 0.2
"""Without arithmetic in fp16 a multiply-add takes torch so long where B is row-major, and where it is column-major."""

ONE_THREAD_FLOPS = 2**25
"""Operations (2 M N K) of the largest product that is timed on one thread too: threads wait for one another."""


class Preallocated(TorchProduct):
    """torch.mm on widened operands, in buffers that are allocated beforehand."""

    def serves(self, task: Task) -> bool:
        return super().serves(task) and (not self.threads or task.flops <= ONE_THREAD_FLOPS)

    def usually_strongest(self, task: Task) -> bool:
        return not self.threads

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

    def slow_s(self, task: Gemm, extensions: Collection[str]) -> float:
        if task.dtype != "float16" or any(name in extensions for name in FP16_EXTENSIONS):
            return 0.0
        each_ns = SLOW_NS if task.layout is Layout.NN and task.n > 1 else SLOW_TN_NS
        return task.m * task.n * task.k * each_ns * 1e-9


class Widened(TorchProduct):
    """torch.matmul on widened operands, one expression, conversions counted."""

    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415

        return lambda a, b, c: c.copy_(torch.matmul(a.float(), b.float()))


BASELINES = (
    Preallocated("torch widened, preallocated", 10),
    Half("torch fp16", 20),
    Widened("torch widened", 30),
    Preallocated("torch widened, one thread", 40, threads=1),
)
