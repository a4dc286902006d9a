"""The precision contract in machine code: no tensor instruction sums or multiplies in less than the class allows.

Inputs of one check cannot prove what a kernel does on others; its instructions can. fp32 class: tensor-core products
of fp16 operands with fp32 accumulators (or fp64 ones) only. fp16 class: fp16 accumulators too. Never bf16, tf32, fp8 or
integer operands. Names as nvdisasm prints them: HMMA.16816.F32, HGMMA.64x128x16.F32.
"""

import re

from cuda_l2.records import Accumulate, VerdictStatus
from cuda_l2.verify._base import Check, CheckFailed, Session

_OTHER_OPERANDS = re.compile(r"BF16|TF32|E4M3|E5M2|E2M1|^[IBQO][GM]*MMA|^QGMMA|^UTC[QIO]")
_FP16_SUM = re.compile(r"^(HMMA|HGMMA|UTCHMMA)\b.*\.F16\b")


class Instructions(Check):
    name = "instructions"
    order = 5

    def applies(self, session: Session) -> bool:
        return bool(session.build.kernels)

    def run(self, session: Session) -> None:
        fp32 = session.gemm.accumulate is Accumulate.FP32
        for kernel in session.build.kernels:
            for opcode in kernel.tensor_instructions:
                if _OTHER_OPERANDS.search(opcode) or (fp32 and _FP16_SUM.match(opcode)):
                    allowed = "fp16 operands and fp32 sums" if fp32 else "fp16 operands"
                    reason = f"{kernel.name} uses {opcode}; the {session.gemm.accumulate} class allows {allowed} only"
                    raise CheckFailed(VerdictStatus.IMPRECISE, reason)


CHECK = Instructions()
"""The check; found by `all_checks`."""
