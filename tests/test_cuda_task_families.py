"""A kernel of every GPU family of tasks goes through memory, checks and rounds, with this machine in place of a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
from cuda_on_cpu import Compiled
from fake_gpu import fake_gpu  # noqa: F401 - a fixture

from cuda_l2.families._base import Family, Schedule, all_families
from cuda_l2.families._gpu_task import GpuTaskFamily
from cuda_l2.machine.cuda.target import compile_only
from cuda_l2.measure.protocols import CUDA_PROTOCOLS
from cuda_l2.records import Build, BuildStatus, Operation, VerdictStatus
from cuda_l2.rigs.cuda import CudaBench
from cuda_l2.tasks._base import SMALLER, definition

HOPPER = compile_only("sm_90a")
FAMILIES = [family for family in all_families() if isinstance(family, GpuTaskFamily)]


def small(name: str) -> Iterator[Operation]:
    """A task at sizes that loads of vectors divide and at the CPU's, in each of its types."""
    known = definition(name)
    for dtype in known.dtypes:
        yield known.task(known.other_sizes(np.random.default_rng(1), SMALLER, multiple=32), dtype)
        yield known.task(dtype=dtype)


@pytest.mark.corpus(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_familys_default_passes_every_check_and_is_timed(
    family: Family,
    fake_gpu: Any,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    assert isinstance(family, GpuTaskFamily)
    task = next(task for name in family.table for task in small(name) if family.serves(task, HOPPER))
    candidate = family.render(Schedule(family, task, HOPPER, family.default(task, HOPPER)))
    compiled = Compiled(candidate.source, tmp_path)
    rig = fake_gpu({"kernel": lambda addresses, plan: compiled.launch(plan, addresses)})
    (tmp_path / "cubin").write_text("kernel")
    build = Build(candidate.id, BuildStatus.BUILT, artifact=str(tmp_path / "cubin"))
    bench = CudaBench(rig, task, 1)
    verdict = bench.verify(candidate, build)
    assert verdict.status is VerdictStatus.CORRECT, (verdict.check, verdict.reason)
    at_own_sizes = [name for name in verdict.passed if name != "other shapes"]  # which some kernels are compiled for
    assert at_own_sizes == ["five seeds", "other values", "special values", "hygiene", "state", "concurrency"]
    timing = bench.time(candidate, build, CUDA_PROTOCOLS["search"])
    assert timing.speedup, timing.reason
