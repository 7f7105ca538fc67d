"""What a policy is given: one request at the layer where it selects.

Shapes: N reusable tokens, n prompt tokens, L layers and H query heads of the model. Positions are prompt positions.
A signal is computed when it is asked for, once, and only where the policy declares that it needs it; what it costs is
part of the request's TTFT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvaudit.errors import PolicyError
from kvaudit.records import Part

Positions = NDArray[np.int64]
Floats = NDArray[np.float32]

Need = Literal[
    "deviation",
    "key-deviation",
    "value-deviation",
    "query-attention",
    "auxiliary-attention",
    "written-attention",
    "output-kl",
]
"""The signals by name, as a policy declares them."""


@dataclass(frozen=True, slots=True)
class Written:
    """Where the KV of a cached chunk comes from: the write that made it (the ledger's entry, DESIGN 5).

    `position` is that of its first token then, `context_hash` covers the token ids that stood before it then,
    `context_hash_now` those that stand before it now. `over` holds the content ids of the chunks that stood before it
    then, in order.
    """

    request_id: str
    part: Part
    ordinal: int
    position: int
    context_hash: str
    context_hash_now: str
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A prompt segment as a policy sees it: positions [start, end); `hit` when its KV came out of the cache.

    `written` says which write that was; None where it is no hit or the engine cannot say.
    """

    kind: str
    content_id: str
    start: int
    end: int
    hit: bool
    written: Written | None = None


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """What a chunk's tokens looked at when the chunk was written, as sums of attention over its rows.

    `inside` went to the chunk itself; `over` maps the content id of each segment that stood before it to what went
    there. The sum of all is the chunk's number of tokens.
    """

    inside: float
    over: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class WrittenAttention:
    """Attention that was saved when chunks were written, at the check layer, mean over heads.

    outside: float32 [N], the share that the reusable token gave to tokens before its chunk, NaN where nothing was
        saved (zeroed gaps).
    chunks: one for each segment of the prompt, None where nothing was saved.
    """

    outside: Floats
    chunks: tuple[ChunkAttention | None, ...]


class Signals(Protocol):
    """What an engine computes on demand. The shapes and meanings are those of `SelectionContext`'s methods."""

    def deviation(self) -> Floats: ...

    def key_deviation(self, layer: int) -> Floats: ...

    def value_deviation(self, layer: int) -> Floats: ...

    def query_attention(self, layer: int) -> Floats: ...

    def auxiliary_attention(self) -> Floats: ...

    def written_attention(self) -> WrittenAttention: ...

    def output_kl(self, positions: Positions) -> float: ...

    @property
    def precision(self) -> float:
        """How far rounding may move what was computed, relative to its size: some units in the last place."""
        ...

    def norms(self, need: Need, layer: int) -> Floats:
        """float32 [N], the L2 norms of the fresh keys (or values) that this deviation (`deviation`, `key-deviation` or
        `value-deviation`) compares at a layer; asked of deviations that the policy was given."""
        ...


@dataclass(frozen=True, slots=True)
class SelectionContext:
    """One request at the layer where its policy selects.

    policy: the policy's name.
    layer: where the selection happens: selected tokens are recomputed from this layer on.
    layers: L, how many layers the model has.
    k: how many positions to return. Always 0 <= k <= N.
    positions: int64 [N], ascending prompt positions of the reusable tokens. At a later layer of a policy that
        narrows its selection layer by layer, those that are still recomputed.
    token_ids: int64 [n], the whole prompt.
    segments: the prompt's tiling, in order.
    rng: seeded by (run seed, request id); a policy holds no state of its own between requests.
    needs: the signals that the policy declares.

    Every signal raises PolicyError, naming the policy, where the policy does not declare it.
    """

    policy: str
    request_id: str
    layer: int
    layers: int
    k: int
    positions: Positions
    token_ids: Positions
    segments: Sequence[SegmentView]
    rng: np.random.Generator
    needs: frozenset[Need]
    signals: Signals

    @property
    def deviation(self) -> Floats:
        """float32 [N]: squared L2 distance between a token's current key and its cached key as it is loaded (moved
        to the current position), summed over all KV heads, at `layer` (paper 2.2, equation 1). Of values in place of
        keys where the engine's switch says so (CacheBlend's own repository). Needs `deviation`.
        """
        return self._declared("deviation").deviation()

    def key_deviation(self, layer: int | None = None) -> Floats:
        """float32 [N]: as `deviation`, of keys, at any layer up to `layer`. Needs `key-deviation`."""
        return self._declared("key-deviation").key_deviation(self._reached(layer))

    def value_deviation(self, layer: int | None = None) -> Floats:
        """float32 [N]: as `deviation`, of values, at any layer up to `layer`. Needs `value-deviation`."""
        return self._declared("value-deviation").value_deviation(self._reached(layer))

    def query_attention(self, layer: int | None = None) -> Floats:
        """float32 [H, N]: attention of the last segment's tokens over the cached keys of the reusable tokens at any of
        the L layers (default: `layer`), mean over those query rows, in a prefill that reuses everything and recomputes
        nothing. Softmax over all keys that a row sees, so that a head's sum is at most 1. Needs `query-attention`.
        """
        signals, asked = self._declared("query-attention"), self.layer if layer is None else layer
        if not 0 <= asked < self.layers:
            raise self._error(f"asked for query attention at layer {asked}", f"layers are 0 to {self.layers - 1}")
        return signals.query_attention(asked)

    def auxiliary_attention(self) -> Floats:
        """float32 [H', N]: attention of the last segment's tokens over the reusable tokens in the last layer of a small
        auxiliary model with H' heads that prefills the whole prompt; mean over those query rows, summed over the
        auxiliary tokens that share text with a token. Needs `auxiliary-attention`.
        """
        return self._declared("auxiliary-attention").auxiliary_attention()

    def written_attention(self) -> WrittenAttention:
        """What each chunk looked at when it was written. Needs `written-attention`."""
        return self._declared("written-attention").written_attention()

    def output_kl(self, positions: Positions) -> float:
        """KL divergence in nats of the first answer token's distribution from full prefill's, KL(full prefill || run),
        if these positions were recomputed. A full prefill the first time, then a pass each. Needs `output-kl`.
        """
        return self._declared("output-kl").output_kl(positions)

    def _declared(self, need: Need) -> Signals:
        if need not in self.needs:
            declared = ", ".join(sorted(self.needs)) or "nothing"
            raise self._error(f"asked for {need}, and declares {declared}", f"add {need!r} to its `needs`")
        return self.signals

    def _reached(self, layer: int | None) -> int:
        asked = self.layer if layer is None else layer
        if not 0 <= asked <= self.layer:
            raise self._error(f"asked for deviation at layer {asked}", f"it selects at layer {self.layer}: up to there")
        return asked

    def _error(self, what: str, hint: str) -> PolicyError:
        return PolicyError(f"policy {self.policy!r} {what} for request {self.request_id!r}", hint)
