"""torch.matmul on the GPU: with the precision switches of the product's class, and as torch comes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines._base import LibraryProduct
from cuda_l2.measure.cublas import Launch
from cuda_l2.records import Accumulate, Gemm, Task

if TYPE_CHECKING:
    from cuda_l2.measure.libraries import Libraries


@dataclass(frozen=True)
class TorchMatmul(LibraryProduct):
    default: bool = False
    """Whether torch's own switches stay."""

    def serves(self, task: Task) -> bool:
        # the class of fp16 sums is compared under its own switches alone
        return super().serves(task) and not (self.default and getattr(task, "accumulate", None) is Accumulate.FP16)

    def launcher(self, libraries: "Libraries", gemm: Gemm) -> Launch:
        from cuda_l2.measure import cuda_torch  # noqa: PLC0415 - loads torch

        return cuda_torch.torch_matmul(gemm, default=self.default)

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        from cuda_l2.measure import cuda_torch  # noqa: PLC0415

        return cuda_torch.facts(gemm, default=self.default)


KIND = "torch.matmul"
BASELINES = (TorchMatmul(KIND, 10), TorchMatmul(f"{KIND}, default switches", 11, default=True))
