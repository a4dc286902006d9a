"""cuda_l2.matmul, and what torch must know of the op: shapes of results, gradients."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cuda_l2.library.deploy import ahead, invariant, tracing, winners
from cuda_l2.library.deploy.entries import DETERMINISTIC
from cuda_l2.library.deploy.native import Native, native
from cuda_l2.library.product import dispatch_modes, function_modes, tracing_state
from cuda_l2.system.errors import UserError

Tensor = torch.Tensor
PLAIN = (Tensor, torch.nn.Parameter)
FAILURES = (RuntimeError, TypeError)
"""What the op may raise. torch serves the call then: it raises its own error, or knows a subclass of tensors."""


@functools.cache
def op() -> Native | None:
    """The op, registered and, where there is a driver, started. None, after one warning, where it cannot be had."""
    try:
        library = native()
    except UserError as error:
        warnings.warn(f"matrix products are torch's own: {error}", RuntimeWarning, stacklevel=2)
        return None
    for name in ("product", "matmul", "linear"):
        torch.library.register_fake(f"cuda_l2::{name}", _FAKES[name])
    torch.library.register_fake("cuda_l2::matmul.out", lambda a, b, bias=None, *, out: out)
    torch.library.register_fake("cuda_l2::product_by", lambda a, b, rule: torch.matmul(a, b))
    torch.library.register_autograd("cuda_l2::matmul", _backward, setup_context=_save)
    torch.library.register_autograd("cuda_l2::product_by", _backward_by_rule, setup_context=_save_by_rule)
    library.on_first(_start)
    return library


def _start() -> None:
    """Find the driver, when the first tensor on a CUDA device comes up: a process may fork before."""
    from cuda_l2.library.deploy.dispatch import serve  # noqa: PLC0415 - imports what a GPU alone needs

    library = native()
    reason = library.start()
    if reason:
        warnings.warn(f"matrix products are torch's own: {reason}", RuntimeWarning, stacklevel=2)
    else:
        library.on_miss(serve)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    weights_ahead: bool = False,
) -> Tensor:
    """torch.matmul(a, b), plus bias, by the kernel that was measured to be the fastest for the shape on this GPU.

    Any ranks, strides and types that torch.matmul takes, with its errors. Kernels serve fp16 and bf16 on a CUDA device:
    a of any rank with its rows one after the other, b of rank 2, row-major or transposed; and on the CPU the shapes for
    which `optimize` found a kernel on this machine, to whose rounded product a bias is added. torch serves all else, on
    a GPU every product with a bias too: it adds it before it rounds. Gradients flow as through torch.matmul.
    deterministic: by a kernel that does not depend on what was tuned; for most shapes that is torch's. batch_invariant:
    a row's bits depend neither on the number of rows of a nor on the row's place; UserError where no kernel can do so.
    weights_ahead: b, or what it is the transpose of, is declared constant from now on: kernels may read it before the
    launch ahead has ended, unless torch counted a write to it since its latest launch. After any other write call
    `invalidate`. Not in a graph of torch.compile.
    """
    plain = bias is None and not (deterministic or batch_invariant or weights_ahead)
    if plain and not torch.compiler.is_dynamo_compiling():  # other traces have modes or tensors of their own
        done = QUICK_PRODUCT(a, b) if out is None else QUICK_PRODUCT(a, b, out)
        if done is not None:
            return done
    if batch_invariant:
        return invariant.matmul(a, b, out, bias)
    if deterministic:
        return _deterministic(a, b, out, bias)
    if weights_ahead and READY and isinstance(b, Tensor) and not torch.compiler.is_compiling():
        weight = ahead.transposed(b)
        if ahead.constant(b if weight is None else weight) and weight is not None and out is None:
            return linear(a, weight, bias)
    compiling = torch.compiler.is_compiling()
    odd = (bias is not None and compiling) or (out is not None and not isinstance(out, Tensor))
    if not READY or odd or _is_torchs(a, b, compiling, transposed=False):
        return _torch_matmul(a, b, out, bias)
    if a.is_cpu and not compiling and (won := winners.product(a, b, out, bias)) is not None:
        return won
    if out is not None:
        return _into(a, b, out, bias)
    try:
        if bias is None and not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
            result: Tensor = (PRODUCT if compiling else DIRECT_PRODUCT)(a, b)
        elif plain and QUICK and not compiling and _is_plain(a, b):
            return torch.matmul(a, b)  # no kernel serves it, and this records it for less
        else:
            result = torch.ops.cuda_l2.matmul.default(a, b, bias)
    except FAILURES:
        return _torch_matmul(a, b, None, bias)
    return result


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    deterministic: bool = False,
    batch_invariant: bool = False,
    declared: bool = False,
) -> Tensor:
    """torch.nn.functional.linear, as `matmul` serves it. declared: weight was declared constant, for `wins`.

    With a bias torch serves it on a GPU, except under torch.compile: there the bias is added to a tuned kernel's
    rounded product by the kernel into which Inductor fuses what follows, as it does with torch's own product.
    """
    if deterministic or batch_invariant:
        b = weight.mT if weight.dim() == 2 else weight
        return matmul(x, b, bias=bias, deterministic=deterministic, batch_invariant=batch_invariant)
    dynamo = torch.compiler.is_dynamo_compiling()
    if bias is None and not dynamo and (done := QUICK_LINEAR(x, weight)) is not None:
        return done
    compiling = torch.compiler.is_compiling()
    if (
        (bias is not None and not compiling and not getattr(x, "is_cpu", False))
        or not READY
        or _is_torchs(x, weight, compiling, transposed=True, ahead=declared)
    ):
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None and compiling:
        return linear(x, weight, declared=declared) + bias
    ours = x.is_cpu and not compiling and x.dtype in winners.DTYPES and weight.dim() == 2
    if ours and (won := winners.product(x, weight.mT, None, bias)) is not None:
        return won
    if bias is not None:
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        if QUICK and not compiling and _is_plain(x, weight):
            return torch.nn.functional.linear(x, weight)
        return matmul(x, weight.mT) if weight.dim() == 2 else torch.nn.functional.linear(x, weight)
    try:
        result: Tensor = (LINEAR if compiling else DIRECT_LINEAR)(x, weight)
    except FAILURES:
        return torch.nn.functional.linear(x, weight)
    return result


def _deterministic(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    """`matmul` by a kernel that is the same whatever was tuned, and whether or not it is traced."""
    plain = READY and isinstance(a, Tensor) and isinstance(b, Tensor) and a.device.type in ("cuda", "cpu")
    if not plain or out is not None or bias is not None or torch.is_autocast_enabled(a.device.type):
        return _torch_matmul(a, b, out, bias)
    try:
        result: Tensor = torch.ops.cuda_l2.product_by.default(a, b, DETERMINISTIC)
    except FAILURES:
        return torch.matmul(a, b)
    return result


def _is_torchs(a: Tensor, b: Tensor, compiling: bool, *, transposed: bool, ahead: bool = False) -> bool:
    """Whether torch serves these at once: under autocast, on other devices, what is no tensor, and what is traced.

    Under torch.compile all that no tuned kernel serves, so that Inductor sees it. transposed: B is b^T. ahead: as in
    `tracing.wins`.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    place = "cuda" if a.is_cuda else "cpu" if a.is_cpu else ""  # a.device.type takes several times as long
    if not place or torch.is_autocast_enabled(place):
        return True
    if place == "cpu" and not compiling and (tracing_state() is not None or dispatch_modes()):
        return True
    return compiling and not tracing.wins(a, b, transposed=transposed, ahead=ahead)


