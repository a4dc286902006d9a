"""torch.matmul as it stands on the CPU, fp16 in and out."""

from cuda_l2.measure.baselines._base import Function, TorchProduct
from cuda_l2.records import Gemm


class Half(TorchProduct):
    def bind(self, task: Gemm) -> Function:
        import torch  # noqa: PLC0415 - in the process that launches it

        return lambda a, b, c: torch.matmul(a, b, out=c)


BASELINES = (Half("torch fp16", 20),)
