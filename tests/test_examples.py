"""The examples of docs/contract.md do what it says of them."""

from pathlib import Path

import pytest

from cuda_l2 import contract
from cuda_l2.build.cuda import build_all
from cuda_l2.evaluator import Evaluator
from cuda_l2.records import BuildStatus, Candidate, Gemm
from cuda_l2.targets.cuda import compile_only

EXAMPLES = Path(__file__).parents[1] / "examples"
INSTRUCTION = {"mma_sync": "HMMA.16816.F32", "wgmma_tma": "HGMMA.64x64x16.F32"}


@pytest.mark.parametrize("name", INSTRUCTION)
def test_an_example_compiles_to_what_it_shows(name) -> None:
    candidate = Candidate((EXAMPLES / f"{name}.cu").read_text())
    (build,) = build_all([candidate], compile_only("sm_90a"))
    assert build.status is BuildStatus.BUILT, build.reason
    (kernel,) = build.kernels
    assert kernel.tensor_instructions == (INSTRUCTION[name],)
    assert kernel.spill_bytes == 0


def test_every_example_has_a_plan_and_is_named_in_the_specification() -> None:
    specification = (EXAMPLES.parent / "docs" / "contract.md").read_text()
    files = sorted(EXAMPLES.glob("*.cu"))
    assert len(files) == 3
    for file in files:
        assert file.name in specification
        plan = contract.parse_cuda(file.read_text()).plan(200, 104, 72, 132)
        assert plan.launches[0].grid[0] * plan.launches[0].grid[1] > 1


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("mma_sync", "100x333x77"), ("wgmma_tma", "200x104x72:tn"), ("cute_tma", "200x104x72:tn")],
)
def test_an_example_is_right(gpu, name, shape) -> None:
    with Evaluator(Gemm.parse(shape), gpu) as evaluator:
        (trial,) = evaluator.evaluate([Candidate((EXAMPLES / f"{name}.cu").read_text())])
    assert trial.status == "measured", trial.reason
