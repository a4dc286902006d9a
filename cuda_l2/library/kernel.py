"""A verified CPU kernel as a callable on torch tensors, in this process."""

import ctypes
import functools
import threading
from pathlib import Path

import torch

from cuda_l2 import contract
from cuda_l2.records import Build, Candidate, Gemm, Layout
from cuda_l2.system.native import compiled

POOL = Path(__file__).parents[1] / "machine" / "cpu" / "pool.c"
ALIGN = 64
WORKSPACE_ALIGN = 4096
_LOCK = threading.Lock()
"""The pool serves one kernel at a time."""


class Kernel:
    """Calls a candidate's compiled code: C = A B.

    The code runs in this process with this process's rights: load only what was verified and whose author you
    trust as far as any native library's.
    """

    def __init__(self, gemm: Gemm, candidate: Candidate, build: Build) -> None:
        terms = contract.parse_cpu(candidate.source)
        self.gemm, self.candidate, self.artifact = gemm, candidate, Path(build.artifact)
        self._pool = _pool(terms.threads)
        self._function = getattr(ctypes.CDLL(str(self.artifact)), terms.entry)
        self._function.restype = None
        workspace = terms.task_workspace_bytes(gemm)
        self._workspace = torch.empty(workspace + WORKSPACE_ALIGN, dtype=torch.uint8)
        aligned = -(-self._workspace.data_ptr() // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        sizes = [ctypes.c_int64(size) for size in (gemm.m, gemm.n, gemm.k)]
        self._sizes, self._tail = sizes, [ctypes.c_void_p(aligned), self._pool.pool_parallel_for]

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """C for tensors A (M x K) and B (K x N) of the shape's type; B column-major where the shape says tn.

        ValueError for other tensors.
        """
        gemm = self.gemm
        dtype: torch.dtype = getattr(torch, gemm.dtype)
        _require(a, dtype, (gemm.m, gemm.k), (gemm.k, 1), "a")
        _require(b, dtype, (gemm.k, gemm.n), (gemm.n, 1) if gemm.layout is Layout.NN else (1, gemm.k), "b")
        if out is None:
            out = torch.empty(gemm.m, gemm.n, dtype=dtype)
        _require(out, dtype, (gemm.m, gemm.n), (gemm.n, 1), "out")
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (a, b, out)]
        with _LOCK:
            self._function(*self._sizes, *pointers, *self._tail)
        return out


def _require(
    tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int], strides: tuple[int, int], name: str
) -> None:
    fits = all(size == 1 or stride == want for size, stride, want in zip(shape, tensor.stride(), strides, strict=False))
    if tensor.device.type == "cpu" and tensor.dtype is dtype and tuple(tensor.shape) == shape and fits:
        if tensor.data_ptr() % ALIGN == 0:
            return
        raise ValueError(f"{name} must begin at a multiple of {ALIGN} bytes; {name}.clone() does")
    raise ValueError(
        f"{name} must be a CPU tensor of {dtype} and shape {shape} with strides {strides}, not"
        f" {tensor.dtype} on {tensor.device} of shape {tuple(tensor.shape)} with strides {tensor.stride()}"
    )


@functools.cache
def _pool(threads: int) -> ctypes.CDLL:
    """A thread pool of its own for each thread count; a copy of the library for each, since its state is static."""
    library = ctypes.CDLL(str(compiled(POOL, "-shared", "-fPIC", "-pthread", f"-DPOOL_THREADS={threads}")))
    error = library.pool_start(threads, 0)  # this process is the caller's: its threads are not ours to pin
    if error:
        raise RuntimeError(f"cannot start {threads} threads: error {error}")
    return library
