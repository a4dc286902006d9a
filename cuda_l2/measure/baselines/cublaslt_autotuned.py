"""cuBLASLt with the fastest of its algorithms (paper listing 8): the baseline that a library of kernels must beat.

In the fp16 class also the fp32 class's choice, which is sometimes the faster one.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cuda_l2.measure.baselines.cublaslt_heuristic import Heuristic
from cuda_l2.records import Accumulate, Gemm, Layout, Task

if TYPE_CHECKING:
    from cuda_l2.measure.cublas import Algorithm
    from cuda_l2.measure.libraries import Libraries


class AutoTuned(Heuristic):
    def serves(self, task: Task) -> bool:
        other_class = getattr(task, "accumulate", None) is not self.accumulate
        return super().serves(task) and (self.accumulate is None or other_class)

    def usually_strongest(self, task: Task) -> bool:
        return self.accumulate is None and self.layout is getattr(task, "layout", None)

    def product(self, gemm: Gemm) -> Gemm:
        return replace(gemm, accumulate=self.accumulate or gemm.accumulate)

    def algorithm(self, libraries: "Libraries", gemm: Gemm) -> "Algorithm":
        """Needs `Libraries.tune` before."""
        found = libraries.tuned(gemm).of(self.b_layout(gemm))
        if not found:
            raise RuntimeError(f"cuBLASLt does not compute {gemm} with B {self.layout}")
        return found.algorithms[found.chosen]

    def facts(self, libraries: "Libraries", gemm: Gemm) -> dict[str, Any]:
        tuned = libraries.tuned(self.product(gemm))
        found = tuned.of(self.b_layout(gemm))
        assert found is not None
        return super().facts(libraries, gemm) | {
            "method": tuned.method,
            "returned": len(found.algorithms),
            "returned_index": found.chosen,
            "regret": found.regret,
            "tuned": tuned.created,
        }


KIND = "cuBLASLt-AutoTuning"
BASELINES = (
    *(AutoTuned(KIND, 40 + number, layout=layout, tuned=True) for number, layout in enumerate(Layout)),
    *(
        AutoTuned(f"{KIND}-32F", 42 + number, layout=layout, accumulate=Accumulate.FP32, tuned=True)
        for number, layout in enumerate(Layout)
    ),
)
