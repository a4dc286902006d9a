"""What torch.compile's tracer asks of a product: does a tuned kernel serve it, or does Inductor keep it?"""

import torch

from cuda_l2.library.deploy.entries import AHEAD, DTYPES, TUNED
from cuda_l2.records import Gemm, Layout

Tensor = torch.Tensor
ELEMENTS = tuple(getattr(torch, name) for name in DTYPES)


def wins(a: Tensor, b: Tensor, *, transposed: bool, ahead: bool = False) -> bool:
    """Whether a tuned kernel serves a product of these sizes, all of them known to the tracer. transposed: B is b^T.

    ahead: b is declared constant, so that what was tuned with weights ahead counts too.
    The answer becomes part of what is compiled. Where choices change later it is an old choice, never a wrong result.
    """
    from torch.fx.experimental.symbolic_shapes import has_static_value  # noqa: PLC0415 - the tracer has it loaded

    if a.dtype not in ELEMENTS or a.dtype != b.dtype or a.device != b.device or a.dim() < 1 or b.dim() != 2:
        return False
    for size in (*a.shape, *b.shape):
        if not has_static_value(size):
            return False
    if not a.is_contiguous():
        return False
    return _tuned(a.device, a.dtype, tuple(a.shape), tuple(b.shape), tuple(b.stride()), transposed, ahead)


def _tuned(
    place: torch.device,
    dtype: torch.dtype,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    b_strides: tuple[int, ...],
    transposed: bool,
    ahead: bool = False,
) -> bool:
    """Asked once a product that is traced; torch.compile does not look inside."""
    gemm = product(dtype, a_shape, b_shape, b_strides, transposed=transposed)
    if place.type != "cuda" or gemm is None:
        return False
    from cuda_l2.library.deploy import choices, dispatch  # noqa: PLC0415 - imports what a GPU alone needs

    for rule in (AHEAD, TUNED) if ahead else (TUNED,):
        known = dispatch.known(torch.cuda.current_device() if place.index is None else place.index, rule)
        choice = known.get(gemm) or choices.between(known, gemm)
        if choice is not None and choice.served:
            return True
    return False


# what torch.compiler.assume_constant_result does, which would load the compiler
_tuned._dynamo_marked_constant = True  # type: ignore[attr-defined]


def gemm_of(a: Tensor, b: Tensor, *, transposed: bool = False) -> Gemm | None:
    """The product that a kernel would see, as the op decides it; None where torch serves it. transposed: B is b^T."""
    if a.dtype not in ELEMENTS or a.dtype != b.dtype or a.device != b.device or a.dim() < 1 or b.dim() != 2:
        return None
    if not a.is_contiguous():
        return None
    return product(a.dtype, tuple(a.shape), tuple(b.shape), b.stride(), transposed=transposed)


def product(
    dtype: torch.dtype,
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    b_strides: tuple[int, ...],
    *,
    transposed: bool,
) -> Gemm | None:
    """The same by sizes, with rows of A one after the other."""
    if transposed:
        b_shape, b_strides = b_shape[::-1], b_strides[::-1]
    (k, n), (by_k, by_n), m = b_shape, b_strides, 1
    for size in a_shape[:-1]:
        m *= size
    if a_shape[-1] != k or not m or not n or not k:
        return None
    if (n == 1 or by_n == 1) and (k == 1 or by_k == n):
        return Gemm(m, n, k, Layout.NN, dtype=str(dtype))
    return Gemm(m, n, k, Layout.TN, dtype=str(dtype)) if (k == 1 or by_k == 1) and (n == 1 or by_n == k) else None
