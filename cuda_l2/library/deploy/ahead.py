"""Weights ahead: operands declared constant, which kernels may read before the launch ahead has ended.

Only an operand's owner can say so, tensor by tensor. At each launch the op compares the tensor's address and torch's
counter of writes with those of the latest launch (`Constants` in table.h), and takes an ordinary edge where they
differ.
"""

import functools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from cuda_l2.library.deploy.native import native

_declared: dict[int, "weakref.finalize[Any, Any]"] = {}


def constant(weight: torch.Tensor) -> bool:
    """Let products read a tensor ahead. False where that is never safe: torch counts no writes to inference tensors."""
    if weight.is_inference():
        return False
    identity = weight._cdata
    _watch_optimizers()
    if identity not in _declared:
        _declared[identity] = weakref.finalize(weight, _end, identity)  # before its memory is another tensor's
        _declared[identity].atexit = False
        native().constant(identity)
    return True


def variable(weight: torch.Tensor) -> None:
    """Let no product read a tensor ahead any more."""
    if weight._cdata in _declared:
        _declared[weight._cdata]()


def invalidate(model: Any = None) -> None:
    """Say that weights may have been written where torch counts no write: by `.data`, a kernel, another library.

    The next product with each weight that is read ahead waits for all work before it. model: whose weights; all that
    are read ahead are meant, whatever is given.
    """
    if _declared:
        native().invalidate()


def transposed(b: torch.Tensor) -> torch.Tensor | None:
    """The tensor whose transpose b is; None where it is none."""
    base = b._base
    if base is None or base.dim() != 2 or b.dim() != 2 or b.data_ptr() != base.data_ptr():
        return None
    return base if b.shape == base.shape[::-1] and b.stride() == base.stride()[::-1] else None


@functools.cache
def _watch_optimizers() -> None:
    """Take every step of an optimizer for a write: torch counts none of fused ones."""
    register_optimizer_step_post_hook(lambda *_: invalidate())


def _end(identity: int) -> None:
    _declared.pop(identity, None)
    native().variable(identity)
