"""The launch contract of a candidate: plain data, as TOML in the source's leading comment.

docs/contract.md specifies it, docs/tasks.md what it says for tasks other than matrix products.
"""

import re
import tomllib
from typing import Any

from cuda_l2.contract import cpu, cuda_reader
from cuda_l2.contract.buffers import GEMM, Interface
from cuda_l2.contract.cpu import CpuContract
from cuda_l2.contract.cuda import CudaContract
from cuda_l2.contract.expressions import ContractError, evaluate

_COMMENT = re.compile(r"\s*/\*\s*cuda-l2\b((?:[^*]|\*(?!/)){0,16000})\*/")


def parse(source: str) -> CpuContract | CudaContract:
    """Read the contract from the leading comment of a candidate's source; ContractError where there is none."""
    fields = _fields(source)
    match fields.pop("target", None):
        case "cpu":
            return cpu.parse(fields)
        case "cuda":
            return cuda_reader.parse(fields)
    raise ContractError('the contract must say target = "cpu" or target = "cuda"')


def parse_cpu(source: str) -> CpuContract:
    """The contract of a CPU candidate for matrix products."""
    contract = parse(source)
    if not isinstance(contract, CpuContract):
        raise ContractError('this machine\'s candidates must say target = "cpu"')
    _require_gemm(contract)
    return contract


def parse_cuda(source: str) -> CudaContract:
    """The contract of a CUDA candidate for matrix products."""
    contract = parse(source)
    if not isinstance(contract, CudaContract):
        raise ContractError('this machine\'s candidates must say target = "cuda"')
    _require_gemm(contract)
    return contract


def _require_gemm(contract: CpuContract | CudaContract) -> None:
    if contract.interface != GEMM:
        raise ContractError(
            f"the contract declares the buffers {', '.join(contract.interface.names)};"
            " a matrix product's are a, b and c, declared by leaving [[buffer]] out"
        )


def _fields(source: str) -> dict[str, Any]:
    match = _COMMENT.match(source)
    if not match:
        raise ContractError("the source does not begin with a /* cuda-l2 ... */ comment that states its contract")
    try:
        return tomllib.loads(match.group(1))
    except (ValueError, RecursionError) as error:  # tomllib's own error is a ValueError; long numbers raise plain ones
        raise ContractError(f"the contract is not TOML: {error}") from None


__all__ = ["ContractError", "CpuContract", "CudaContract", "Interface", "evaluate", "parse", "parse_cpu", "parse_cuda"]
