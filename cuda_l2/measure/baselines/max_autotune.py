"""torch.compile's max-autotune of a matrix product on the GPU: seconds of tuning a shape."""

from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines._base import LibraryProduct
from cuda_l2.measure.cublas import Launch
from cuda_l2.records import Gemm

if TYPE_CHECKING:
    from cuda_l2.measure.libraries import Libraries


class MaxAutotune(LibraryProduct):
    def ready(self, libraries: "Libraries", gemm: Gemm) -> bool:
        from cuda_l2.measure import cuda_torch  # noqa: PLC0415 - loads torch

        return cuda_torch.can_compile()

    def launcher(self, libraries: "Libraries", gemm: Gemm) -> Launch:
        """Compiled on first use."""
        return libraries.compiled(gemm).launch

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        from cuda_l2.measure import cuda_torch  # noqa: PLC0415

        return cuda_torch.facts(gemm) | {"copies_result": libraries.compiled(gemm).copies}


KIND = "torch.compile max-autotune"
BASELINES = (MaxAutotune(KIND, 50, compiled=True),)
