"""Selective recomputation over cached chunks: the prefill of a prompt that reuses KV at non-prefix positions.

Shape of the computation (DESIGN 5), for L layers and check layer c: layers below c for all tokens of the blended
range; at c keys for all of them, the token deviations, the policy's selection; from there on only the selected and
the not reusable tokens, over the mixed cache. What follows the range is computed over the mixed cache. The path is
the same for every policy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines import Switches
from kvaudit.engines.embedded.cache import NO_CONTEXT, ChunkCache, ChunkKey, Entry
from kvaudit.engines.embedded.forward import Projected, Rotation, Transformer
from kvaudit.engines.embedded.lookup import Found, look_up
from kvaudit.errors import EngineError
from kvaudit.policies import (
    BudgetContext,
    Floats,
    Policy,
    Positions,
    SegmentView,
    SelectionContext,
    WrittenAttention,
    checked_budget,
    checked_selection,
)
from kvaudit.records import GAP_KINDS, Part, Prompt, PromptSegment

NO_POSITIONS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Choice:
    """N reusable positions int64 [N], their deviation float32 [N], and the selected ones int64 [k], all ascending."""

    budget: int
    reusable: Positions
    deviation: Floats
    selected: Positions


NOTHING_REUSABLE = Choice(0, NO_POSITIONS, np.empty(0, dtype=np.float32), NO_POSITIONS)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt after its prefill. `keys` (rotated) and `values` [L, G, n, D] view the arena: valid until the next."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    found: Found
    choice: Choice
    reused_tokens: int

    @property
    def reusable(self) -> Positions:
        return self.choice.reusable

    @property
    def selected(self) -> Positions:
        return self.choice.selected

    @property
    def deviation(self) -> Floats:
        return self.choice.deviation

    @property
    def hits(self) -> tuple[bool, ...]:
        return tuple(entry is not None for entry in self.found.used)


@dataclass(frozen=True, slots=True)
class Range:
    """The blended range [0, end) of a prompt, and the spans in it whose KV is loaded or zeroed."""

    end: int
    loaded: tuple[tuple[int, int, Entry], ...]
    zeroed: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, prompt: Prompt, found: Found, switches: Switches) -> Range:
        last = found.last_used
        if last is None:
            raise EngineError("a blended range needs a chunk that is used")
        tokens, last_end = len(prompt.token_ids), prompt.segments[last].end
        end = tokens if switches.suffix == "with-rows" else min(tokens - 1, last_end)
        loaded, zeroed = [], []
        for segment, entry in zip(prompt.segments, found.used, strict=True):
            if entry is not None:
                loaded.append((segment.start, segment.end, entry))
            elif segment.kind in GAP_KINDS and switches.gap == "zero" and segment.end <= last_end:
                zeroed.append((segment.start, segment.end))
        return cls(end, tuple(loaded), tuple(zeroed))


class Blender:
    """Owns the arena of the prompt at hand; the chunk cache is the only thing that outlives a prompt."""

    def __init__(
        self, transformer: Transformer, cache: ChunkCache, switches: Switches, ratio: float, seed: int
    ) -> None:
        self.transformer, self.cache, self.switches = transformer, cache, switches
        self.ratio, self.seed = ratio, seed
        self.arena = transformer.arena(0)
        self.raw = transformer.raw_arena(0)

    def reserve(self, tokens: int) -> None:
        if tokens > self.arena.shape[3]:
            self.arena = self.transformer.arena(tokens)
            self.raw = self.transformer.raw_arena(tokens)

    def full_prefill(self, prompt: Prompt) -> Prefilled:
        """Everything from the prompt alone: the cache is neither read nor written."""
        segments = len(prompt.segments)
        nothing = Found((None,) * segments, (None,) * segments, (False,) * segments, ("",) * segments)
        hidden = self.transformer.extend(prompt.token_ids, self.arena, 0)
        return self._prefilled(prompt, nothing, hidden, NOTHING_REUSABLE)

    def look_up(self, request_id: str, part: Part, prompt: Prompt) -> Found:
        def compute_alone(segment: PromptSegment, key: ChunkKey) -> Entry:
            token_ids = prompt.token_ids[segment.start : segment.end]
            self.transformer.extend(token_ids, self.arena, 0, self.raw)
            return self.cache.store(
                key,
                self._states(0, len(token_ids)),
                content_id=segment.content_id,
                position=0,
                context_hash=NO_CONTEXT,
                request_id=request_id,
                part=part,
            )

        return look_up(self.cache, prompt, self.switches, compute_alone)

    def prefill(self, request_id: str, prompt: Prompt, found: Found, policy: Policy) -> Prefilled:
        """Prefill over what was found. Nothing is written back yet."""
        if found.last_used is None:
            hidden = self.transformer.extend(prompt.token_ids, self.arena, 0, self.raw)
            return self._prefilled(prompt, found, hidden, NOTHING_REUSABLE)
        span = Range.of(prompt, found, self.switches)
        self._load(span)
        lower = self._lower_layers(prompt, span)
        choice, rows = self._select(request_id, prompt, found, span, lower, policy)
        hidden = self._upper_layers(prompt, span, lower, rows)
        if span.end < len(prompt.token_ids):
            hidden = self.transformer.extend(prompt.token_ids[span.end :], self.arena, span.end, self.raw)
        return self._prefilled(prompt, found, hidden, choice)

    def writes_back(self, found: Found) -> bool:
        """Whether `write_back` would store anything, whatever the prefill computes."""
        chunks = [key for key in found.keys if key is not None]
        if self.switches.write_back in ("none", "isolated"):
            return False
        return self.switches.write_back == "last-writer" or any(key not in self.cache for key in chunks)

    def write_back(self, request_id: str, part: Part, prompt: Prompt, prefilled: Prefilled) -> None:
        """Store chunks out of the mixed state in the arena, as the write-back discipline has it."""
        if not self.writes_back(prefilled.found):
            return
        overwrite = self.switches.write_back == "last-writer"
        found = prefilled.found
        computed_over: list[int] = []
        for index, (segment, key) in enumerate(zip(prompt.segments, found.keys, strict=True)):
            entry = found.used[index]
            if key is not None and (overwrite or key not in self.cache):
                states = self._states(segment.start, segment.end)
                if entry is not None:
                    self._keep_loaded_keys(states, entry, segment, prefilled, len(prompt.token_ids))
                self.cache.store(
                    key,
                    states,
                    content_id=segment.content_id,
                    position=segment.start,
                    context_hash=found.contexts[index],
                    computed_over=computed_over,
                    request_id=request_id,
                    part=part,
                )
            if entry is not None:
                computed_over.append(entry.write_ordinal)

    def _states(self, start: int, end: int) -> Tensor:
        """Raw keys and values [L, 2, G, end - start, D] of computed positions, as a copy."""
        return torch.stack((self.raw[:, :, start:end], self.arena[:, 1, :, start:end]), 1)

    def _keep_loaded_keys(
        self, states: Tensor, entry: Entry, segment: PromptSegment, prefilled: Prefilled, tokens: int
    ) -> None:
        """From the check layer on, positions that were not recomputed keep the raw keys of the entry."""
        computed = np.append(prefilled.selected, tokens - 1)
        kept = np.setdiff1d(np.arange(segment.start, segment.end), computed) - segment.start
        rows = torch.from_numpy(kept).to(states.device)
        above = slice(self.switches.check_layer, None)
        states[above, 0, :, rows] = entry.states[above, 0, :, rows]

    def _load(self, span: Range) -> None:
        """Copy cached chunks to their places and turn their raw keys to the current positions."""
        for start, end, entry in span.loaded:
            self.arena[:, :, :, start:end] = entry.states
        first, last = span.loaded[0][0], span.loaded[-1][1]
        rotation = self.transformer.rotation(first, last)
        for layer in range(self.transformer.layers):
            rotation.in_place(self.arena[layer, 0, :, first:last])
        self._zero(span, slice(None))

    def _zero(self, span: Range, layers: slice | int) -> None:
        for start, end in span.zeroed:
            self.arena[layers, ..., start:end, :] = 0

    def _lower_layers(self, prompt: Prompt, span: Range) -> Tensor:
        """Layers below the check layer for the whole range, exactly; hidden states [E, hidden] before it."""

        def keep(layer: int, made: Projected) -> None:
            self.arena[layer, 0, :, : span.end], self.arena[layer, 1, :, : span.end] = made.keys, made.values
            self.raw[layer, :, : span.end] = made.raw_keys
            self._zero(span, layer)

        return self.transformer.below(self.switches.check_layer, prompt.token_ids[: span.end], keep)

    def _select(
        self, request_id: str, prompt: Prompt, found: Found, span: Range, lower: Tensor, policy: Policy
    ) -> tuple[Choice, Tensor]:
        """The policy's choice at the check layer, and all rows [R] to compute from there on, ascending."""
        tokens = len(prompt.token_ids)
        is_reusable = np.zeros(span.end, dtype=bool)
        loaded = () if self.switches.write_back == "versioned" else span.loaded
        for start, end in [(start, end) for start, end, _ in loaded] + list(span.zeroed):
            is_reusable[start:end] = True
        is_row = ~is_reusable
        for start, end, _ in span.loaded:
            is_row[start:end] = False
        if span.end == tokens:
            is_reusable[-1], is_row[-1] = False, True
        reusable = np.flatnonzero(is_reusable)
        signals = Signals(self, prompt, span, lower, reusable)
        deviation = signals.deviation()
        if not np.isfinite(deviation).all():
            raise EngineError(
                f"the token deviation of request {request_id!r} is not finite", "try --dtype float32 or bfloat16"
            )
        segments = [
            SegmentView(s.kind, s.content_id, s.start, s.end, entry is not None)
            for s, entry in zip(prompt.segments, found.used, strict=True)
        ]
        context = SelectionContext(
            policy=policy.name,
            request_id=request_id,
            layer=self.switches.check_layer,
            layers=self.transformer.layers,
            k=checked_budget(policy, BudgetContext(len(reusable), self.ratio, segments, reusable)),
            positions=reusable,
            token_ids=np.asarray(prompt.token_ids, dtype=np.int64),
            segments=segments,
            rng=generator(self.seed, request_id),
            needs=policy.needs,
            signals=signals,
        )
        selected = checked_selection(policy, context) if context.k else NO_POSITIONS
        is_row[selected] = True
        rows = torch.from_numpy(np.flatnonzero(is_row)).to(self.transformer.device)
        return Choice(context.k, reusable, deviation, selected), rows

    def _upper_layers(self, prompt: Prompt, span: Range, lower: Tensor, rows: Tensor) -> Tensor:
        """The check layer and those above for `rows` over the mixed cache; the last row's hidden state."""
        t, end = self.transformer, span.end
        if not len(rows):
            return lower[:0]
        whole = end == len(prompt.token_ids)
        limits = rows if self.switches.mask == "exact" else torch.arange(end - len(rows), end, device=t.device)
        visibility = t.visibility(limits)
        rotation: Rotation = t.rotation(0, end)[rows]
        hidden = lower[rows]
        for layer in range(self.switches.check_layer, t.layers):
            made = t.project(layer, t.normed(layer, hidden), rotation)
            keys, values = self.arena[layer, 0], self.arena[layer, 1]
            keys.index_copy_(1, rows, made.keys)
            values.index_copy_(1, rows, made.values)
            self.raw[layer].index_copy_(1, rows, made.raw_keys)
            if layer < t.layers - 1:
                attended = t.attend(made.queries, keys[:, :end], values[:, :end], visibility)
                hidden = t.after_attention(layer, hidden, attended)
            elif whole:
                attended = t.attend(made.queries[:, -1:], keys[:, :end], values[:, :end], None)
                hidden = t.after_attention(layer, hidden[-1:], attended)
        return hidden

    def _prefilled(self, prompt: Prompt, found: Found, hidden: Tensor, choice: Choice) -> Prefilled:
        tokens = len(prompt.token_ids)
        reused = sum(s.end - s.start for s, existed in zip(prompt.segments, found.existed, strict=True) if existed)
        logits = self.transformer.logits(hidden[-1:])[0]
        return Prefilled(logits, self.arena[:, 0, :, :tokens], self.arena[:, 1, :, :tokens], found, choice, reused)


