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

from dataclasses import dataclass

from cuda_l2.contract import buffers
from cuda_l2.contract.buffers import GEMM, Interface
from cuda_l2.contract.expressions import evaluate
from cuda_l2.contract.fields import Fields
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


def parse(reader: Fields) -> CpuContract:
    """The contract from its fields, target taken off; ContractError where they cannot be."""
    interface = buffers.take(reader)
    entry, threads = reader.name("entry", "gemm"), reader.number("threads", 1, 1, 1024)
    workspace = reader.expression("workspace", 0)
    reader.finish()
    evaluate(workspace, {**dict.fromkeys(interface.sizes, 1), "threads": threads})
    return CpuContract(entry, threads, workspace, interface)
