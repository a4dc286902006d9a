"""Choosing tokens, with the random numbers given as inputs; and reading images between their pixels."""

import math

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import Domain, Values, integers, normal

_SIZES: Fields = {"cpu": {"rows": 24, "vocabulary": 700}, "gpu": {"rows": 512, "vocabulary": 128256}}
_LOGITS = {"logits": normal("rows vocabulary")}
_IMAGES: Fields = {
    "cpu": {"batch": 2, "channels": 4, "height": 16, "width": 18},
    "gpu": {"batch": 32, "channels": 64, "height": 128, "width": 128},
}


def _top_p(logits: torch.Tensor) -> torch.Tensor:
    """Logits of the smallest set that holds 0.9 of the probability, -inf elsewhere."""
    ordered, order = torch.sort(logits, stable=True, dim=-1, descending=True)
    probabilities = torch.softmax(ordered, -1)
    beyond = probabilities.cumsum(-1) - probabilities > 0.9
    return torch.full_like(logits, -math.inf).scatter(-1, order, ordered.masked_fill(beyond, -math.inf))


def _inverse(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated probability passes a given uniform number."""
    cumulated = probabilities.cumsum(-1)
    return (cumulated < uniform[:, None] * cumulated[:, -1:]).sum(-1).clamp_max(probabilities.shape[-1] - 1)


def _penalty(logits: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Tokens that were said before become less likely."""
    said = logits.gather(-1, previous)
    return logits.scatter(-1, previous, torch.where(said > 0, said / 1.2, said * 1.2))


def _accept(draft: torch.Tensor, target: torch.Tensor, token: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """How many drafted tokens speculative decoding keeps: those before the first with u > p_target / p_draft."""
    index = token[..., None]
    kept = uniform * draft.gather(-1, index)[..., 0] <= target.gather(-1, index)[..., 0]
    return kept.long().cumprod(-1).sum(-1)


TASKS = (
    Definition(
        "temperature_softmax",
        lambda logits, temperature: torch.softmax(logits / temperature[:, None], -1),
        {**_LOGITS, "temperature": Values("rows", Domain.POSITIVE)},
        **_SIZES,
        flops="6*rows*vocabulary",
    ),
    Definition("greedy_token", lambda logits: logits.argmax(-1), _LOGITS, **_SIZES),
    Definition(
        "top_k",
        lambda logits: tuple(logits.topk(8)),
        _LOGITS,
        **_SIZES,
        outputs=("values", "indices"),
        among={"indices": "logits"},
    ),
    Definition(
        "top_k_filter",
        lambda logits: logits.masked_fill(logits < logits.topk(8).values[:, -1:], -math.inf),
        _LOGITS,
        **_SIZES,
    ),
    Definition("top_p_filter", _top_p, _LOGITS, **_SIZES),
    Definition(
        "min_p_filter",
        lambda logits: logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(0.05), -math.inf),
        _LOGITS,
        **_SIZES,
    ),
    Definition(
        "inverse_sampling",
        _inverse,
        {"probabilities": Values("rows vocabulary", Domain.PROBABILITIES), "uniform": Values("rows", Domain.UNIT)},
        **_SIZES,
        dtypes=("float32",),
    ),
    Definition(
        "gumbel_sampling",
        lambda logits, uniform: (logits - torch.log(-torch.log(uniform.clamp(1e-6, 1 - 1e-6)))).argmax(-1),
        {**_LOGITS, "uniform": Values("rows vocabulary", Domain.UNIT)},
        **_SIZES,
        dtypes=("float32",),
    ),
    Definition("repetition_penalty", _penalty, {**_LOGITS, "previous": integers("rows 16", "vocabulary")}, **_SIZES),
    Definition(
        "speculative_acceptance",
        _accept,
        {
            "draft": Values("rows steps vocabulary", Domain.PROBABILITIES),
            "target": Values("rows steps vocabulary", Domain.PROBABILITIES),
            "token": integers("rows steps", "vocabulary"),
            "uniform": Values("rows steps", Domain.UNIT),
        },
        {"rows": 8, "steps": 5, "vocabulary": 100},
        {"rows": 256, "steps": 8, "vocabulary": 32000},
        dtypes=("float32",),
    ),
    Definition(
        "resize_bilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False),
        {"x": normal("batch channels height width")},
        **_IMAGES,
        flops="32*batch*channels*height*width",
    ),
    Definition(
        "grid_sample",
        lambda x, grid: F.grid_sample(x, 2 * grid - 1, align_corners=False),
        {"x": normal("batch channels height width"), "grid": Values("batch height width 2", Domain.UNIT)},
        **_IMAGES,
        flops="8*batch*channels*height*width",
        dtypes=("float32",),
    ),
)
