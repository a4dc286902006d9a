"""verify/instructions.py: which tensor instructions a task of each type and class allows."""

from types import SimpleNamespace
from typing import Any

import pytest

from cuda_l2.records import Gemm
from cuda_l2.verify._base import CheckFailed
from cuda_l2.verify.instructions import CHECK

HALF = ("HMMA.16816.F32", "HGMMA.64x128x16.F32")
HALF_SUMS = ("HMMA.16816.F16", "HGMMA.64x128x16.F16")
BRAIN = ("HMMA.16816.F32.BF16", "HGMMA.64x128x16.F32.BF16")
EVERY = ("DMMA.8x8x4", "UTCHMMA")
NEVER = ("HMMA.1688.F32.TF32", "HGMMA.64x8x8.F32.TF32", "QGMMA.64x8x32.F32.E4M3.E4M3", "IMMA.16832.S8.S8", "UTCQMMA")


@pytest.mark.parametrize(
    ("task", "allowed"),
    [("64x64x64", HALF), ("64x64x64:fp16", HALF + HALF_SUMS), ("64x64x64:bf16", BRAIN)],
)
def test_operands_are_of_the_tasks_type_and_sums_of_its_class(task: str, allowed: tuple[str, ...]) -> None:
    for opcode in (*HALF, *HALF_SUMS, *BRAIN, *EVERY, *NEVER):
        kernels = [SimpleNamespace(name="gemm", tensor_instructions=(opcode,))]
        session: Any = SimpleNamespace(build=SimpleNamespace(kernels=kernels))
        cases: Any = SimpleNamespace(task=Gemm.parse(task))
        if opcode in allowed + EVERY:
            CHECK.run_on(session, cases)
            continue
        with pytest.raises(CheckFailed, match=f"gemm uses {opcode}; the fp(16|32) class allows .* only"):
            CHECK.run_on(session, cases)
