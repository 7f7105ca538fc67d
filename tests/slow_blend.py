"""One request over its mixed cache, and what a policy may ask for on the way: slow, in float64, position by position.

The part of the slow reference that blends; written from the specification alone, as the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from slow_model import Mixed, SlowModel

from kvaudit.engines import Switches
from kvaudit.policies import ChunkAttention, Floats, Positions, WrittenAttention
from kvaudit.records import Prompt

Hidden = dict[int, torch.Tensor]
"""Hidden states by position."""


@dataclass(frozen=True)
class SlowAttention:
    """What a stored chunk looked at when it was written: before it per token and per segment, and inside."""

    outside: list[float]
    over: dict[str, float]
    inside: float


def extend(
    model: SlowModel, cache: Mixed, token_ids: Sequence[int], start: int, sighted: list[Hidden] | None = None
) -> torch.Tensor:
    """Tokens [start, n) with an exact mask over the cache before them; the last hidden state. `sighted` gets the hidden
    states before each layer."""
    hidden = {position: model.embed(token_ids[position]) for position in range(start, len(token_ids))}
    for layer in range(len(model.layers)):
        if sighted is not None:
            sighted[layer].update(hidden)
        for position in hidden:
            cache.put(layer, position, *model.key_and_value(layer, hidden[position]))
        for position in hidden:
            hidden[position] = model.block(layer, hidden[position], position, cache, range(position + 1))
    return hidden[len(token_ids) - 1]


@dataclass
class SlowPass:
    """A request's blended range [0, end).

    `as_loaded`: the cache with what was loaded and zeros elsewhere. `attentions`: per segment what was saved with the
    chunk that it was loaded from. `cache` and `sighted` are what the pass leaves behind; `sighted` holds, for each
    layer, the hidden states before it of every position that was computed there.
    """

    model: SlowModel
    switches: Switches
    prompt: Prompt
    end: int
    loaded: set[int]
    zeroed: set[int]
    as_loaded: Mixed
    attentions: list[SlowAttention | None]
    start: int
    sighted: list[Hidden]
    cache: Mixed = field(init=False)

    def __post_init__(self) -> None:
        last = len(self.prompt.token_ids) - 1
        chosen_from = self.zeroed if self.switches.write_back == "versioned" else self.loaded | self.zeroed
        self.reusable = sorted(chosen_from - {last})
        self.always = (set(range(self.end)) - self.loaded - self.zeroed) | ({last} if last < self.end else set())
        self.cache = self.as_loaded.copy()
        self.exact = self._exact_layers(max(self.start, self.switches.check_layer))

    def run(self, counts: Sequence[int], choose: Callable[[SlowSignals, int], list[int]]) -> list[list[int]]:
        """Fill the cache of the range; the selection at each layer from the start on. `counts` as a schedule has it."""
        for layer in range(self.start):
            for position in set(range(self.end)) - self.zeroed:
                self.cache.put(layer, position, *self.fresh(layer, position))
        hidden = dict(self.exact[self.start])
        left, selections = self.reusable, []
        for layer in range(self.start, len(self.model.layers)):
            self.sighted[layer].update(hidden)
            count = counts[layer - self.start]
            if layer == self.start or count < len(left):
                left = choose(SlowSignals(self, layer, left, dict(hidden)), count) if count else []
                hidden = {row: hidden[row] for row in sorted(self.always | set(left))}
            selections.append(left)
            self.layer(self.cache, layer, hidden)
        self.last = hidden.get(self.end - 1)
        return selections

    def layer(self, cache: Mixed, layer: int, hidden: Hidden) -> None:
        """One layer for the rows that `hidden` has, in place."""
        for row in hidden:
            cache.put(layer, row, *self.model.key_and_value(layer, hidden[row]))
        for j, row in enumerate(hidden):
            newest = row if self.switches.mask == "exact" else self.end - len(hidden) + j
            hidden[row] = self.model.block(layer, hidden[row], row, cache, range(newest + 1))

    def fresh(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw key and value of an exact prefill of the range."""
        return self.model.key_and_value(layer, self.exact[layer][position])

    def deviation(self, layer: int, position: int, fresh: tuple[torch.Tensor, torch.Tensor], kind: str) -> float:
        key, value = fresh
        if kind == "value":
            return float((value - self.as_loaded.values[layer, :, position]).pow(2).sum())
        turned = self.model.rotate(key[:, None], [position])[:, 0]
        return float((turned - self.model.turned(self.as_loaded, layer, [position])[:, 0]).pow(2).sum())

    def recorded_deviation(self) -> np.ndarray:
        layer, kind = self.switches.check_layer, self.switches.deviation
        deviations = [self.deviation(layer, each, self.fresh(layer, each), kind) for each in self.reusable]
        return np.array(deviations, dtype=np.float32)

    def _exact_layers(self, upto: int) -> list[Hidden]:
        """Hidden states of [0, end) before layer 0, 1, ... `upto`, each token over all tokens before it, afresh."""
        hidden = {position: self.model.embed(self.prompt.token_ids[position]) for position in range(self.end)}
        layers, fresh = [hidden], self.as_loaded.copy()
        for layer in range(upto):
            for position in hidden:
                fresh.put(layer, position, *self.model.key_and_value(layer, hidden[position]))
            hidden = {
                position: self.model.block(layer, hidden[position], position, fresh, range(position + 1))
                for position in hidden
            }
            layers.append(hidden)
        return layers


