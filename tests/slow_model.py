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
    """A prompt's cache while it is served: raw keys and values, float64 [L, G, n, D], and the positions to which keys
    are turned, int64 [L, n]: their own, but for keys that were not moved."""

    keys: torch.Tensor
    values: torch.Tensor
    places: torch.Tensor

    @classmethod
    def zeros(cls, layers: int, heads: int, tokens: int, dim: int) -> Mixed:
        shape = (layers, heads, tokens, dim)
        places = torch.arange(tokens).repeat(layers, 1)
        return cls(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64), places)

    def copy(self) -> Mixed:
        return Mixed(self.keys.clone(), self.values.clone(), self.places.clone())

    def grown(self) -> Mixed:
        """A copy with room for one more token."""
        keys, values = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (self.keys, self.values))
        return Mixed(keys, values, torch.nn.functional.pad(self.places, (0, 1), value=self.places.shape[1]))

    def put(self, layer: int, position: int, key: torch.Tensor, value: torch.Tensor, place: int | None = None) -> None:
        self.places[layer, position] = position if place is None else place
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
        values = cache.values[layer][:, visible]
        weights = self.attention(layer, hidden, position, cache, visible)
        heads = [weights[head] @ values[self._group(head)] for head in range(self.query_heads)]
        hidden = hidden + block.self_attn.o_proj(torch.cat(heads))
        normed = self._norm(hidden, block.post_attention_layernorm.weight)
        gate = torch.nn.functional.silu(block.mlp.gate_proj(normed))
        return hidden + block.mlp.down_proj(gate * block.mlp.up_proj(normed))

    def attention(
        self, layer: int, hidden: torch.Tensor, position: int, cache: Mixed, visible: Sequence[int]
    ) -> torch.Tensor:
        """How the token at `position` shares its attention among the cache's `visible` positions, [H, visible]."""
        attention, normed = self.layers[layer].self_attn, self._attention_input(layer, hidden)
        query = self._head_norm(attention, "q_norm", attention.q_proj(normed).view(self.query_heads, self.head_dim))
        query = self.rotate(query[:, None], [position])[:, 0]
        keys = self.turned(cache, layer, visible)
        scores = [keys[self._group(head)] @ query[head] / math.sqrt(self.head_dim) for head in range(self.query_heads)]
        return torch.stack([torch.softmax(score, dim=0) for score in scores])

    def turned(self, cache: Mixed, layer: int, positions: Sequence[int]) -> torch.Tensor:
        """Keys of a layer of the cache at these positions, turned to their places, [G, positions, D]."""
        return self.rotate(cache.keys[layer][:, positions], cache.places[layer, positions].tolist())

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(self._norm(hidden, self.model.model.norm.weight))

    def rotate(self, raw: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """[heads, tokens, D] turned to their positions by the model's own cosines and sines."""
        cosine, sine = self.rotary(raw, torch.tensor([list(positions)]))
        first, second = raw.chunk(2, dim=-1)
        return raw * cosine[0].double() + torch.cat((-second, first), dim=-1) * sine[0].double()

    def _group(self, head: int) -> int:
        return head // (self.query_heads // self.kv_heads)

    def _attention_input(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return self._norm(hidden, self.layers[layer].input_layernorm.weight)

    def _head_norm(self, attention: Any, name: str, heads: torch.Tensor) -> torch.Tensor:
        return self._norm(heads, getattr(attention, name).weight) if hasattr(attention, name) else heads

    def _norm(self, vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * vector / (vector.pow(2).mean(dim=-1, keepdim=True) + self.epsilon).sqrt()
