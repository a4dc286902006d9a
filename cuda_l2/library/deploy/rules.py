"""Kernels that a rule names, by the shape, the GPU's model and the pack alone: nothing that was tuned changes them.

Deterministic: the tables that this package ships name a kernel for each of their shapes; torch serves all others.
Batch-invariant: one kernel with one schedule for every M, so that the bits of a row depend neither on M nor on the
row's place. Families, and whether their kernels can be such:

  sm90_persistent  yes. A tile sums all of K in steps of 64, in order, whatever M is. M is an argument, not compiled.
  sm90_wave        no. It splits K by its schedule alone, but its grid ends at 264 tiles, and so its M.
  sm80_gemm        no. It serves few K beyond 512, and with split K it is two launches.
"""

import functools
import math
from dataclasses import replace

from cuda_l2 import contract
from cuda_l2.library.deploy.pack import Pack, family_schedules
from cuda_l2.library.deploy.recipes import FEW_ROWS, KERNELS, candidate, evidence
from cuda_l2.library.table import COLD, PLAIN, PROGRAMMATIC, Row, family_of
from cuda_l2.machine.cuda.target import CudaTarget
from cuda_l2.records import Candidate, Gemm

EDGES = (PROGRAMMATIC, PLAIN, COLD)
"""Where the tables have a shape several times the last of these counts: weights come from memory."""
INVARIANT_FAMILY = "sm90_persistent"
INVARIANT_ROWS = (1, 16, 64, 256, 1024, 4096)
"""M for which a batch-invariant schedule is chosen: the least product of modelled times wins."""


def deterministic(gemm: Gemm, target: CudaTarget, found: Pack) -> Candidate | None:
    """The shipped tables' kernel for a shape, in either type; None where these, the pack or the GPU have none.

    Kernels whose blocks wait for one another are left out: two at once would wait for ever.
    """
    row = _table().get(replace(gemm, dtype="float16"))
    made = row and candidate(family_of(row.family), dict(row.schedule), gemm, target)
    if not made or contract.kernel_id(made.source) not in found.kernels:
        return None
    plan = contract.parse_cuda(made.source).plan(gemm, target.sms)
    return None if any(launch.coresident for launch in plan.launches) else made


def invariant(gemm: Gemm, target: CudaTarget, found: Pack) -> Candidate | None:
    """The kernel, with its contract, for a shape's N, K, layout and type and every M; None where the pack has none."""
    return _invariant(replace(gemm, m=1), target, found)


@functools.cache
def _invariant(gemm: Gemm, target: CudaTarget, found: Pack) -> Candidate | None:
    family = family_of(INVARIANT_FAMILY)

    def cost(compiled: dict[str, int]) -> tuple[float, list[tuple[str, int]]]:
        """Cost of a schedule; the schedule itself decides between equals."""
        times = [family.estimate_us(replace(gemm, m=m), target, compiled) for m in INVARIANT_ROWS]
        return sum(map(math.log, times)), sorted(compiled.items())

    alone = [  # the model ignores clusters
        compiled
        for name, compiled in family_schedules(found, gemm)
        if name == INVARIANT_FAMILY and compiled["CM"] * compiled["CN"] == 1
    ]
    for compiled in sorted(alone, key=cost):
        rows = compiled["BN"] if compiled["SWAP"] else compiled["BM"]
        many = replace(gemm, m=rows * target.sms)  # a family writes a schedule for sizes that keep a GPU busy
        launch = family.launches(many, target, compiled)[0]
        made = candidate(family, {**compiled, **launch, "EDGE": 1}, many, target)
        if made and contract.kernel_id(made.source) in found.kernels:
            return made
    return None


@functools.cache
def _table() -> dict[Gemm, Row]:
    # what was not proved may serve only where tuning compares its product with torch's
    rows = [row for path in (KERNELS, FEW_ROWS) for row, (_, proof) in evidence(path).items() if proof]
    rows.sort(key=lambda row: EDGES.index(row.edge))
    return {replace(row.gemm, dtype="float16"): row for row in rows}
