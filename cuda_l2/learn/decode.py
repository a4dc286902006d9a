"""Answers of a Llama, many at once: a static cache of keys and values, and one CUDA graph a token on a GPU.

transformers' generate is bound by the host there: 90 ms a token whatever the batch. Prompts are padded on the left, so
every answer's next token is in the same column of the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PROMPTS = 8
"""Prompts that are read together."""
COLUMNS = 512
"""A graph's attention reads the cache up to a multiple of this; each has a graph of its own."""
STATIC = "default", "linear", "llama3", "yarn"
"""Rotary positions that do not look at the length of the text, as a graph cannot."""
CHECK = 32
"""Tokens between two looks whether every answer has ended."""


def serves(model: Any) -> bool:
    """Whether `write` computes what the model does."""
    config = model.config
    if config.model_type != "llama" or hasattr(model, "peft_config") or hasattr(config, "quantization_config"):
        return False
    positions = getattr(model.model.rotary_emb, "rope_type", "default") in STATIC
    return positions and not (config.attention_bias or config.mlp_bias) and config.hidden_act == "silu"


@torch.no_grad()
def write(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, pad: int, end: int
) -> list[list[int]]:
    """Up to `tokens` tokens for each prompt; after its end `end` is repeated. torch's generator decides."""
    return _Decoder(model, prompts, tokens, temperature, pad, end).write()


@dataclass(frozen=True)
class _Layer:
    """A layer's weights in the type of products; norms in that of the residual stream."""

    before: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    after: torch.Tensor
    up: torch.Tensor  # gate's, then up's
    down: torch.Tensor


