"""cuBLASLt with the first algorithm that its heuristic returns (paper listing 7)."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines._base import LibraryProduct
from cuda_l2.measure.cublas import Launch
from cuda_l2.records import Gemm, Layout

if TYPE_CHECKING:
    from cuda_l2.measure.cublas import Algorithm
    from cuda_l2.measure.libraries import Libraries


class Heuristic(LibraryProduct):
    def ready(self, libraries: "Libraries", gemm: Gemm) -> bool:
        return bool(libraries.product(gemm, self.b_layout(gemm)).algorithms)

    def algorithm(self, libraries: "Libraries", gemm: Gemm) -> "Algorithm":
        """The one that is launched; RuntimeError where cuBLASLt does not compute the product."""
        algorithms = libraries.product(gemm, self.b_layout(gemm)).algorithms
        if not algorithms:
            raise RuntimeError(f"cuBLASLt does not compute {gemm} with B {self.layout}")
        return algorithms[0]

    def launcher(self, libraries: "Libraries", gemm: Gemm) -> Launch:
        gemm = self.product(gemm)
        return libraries.product(gemm, self.b_layout(gemm)).launcher(self.algorithm(libraries, gemm))

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        gemm = self.product(gemm)
        return libraries.facts(gemm) | asdict(self.algorithm(libraries, gemm))

    def product(self, gemm: Gemm) -> Gemm:
        """What the library is asked for."""
        return gemm


KIND = "cuBLASLt-heuristic"
BASELINES = tuple(Heuristic(KIND, 30 + number, layout=layout) for number, layout in enumerate(Layout))