def _torch_matmul(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(a, b, out=out)
    if out is not None:
        return torch.matmul(a, b, out=out).add_(bias)
    return torch.nn.functional.linear(a, b.mT, bias) if b.dim() == 2 else torch.matmul(a, b) + bias


def _into(a: Tensor, b: Tensor, out: Tensor | None, bias: Tensor | None) -> Tensor:
    assert out is not None
    tensors = (a, b, out)
    if bias is not None or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return _torch_matmul(a, b, out, bias)
    try:
        torch.ops.cuda_l2.matmul.out(a, b, out=out)
    except FAILURES:
        return _torch_matmul(a, b, out, None)
    torch.autograd.graph.increment_version(out)
    return out


class _Product(torch.autograd.Function):
    """a b, or a b^T where transposed, whose gradients are products again.

    The operators' own formula does the same at five times the cost. Not for torch.func, which asks for two functions.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, transposed: bool) -> Tensor:
        wants_a, wants_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None)
        ctx.transposed = transposed
        product = (QUICK_LINEAR if transposed else QUICK_PRODUCT)(a, b)
        if product is not None:
            return product
        try:
            product = (DIRECT_LINEAR if transposed else DIRECT_PRODUCT)(a, b)
        except FAILURES:
            product = torch.matmul(a, b.mT if transposed else b)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        grad_a = None if b is None else matmul(grad, b if ctx.transposed else b.mT)
        grad_b = None
        if a is not None:
            rows, given = (each if each.dim() == 2 else each.reshape(-1, each.shape[-1]) for each in (a, grad))
            grad_b = matmul(given.mT, rows) if ctx.transposed else matmul(rows.mT, given)
        return grad_a, grad_b, None


def _is_plain(a: Tensor, b: Tensor) -> bool:
    """Whether these are tensors of torch's own, in no transform, mode or trace."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    plain = type(a) in PLAIN and type(b) in PLAIN and not transformed and not function_modes()
    return plain and tracing_state() is None and not dispatch_modes()


def _fake_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return _torch_matmul(a, b, None, bias)


_FAKES = {"product": _fake_matmul, "matmul": _fake_matmul, "linear": torch.nn.functional.linear}


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    a, b, bias = inputs
    ctx.save_for_backward(a, b)
    ctx.bias = None if bias is None else bias.shape


def _save_by_rule(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    _save(ctx, (*inputs[:2], None), output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad, torch.ops.cuda_l2.matmul.default)


def _backward_by_rule(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Whatever the rule: a gradient of B is a sum over all rows, which no kernel takes in the same way for every M."""
    return _gradients(ctx, grad, lambda a, b: torch.ops.cuda_l2.product_by.default(a, b, DETERMINISTIC))


def _gradients(ctx: Any, grad: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of any ranks that torch.matmul takes, by the op again."""
    a, b = ctx.saved_tensors
    wants_a, wants_b, *others = ctx.needs_input_grad  # torch leaves out an argument that has its default
    grad_bias = grad.sum_to_size(ctx.bias) if any(others) else None
    rows, columns = a, b
    if a.dim() == 1:
        rows, grad = a.unsqueeze(0), grad.unsqueeze(-1 if b.dim() == 1 else -2)
    if b.dim() == 1:
        columns, grad = b.unsqueeze(-1), grad.unsqueeze(-1)
    grad_a = grad_b = None
    if wants_a:
        grad_a = product(grad, columns.mT).sum_to_size(rows.shape).reshape(a.shape)
    if wants_b and columns.dim() == 2:  # one product over all rows
        flat = rows.reshape(-1, rows.shape[-1])
        grad_b = product(flat.mT, grad.reshape(-1, grad.shape[-1])).reshape(b.shape)
    elif wants_b:
        grad_b = product(rows.mT, grad).sum_to_size(columns.shape).reshape(b.shape)
    return (grad_a, grad_b, *[grad_bias for _ in others])


READY = op() is not None
"""Found out when this file is imported, on the first use of any of it: torch.compile must not look inside."""
PRODUCT: Any = torch.ops.cuda_l2.product.default if READY else None
LINEAR: Any = torch.ops.cuda_l2.linear.default if READY else None
DIRECT_PRODUCT, DIRECT_LINEAR = (getattr(operator, "_op", operator) for operator in (PRODUCT, LINEAR))
"""The same without a call of Python in between, which the tracer needs."""


def _quick(*, transposed: bool) -> Callable[..., Tensor | None]:
    library = op()
    return (library and library.quick(_Product.apply, transposed=transposed)) or _serves_nothing


def _serves_nothing(a: Tensor, b: Tensor, out: Tensor | None = None) -> None:
    return None


QUICK_PRODUCT, QUICK_LINEAR = _quick(transposed=False), _quick(transposed=True)
"""`Native.quick`'s; where there is none, a function that serves nothing."""
QUICK = QUICK_PRODUCT is not _serves_nothing
