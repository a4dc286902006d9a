"""Sums, extremes, scans, norms and pooling, in the task's type; indices as int64."""

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import Domain, Values, integers, normal

_SIZES: Fields = {"cpu": {"rows": 64, "columns": 500}, "gpu": {"rows": 8192, "columns": 8192}}
_X = {"x": normal("rows columns")}
_IMAGES: Fields = {
    "cpu": {"batch": 3, "channels": 8, "height": 14, "width": 18},
    "gpu": {"batch": 64, "channels": 128, "height": 64, "width": 64},
}
_IMAGE = {"x": normal("batch channels height width")}
_AFFINE = {"gain": normal("columns"), "shift": normal("columns")}
_CHANNEL_AFFINE = {"gain": normal("channels"), "shift": normal("channels")}


TASKS = (
    Definition("sum_rows", lambda x: x.sum(-1), _X, **_SIZES, flops="rows*columns"),
    Definition("sum_columns", lambda x: x.sum(0), _X, **_SIZES, flops="rows*columns"),
    Definition("max_columns", lambda x: x.amax(0), _X, **_SIZES),
    Definition("mean_columns", lambda x: x.mean(0), _X, **_SIZES, flops="rows*columns"),
    Definition("sum_all", lambda x: x.sum(), _X, **_SIZES, flops="rows*columns"),
    Definition("variance_rows", lambda x: x.var(-1), _X, **_SIZES, flops="3*rows*columns"),
    Definition("l2_norm_rows", lambda x: torch.linalg.vector_norm(x, dim=-1), _X, **_SIZES, flops="2*rows*columns"),
    Definition("normalise_rows", lambda x: F.normalize(x, dim=-1), _X, **_SIZES, flops="3*rows*columns"),
    Definition("logsumexp", lambda x: torch.logsumexp(x, -1), _X, **_SIZES, flops="4*rows*columns"),
    Definition("max_rows", lambda x: tuple(x.max(-1)), _X, **_SIZES, outputs=("values", "indices")),
    Definition("argmin_columns", lambda x: x.argmin(0), _X, **_SIZES),
    Definition("count_positive", lambda x: (x > 0).sum(-1), _X, **_SIZES),
    Definition("cumsum", lambda x: x.cumsum(-1), _X, **_SIZES, flops="rows*columns"),
    Definition("cummax", lambda x: x.cummax(-1).values, _X, **_SIZES),
    Definition("softmax", lambda x: torch.softmax(x, -1), _X, **_SIZES, flops="5*rows*columns"),
    Definition("log_softmax", lambda x: torch.log_softmax(x, -1), _X, **_SIZES, flops="5*rows*columns"),
    Definition(
        "layer_norm",
        lambda x, gain, shift: F.layer_norm(x, gain.shape, gain, shift),
        _X,
        **_SIZES,
        weights=_AFFINE,
        flops="7*rows*columns",
    ),
    Definition(
        "rms_norm",
        lambda x, gain: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain,
        _X,
        **_SIZES,
        weights={"gain": normal("columns")},
        flops="4*rows*columns",
    ),
    Definition(
        "residual_rms_norm",
        lambda x, residual, gain: (x + residual, F.rms_norm(x + residual, gain.shape, gain, 1e-6)),
        {**_X, "residual": normal("rows columns")},
        **_SIZES,
        weights={"gain": normal("columns")},
        outputs=("sum", "out"),
        flops="5*rows*columns",
    ),
    Definition(
        "group_norm",
        lambda x, gain, shift, groups: F.group_norm(x, groups, gain, shift),
        {"x": normal("batch groups*channels height width")},
        {"batch": 3, "groups": 4, "channels": 4, "height": 14, "width": 18},
        {"batch": 64, "groups": 32, "channels": 8, "height": 64, "width": 64},
        weights={"gain": normal("groups*channels"), "shift": normal("groups*channels")},
        flops="7*batch*groups*channels*height*width",
        indefinite=("gain",),
    ),
    Definition("instance_norm", lambda x: F.instance_norm(x), _IMAGE, **_IMAGES, flops="7*batch*channels*height*width"),
    Definition(
        "batch_norm_training",
        lambda x, gain, shift: F.batch_norm(x, None, None, gain, shift, training=True),
        _IMAGE,
        **_IMAGES,
        weights=_CHANNEL_AFFINE,
        flops="7*batch*channels*height*width",
        indefinite=("gain",),
    ),
    Definition("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), _IMAGE, **_IMAGES),
    Definition("average_pool2d", lambda x: F.avg_pool2d(x, 2), _IMAGE, **_IMAGES),
    Definition("global_average_pool", lambda x: x.mean((-2, -1)), _IMAGE, **_IMAGES),
    Definition(
        "segment_sum",
        lambda x, segment, segments: x.new_zeros(segments, x.shape[-1]).index_add(0, segment, x),
        {"x": normal("rows columns"), "segment": integers("rows", "segments")},
        {"rows": 300, "columns": 40, "segments": 20},
        {"rows": 1 << 18, "columns": 128, "segments": 4096},
        flops="rows*columns",
    ),
    Definition(
        "linear_recurrence",
        lambda x, decay: torch.stack(list(_recurrence(x, decay)), 1),
        {"x": normal("batch length channels"), "decay": Values("batch length channels", Domain.UNIT)},
        {"batch": 2, "length": 24, "channels": 32},
        {"batch": 16, "length": 256, "channels": 2048},
        flops="2*batch*length*channels",
        stepwise="length",
    ),
)


def _recurrence(x: torch.Tensor, decay: torch.Tensor) -> list[torch.Tensor]:
    """h[t] = decay[t] h[t - 1] + x[t]."""
    states = [x[:, 0]]
    for step in range(1, x.shape[1]):
        states.append(decay[:, step] * states[-1] + x[:, step])
    return states
