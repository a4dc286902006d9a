"""The precision contract in machine code: no tensor instruction sums or multiplies in less than the class allows.

Inputs of one check cannot prove what a kernel does on others; its instructions can. fp32 class: tensor-core products
of fp16 operands with fp32 accumulators (or fp64 ones) only. fp16 class: fp16 accumulators too. Never bf16, tf32, fp8 or
integer operands. Names as nvdisasm prints them: HMMA.16816.F32, HGMMA.64x128x16.F32.
"""

import re

from cuda_l2.records import Accumulate, Task, VerdictStatus
from cuda_l2.tasks.products import ProductCases
from cuda_l2.verify._base import CheckFailed, ProductCheck, Session

_OTHER_OPERANDS = re.compile(r"BF16|TF32|E4M3|E5M2|E2M1|^[IBQO][GM]*MMA|^QGMMA|^UTC[QIO]")
_FP16_SUM = re.compile(r"^(HMMA|HGMMA|UTCHMMA)\b.*\.F16\b")


class Instructions(ProductCheck):
    name = "instructions"
    order = 5

    def applies_to(self, task: Task, device: str) -> bool:
        return task.product and device == "cuda"

    def run_on(self, session: Session, cases: ProductCases) -> None:
        accumulate = cases.task.accumulate
        fp32 = accumulate is Accumulate.FP32
        for kernel in session.build.kernels:
            for opcode in kernel.tensor_instructions:
                if _OTHER_OPERANDS.search(opcode) or (fp32 and _FP16_SUM.match(opcode)):
                    allowed = "fp16 operands and fp32 sums" if fp32 else "fp16 operands"
                    reason = f"{kernel.name} uses {opcode}; the {accumulate} class allows {allowed} only"
                    raise CheckFailed(VerdictStatus.IMPRECISE, reason)


CHECK = Instructions()
