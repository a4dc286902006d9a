"""Convolutions, channels first, in the task's type."""

import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import Domain, Values, normal

_CPU = {"batch": 2, "channels": 8, "filters": 12, "height": 20, "width": 24, "window": 3}
_GPU = {"batch": 32, "channels": 64, "filters": 128, "height": 128, "width": 128, "window": 3}
_IMAGE = {"x": normal("batch channels height width")}
_FILTERS = {"w": normal("filters channels window window", "channels*window*window")}
_FLOPS = "2*batch*filters*channels*height*width*window*window"
_PLAIN: Fields = {"cpu": _CPU, "gpu": _GPU, "rigid": ("window",), "flops": _FLOPS, "indefinite": ("w",)}


TASKS = (
    Definition(
        "conv1d",
        lambda x, w, window: F.conv1d(x, w, padding=window // 2),
        {"x": normal("batch channels length")},
        {"batch": 2, "channels": 12, "filters": 16, "length": 200, "window": 5},
        {"batch": 32, "channels": 128, "filters": 256, "length": 8192, "window": 5},
        {"w": normal("filters channels window", "channels*window")},
        flops="2*batch*filters*channels*length*window",
        rigid=("window",),
        indefinite=("w",),
    ),
    Definition("conv2d", lambda x, w: F.conv2d(x, w, padding=1), _IMAGE, weights=_FILTERS, **_PLAIN),
    Definition(
        "conv2d_stride2",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        _IMAGE,
        weights=_FILTERS,
        **{**_PLAIN, "flops": _FLOPS + "/4"},
    ),
    Definition(
        "conv2d_dilated", lambda x, w: F.conv2d(x, w, padding=2, dilation=2), _IMAGE, weights=_FILTERS, **_PLAIN
    ),
    Definition(
        "conv2d_bias_relu",
        lambda x, w, bias: F.relu(F.conv2d(x, w, bias, padding=1)),
        _IMAGE,
        weights={**_FILTERS, "bias": normal("filters")},
        **_PLAIN,
    ),
    Definition(
        "conv2d_batch_norm_silu",
        lambda x, w, mean, variance, gain, shift: F.silu(
            F.batch_norm(F.conv2d(x, w, padding=1), mean, variance, gain, shift)
        ),
        _IMAGE,
        weights={
            **_FILTERS,
            "mean": normal("filters"),
            "variance": Values("filters", Domain.POSITIVE),
            "gain": normal("filters"),
            "shift": normal("filters"),
        },
        **{**_PLAIN, "indefinite": ("w", "gain")},
    ),
    Definition(
        "conv2d_grouped",
        lambda x, w, groups: F.conv2d(x, w, padding=1, groups=groups),
        {"x": normal("batch groups*channels height width")},
        {"batch": 2, "groups": 4, "channels": 4, "filters": 6, "height": 20, "width": 24},
        {"batch": 32, "groups": 8, "channels": 16, "filters": 16, "height": 128, "width": 128},
        {"w": normal("groups*filters channels 3 3", "channels*9")},
        flops="18*batch*groups*filters*channels*height*width",
        rigid=("groups",),
        indefinite=("w",),
    ),
    Definition(
        "conv2d_depthwise",
        lambda x, w, channels: F.conv2d(x, w, padding=2, groups=channels),
        {"x": normal("batch channels height width")},
        {"batch": 2, "channels": 12, "height": 20, "width": 24},
        {"batch": 32, "channels": 256, "height": 112, "width": 112},
        {"w": normal("channels 1 5 5", "25")},
        flops="50*batch*channels*height*width",
        indefinite=("w",),
    ),
    Definition(
        "conv2d_pointwise",
        lambda x, w: F.conv2d(x, w),
        {"x": normal("batch channels height width")},
        {"batch": 2, "channels": 24, "filters": 32, "height": 14, "width": 14},
        {"batch": 32, "channels": 256, "filters": 512, "height": 56, "width": 56},
        {"w": normal("filters channels 1 1", "channels")},
        flops="2*batch*channels*filters*height*width",
    ),
    Definition(
        "conv2d_transposed",
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        {"x": normal("batch channels height width")},
        {"batch": 2, "channels": 8, "filters": 6, "height": 12, "width": 10},
        {"batch": 32, "channels": 128, "filters": 64, "height": 64, "width": 64},
        {"w": normal("channels filters 4 4", "channels*4")},
        flops="32*batch*channels*filters*height*width",
    ),
    Definition(
        "conv3d",
        lambda x, w: F.conv3d(x, w, padding=1),
        {"x": normal("batch channels depth height width")},
        {"batch": 1, "channels": 4, "filters": 6, "depth": 6, "height": 10, "width": 12},
        {"batch": 8, "channels": 32, "filters": 64, "depth": 16, "height": 64, "width": 64},
        {"w": normal("filters channels 3 3 3", "channels*27")},
        flops="54*batch*filters*channels*depth*height*width",
        indefinite=("w",),
    ),
    Definition(
        "causal_depthwise_conv1d",
        lambda x, w, channels, window: F.silu(F.conv1d(F.pad(x, (window - 1, 0)), w, groups=channels)),
        {"x": normal("batch channels length")},
        {"batch": 2, "channels": 24, "length": 100, "window": 4},
        {"batch": 8, "channels": 4096, "length": 2048, "window": 4},
        {"w": normal("channels 1 window", "window")},
        flops="2*batch*channels*length*window",
        rigid=("window",),
        indefinite=("w",),
    ),
)
