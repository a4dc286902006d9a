"""Rows of tables by index, and the gradients that go back to them."""

import torch
import torch.nn.functional as F

from cuda_l2.tasks._base import Definition
from cuda_l2.tasks.values import integers, normal

_CPU = {"batch": 4, "length": 40, "vocabulary": 300, "width": 48}
_GPU = {"batch": 16, "length": 2048, "vocabulary": 50304, "width": 1024}
_TOKENS = {"tokens": integers("batch length", "vocabulary")}
_TABLE = {"table": normal("vocabulary width")}


def _begin(
    tokens: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, gain: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    """Tokens and positions embedded, summed and normalised, as a transformer begins."""
    return F.layer_norm(F.embedding(tokens, table) + positions, gain.shape, gain, shift)


TASKS = (
    Definition("embedding", lambda tokens, table: F.embedding(tokens, table), _TOKENS, _CPU, _GPU, _TABLE),
    Definition(
        "embedding_bag_sum",
        lambda tokens, table: F.embedding(tokens, table).sum(1),
        _TOKENS,
        _CPU,
        _GPU,
        _TABLE,
        flops="batch*length*width",
    ),
    Definition(
        "embedding_bag_weighted",
        lambda tokens, share, table: torch.einsum("bl,blw->bw", share, F.embedding(tokens, table)),
        {**_TOKENS, "share": normal("batch length")},
        _CPU,
        _GPU,
        _TABLE,
        flops="2*batch*length*width",
    ),
    Definition(
        "embedding_position_norm",
        _begin,
        _TOKENS,
        _CPU,
        _GPU,
        {**_TABLE, "positions": normal("length width"), "gain": normal("width"), "shift": normal("width")},
        flops="8*batch*length*width",
    ),
    Definition(
        "embedding_gradient",
        lambda tokens, gradient, vocabulary: gradient.new_zeros(vocabulary, gradient.shape[-1]).index_add(
            0, tokens.flatten(), gradient.flatten(0, 1)
        ),
        {**_TOKENS, "gradient": normal("batch length width")},
        _CPU,
        _GPU,
        flops="batch*length*width",
    ),
    Definition(
        "embedding_similarity",
        lambda tokens, query, table: (F.embedding(tokens, table) * query[:, None]).sum(-1),
        {**_TOKENS, "query": normal("batch width")},
        _CPU,
        _GPU,
        _TABLE,
        flops="2*batch*length*width",
    ),
)
