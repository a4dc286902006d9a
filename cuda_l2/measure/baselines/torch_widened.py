"""torch.matmul on the CPU on operands widened to fp32, one expression, conversions counted."""

from cuda_l2.measure.baselines._base import Function, TorchProduct
from cuda_l2.records import Gemm


class Widened(TorchProduct):
    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415 - in the process that launches it

        return lambda a, b, c: c.copy_(torch.matmul(a.float(), b.float()))


BASELINES = (Widened("torch widened", 30),)
