"""The launch contract of a candidate: plain data, as TOML in the source's leading comment.

docs/contract.md specifies it, docs/tasks.md what it says for tasks other than matrix products.
"""

import functools
import hashlib
import re
import tomllib
from typing import Any

from cuda_l2.contract import cpu, cuda_reader
from cuda_l2.contract.buffers import Interface
from cuda_l2.contract.cpu import CpuContract
from cuda_l2.contract.cuda import CudaContract, Plan
from cuda_l2.contract.expressions import ContractError, evaluate
from cuda_l2.contract.fields import Fields
from cuda_l2.records import Task

__all__ = ["ContractError", "CpuContract", "CudaContract", "Interface", "evaluate"]  # of this folder's modules

_COMMENT = re.compile(r"\s*/\*\s*cuda-l2\b((?:[^*]|\*(?!/)){0,16000})\*/")


def parse(source: str) -> CpuContract | CudaContract:
    """Read the contract from the leading comment of a candidate's source; ContractError where there is none."""
    reader = Fields(_stated(source))
    match reader.pop("target"):
        case "cpu":
            return cpu.parse(reader)
        case "cuda":
            return cuda_reader.parse(reader)
    raise ContractError('the contract must say target = "cpu" or target = "cuda"')


def target_of(source: str) -> str:
    """The target that a source's contract names, cpu or cuda; empty where it names neither."""
    try:
        said = _stated(source).get("target")
    except ContractError:
        return ""
    return said if said in ("cpu", "cuda") else ""


def declares_constant(source: str) -> bool:
    """Whether a source's contract declares inputs constant; false where it has none."""
    return states_contract(source) and "constant" in _stated(source)


def states_contract(source: str) -> bool:
    """Whether a source begins with the comment that a contract stands in, whatever that says."""
    return _COMMENT.match(source) is not None


def parse_cpu(source: str) -> CpuContract:
    """The contract of a CPU candidate; ContractError where it is none."""
    contract = parse(source)
    if not isinstance(contract, CpuContract):
        raise ContractError('this machine\'s candidates must say target = "cpu"')
    return contract


def parse_cuda(source: str) -> CudaContract:
    """The contract of a CUDA candidate; ContractError where it is none."""
    contract = parse(source)
    if not isinstance(contract, CudaContract):
        raise ContractError('this machine\'s candidates must say target = "cuda"')
    return contract


@functools.lru_cache(maxsize=64)
def plan_cuda(source: str, task: Task, sms: int) -> Plan:
    """What is launched for a task on a device with this number of multiprocessors; ContractError where refused."""
    return parse_cuda(source).plan(task, sms)


def code(source: str) -> str:
    """What is compiled: the text after the contract; ContractError where there is none."""
    return source[_match(source).end() :]


def kernel_id(source: str, terms: CudaContract | None = None) -> str:
    """Hash of what is compiled, and for which architecture, 16 hex digits: one kernel may serve many contracts.

    terms: the source's contract, where it is read already.
    """
    arch = (terms or parse_cuda(source)).arch
    return hashlib.sha256(f"{arch}\0{code(source)}".encode(errors="surrogatepass")).hexdigest()[:16]


def _stated(source: str) -> dict[str, Any]:
    """What the leading comment says; ContractError where there is none, or it is no TOML."""
    text = _match(source).group(1)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError; long numbers raise plain ones
        raise ContractError(f"the contract is not TOML: {error}") from None


def _match(source: str) -> re.Match[str]:
    match = _COMMENT.match(source)
    if not match:
        raise ContractError("the source does not begin with a /* cuda-l2 ... */ comment that states its contract")
    return match
