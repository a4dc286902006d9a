"""A decoder of transformers with random weights, plain and accelerated, and the steps of it that are timed.

A decoding step fills the last place of its cache and a prefill attends to its own tokens alone, so attention needs no
mask and is the same fused kernel of torch's in every arm. Products on the same input may be one: query, key and value;
gate and up of an MLP.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cuda_l2.library.deploy.accelerate import accelerate, recorded
from cuda_l2.library.deploy.entries import DTYPES
from cuda_l2.records import Gemm
from cuda_l2.runs.settings import DecoderSettings
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import read_text
from cuda_l2.system.text import line_of

Tensor = torch.Tensor
KINDS = ("llama", "qwen2")
"""Types of models whose layers are made of these parts."""


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


MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": {
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    },
    "qwen-1.5b": {
        **{"model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28},
        **{"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    },
}
"""Sizes of Llama 3.1 8B and of Qwen2.5 1.5B."""
ATTENTION = "cuda_l2_unmasked"
DECODE, PREFILL, HEAD = "decode", "prefill", "head"


@dataclass(frozen=True)
class Case:
    """A step. decode and prefill: all layers on `tokens` new tokens a sequence; head: the logits of one token each."""

    phase: str
    batch: int
    tokens: int = 1
    cached: int = 0  # tokens of a sequence that the cache holds before

    def __str__(self) -> str:
        return f"{self.phase}, batch {self.batch}"


class Decoder:
    """A model twice, with the same parameters: plain, and accelerated. Parameters are random; none wants a gradient.

    merged: products on the same input are one, in both.
    """

    def __init__(self, config: Any, device: str | torch.device, *, merged: bool = False) -> None:
        self.config, self.device = config, torch.device(device)
        transformers.AttentionInterface.register(ATTENTION, attention)
        torch.manual_seed(0)
        with self.device:
            self.plain: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
                config, dtype=config.dtype, attn_implementation=ATTENTION
            )
        if merged:
            merge(self.plain, attention)
        self.plain.eval().requires_grad_(False)
        shared = {id(parameter): parameter for parameter in self.plain.parameters()}
        self.ours: torch.nn.Module = accelerate(copy.deepcopy(self.plain, shared))

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)


class Step:
    """A case's call on tensors of its own. It moves on the cache's count, which `restore` sets back."""

    def __init__(self, decoder: Decoder, case: Case) -> None:
        self.case, self._cache_layers = case, []
        config, device = decoder.config, decoder.device
        if case.phase == HEAD:
            hidden = torch.randn(case.batch, case.tokens, config.hidden_size, device=device, dtype=config.dtype)
            self.inputs: dict[str, Any] = {"input": hidden}
            return
        cache = transformers.StaticCache(config=config, max_cache_len=case.cached + case.tokens)
        self.inputs = {
            "input_ids": torch.randint(config.vocab_size, (case.batch, case.tokens), device=device),
            "position_ids": torch.arange(case.cached, case.cached + case.tokens, device=device).unsqueeze(0),
            "past_key_values": cache,
            "use_cache": True,
        }
        if any(layer.is_sliding for layer in cache.layers):
            raise UserError("the model has sliding windows; only models whose layers attend to all tokens are timed")
        self.run(self.part(decoder.plain))  # the cache gets its memory
        self._cache_layers = cache.layers
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.restore()

    def part(self, model: Any) -> torch.nn.Module:
        """The module of a model that the step calls."""
        found: torch.nn.Module = model.get_output_embeddings() if self.case.phase == HEAD else model.base_model
        return found

    def run(self, part: torch.nn.Module) -> Tensor:
        """Logits, or the hidden states after the last layer, of shape (batch, tokens, size)."""
        output = part(**self.inputs)
        result: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        return result

    def restore(self) -> None:
        """Have the cache hold as many tokens as before the step."""
        for layer in self._cache_layers:
            layer.cumulative_length.fill_(self.case.cached)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """Each query attends to all keys, in a prefill to those up to its own. Operands: (batch, heads, tokens, size)."""
    causal, grouped = query.shape[2] > 1, query.shape[1] != key.shape[1]
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).contiguous(), None


def cases_of(settings: DecoderSettings) -> list[Case]:
    """The steps of each phase, by batch."""
    batches, context, prefill = settings.batches, settings.context, settings.prefill
    found = [Case(DECODE, batch, cached=context - 1) for batch in batches]
    found += [Case(PREFILL, 1, prefill)] if prefill else []
    return found + [Case(HEAD, batch) for batch in batches]


def config_of(model: str, layers: int) -> Any:
    """transformers' config of a model by name or of a config.json, with at most `layers` layers; UserError for none."""
    path = Path(model)
    if model not in MODELS and path.suffix != ".json":
        raise UserError(f"there is no model {model!r}: choose {', '.join(MODELS)}, or give a config.json")
    try:
        fields = dict(MODELS[model] if model in MODELS else json.loads(read_text(path)))
        dtype = fields.pop("dtype", None) or fields.pop("torch_dtype", None) or "bfloat16"
        if dtype not in DTYPES:
            raise ValueError(f"its type is {dtype}, and kernels serve {' and '.join(DTYPES)}")
        count = min(layers, int(fields["num_hidden_layers"]))
        fields["num_hidden_layers"] = count
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:count]
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError("it is no causal language model")
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UserError(f"{model} is no config.json of a decoder: {line_of(error)}") from None
    config.dtype = getattr(torch, dtype)
    return config


def shapes(decoder: Decoder, cases: Sequence[Case]) -> list[Gemm]:
    """The products that a kernel might serve, each once, in the order they come up."""
    with torch.no_grad(), recorded() as seen:
        for case in cases:
            step = Step(decoder, case)
            step.run(step.part(decoder.ours))
    return list(seen.shapes)
