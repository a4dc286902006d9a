"""Gradient clipping and optimizer steps, as functions: new parameters and state from old ones, in fp32."""

from collections.abc import Callable

import torch

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import Domain, Values, normal

_SIZES: Fields = {"cpu": {"count": 10000}, "gpu": {"count": 1 << 26}, "dtypes": ("float32",)}
_STEP = {"parameter": normal("count"), "gradient": normal("count")}
_MOMENTUM = {**_STEP, "momentum": normal("count")}
_VARIANCE = {"variance": Values("count", Domain.SQUARES)}
_MOMENTS = {**_MOMENTUM, **_VARIANCE}
_ADAM: Fields = {**_SIZES, "outputs": ("new", "new_momentum", "new_variance")}
_LAYERS: Fields = {
    "cpu": {"small": 300, "middle": 2000, "large": 9000},
    "gpu": {"small": 4096, "middle": 1 << 20, "large": 1 << 25},
    "dtypes": ("float32",),
    "outputs": ("small_out", "middle_out", "large_out"),
}
_GRADIENTS = {"a": normal("small"), "b": normal("middle"), "c": normal("large")}
_RATE = 1e-3

Step = tuple[torch.Tensor, ...]


def _adam(decay: float) -> Callable[..., Step]:
    """Adam's step 10 with beta 0.9 and 0.999; decay: AdamW's, decoupled."""

    def step(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor) -> Step:
        first = 0.9 * momentum + 0.1 * gradient
        second = 0.999 * variance + 0.001 * gradient.square()
        update = first / (1 - 0.9**10) / ((second / (1 - 0.999**10)).sqrt() + 1e-8)
        return parameter * (1 - _RATE * decay) - _RATE * update, first, second

    return step


def _sgd(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor) -> Step:
    velocity = 0.9 * momentum + gradient + 1e-4 * parameter
    return parameter - _RATE * velocity, velocity


def _lion(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor) -> Step:
    update = (0.9 * momentum + 0.1 * gradient).sign()
    return parameter - _RATE * (update + 0.1 * parameter), 0.99 * momentum + 0.01 * gradient


def _rmsprop(parameter: torch.Tensor, gradient: torch.Tensor, variance: torch.Tensor) -> Step:
    second = 0.99 * variance + 0.01 * gradient.square()
    return parameter - _RATE * gradient / (second.sqrt() + 1e-8), second


def _adagrad(parameter: torch.Tensor, gradient: torch.Tensor, variance: torch.Tensor) -> Step:
    total = variance + gradient.square()
    return parameter - _RATE * gradient / (total.sqrt() + 1e-10), total


def _lamb(parameter: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor) -> Step:
    """Adam's update scaled to the parameter's own norm."""
    first, second = 0.9 * momentum + 0.1 * gradient, 0.999 * variance + 0.001 * gradient.square()
    update = first / (second.sqrt() + 1e-6) + 0.01 * parameter
    trust = torch.linalg.vector_norm(parameter) / (torch.linalg.vector_norm(update) + 1e-6)
    return parameter - _RATE * trust * update, first, second


def _clip_norm(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Step:
    """All gradients scaled so that their norm together is at most 1."""
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in (a, b, c)]))
    factor = (1 / (total + 1e-6)).clamp_max(1.0)
    return a * factor, b * factor, c * factor


def _clip_adaptive(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Rows of a gradient at most 0.01 of the norm of the parameter's row."""
    most = 0.01 * parameter.norm(dim=-1, keepdim=True).clamp_min(1e-3)
    factor: torch.Tensor = most / gradient.norm(dim=-1, keepdim=True).clamp_min(1e-6)
    return gradient * factor.clamp_max(1.0)


TASKS = (
    Definition("clip_gradient_norm", _clip_norm, _GRADIENTS, **_LAYERS, flops="3*(small+middle+large)"),
    Definition(
        "clip_gradient_value",
        lambda a, b, c: tuple(gradient.clamp(-0.5, 0.5) for gradient in (a, b, c)),
        _GRADIENTS,
        **_LAYERS,
    ),
    Definition(
        "clip_gradient_adaptive",
        _clip_adaptive,
        {"parameter": normal("rows columns"), "gradient": normal("rows columns")},
        {"rows": 64, "columns": 200},
        {"rows": 8192, "columns": 8192},
        flops="5*rows*columns",
        dtypes=("float32",),
    ),
    Definition("sgd_momentum", _sgd, _MOMENTUM, **_SIZES, outputs=("new", "new_momentum"), flops="6*count"),
    Definition("adam", _adam(0.0), _MOMENTS, **_ADAM, flops="14*count"),
    Definition("adamw", _adam(0.1), _MOMENTS, **_ADAM, flops="15*count"),
    Definition("lamb", _lamb, _MOMENTS, **_ADAM, flops="16*count"),
    Definition("lion", _lion, _MOMENTUM, **_SIZES, outputs=("new", "new_momentum"), flops="9*count"),
    Definition("rmsprop", _rmsprop, {**_STEP, **_VARIANCE}, **_SIZES, outputs=("new", "new_variance"), flops="8*count"),
    Definition("adagrad", _adagrad, {**_STEP, **_VARIANCE}, **_SIZES, outputs=("new", "new_variance"), flops="6*count"),
    Definition(
        "moving_average",
        lambda parameter, average: torch.lerp(average, parameter, 0.01),
        {"parameter": normal("count"), "average": normal("count")},
        **_SIZES,
        flops="2*count",
        indefinite=("average",),
    ),
)