class _Decoder:
    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, pad: int, end: int
    ) -> None:
        config, inner = model.config, model.model
        self._device = inner.embed_tokens.weight.device
        self._type = torch.bfloat16 if self._device.type == "cuda" else inner.embed_tokens.weight.dtype
        self._temperature, self._end, self._tokens = temperature, end, tokens
        self._heads, self._shared = config.num_attention_heads, config.num_key_value_heads
        self._size, self._epsilon = inner.layers[0].self_attn.head_dim, config.rms_norm_eps
        self._rotary, self._norm = inner.rotary_emb, inner.norm.weight
        self._embedding, self._head = inner.embed_tokens.weight, self._low(model.lm_head.weight)
        self._layers = [self._layer(layer) for layer in inner.layers]
        # answers to one question share its reading
        self._unique = list(dict.fromkeys(map(tuple, prompts)))
        places = {prompt: place for place, prompt in enumerate(self._unique)}
        self._which = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=self._device)
        self._longest = max(map(len, self._unique))
        self._width = -(-(self._longest + tokens) // COLUMNS) * COLUMNS
        self._ids = torch.tensor([[pad] * (self._longest - len(p)) + list(p) for p in self._unique]).to(self._device)
        self._padding = torch.tensor([self._longest - len(p) for p in self._unique], device=self._device)
        shape = (len(self._layers), 2, len(prompts), self._shared, self._width, self._size)
        self._cache = torch.zeros(shape, dtype=self._type, device=self._device)

    def _low(self, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.detach() for weight in weights]).to(self._type)

    def _layer(self, layer: Any) -> _Layer:
        heads, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm.weight,
            self._low(heads.q_proj.weight, heads.k_proj.weight, heads.v_proj.weight),
            self._low(heads.o_proj.weight),
            layer.post_attention_layernorm.weight,
            self._low(mlp.gate_proj.weight, mlp.up_proj.weight),
            self._low(mlp.down_proj.weight),
        )

    def write(self) -> list[list[int]]:
        logits = torch.cat([self._read(start) for start in range(0, len(self._unique), PROMPTS)])[self._which]
        count, padding = len(self._which), self._padding[self._which]
        hidden = torch.arange(self._width, device=self._device) < padding[:, None]
        hidden[:, self._longest :] = True
        self._mask = torch.zeros((count, 1, 1, self._width), dtype=self._type, device=self._device)
        self._mask.masked_fill_(hidden[:, None, None], float("-inf"))
        self._column = torch.tensor([self._longest], device=self._device)
        self._place = (self._longest - padding)[:, None]
        self._answers = torch.full((count, self._tokens), self._end, device=self._device)
        self._answers[:, 0] = self._drawn(logits)
        self._done = self._answers[:, 0] == self._end
        self._next = self._answers[:, :1].clone()
        graphs: dict[int, Any] = {}
        for number in range(1, self._tokens):
            width = -(-(self._longest + number) // COLUMNS) * COLUMNS
            if width in graphs:
                graphs[width].replay()
            else:
                self._step(width)
                if self._device.type == "cuda":
                    graphs = {width: self._captured(width)}
            if number % CHECK == 0 and bool(self._done.all()):
                break
        return self._answers.tolist()

    def _captured(self, width: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the judge's threads may call CUDA meanwhile
            self._step(width)
        return graph

    def _read(self, start: int) -> torch.Tensor:
        """Fill the cache for some prompts; the logits of their first tokens."""
        ids, padding = self._ids[start : start + PROMPTS], self._padding[start : start + PROMPTS]
        columns = torch.arange(self._longest, device=self._device)
        places = (columns - padding[:, None]).clamp(min=0)
        seen = (columns[:, None] >= columns) & (columns >= padding[:, None, None])
        seen |= torch.eye(self._longest, dtype=torch.bool, device=self._device)  # padding sees itself: no row is empty
        kept = [(self._which == place).nonzero()[:, 0] for place in range(start, start + len(ids))]

        def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for row, rows in enumerate(kept):
                self._cache[number, 0, rows, :, : self._longest] = k[row]
                self._cache[number, 1, rows, :, : self._longest] = v[row]
            group = self._heads // self._shared
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])

        return self._logits(ids, places, attend)

    def _step(self, width: int) -> None:
        """One more token of every answer; all of its state is on the device."""
        self._mask.index_fill_(3, self._column, 0.0)

        def attend(number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._cache[number]
            keys.index_copy_(2, self._column, k)
            values.index_copy_(2, self._column, v)
            # heads that share keys are rows of one query
            grouped = q.view(len(q), self._shared, -1, self._size)
            rows = self._mask[..., :width].expand(-1, self._shared, grouped.shape[2], -1)
            seen = functional.scaled_dot_product_attention(
                grouped, keys[:, :, :width], values[:, :, :width], attn_mask=rows
            )
            return seen.reshape(q.shape)

        drawn = self._drawn(self._logits(self._next, self._place, attend))
        drawn = torch.where(self._done, self._end, drawn)
        self._column += 1
        self._place += 1
        self._answers.index_copy_(1, self._column - self._longest, drawn[:, None])
        self._done |= drawn == self._end
        self._next.copy_(drawn[:, None])

    def _logits(self, ids: torch.Tensor, places: torch.Tensor, attend: Any) -> torch.Tensor:
        """Logits of each row's last token. The residual stream has the weights' type, as under autocast."""
        x = functional.embedding(ids, self._embedding)
        cos, sin = (part[:, None].to(self._type) for part in self._rotary(x, places))
        rows, length = ids.shape
        with sdpa_kernel(BACKENDS):
            for number, layer in enumerate(self._layers):
                qkv = self._normed(x, layer.before) @ layer.qkv.T
                qkv = qkv.view(rows, length, -1, self._size).transpose(1, 2)
                q, k, v = qkv.tensor_split([self._heads, self._heads + self._shared], 1)
                seen = attend(number, _turned(q, cos, sin), _turned(k, cos, sin), v)
                x = x + seen.transpose(1, 2).reshape(rows, length, -1) @ layer.out.T
                gate, up = (self._normed(x, layer.after) @ layer.up.T).chunk(2, -1)
                x = x + (functional.silu(gate) * up) @ layer.down.T
        return self._normed(x[:, -1], self._norm) @ self._head.T

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self._epsilon).to(self._type)

    def _drawn(self, logits: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(logits.float() / self._temperature, -1)
        return (shares / torch.empty_like(shares).exponential_()).argmax(-1)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin
