"""Decoder layers whose products on the same input are one: query, key and value; gate and up of an MLP."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cuda_l2.system.errors import UserError

KINDS = ("llama", "qwen2")
"""Types of models whose layers are made of these parts."""

Tensor = torch.Tensor


class MergedLinear(torch.nn.Module):
    """Linear layers on one input as one product; their results in order."""

    def __init__(self, layers: Sequence[torch.nn.Linear]) -> None:
        super().__init__()
        first, self.sizes = layers[0], [layer.out_features for layer in layers]
        biased = first.bias is not None
        kind = {"device": first.weight.device, "dtype": first.weight.dtype}
        self.linear = torch.nn.Linear(first.in_features, sum(self.sizes), bias=biased, **kind)
        with torch.no_grad():
            self.linear.weight.copy_(torch.cat([layer.weight for layer in layers]))
            if biased:
                self.linear.bias.copy_(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).split(self.sizes, dim=-1)  # type: ignore[no-any-return]


class MergedAttention(torch.nn.Module):
    """An attention block with one product for query, key and value."""

    def __init__(self, block: Any, attend: Any) -> None:
        super().__init__()
        self.projections = MergedLinear([block.q_proj, block.k_proj, block.v_proj])
        self.o_proj, self.head_dim = block.o_proj, block.head_dim
        self.scaling, self.layer_idx, self.attend = block.scaling, block.layer_idx, attend

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: Any, **others: Any
    ) -> tuple[Tensor, None]:
        shape = hidden_states.shape[:-1]
        query, key, value = (
            each.view(*shape, -1, self.head_dim).transpose(1, 2) for each in self.projections(hidden_states)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        found, _ = self.attend(self, query, key, value, None, self.scaling)
        return self.o_proj(found.reshape(*shape, -1)), None


class MergedMLP(torch.nn.Module):
    """down(activation(gate(x)) * up(x)) with one product for gate and up."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.projections = MergedLinear([block.gate_proj, block.up_proj])
        self.down_proj, self.act_fn = block.down_proj, block.act_fn

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.projections(x)
        result: Tensor = self.down_proj(self.act_fn(gate) * up)
        return result


def merge(model: Any, attend: Any) -> None:
    """Merge the products of every layer, in place. attend: attention, as transformers calls it.

    UserError where the model's layers are of another kind.
    """
    if model.config.model_type not in KINDS:
        raise UserError(f"--merged takes models of type {' and '.join(KINDS)}, not {model.config.model_type}")
    for layer in model.base_model.layers:
        layer.self_attn = MergedAttention(layer.self_attn, attend)
        layer.mlp = MergedMLP(layer.mlp)
