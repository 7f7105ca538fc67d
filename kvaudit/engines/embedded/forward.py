"""The forward pass, layer by layer, over one arena of keys and values.

L layers, H query heads, G KV heads, D head dim, n tokens. The arena is [L, 2, G, capacity, D]: rotated keys, then
values, of the prompt that is being served. "Raw" keys are those before rotation (for Qwen3: after the key norm).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvaudit.engines.embedded.weights import LayerWeights, Linear, Weights

ROWS_PER_BLOCK = 128
"""Rows that attend together: their keys are cut where the last of them stops to see, so that less is masked away."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines [n, D / 2] of n positions, in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Rotation:
        return Rotation(self.cos[rows], self.sin[rows])

    def of(self, raw: Tensor) -> Tensor:
        """Rotate [..., n, D]. The operations and their rounding are those of transformers' rotary embedding."""
        left, right = raw.chunk(2, -1)
        return torch.cat((left * self.cos - right * self.sin, right * self.cos + left * self.sin), -1)

    def in_place(self, raw: Tensor) -> None:
        left, right = raw.chunk(2, -1)
        turned = left * self.cos - right * self.sin
        right.mul_(self.cos).add_(left * self.sin)
        left.copy_(turned)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of a group, which see at most the first `keys` keys, through an additive mask."""

    start: int
    stop: int
    keys: int
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which keys each of R rows sees: row j those at 0..limits[j], limits ascending (int64 [R])."""

    limits: Tensor
    blocks: tuple[Block, ...]

    @property
    def causal(self) -> bool:
        return not self.blocks


@dataclass(frozen=True, slots=True)
class Projected:
    """Rotated queries [H, n, D], raw and rotated keys and values [G, n, D]."""

    queries: Tensor
    raw_keys: Tensor
    keys: Tensor
    values: Tensor


def linear(x: Tensor, layer: Linear) -> Tensor:
    return functional.linear(x, layer.weight, layer.bias)


