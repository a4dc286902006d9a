"""cuBLAS with its own choice of algorithm (paper listing 6). NN reads B row-major, TN column-major."""

from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines._base import LibraryProduct
from cuda_l2.measure.cublas import Launch
from cuda_l2.records import Gemm, Layout

if TYPE_CHECKING:
    from cuda_l2.measure.libraries import Libraries


class Blas(LibraryProduct):
    def launcher(self, libraries: "Libraries", gemm: Gemm) -> Launch:
        return libraries.blas.gemm_ex(gemm, self.b_layout(gemm))

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        return libraries.facts(gemm)


KIND = "cuBLAS"
BASELINES = tuple(Blas(KIND, 20 + number, layout=layout) for number, layout in enumerate(Layout))
