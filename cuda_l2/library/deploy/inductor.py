"""torch.compile's max-autotune with tuned kernels among its candidates: Inductor times them where they stand."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import torch

from cuda_l2.library.deploy import dispatch
from cuda_l2.library.deploy.calls import READY

Tensor = torch.Tensor


def max_autotune() -> dict[str, Any]:
    """torch.compile(model, options=cuda_l2.max_autotune()): max-autotune, with tuned kernels among its candidates.

    A product is served by a tuned kernel where Inductor finds it faster than torch's own and than a kernel of
    Inductor's with what follows fused into it. For a model that is not accelerated: in one that is, the choice is made
    before Inductor sees the product. Products with a bias or an added matrix, and of one row, stay Inductor's.
    """
    options: dict[str, Any] = dict(torch._inductor.list_mode_options("max-autotune-no-cudagraphs"))
    if READY and torch.cuda.is_available():
        # Inductor's cache of graphs would bring a graph into a process that does not know the candidate's name
        options |= {"external_matmul": [_candidate(_digest())], "fx_graph_cache": False}
    return options


@functools.cache
def _candidate(digest: str) -> Callable[..., None]:
    """The product as Inductor calls it. Its name, by which Inductor keeps times on disk, is that of the choices."""

    def product(a: Tensor, b: Tensor, *, out: Tensor) -> None:
        torch.ops.cuda_l2.matmul.out(a, b, out=out)

    product.__name__ = f"cuda_l2_{digest}"
    return product


def _digest() -> str:
    """Names what is tuned on the current device."""
    served = [choice for choice in dispatch.known(torch.cuda.current_device()).values() if choice.served]
    text = "\n".join(sorted(f"{choice.shape} {choice.kernel} {choice.schedule}" for choice in served))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