class Transformer:
    """Llama, Mistral, Qwen2 and Qwen3 blocks over `Weights`. Holds no state but the rotary table."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.device, self.dtype = weights.embedding.device, weights.embedding.dtype
        self.layers = len(weights.layers)
        self.heads, self.kv_heads, self.head_dim = weights.heads, weights.kv_heads, weights.head_dim
        self._table = self._rotations(1024)

    def arena(self, tokens: int) -> Tensor:
        return torch.zeros(self.layers, 2, self.kv_heads, tokens, self.head_dim, dtype=self.dtype, device=self.device)

    @property
    def token_bytes(self) -> int:
        """What the keys and values of one token take."""
        return self.arena(1).nbytes

    def raw_arena(self, tokens: int) -> Tensor:
        return torch.empty(self.layers, self.kv_heads, tokens, self.head_dim, dtype=self.dtype, device=self.device)

    def rotation(self, start: int, stop: int) -> Rotation:
        if stop > len(self._table.cos):
            self._table = self._rotations(max(stop, 2 * len(self._table.cos)))
        return self._table[slice(start, stop)]

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self.weights.embedding[torch.tensor(token_ids, dtype=torch.long, device=self.device)]

    def normed(self, layer: int, hidden: Tensor) -> Tensor:
        return self._norm(hidden, self.weights.layers[layer].input_norm)

    def project(self, layer: int, x: Tensor, rotation: Rotation) -> Projected:
        """Queries, keys and values of the normed hidden states x [n, hidden]."""
        w = self.weights.layers[layer]
        query_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = torch.split(linear(x, w.qkv), [query_size, kv_size, kv_size], -1)
        raw = self._head_norm(self._by_head(k, self.kv_heads), w.k_norm)
        queries = self._head_norm(self._by_head(q, self.heads), w.q_norm)
        return Projected(rotation.of(queries), raw, rotation.of(raw), self._by_head(v, self.kv_heads))

    def raw_keys(self, layer: int, x: Tensor) -> Tensor:
        """Raw keys [G, n, D] alone, without queries and values."""
        w = self.weights.layers[layer]
        return self._head_norm(self._by_head(linear(x, self._part(w, 1)), self.kv_heads), w.k_norm)

    def values(self, layer: int, x: Tensor) -> Tensor:
        return self._by_head(linear(x, self._part(self.weights.layers[layer], 2)), self.kv_heads)

    def queries(self, layer: int, x: Tensor, rotation: Rotation) -> Tensor:
        w = self.weights.layers[layer]
        return rotation.of(self._head_norm(self._by_head(linear(x, self._part(w, 0)), self.heads), w.q_norm))

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP; hidden [R, hidden], attended [H, R, D]."""
        w = self.weights.layers[layer]
        hidden = hidden + linear(attended.transpose(0, 1).flatten(1), w.out)
        gate, up = linear(self._norm(hidden, w.post_norm), w.gate_up).chunk(2, -1)
        return hidden + linear(functional.silu(gate) * up, w.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [R, vocabulary]."""
        return functional.linear(self._norm(hidden, self.weights.norm), self.weights.head).float()

    def visibility(self, limits: Tensor) -> Visibility:
        """Masks for rows with ascending limits; none at all for the plain causal triangle."""
        rows = len(limits)
        if torch.equal(limits, torch.arange(rows, device=limits.device)):
            return Visibility(limits, ())
        group = self.heads // self.kv_heads
        blocks = []
        for start in range(0, rows, ROWS_PER_BLOCK):
            stop = min(rows, start + ROWS_PER_BLOCK)
            keys = int(limits[stop - 1]) + 1
            seen = torch.arange(keys, device=self.device)[None, :] <= limits[start:stop, None]
            mask = torch.zeros(stop - start, keys, dtype=self.dtype, device=self.device)
            blocks.append(Block(start, stop, keys, mask.masked_fill_(~seen, float("-inf")).repeat(group, 1)))
        return Visibility(limits, tuple(blocks))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility | None) -> Tensor:
        """Attention [H, R, D] of queries [H, R, D] over keys and values [G, n, D]; all keys without a visibility."""
        if visibility is not None and visibility.causal:
            rows = queries.shape[1]
            return functional.scaled_dot_product_attention(
                queries[None], keys[None, :, :rows], values[None, :, :rows], is_causal=True, enable_gqa=True
            )[0]
        if visibility is None:
            return self._folded(queries, keys, values, None)
        parts = [
            self._folded(queries[:, b.start : b.stop], keys[:, : b.keys], values[:, : b.keys], b.mask)
            for b in visibility.blocks
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def below(
        self, layer: int, token_ids: Sequence[int], keep: Callable[[int, Projected], None] | None = None
    ) -> Tensor:
        """Hidden states [n, hidden] before `layer` of tokens at positions 0.., with an exact causal mask.

        `keep` is shown what each layer below projects.
        """
        tokens = len(token_ids)
        rotation = self.rotation(0, tokens)
        hidden = self.embed(token_ids)
        causal = Visibility(torch.arange(tokens, device=self.device), ())
        for lower in range(layer):
            made = self.project(lower, self.normed(lower, hidden), rotation)
            if keep is not None:
                keep(lower, made)
            attended = self.attend(made.queries, made.keys, made.values, causal)
            hidden = self.after_attention(lower, hidden, attended)
        return hidden

    def attention(self, queries: Tensor, keys: Tensor, limits: Tensor) -> Tensor:
        """Attention weights, float32 [H, R, n], of queries [H, R, D] over keys [G, n, D]; row j sees 0..limits[j]."""
        rows, tokens = queries.shape[1], keys.shape[1]
        folded = queries.float().reshape(self.kv_heads, -1, self.head_dim)
        scores = (folded @ keys.float().transpose(1, 2) / self.head_dim**0.5).view(self.heads, rows, tokens)
        unseen = torch.arange(tokens, device=self.device)[None, :] > limits[:, None]
        weights: Tensor = scores.masked_fill_(unseen, float("-inf")).softmax(-1)
        return weights

    def extend(
        self,
        token_ids: Sequence[int],
        arena: Tensor,
        start: int,
        raw: Tensor | None = None,
        every_row: bool = False,
        show: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Compute tokens at positions start.. over arena[..., :start, :] with an exact causal mask.

        Writes their keys and values into the arena, and their raw keys into `raw` [L, G, capacity, D].
        `show` is given the hidden states [T, hidden] before each layer.
        Returns hidden states [T, hidden] after the last layer, of the last token only unless `every_row`.
        """
        tokens = len(token_ids)
        stop = start + tokens
        rotation = self.rotation(start, stop)
        hidden = self.embed(token_ids)
        visibility = None if tokens == 1 else self.visibility(torch.arange(start, stop, device=self.device))
        for layer in range(self.layers):
            if show is not None:
                show(layer, hidden)
            made = self.project(layer, self.normed(layer, hidden), rotation)
            keys, values = arena[layer, 0], arena[layer, 1]
            keys[:, start:stop], values[:, start:stop] = made.keys, made.values
            if raw is not None:
                raw[layer, :, start:stop] = made.raw_keys
            if layer == self.layers - 1 and not every_row:
                attended = self.attend(made.queries[:, -1:], keys[:, :stop], values[:, :stop], None)
                hidden = self.after_attention(layer, hidden[-1:], attended)
            else:
                attended = self.attend(made.queries, keys[:, :stop], values[:, :stop], visibility)
                hidden = self.after_attention(layer, hidden, attended)
        return hidden

    def _folded(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The query heads that share a KV head become rows of one head: no copy of keys per query head."""
        rows = queries.shape[1]
        folded = queries.reshape(1, self.kv_heads, -1, self.head_dim)
        out = functional.scaled_dot_product_attention(folded, keys[None], values[None], attn_mask=mask)
        return out.reshape(self.heads, rows, self.head_dim)

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        return x.view(len(x), heads, self.head_dim).transpose(0, 1)

    def _head_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.weights.norm_eps)

    def _part(self, w: LayerWeights, part: int) -> Linear:
        """Queries (0), keys (1) or values (2) out of the fused projection."""
        query_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        first = (0, query_size, query_size + kv_size)[part]
        rows = slice(first, first + (query_size if part == 0 else kv_size))
        return Linear(w.qkv.weight[rows], None if w.qkv.bias is None else w.qkv.bias[rows])

    def _rotations(self, positions: int) -> Rotation:
        w = self.weights
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device=self.device),
            w.inverse_frequencies.to(self.device, torch.float32),
        )
        return Rotation((angles.cos() * w.rotary_scale).to(self.dtype), (angles.sin() * w.rotary_scale).to(self.dtype))
