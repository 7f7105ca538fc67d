"""What a policy may ask for (`kvaudit.policies.context.Signals`), computed when it asks and not before.

n prompt tokens, L layers, H query heads, G KV heads, D head dim. A signal never changes what the real pass reads:
it works on memory of its own, or on rows that the real pass writes itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvaudit.engines.embedded.mixed import MixedCache, Rows
from kvaudit.errors import EngineError, PolicyError
from kvaudit.policies import Floats, Need, Positions, WrittenAttention
from kvaudit.records import Prompt

Auxiliary = Callable[[Prompt, int, int], Floats]
"""Attention float32 [H', n] of a prompt's rows [start, end) over all its tokens, in a model with H' heads."""

KEYS, VALUES = 0, 1

UNITS_OFF = {torch.float32: 6, torch.float16: 1, torch.bfloat16: 1}
"""How many units in the last place a token's key is off, as a vector, where only rounding is: measured on
smollm2-135m at the check layer, cached against fresh, up to 5.2 in float32 and 0.9 in bfloat16. Contexts that really
differ are thousands of units away in float32."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A layer at which a policy selects.

    left: int64, the reusable positions that may still be chosen. rows: int64 [R], the positions that were computed up
    to here, `left` and all that every pass computes among them. hidden: their hidden states [R, hidden] before `layer`.
    The arena is as loaded from `layer` on, but for the rows that every pass computes.
    """

    layer: int
    left: Positions
    rows: Positions
    hidden: Tensor

    def pick(self, positions: Positions) -> Tensor:
        """Hidden states of some of the rows."""
        return self.hidden[torch.from_numpy(np.searchsorted(self.rows, positions)).to(self.hidden.device)]


class QueryPass:
    """A prefill that reuses everything and recomputes nothing, as far up as somebody asks.

    Its rows are all tokens that are not reusable, from layer 0 on, over the cache as loaded.
    """

    def __init__(self, mixed: MixedCache) -> None:
        self._mixed = mixed
        self._attention: list[Floats] = []

    def attention(self, layer: int, intact_from: int) -> Floats:
        """float32 [H, n]: mean over the computed rows of the last segment. The arena is as loaded from `intact_from`
        on."""
        while len(self._attention) <= layer:
            self._advance(len(self._attention), intact_from)
        return self._attention[layer]

    @cached_property
    def _rows(self) -> Rows:
        return self._mixed.rows_and_suffix(self._mixed.span.computed)

    @cached_property
    def _hidden(self) -> Tensor:
        token_ids = self._mixed.prompt.token_ids
        return self._mixed.transformer.embed([token_ids[position] for position in self._rows.at.tolist()])

    def _advance(self, layer: int, intact_from: int) -> None:
        mixed, rows = self._mixed, self._rows
        states = mixed.arena[layer] if layer >= intact_from else mixed.loaded(layer)
        made = mixed.put(layer, self._hidden, rows, states)
        asking = rows.at >= mixed.prompt.segments[-1].start
        limits = rows.visibility.limits[asking]
        weights = mixed.transformer.attention(made.queries[:, asking], states[KEYS], limits)
        self._attention.append(weights.mean(1).cpu().numpy())
        last = layer == mixed.transformer.layers - 1
        self._hidden = mixed.follow(layer, self._hidden, made, rows, states, "none" if last else "every")


class RequestSignals:
    """What is the same at every layer that a request's policy selects at, computed once."""

    def __init__(self, mixed: MixedCache, policy: str, request_id: str, auxiliary: Auxiliary | None) -> None:
        self.mixed, self.policy, self.request_id = mixed, policy, request_id
        self.query_pass = QueryPass(mixed)
        self.ranking_part = VALUES if mixed.switches.deviation == "value" else KEYS
        self._auxiliary = auxiliary

    def distance(self, fresh: Tensor, cached: Tensor) -> Floats:
        """Squared L2 distance over all KV heads of [G, R, D], float32 [R] (paper 2.2, equation 1)."""
        distance: Floats = (fresh.float() - cached.float()).square().sum((0, 2)).cpu().numpy()
        return distance

    def finite(self, deviation: Floats) -> Floats:
        if not np.isfinite(deviation).all():
            raise EngineError(
                f"the token deviation of request {self.request_id!r} is not finite", "try --dtype float32 or bfloat16"
            )
        return deviation

    def projected(self, layer: int, hidden: Tensor, rows: Positions, part: int) -> Tensor:
        """Rotated keys or values [G, R, D] of rows from their hidden states before a layer."""
        t = self.mixed.transformer
        normed = t.normed(layer, hidden)
        if part == VALUES:
            return t.values(layer, normed)
        return t.rotation(0, self.mixed.span.end)[self.mixed.index(rows)].of(t.raw_keys(layer, normed))

    @torch.inference_mode()
    def deviation_as_recorded(self, below: Tensor | None) -> Floats:
        """float32 [N] at the check layer, whatever was computed since; `below` is the range's hidden states before it
        where they are at hand."""
        mixed, layer = self.mixed, self.mixed.switches.check_layer
        span = mixed.span
        if not len(span.reusable):
            return np.empty(0, dtype=np.float32)
        if below is None:
            below = mixed.transformer.below(layer, mixed.prompt.token_ids[: span.end])
        fresh = self.projected(layer, below, np.arange(span.end), self.ranking_part)
        loaded = mixed.loaded(layer)[self.ranking_part, :, : span.end]
        return self.finite(self.distance(fresh, loaded)[span.reusable])

    @cached_property
    def auxiliary_attention(self) -> Floats:
        if self._auxiliary is None:
            raise EngineError(
                f"policy {self.policy!r} asked for auxiliary attention, and no auxiliary model is open",
                "open the engine with --option auxiliary=MODEL",
            )
        last = self.mixed.prompt.segments[-1]
        return self._auxiliary(self.mixed.prompt, last.start, last.end)

    @cached_property
    def written_attention(self) -> WrittenAttention:
        """`outside` for all n tokens, NaN where nothing was saved."""
        saved = [None if entry is None else entry.attention for entry in self.mixed.found.used]
        outside = np.full(self.mixed.tokens, np.nan, dtype=np.float32)
        for start, end, entry in self.mixed.span.loaded:
            if entry.attention is not None:
                outside[start:end] = entry.attention.outside
        return WrittenAttention(outside, tuple(None if each is None else each.chunk for each in saved))

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """Full prefill's log-probabilities [V] of the first answer token."""
        t, token_ids = self.mixed.transformer, self.mixed.prompt.token_ids
        return logprobs(t.logits(t.extend(token_ids, t.arena(len(token_ids)), 0))[0])


class Signals:
    """What a policy may ask for at one stage; see `SelectionContext` for shapes and meanings."""

    def __init__(self, request: RequestSignals, stage: Stage) -> None:
        self._request, self._stage, self._mixed = request, stage, request.mixed
        self._deviations: dict[tuple[int, int], Floats] = {}

    @property
    def seen_deviation(self) -> Floats | None:
        """`deviation` where the policy asked for it, by that name or another."""
        return self._deviations.get((self._stage.layer, self._request.ranking_part))

    def deviation(self) -> Floats:
        return self._deviation(self._stage.layer, self._request.ranking_part)

    def key_deviation(self, layer: int) -> Floats:
        return self._deviation(layer, KEYS)

    def value_deviation(self, layer: int) -> Floats:
        return self._deviation(layer, VALUES)

    def query_attention(self, layer: int) -> Floats:
        return self._request.query_pass.attention(layer, self._stage.layer)[:, self._stage.left]

    def auxiliary_attention(self) -> Floats:
        return self._request.auxiliary_attention[:, self._stage.left]

    def written_attention(self) -> WrittenAttention:
        written = self._request.written_attention
        return WrittenAttention(written.outside[self._stage.left], written.chunks)

    @property
    def precision(self) -> float:
        dtype = self._mixed.transformer.dtype
        return UNITS_OFF[dtype] * torch.finfo(dtype).eps

    def norms(self, need: Need, layer: int) -> Floats:
        parts: dict[Need, int] = {"key-deviation": KEYS, "value-deviation": VALUES}
        part = parts.get(need, self._request.ranking_part)
        at = np.searchsorted(self._rows(layer), self._stage.left)
        norms: Floats = self._fresh(layer, part).float().square().sum((0, 2)).sqrt().cpu().numpy()[at]
        return norms

    def output_kl(self, positions: Positions) -> float:
        """The stage's pass from its layer on, with these positions for selection, over copies of the layers."""
        mixed, stage = self._mixed, self._stage
        chosen = np.unique(positions)
        if not np.isin(chosen, stage.left).all():
            raise PolicyError(
                f"policy {self._request.policy!r} asked for the output's KL at a position that is not reusable for "
                f"request {self._request.request_id!r}",
                "ask with positions of the context",
            )
        computed = np.union1d(mixed.span.computed, chosen)
        rows = mixed.rows_and_suffix(computed)
        hidden = torch.cat((stage.pick(computed), self._suffix))
        for layer in range(stage.layer, mixed.transformer.layers):
            states = mixed.arena[layer].clone()
            made = mixed.put(layer, hidden, rows, states)
            last = layer == mixed.transformer.layers - 1
            hidden = mixed.follow(layer, hidden, made, rows, states, "last" if last else "every")
        expected, observed = self._request.expected, logprobs(mixed.transformer.logits(hidden)[0])
        return max(0.0, float((np.exp(expected) * (expected - observed)).sum()))

    @cached_property
    def _suffix(self) -> Tensor:
        """Hidden states before the stage's layer of the tokens after the range."""
        mixed = self._mixed
        hidden = mixed.transformer.embed(mixed.prompt.token_ids[mixed.span.end :])
        if not len(hidden):
            return hidden
        rows = mixed.rows_and_suffix(np.empty(0, dtype=np.int64))
        for layer in range(self._stage.layer):
            states = mixed.arena[layer].clone()
            hidden = mixed.follow(layer, hidden, mixed.put(layer, hidden, rows, states), rows, states, "every")
        return hidden

    def _deviation(self, layer: int, part: int) -> Floats:
        """Fresh against as loaded, at the stage's layer or below it, for the positions that are left. Read-only: a
        policy that wrote into it would change what is recorded."""
        if (layer, part) not in self._deviations:
            mixed, stage = self._mixed, self._stage
            rows = self._rows(layer)
            cached = mixed.arena[layer, part] if layer == stage.layer else mixed.loaded(layer)[part]
            distance = self._request.distance(self._fresh(layer, part), cached[:, mixed.index(rows)])
            deviation = self._request.finite(distance[np.searchsorted(rows, stage.left)])
            deviation.flags.writeable = False
            self._deviations[layer, part] = deviation
        return self._deviations[layer, part]

    def _rows(self, layer: int) -> Positions:
        """The positions that `_fresh` has at a layer."""
        return self._stage.rows if layer == self._stage.layer else np.arange(self._mixed.span.end)

    def _fresh(self, layer: int, part: int) -> Tensor:
        """Rotated keys or values as this run computed them: of the stage's rows at its layer, of the range below it."""
        mixed, stage = self._mixed, self._stage
        if layer == stage.layer:
            return self._request.projected(layer, stage.hidden, stage.rows, part)
        if layer < mixed.start:
            made = mixed.fresh_below[layer]
            return made.keys if part == KEYS else made.values
        return mixed.arena[layer, part][:, : mixed.span.end]


def logprobs(logits: Tensor) -> NDArray[np.float64]:
    """float64 [V]. Raises EngineError where logits are not finite."""
    if not torch.isfinite(logits).all():
        raise EngineError("the logits are not finite", "try --dtype float32 or bfloat16")
    made: NDArray[np.float64] = logits.double().log_softmax(-1).cpu().numpy()
    return made