class Signals:
    """What a policy may ask for at the check layer, computed from the hidden states [E, hidden] before it."""

    def __init__(self, blender: Blender, prompt: Prompt, span: Range, lower: Tensor, reusable: Positions) -> None:
        self._t, self._layer = blender.transformer, blender.switches.check_layer
        self._mixed = blender.arena[self._layer, :, :, : span.end]
        self._by_value = blender.switches.deviation == "value"
        self._prompt, self._span, self._lower, self._reusable = prompt, span, lower, reusable

    @cached_property
    def _deviation(self) -> Floats:
        return self.value_deviation(self._layer) if self._by_value else self.key_deviation(self._layer)

    def deviation(self) -> Floats:
        return self._deviation

    def key_deviation(self, layer: int) -> Floats:
        rotation = self._t.rotation(0, self._span.end)
        return self._distance(rotation.of(self._t.raw_keys(self._layer, self._normed)), self._mixed[0])

    def value_deviation(self, layer: int) -> Floats:
        return self._distance(self._t.values(self._layer, self._normed), self._mixed[1])

    def query_attention(self, layer: int) -> Floats:
        t, last = self._t, self._prompt.segments[-1]
        hidden = self._lower if self._span.end >= last.end else t.below(self._layer, self._prompt.token_ids)
        rows = slice(last.start, last.end)
        queries = t.queries(self._layer, t.normed(self._layer, hidden[rows]), t.rotation(last.start, last.end))
        index = torch.from_numpy(self._reusable).to(t.device)
        keys = self._mixed[0][:, index].float().repeat_interleave(t.heads // t.kv_heads, 0)
        scores = queries.float() @ keys.transpose(1, 2) / t.head_dim**0.5
        attention: Floats = scores.softmax(-1).mean(1).cpu().numpy()
        return attention

    def auxiliary_attention(self) -> Floats:
        raise NotImplementedError

    def written_attention(self) -> WrittenAttention:
        raise NotImplementedError

    def output_kl(self, positions: Positions) -> float:
        raise NotImplementedError

    @property
    def _normed(self) -> Tensor:
        return self._t.normed(self._layer, self._lower)

    def _distance(self, fresh: Tensor, cached: Tensor) -> Floats:
        """Squared L2 distance over all KV heads, float32 [N] (paper 2.2, equation 1)."""
        distance: Floats = (fresh.float() - cached.float()).square().sum((0, 2)).cpu().numpy()
        return distance[self._reusable]


def generator(seed: int, request_id: str) -> np.random.Generator:
    """The random generator of one request, the same in every arm (DESIGN 4)."""
    digest = hashlib.sha256(f"{seed}:{request_id}".encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))