@dataclass(frozen=True)
class SlowSignals:
    """`hidden`: of the rows that were computed up to `layer`, before it."""

    of: SlowPass
    layer: int
    left: list[int]
    hidden: Hidden

    def deviation(self) -> Floats:
        return self._deviation(self.layer, self.of.switches.deviation)

    def key_deviation(self, layer: int) -> Floats:
        return self._deviation(layer, "key")

    def value_deviation(self, layer: int) -> Floats:
        return self._deviation(layer, "value")

    def query_attention(self, layer: int) -> Floats:
        """A run that loads everything, zeroes what is zeroed and computes the rest from layer 0 on."""
        of, tokens = self.of, len(self.of.prompt.token_ids)
        cache, rows = of.as_loaded.copy(), sorted(of.always)
        sees = {
            row: range((row if of.switches.mask == "exact" else of.end - len(rows) + j) + 1)
            for j, row in enumerate(rows)
        } | {row: range(row + 1) for row in range(of.end, tokens)}
        hidden = {row: of.model.embed(of.prompt.token_ids[row]) for row in sees}
        for lower in range(layer):
            self._put(cache, lower, hidden)
            hidden = {row: of.model.block(lower, hidden[row], row, cache, sees[row]) for row in hidden}
        self._put(cache, layer, hidden)
        asking = [row for row in hidden if row >= of.prompt.segments[-1].start]
        total = torch.zeros(of.model.query_heads, tokens, dtype=torch.float64)
        for row in asking:
            total[:, : len(sees[row])] += of.model.attention(layer, hidden[row], row, cache, sees[row])
        return (total / len(asking)).float().numpy()[:, self.left]

    def auxiliary_attention(self) -> Floats:
        raise AssertionError("the reference has no auxiliary model")

    def written_attention(self) -> WrittenAttention:
        outside = np.full(len(self.of.prompt.token_ids), np.nan, dtype=np.float32)
        for segment, saved in zip(self.of.prompt.segments, self.of.attentions, strict=True):
            if saved is not None:
                outside[segment.start : segment.end] = saved.outside
        chunks = tuple(saved and ChunkAttention(saved.inside, saved.over) for saved in self.of.attentions)
        return WrittenAttention(outside[self.left], chunks)

    def output_kl(self, positions: Positions) -> float:
        of, token_ids = self.of, self.of.prompt.token_ids
        cache = of.cache.copy()
        hidden = {row: self.hidden[row] for row in sorted(of.always | set(positions.tolist()))}
        for layer in range(self.layer, len(of.model.layers)):
            of.layer(cache, layer, hidden)
        last = hidden[of.end - 1] if of.end == len(token_ids) else extend(of.model, cache, token_ids, of.end)
        full = extend(of.model, Mixed.zeros(*self._shape(of.as_loaded)), token_ids, 0)
        expected, observed = (torch.log_softmax(of.model.logits(each), 0) for each in (full, last))
        return float((expected.exp() * (expected - observed)).sum())

    def _deviation(self, layer: int, kind: str) -> Floats:
        return np.array(
            [self.of.deviation(layer, each, self._fresh(layer, each), kind) for each in self.left], dtype=np.float32
        )

    def _fresh(self, layer: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What this run has of a position that it computed up to here."""
        if layer == self.layer:
            return self.of.model.key_and_value(layer, self.hidden[position])
        if layer < self.of.start:
            return self.of.fresh(layer, position)
        return self.of.cache.keys[layer, :, position], self.of.cache.values[layer, :, position]

    def _put(self, cache: Mixed, layer: int, hidden: Hidden) -> None:
        for row in hidden:
            cache.put(layer, row, *self.of.model.key_and_value(layer, hidden[row]))

    def _shape(self, cache: Mixed) -> tuple[int, int, int, int]:
        layers, heads, tokens, dim = cache.keys.shape
        return layers, heads, tokens, dim


def looked_at(
    model: SlowModel, layer: int, prompt: Prompt, index: int, cache: Mixed, hidden: Hidden
) -> SlowAttention | None:
    """A chunk's attention at a layer, each token over those up to itself; None where one of its tokens was not computed
    there."""
    segment = prompt.segments[index]
    outside, inside, over = [], 0.0, {before.content_id: 0.0 for before in prompt.segments[:index]}
    for position in range(segment.start, segment.end):
        if position not in hidden:
            return None
        heads = model.attention(layer, hidden[position], position, cache, range(position + 1))
        weights = heads.mean(0).tolist()
        outside.append(sum(weights[: segment.start]))
        inside += sum(weights[segment.start :])
        for before in prompt.segments[:index]:
            over[before.content_id] += sum(weights[before.start : before.end])
    return SlowAttention(outside, over, inside)
