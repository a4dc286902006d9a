"""What must have run once in a process before PyTorch's results can be relied on."""

import contextlib
import functools
from collections.abc import Iterator

import torch

FUNCTIONS = (
    *("acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "log", "log10", "log1p"),
    *("log2", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
ELEMENTS = 1 << 18
"""Enough for every thread to take part."""
PRECISION_SWITCHES = (
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    (torch.backends.cudnn, "allow_tf32"),
)


@functools.cache
def warm_vector_math() -> None:
    """Run the vector functions that come from MKL, in both types.

    The first call of tanh on several threads was off by 5e-5 in 3 of 10 processes, torch 2.13; later ones by 3e-8.
    """
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            values = torch.full((ELEMENTS,), 0.5, dtype=dtype)
            for name in FUNCTIONS:
                getattr(torch, name)(values)


def set_full_precision() -> None:
    """No TF32, no fp16 sums: on a GPU PyTorch's convolutions would use the one, its products of halves the other."""
    for backend, switch in PRECISION_SWITCHES:
        setattr(backend, switch, False)


@contextlib.contextmanager
def in_full_precision() -> Iterator[None]:
    """As `set_full_precision` has it, for a while."""
    before = [getattr(*switch) for switch in PRECISION_SWITCHES]
    set_full_precision()
    try:
        yield
    finally:
        for (backend, switch), value in zip(PRECISION_SWITCHES, before, strict=True):
            setattr(backend, switch, value)
