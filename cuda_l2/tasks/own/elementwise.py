"""Element by element, with what is usually fused to it, in the task's type."""

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import booleans, integers, normal

_SIZES: Fields = {"cpu": {"rows": 64, "columns": 500}, "gpu": {"rows": 8192, "columns": 8192}}
_X = {"x": normal("rows columns")}
_XY = {**_X, "y": normal("rows columns")}


def _rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding; halves of the last dimension are the pairs."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as int8 with one scale each."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 127
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale


TASKS = (
    Definition("add", lambda x, y: x + y, _XY, **_SIZES, flops="rows*columns"),
    Definition("relu", lambda x: F.relu(x), _X, **_SIZES),
    Definition("gelu", lambda x: F.gelu(x), _X, **_SIZES, flops="8*rows*columns"),
    Definition("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), _X, **_SIZES, flops="8*rows*columns"),
    Definition("sigmoid", lambda x: torch.sigmoid(x), _X, **_SIZES, flops="4*rows*columns"),
    Definition("softplus", lambda x: F.softplus(x), _X, **_SIZES, flops="4*rows*columns"),
    Definition("mish", lambda x: F.mish(x), _X, **_SIZES, flops="8*rows*columns"),
    Definition("hardswish", lambda x: F.hardswish(x), _X, **_SIZES, flops="4*rows*columns"),
    Definition("relu_squared", lambda x: F.relu(x).square(), _X, **_SIZES, flops="2*rows*columns"),
    Definition("silu_gate", lambda x, y: F.silu(x) * y, _XY, **_SIZES, flops="6*rows*columns"),
    Definition(
        "bias_gelu_residual",
        lambda x, y, bias: y + F.gelu(x + bias),
        _XY,
        **_SIZES,
        weights={"bias": normal("columns")},
        flops="10*rows*columns",
    ),
    Definition(
        "masked_dropout",
        lambda x, keep: torch.where(keep, x / 0.9, 0.0),
        {**_X, "keep": booleans("rows columns")},
        **_SIZES,
        flops="rows*columns",
    ),
    Definition(
        "scale_shift_clamp",
        lambda x, gain, shift: (x * gain + shift).clamp(-2, 2),
        _X,
        **_SIZES,
        weights={"gain": normal("columns"), "shift": normal("columns")},
        flops="4*rows*columns",
    ),
    Definition("transpose_add", lambda x, y: x + y.mT, {**_X, "y": normal("columns rows")}, **_SIZES),
    Definition(
        "complex_multiply",
        lambda x, y: torch.stack(
            [x[..., 0] * y[..., 0] - x[..., 1] * y[..., 1], x[..., 0] * y[..., 1] + x[..., 1] * y[..., 0]], -1
        ),
        {"x": normal("rows columns 2"), "y": normal("rows columns 2")},
        **_SIZES,
        flops="6*rows*columns",
    ),
    Definition(
        "rotary_embedding",
        _rotary,
        {"x": normal("batch heads length 2*half"), "cosine": normal("length half"), "sine": normal("length half")},
        {"batch": 2, "heads": 4, "length": 30, "half": 16},
        {"batch": 8, "heads": 32, "length": 2048, "half": 64},
        flops="6*batch*heads*length*half",
    ),
    Definition(
        "quantise_int8", _quantise, _X, **_SIZES, outputs=("out", "scale"), flops="4*rows*columns", dtypes=("float32",)
    ),
    Definition(
        "dequantise_int8",
        lambda x, scale: x.to(scale.dtype) * scale,
        {"x": integers("rows columns", "128", "int8", least=-127), "scale": normal("rows 1")},
        **_SIZES,
        flops="rows*columns",
    ),
)
