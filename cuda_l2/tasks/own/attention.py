"""Attention: batch, heads, length, depth, in the task's type."""

import math

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition, Fields
from cuda_l2.tasks.values import booleans, integers, normal

_CPU = {"batch": 2, "heads": 3, "length": 48, "depth": 16}
_GPU = {"batch": 8, "heads": 16, "length": 2048, "depth": 64}
_SIZES: Fields = {"cpu": _CPU, "gpu": _GPU, "flops": "4*batch*heads*length*length*depth"}
_QKV = {name: normal("batch heads length depth") for name in ("q", "k", "v")}


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(Q K^T / sqrt(depth) + bias) V, as it is written."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores if bias is None else scores + bias, -1) @ v


def _distance(q: torch.Tensor) -> torch.Tensor:
    """How far back each key (column) lies from each query (row)."""
    position = torch.arange(q.shape[-2], device=q.device)
    return position[:, None] - position


def _masked(q: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """A bias of 0 where allowed, else -inf."""
    return torch.zeros(allowed.shape, dtype=q.dtype, device=q.device).masked_fill(~allowed, -math.inf)


def _alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    distance = _distance(q)
    return _attend(q, k, v, _masked(q, distance >= 0) - slope[:, None, None] * distance.abs().to(q.dtype))


def _linear(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with the feature map elu + 1: no square of the length."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return (q @ (k.mT @ v)) / (q @ k.sum(-2, keepdim=True).mT + 1e-6)


def _paged(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """One query a sequence; its keys and values lie in the pages that its row of the table names."""
    k, v = (pages[table].flatten(1, 2).transpose(1, 2) for pages in (keys, values))
    return _attend(q, k, v)


TASKS = (
    Definition("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), _QKV, **_SIZES),
    Definition("attention_written_out", lambda q, k, v: _attend(q, k, v), _QKV, **_SIZES),
    Definition(
        "attention_causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _QKV,
        **_SIZES,
        indefinite=tuple(_QKV),
    ),
    Definition(
        "attention_window",
        lambda q, k, v: _attend(q, k, v, _masked(q, (_distance(q) >= 0) & (_distance(q) < 8))),
        _QKV,
        **_SIZES,
        indefinite=tuple(_QKV),
    ),
    Definition("attention_alibi", _alibi, {**_QKV, "slope": normal("heads")}, **_SIZES, indefinite=(*_QKV, "slope")),
    Definition(
        "attention_key_padding",
        lambda q, k, v, keep: _attend(q, k, v, torch.where(keep, 0.0, -1e4).to(q.dtype)[:, None, None]),
        {**_QKV, "keep": booleans("batch length")},
        **_SIZES,
    ),
    Definition(
        "attention_grouped_query",
        lambda q, k, v, sharing: _attend(q, k.repeat_interleave(sharing, 1), v.repeat_interleave(sharing, 1)),
        {**_QKV, "q": normal("batch sharing*heads length depth")},
        {**_CPU, "sharing": 2},
        {**_GPU, "heads": 4, "sharing": 4},
        flops="4*batch*heads*sharing*length*length*depth",
        rigid=("sharing",),
    ),
    Definition(
        "attention_cross",
        lambda q, k, v: _attend(q, k, v),
        {**_QKV, "q": normal("batch heads queries depth")},
        {**_CPU, "queries": 20},
        {**_GPU, "queries": 256},
        flops="4*batch*heads*queries*length*depth",
    ),
    Definition("attention_linear", _linear, _QKV, _CPU, _GPU, flops="4*batch*heads*length*depth*depth"),
    Definition(
        "attention_decode_paged",
        _paged,
        {
            "q": normal("batch heads 1 depth"),
            "keys": normal("pages page heads depth"),
            "values": normal("pages page heads depth"),
            "table": integers("batch used", "pages"),
        },
        {"batch": 3, "heads": 4, "depth": 16, "pages": 20, "page": 8, "used": 5},
        {"batch": 64, "heads": 16, "depth": 128, "pages": 4096, "page": 16, "used": 128},
        flops="4*batch*heads*used*page*depth",
        rigid=("page",),
    ),
)
