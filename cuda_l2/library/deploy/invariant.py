"""Products whose rows have the same bits in every batch: the call, what it refuses, and a check of the promise.

torch's kernels are chosen by M, and so are their sums. None of them may take a batch-invariant kernel's place: what no
such kernel serves raises.
"""

from collections.abc import Callable, Iterator

import torch

from cuda_l2.library.deploy.entries import DTYPES, INVARIANT
from cuda_l2.system.errors import UserError

Tensor = torch.Tensor
ROWS = (1, 2, 7, 16, 63, 64, 65, 127, 128, 200, 511, 512, 2048)
"""Sizes of batches that are compared with one of all rows: on both sides of the ends of tiles."""
ALIGN = 16


def matmul(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    """torch.matmul(a, b), and its rounded result plus bias, by one kernel for every number of rows of a.

    UserError where no kernel serves it so. Gradients are those of a deterministic product, and not batch-invariant.
    """
    if out is not None:
        raise UserError("out cannot be given with batch_invariant=True; leave it out, or copy the result")
    try:
        product: Tensor = torch.ops.cuda_l2.product_by.default(a, b, INVARIANT)
    except (RuntimeError, TypeError, AttributeError):  # the op is missing where it cannot be built
        product = _second_try(a, b)
    return product if bias is None else product + bias


def differing(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Iterator[str]:
    """Batches in which a row's bits differ from those in the batch of all rows of a, one line each.

    Batches of ROWS sizes, up to a's: rows from its beginning, its end and its middle, and rows in random order.
    """
    whole, total = product(a, b).view(torch.int16), a.shape[0]
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(a.device)
    for m in (m for m in ROWS if m <= total):
        for start in sorted({0, (total - m) // 2, total - m}):
            if not torch.equal(product(a[start : start + m], b).view(torch.int16), whole[start : start + m]):
                yield f"{m} rows from row {start} on"
        if not torch.equal(product(a[shuffled[:m]], b).view(torch.int16), whole[shuffled[:m]]):
            yield f"{m} rows in another order"


def _second_try(a: Tensor, b: Tensor) -> Tensor:
    """A call that failed again, with A copied where its rows are apart or begin at an odd address; UserError else."""
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    if not tensors or a.numel() == 0 or (b.dim() == 2 and a.dim() > 0 and a.shape[-1] != b.shape[0]):
        return torch.matmul(a, b)  # no row, no product, or torch's error
    reason = _why_not(a, b)
    if reason:
        raise UserError(f"batch_invariant=True: {reason}")
    if not a.is_contiguous() or a.data_ptr() % ALIGN:
        a = a.clone(memory_format=torch.contiguous_format)
    try:
        product: Tensor = torch.ops.cuda_l2.product_by.default(a, b, INVARIANT)
    except (RuntimeError, AttributeError) as error:
        n, k = b.shape[1], b.shape[0]
        raise UserError(
            f"batch_invariant=True: no kernel serves N={n} and K={k} for every M ({error}): kernels need a Hopper GPU,"
            " K (for row-major B also N) a multiple of 64, and N a multiple of 8 of at least 48; else leave it out"
        ) from None
    return product


def _why_not(a: Tensor, b: Tensor) -> str:
    """Why no kernel can serve these operands, whatever their sizes; or empty."""
    if a.device.type != "cuda" or b.device != a.device:
        return f"operands must be on one CUDA device, not on {a.device} and {b.device}"
    if str(a.dtype).removeprefix("torch.") not in DTYPES or b.dtype != a.dtype:
        return f"operands must both be fp16 or both be bf16, not {a.dtype} and {b.dtype}: convert the model"
    if b.dim() != 2 or not (b.is_contiguous() or b.t().is_contiguous()):
        return "B must be of rank 2, and contiguous or the transpose of a contiguous tensor"
    return f"B must begin at a multiple of {ALIGN} bytes; B.clone() does" if b.data_ptr() % ALIGN else ""
