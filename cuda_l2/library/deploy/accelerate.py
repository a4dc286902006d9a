"""Models on the op: Linear layers that call it, and a mode in which torch's own functions do."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from cuda_l2.library.deploy import ahead, calls
from cuda_l2.library.deploy.tracing import gemm_of
from cuda_l2.records import Gemm
from cuda_l2.system.errors import UserError
from cuda_l2.system.values import short

Model = TypeVar("Model", bound=torch.nn.Module)
Tensor = torch.Tensor


class AcceleratedLinear(torch.nn.Linear):
    """torch.nn.Linear whose product is the op's. Parameters, names and files are those of a Linear."""

    deterministic = batch_invariant = weights_ahead = False

    def forward(self, input: Tensor) -> Tensor:
        if self.deterministic or self.batch_invariant:
            rules = {"deterministic": self.deterministic, "batch_invariant": self.batch_invariant}
            return calls.linear(input, self.weight, self.bias, **rules)
        return calls.linear(input, self.weight, self.bias, declared=self.weights_ahead)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What .to(), .half() and the like call: memory and contents change, and torch may count no write."""
        declared = self.weights_ahead and calls.READY
        if declared:
            ahead.variable(self.weight)  # its weak reference would keep torch from exchanging the tensor
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if declared:
            ahead.constant(self.weight)
        return self


def accelerate(
    model: Model, *, deterministic: bool = False, batch_invariant: bool = False, weights_ahead: bool = False
) -> Model:
    """Make every torch.nn.Linear of a model call the op, in place; the model.

    Subclasses of Linear, and layers with a forward of their own, stay as they are. Which kernel serves a layer is
    decided call by call: its type and device may change afterwards. deterministic, batch_invariant: as in
    `calls.matmul`, for these layers alone; a later call changes it.
    weights_ahead: kernels may read these layers' weights before the launch ahead has ended. Call `invalidate` after
    writes that torch does not count: through `.data`, by a kernel of your own, by another library. A weight that is
    replaced by another tensor is read ahead only after another call of this.
    """
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"accelerate takes a torch.nn.Module, not {short(model)}; for other code: with accelerated()")
    for module in model.modules():
        if type(module) is torch.nn.Linear and "forward" not in vars(module):
            module.__class__ = AcceleratedLinear
        if type(module) is AcceleratedLinear:
            module.deterministic, module.batch_invariant = deterministic, batch_invariant
            module.weights_ahead = weights_ahead and not module.weight.is_inference()
            if calls.READY:
                (ahead.constant if module.weights_ahead else ahead.variable)(module.weight)
    return model


class accelerated(TorchFunctionMode):  # noqa: N801 - a context manager, named as one reads it
    """Within it torch.matmul, mm, `@` and torch.nn.functional.linear call the op, for code that cannot be changed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = _OURS.get(func)
        plain = all(type(tensor) in _PLAIN for tensor in args[:2]) and len(args) >= 2
        if ours is None or not plain or (func in _MM and args[0].dim() + args[1].dim() != 4):
            return func(*args, **kwargs)
        return ours(*args, **kwargs)


class recorded(TorchFunctionMode):  # noqa: N801
    """Within it the shapes of products that a kernel might serve are kept, each once, in the order they came up.

    Those with a bias too, which kernels serve under torch.compile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[Gemm, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = _transposed(func)
        if place is not None and len(args) >= 2:
            gemm = gemm_of(args[0], args[1], transposed=place)
            if gemm is not None:
                self.shapes[gemm] = None
        return func(*args, **(kwargs or {}))


def _mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    return calls.matmul(a, b, out=out)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MM = {torch.mm, torch.Tensor.mm}
_MATMUL = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
_OURS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([*_MM, *_MATMUL], _mm),
    torch.nn.functional.linear: calls.linear,
}

_TRANSPOSED = {**dict.fromkeys([*_MM, *_MATMUL], False), torch.nn.functional.linear: True}
_OPERATORS = {"cuda_l2.product.default": False, "cuda_l2.linear.default": True}


def _transposed(func: Any) -> bool | None:
    """Whether a function's second operand is B^T; None where it is no product."""
    if isinstance(func, torch._ops.OpOverload):
        return _OPERATORS.get(str(func))
    return _TRANSPOSED.get(func)
