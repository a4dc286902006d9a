"""cuBLASLt's algorithms for a shape: candidates beside the pack's kernels, launched by the op without torch.

torch takes the first that the library's heuristic proposes; here all of them are timed. An algorithm is kept as a
schedule: its 64 bytes as eight numbers, its workspace, and the version of the library, for which alone it is valid.
"""

import functools
import struct
from collections.abc import Mapping

from cuda_l2.library.deploy.entries import TUNED, packed_algorithm
from cuda_l2.library.deploy.native import native
from cuda_l2.measure import cublas
from cuda_l2.measure.cublas import ROUNDED, Algorithm, Cublas, CublasError, LtProduct
from cuda_l2.records import Candidate, Gemm
from cuda_l2.system.errors import UserError

FAMILY = "cublaslt"
"""The family, and the kernel's id, of a choice that is an algorithm."""
WORKSPACE_BYTES = 256 << 20
"""Most that an algorithm may ask for, as in the other comparisons with cuBLASLt."""
ALIGNMENT = 16
"""Bytes to which the op asks that addresses are aligned."""


def candidates(gemm: Gemm, device: int, *, rounded: bool) -> list[Candidate]:
    """What the heuristic proposes for a shape on the current device, its own choice first.

    None where torch brings no cuBLASLt, or the library computes no such product or fails. rounded: also those that
    round parts of sums, which may not serve.
    """
    try:
        product = LtProduct(_blas(device), gemm, gemm.layout, ALIGNMENT)
        found = product.algorithms
        product.close()
    except (UserError, CublasError):
        return []
    found = tuple(each for each in found if rounded or each.reduction not in ROUNDED)
    return [Candidate("", FAMILY, _schedule(each), FAMILY) for each in found]


def put(schedule: Mapping[str, int], gemm: Gemm, device: int, rule: int = TUNED) -> str:
    """Serve a shape by an algorithm. Why it cannot be, or empty."""
    if schedule.get("VERSION") != cublas.lt_version():
        return "it was tuned with another version of cuBLASLt: tune it again"
    algorithm = struct.pack("<8Q", *(schedule[f"W{number}"] for number in range(8)))
    plan = packed_algorithm(gemm, device, algorithm, schedule["WORKSPACE"], cublas.file_name("cublasLt"), rule)
    return native().put(plan, "0", b"")


def _schedule(algorithm: Algorithm) -> tuple[tuple[str, int], ...]:
    words = struct.unpack("<8Q", bytes.fromhex(algorithm.data))
    named = {f"W{number}": word for number, word in enumerate(words)}
    return tuple((named | {"WORKSPACE": algorithm.workspace_bytes, "VERSION": cublas.lt_version()}).items())


@functools.cache
def _blas(device: int) -> Cublas:
    """For the heuristic alone: it launches nothing, so it has no workspace."""
    return Cublas(0, WORKSPACE_BYTES)
