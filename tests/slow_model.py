"""A transformers model's weights, one token at a time in float64, with the visible positions given by the caller."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Mixed:
    """A prompt's cache while it is served: raw keys and values, float64 [L, G, n, D]."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def zeros(cls, layers: int, heads: int, tokens: int, dim: int) -> Mixed:
        shape = (layers, heads, tokens, dim)
        return cls(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))

    def grown(self) -> Mixed:
        """A copy with room for one more token."""
        return Mixed(*(torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (self.keys, self.values)))

    def put(self, layer: int, position: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.keys[layer, :, position] = key
        self.values[layer, :, position] = value


class SlowModel:
    """One token at a time through the weights of a transformers model, in float64."""

    def __init__(self, hf_model: Any) -> None:
        assert getattr(hf_model.config, "sliding_window", None) is None, "sliding windows are not modelled"
        self.model = copy.deepcopy(hf_model).double()
        self.rotary = hf_model.model.rotary_emb
        config = hf_model.config
        self.layers = list(self.model.model.layers)
        self.kv_heads = config.num_key_value_heads
        self.query_heads = config.num_attention_heads
        self.head_dim = self.layers[0].self_attn.head_dim
        self.epsilon = config.rms_norm_eps

    def embed(self, token_id: int) -> torch.Tensor:
        row: torch.Tensor = self.model.model.embed_tokens.weight[token_id]
        return row

    def key_and_value(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw key and value of one token, [G, D] each."""
        attention, normed = self.layers[layer].self_attn, self._attention_input(layer, hidden)
        key = self._head_norm(attention, "k_norm", attention.k_proj(normed).view(self.kv_heads, self.head_dim))
        return key, attention.v_proj(normed).view(self.kv_heads, self.head_dim)

    def block(
        self, layer: int, hidden: torch.Tensor, position: int, cache: Mixed, visible: Iterable[int]
    ) -> torch.Tensor:
        """The layer's output for the token at `position` that attends to the cache's `visible` positions."""
        block, visible = self.layers[layer], list(visible)
        attention, normed = block.self_attn, self._attention_input(layer, hidden)
        query = self._head_norm(attention, "q_norm", attention.q_proj(normed).view(self.query_heads, self.head_dim))
        query = self.rotate(query[:, None], [position])[:, 0]
        keys = self.rotate(cache.keys[layer][:, visible], visible)
        values = cache.values[layer][:, visible]
        heads = []
        for head in range(self.query_heads):
            group = head // (self.query_heads // self.kv_heads)
            weights = torch.softmax(keys[group] @ query[head] / math.sqrt(self.head_dim), dim=0)
            heads.append(weights @ values[group])
        hidden = hidden + attention.o_proj(torch.cat(heads))
        normed = self._norm(hidden, block.post_attention_layernorm.weight)
        gate = torch.nn.functional.silu(block.mlp.gate_proj(normed))
        return hidden + block.mlp.down_proj(gate * block.mlp.up_proj(normed))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self._norm(hidden, self.model.model.norm.weight))

    def rotate(self, raw: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """[heads, tokens, D] turned to their positions by the model's own cosines and sines."""
        cosine, sine = self.rotary(raw, torch.tensor([list(positions)]))
        first, second = raw.chunk(2, dim=-1)
        return raw * cosine[0].double() + torch.cat((-second, first), dim=-1) * sine[0].double()

    def _attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, self.layers[layer].input_layernorm.weight)

    def _head_norm(self, attention: Any, name: str, heads: torch.Tensor) -> torch.Tensor:
        return self._norm(heads, getattr(attention, name).weight) if hasattr(attention, name) else heads

    def _norm(self, vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * vector / (vector.pow(2).mean(dim=-1, keepdim=True) + self.epsilon).sqrt()
