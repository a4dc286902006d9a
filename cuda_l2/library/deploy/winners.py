"""Products on the CPU by kernels that `optimize` found on this machine, each for one shape; torch serves all others.

A process asks the archive once a shape, and keeps the answer. Nothing here is locked: threads that ask at once get
kernels alike, and a child of a fork never waits for a lock that its parent held.
"""

import functools
import timeit
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from cuda_l2 import contract
from cuda_l2.archive import Archive
from cuda_l2.records import Gemm, Layout, Timing
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

if TYPE_CHECKING:
    from cuda_l2.library.kernel import Kernel

Tensor = torch.Tensor
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
PLAIN = (torch.Tensor, torch.nn.Parameter)
OWN_US = 5.0
"""Microseconds of the questions that a call asks before it calls a kernel. On two busy cores, where a kernel's own call
took 1.9 us instead of 1.1, they were 3.7 in matmul and 7.5 in linear."""
FAILURES = (UserError, OSError, RuntimeError, ValueError, KeyError)


class Winner(NamedTuple):
    """A kernel, the number of threads on which it runs, and whether it still gains where a bias is added to its C."""

    kernel: "Kernel"
    threads: int
    with_bias: bool


_winners: dict[tuple[object, ...], Winner | None] = {}


def product(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None = None) -> Tensor | None:
    """a b by a winner, with gradients that torch computes; None where torch is to serve the call.

    For plain tensors on the CPU, fp16 or bf16, whose sizes and layouts are a winner's. Where torch may use fewer
    threads than a winner does, torch serves. bias: N elements, added to the rounded product.
    """
    plain = type(a) in PLAIN and type(b) in PLAIN and a.layout is b.layout is torch.strided
    if not plain or a.dtype not in DTYPES or not a.is_contiguous():
        return None
    key = a.shape, b.shape, b.stride(), b.dtype, a.dtype
    if key not in _winners:
        _winners[key] = _asked(a, b)
    winner = _winners[key]
    if winner is None or winner.threads > torch.get_num_threads():
        return None
    if bias is not None and not (winner.with_bias and _fits(bias, b)):
        return None
    try:
        if a.dim() == 2:
            c = winner.kernel(a, b, out)
        elif out is None:
            c = winner.kernel(a.view(-1, a.shape[-1]), b).view(*a.shape[:-1], b.shape[-1])
        else:
            return None
    except (ValueError, OSError):  # an odd address, torch.vmap, out that overlaps an operand, no thread to be had
        return None  # torch computes it, or says why not
    if bias is None:
        return c
    return c + bias if out is None else c.add_(bias)  # not in place elsewhere: bias may be a tensor of torch.vmap


def _fits(bias: Tensor, b: Tensor) -> bool:
    return type(bias) in PLAIN and bias.is_cpu and bias.dtype is b.dtype and bias.shape == b.shape[1:]


def _asked(a: Tensor, b: Tensor) -> Winner | None:
    """The winner for two tensors of the archive, or None; raises nothing."""
    if b.dtype != a.dtype or a.dim() < 1 or b.dim() != 2 or a.shape[-1] != b.shape[0] or not a.numel() or not b.numel():
        return None
    m, (k, n) = a.numel() // a.shape[-1], b.shape
    layout = Layout.NN if b.is_contiguous() else Layout.TN if b.t().is_contiguous() else None
    if layout is None:
        return None
    try:
        return find(Gemm(m, n, k, layout, dtype=DTYPES[a.dtype]), paths.default_archive())
    except FAILURES as error:
        _warn(str(error))
        return None


def find(gemm: Gemm, archive: Path) -> Winner | None:
    """A shape's winner by the archive's latest report on this machine, where what it wins is more than a call costs."""
    if not archive.exists() or str(gemm) not in _reported(archive):
        return None
    from cuda_l2.library import saved  # noqa: PLC0415 - what compiles kernels, once there is one
    from cuda_l2.library.kernel import Kernel  # noqa: PLC0415

    found, timing = saved.best(gemm, archive)
    if isinstance(found, saved.TorchsOwn) or timing is None:
        return None
    with torch.device("cpu"), torch.inference_mode(False):  # its buffers serve calls in every mode
        kernel = Kernel(gemm, found.candidate, saved.built(found), found.machine)
        left_us = gain_us(timing) - kernel.call_overhead_us - OWN_US
        if left_us <= 0:
            return None
        return Winner(kernel, contract.parse_cpu(found.candidate.source).threads, left_us > bias_us(gemm))


def gain_us(timing: Timing) -> float:
    """Microseconds by which a kernel is faster than the strongest baseline of its report."""
    times = {arm.name: arm.latency_us.estimate for arm in (*timing.baselines, timing.candidate) if arm}
    return times[timing.reference] - times[timing.candidate.name] if timing.candidate else 0.0


def bias_us(gemm: Gemm) -> float:
    """Microseconds that adding a bias to C takes, the least of ten times."""
    dtype = getattr(torch, gemm.dtype)
    c, bias = torch.zeros(gemm.m, gemm.n, dtype=dtype), torch.zeros(gemm.n, dtype=dtype)
    return min(timeit.repeat(lambda: c + bias, number=1, repeat=10)) * 1e6


@functools.cache
def _reported(path: Path) -> frozenset[str]:
    """The shapes of which an archive has reports on this machine."""
    from cuda_l2.library.saved import REPORTED  # noqa: PLC0415
    from cuda_l2.machine.cpu.target import detect  # noqa: PLC0415

    machine = detect().machine
    with Archive(path, reading=True) as archive:
        return frozenset(task for protocol in REPORTED for task in archive.tasks(machine, protocol))


@functools.cache
def _warn(text: str) -> None:
    warnings.warn(f"cuda-l2: torch serves products on the CPU: {text}", RuntimeWarning, stacklevel=4)
