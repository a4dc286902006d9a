"""The precision contract in machine code: no tensor instruction sums or multiplies in less than the class allows.

Inputs of one check cannot prove what a kernel does on others; its instructions can. fp32 class: tensor-core products
of operands of the task's type with fp32 accumulators (or fp64 ones) only. fp16 class: fp16 accumulators too. Never
tf32, fp8 or integer operands, nor bf16 in an fp16 task or fp16 in a bf16 task. Names as nvdisasm prints them:
HMMA.16816.F32, HGMMA.64x128x16.F32, HMMA.16816.F32.BF16. UTCHMMA takes fp16 and bf16 under one name.
"""

import re

from cuda_l2.records import SHORT_DTYPES, Accumulate, Gemm, VerdictStatus
from cuda_l2.tasks.products import ProductCases
from cuda_l2.verify._base import CheckFailed, ProductCheck, Session

_OTHER_OPERANDS = re.compile(r"TF32|E4M3|E5M2|E2M1|^[IBQO][GM]*MMA|^QGMMA|^UTC[QIO]")
_OTHER_TYPE = {"float16": re.compile(r"BF16"), "bfloat16": re.compile(r"^HG?MMA\b(?!.*\.BF16)")}
_FP16_SUM = re.compile(r"^(HMMA|HGMMA|UTCHMMA)\b.*\.F16\b")


class Instructions(ProductCheck):
    name = "instructions"
    order = 5
    device = "cuda"

    def run_on(self, session: Session, cases: ProductCases) -> None:
        gemm = cases.task
        for kernel in session.build.kernels:
            for opcode in kernel.tensor_instructions:
                allowed = _allowed_instead(opcode, gemm)
                if allowed:
                    reason = f"{kernel.name} uses {opcode}; the {gemm.accumulate} class allows {allowed} only"
                    raise CheckFailed(VerdictStatus.IMPRECISE, reason)


def _allowed_instead(opcode: str, gemm: Gemm) -> str:
    """The operands and sums that a task allows, in words, where the instruction has others; empty where it has not."""
    fp32 = gemm.accumulate is Accumulate.FP32
    refused = _OTHER_OPERANDS.search(opcode) or _OTHER_TYPE[gemm.dtype].search(opcode)
    if not refused and not (fp32 and _FP16_SUM.match(opcode)):
        return ""
    return f"{SHORT_DTYPES[gemm.dtype]} operands" + (" and fp32 sums" if fp32 else "")


CHECK = Instructions()
