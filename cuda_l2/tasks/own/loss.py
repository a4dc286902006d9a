"""Losses as training computes them, and the gradients that begin the way back."""

import math

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import Domain, Values, booleans, integers, normal

_CLASSES: Fields = {"cpu": {"rows": 48, "classes": 300}, "gpu": {"rows": 8192, "classes": 32000}}
_LOGITS = {"logits": normal("rows classes"), "target": integers("rows", "classes")}
_PAIRS: Fields = {"cpu": {"rows": 64, "columns": 200}, "gpu": {"rows": 8192, "columns": 4096}}
_PAIR = {"x": normal("rows columns"), "y": normal("rows columns")}
_LABELLED = {"x": normal("rows columns"), "label": booleans("rows columns")}


def _focal(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Binary focal loss with gamma 2 and alpha 0.25."""
    target = label.to(x.dtype)
    plain = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    probability = torch.sigmoid(x)
    missed = torch.where(label, 1 - probability, probability)
    return (torch.where(label, 0.25, 0.75).to(x.dtype) * missed.square() * plain).mean()


def _gradient(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The gradient of the mean cross entropy by the logits."""
    return (torch.softmax(logits, -1) - F.one_hot(target, logits.shape[-1])) / logits.shape[0]


def _contrastive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """InfoNCE at temperature 0.1: row i of x belongs to row i of y."""
    scores = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT / 0.1
    return (torch.logsumexp(scores, -1) - scores.diagonal()).mean()


def _dice(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    probability, target = torch.sigmoid(x), label.to(x.dtype)
    return 1 - (2 * (probability * target).sum(-1) + 1) / (probability.sum(-1) + target.sum(-1) + 1)


TASKS = (
    Definition(
        "cross_entropy",
        lambda logits, target: F.cross_entropy(logits, target),
        _LOGITS,
        **_CLASSES,
        flops="5*rows*classes",
    ),
    Definition(
        "cross_entropy_smoothed",
        lambda logits, target: F.cross_entropy(logits, target, label_smoothing=0.1, reduction="none"),
        _LOGITS,
        **_CLASSES,
        flops="6*rows*classes",
    ),
    Definition("cross_entropy_gradient", _gradient, _LOGITS, **_CLASSES, flops="6*rows*classes"),
    Definition(
        "linear_cross_entropy",
        lambda x, target, w: F.cross_entropy(F.linear(x, w), target),
        {"x": normal("rows width"), "target": integers("rows", "classes")},
        {"rows": 48, "classes": 300, "width": 32},
        {"rows": 4096, "classes": 32000, "width": 1024},
        {"w": normal("classes width", "width")},
        flops="2*rows*classes*width",
    ),
    Definition("mse", lambda x, y: F.mse_loss(x, y), _PAIR, **_PAIRS, flops="3*rows*columns"),
    Definition("huber", lambda x, y: F.huber_loss(x, y), _PAIR, **_PAIRS, flops="5*rows*columns"),
    Definition(
        "binary_cross_entropy",
        lambda x, label: F.binary_cross_entropy_with_logits(x, label.to(x.dtype)),
        _LABELLED,
        **_PAIRS,
        flops="8*rows*columns",
        indefinite=("x",),
    ),
    Definition("focal", _focal, _LABELLED, **_PAIRS, flops="14*rows*columns", indefinite=("x",)),
    Definition("dice", _dice, _LABELLED, **_PAIRS, flops="8*rows*columns"),
    Definition(
        "hinge",
        lambda x, label: F.relu(1 - torch.where(label, x, -x)).mean(),
        _LABELLED,
        **_PAIRS,
        flops="3*rows*columns",
    ),
    Definition(
        "kl_divergence",
        lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True),
        dict.fromkeys(_PAIR, Values("rows columns", Domain.LOG_PROBABILITIES)),
        **_PAIRS,
        flops="4*rows*columns",
    ),
    Definition(
        "gaussian_likelihood",
        lambda x, y, variance: 0.5 * (variance.log() + (x - y).square() / variance + math.log(2 * math.pi)).mean(-1),
        {**_PAIR, "variance": Values("rows columns", Domain.POSITIVE)},
        **_PAIRS,
        flops="7*rows*columns",
    ),
    Definition(
        "triplet_margin",
        lambda x, y, z: F.triplet_margin_loss(x, y, z),
        {**_PAIR, "z": normal("rows columns")},
        **_PAIRS,
        flops="8*rows*columns",
    ),
    Definition(
        "cosine_distance", lambda x, y: 1 - F.cosine_similarity(x, y, -1), _PAIR, **_PAIRS, flops="6*rows*columns"
    ),
    Definition("contrastive", _contrastive, _PAIR, **_PAIRS, flops="2*rows*rows*columns"),
)
