"""cuBLASLt with the fastest configuration that a search beyond its heuristic's list finds.

It is timed only where it is asked for: the search takes seconds a shape and layout.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines.cublaslt_heuristic import Heuristic
from cuda_l2.records import Gemm, Layout

if TYPE_CHECKING:
    from cuda_l2.measure.brute import Searched
    from cuda_l2.measure.cublas import Algorithm
    from cuda_l2.measure.libraries import Libraries


class Brute(Heuristic):
    def ready(self, libraries: "Libraries", gemm: Gemm) -> bool:
        return libraries.searched(gemm, self.b_layout(gemm)) is not None

    def algorithm(self, libraries: "Libraries", gemm: Gemm) -> "Algorithm":
        """Needs `Libraries.search` before."""
        return self._found(libraries, gemm).algorithm

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        found = {name: value for name, value in asdict(self._found(libraries, gemm)).items() if name != "algorithm"}
        return super().facts(libraries, gemm) | found

    def _found(self, libraries: "Libraries", gemm: Gemm) -> "Searched":
        found = libraries.searched(gemm, self.b_layout(gemm))
        if not found:
            raise RuntimeError(f"no configuration of cuBLASLt was found for {gemm} with B {self.layout}")
        return found


KIND = "cuBLASLt-brute"
BASELINES = tuple(
    Brute(KIND, 44 + number, layout=layout, tuned=True, searched=True) for number, layout in enumerate(Layout)
)
