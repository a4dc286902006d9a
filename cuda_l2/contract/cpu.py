"""The contract of a CPU candidate.

    /* cuda-l2
    target = "cpu"
    entry = "gemm"
    threads = 2
    workspace = "threads * 4096 + 4 * m * n"
    dtype = "float16"
    */

`entry` names the one exported function, of the signature written in docs/contract.md. `threads` is
how many the runtime's parallel-for offers. `workspace` is a number of bytes: an expression over
m, n, k or a task's own sizes, and threads. `dtype` is the element type of a matrix product, float16 or bfloat16.
"""

import re
from dataclasses import dataclass
from typing import Any

from cuda_l2.contract import buffers
from cuda_l2.contract.buffers import GEMM, Interface
from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.records import Task


@dataclass(frozen=True, slots=True)
class CpuContract:
    """What the runtime must know to call a CPU candidate."""

    entry: str
    threads: int
    workspace: str
    interface: Interface = GEMM

    def workspace_bytes(self, task: Task) -> int:
        """Bytes for one task; ContractError also where its tensors are not the ones declared."""
        return evaluate(self.workspace, {**self.interface.bind(task), "threads": self.threads})


def parse(fields: dict[str, Any]) -> CpuContract:
    """The contract from its fields, target taken off; ContractError where they cannot be."""
    interface, fields = buffers.take(fields)
    unknown = set(fields) - {"entry", "threads", "workspace"}
    if unknown:
        raise ContractError(f"the contract has unknown fields: {', '.join(sorted(unknown))}")
    entry, threads, workspace = fields.get("entry", "gemm"), fields.get("threads", 1), fields.get("workspace", 0)
    if not isinstance(entry, str) or not re.fullmatch(r"[A-Za-z_]\w{0,62}", entry):
        raise ContractError("entry must be the name of a C function")
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= 1024:
        raise ContractError("threads must be a whole number from 1 to 1024")
    if isinstance(workspace, bool) or not isinstance(workspace, int | str) or workspace == "":
        raise ContractError("workspace must be a number of bytes or an expression in quotes")
    evaluate(str(workspace), {**dict.fromkeys(interface.sizes, 1), "threads": threads})
    return CpuContract(entry, threads, str(workspace), interface)
