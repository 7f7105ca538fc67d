"""Selective recomputation over cached chunks: the prefill of a prompt that reuses KV at non-prefix positions.

Shape of the computation (DESIGN 5), for L layers and a policy that starts at layer c (the check layer, or layer 0):
layers below c for all tokens of the blended range; at c the policy's selection; from there on only the selected and
the not reusable tokens, over the mixed cache. A policy with a schedule narrows its selection at later layers. What
follows the range is computed over the mixed cache. The path is the same for every policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines import Switches
from kvaudit.engines.embedded.cache import NO_CONTEXT, ChunkCache, ChunkKey, Entry, chunks_before
from kvaudit.engines.embedded.forward import Transformer
from kvaudit.engines.embedded.lookup import Found, is_written, look_up, look_up_prefix
from kvaudit.engines.embedded.mixed import MixedCache, Outputs
from kvaudit.engines.embedded.prefix import PrefixCache
from kvaudit.engines.embedded.selecting import NOTHING_REUSABLE, Choice, Selector, starting_layer
from kvaudit.engines.embedded.signals import Auxiliary, RequestSignals, Stage
from kvaudit.engines.embedded.writing import CheckRows, attention_alone, keep_loaded_keys
from kvaudit.policies import Floats, Policy, Positions
from kvaudit.policies.seeding import generator
from kvaudit.records import Part, Prompt, PromptSegment

KEPT_FRESH = frozenset({"key-deviation", "value-deviation"})


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt after its prefill. `keys` (rotated) and `values` [L, G, n, D] view the arena: valid until the next.

    kept_from: int64 [n], the layer from which each position was left as loaded; L where it was computed throughout.
    check_rows: what was computed at the check layer, where the policy's chunks are stored with their attention.
    """

    logits: Tensor
    keys: Tensor
    values: Tensor
    found: Found
    choice: Choice
    reused_tokens: int
    kept_from: Positions
    check_rows: CheckRows | None

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
class Upper:
    """What the pass from the starting layer up ends with: the last row's hidden state (of a whole prompt), the
    reusable positions that are recomputed to the end, and how many were at each layer, summed."""

    hidden: Tensor
    kept_from: Positions
    left: Positions
    spent: int


class Blender:
    """Owns the arena of the prompt at hand; the chunk cache is the only thing that outlives a prompt."""

    def __init__(
        self,
        transformer: Transformer,
        cache: ChunkCache | PrefixCache,
        switches: Switches,
        ratio: float,
        seed: int,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        self.transformer, self.cache, self.switches = transformer, cache, switches
        self.ratio, self.seed, self.auxiliary = ratio, seed, auxiliary
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
        return self._prefilled(prompt, nothing, hidden)

    def look_up(self, request_id: str, part: Part, prompt: Prompt) -> Found:
        cache = self.cache
        if isinstance(cache, PrefixCache):
            return look_up_prefix(cache, prompt)

        def compute_alone(segment: PromptSegment, key: ChunkKey) -> Entry:
            token_ids = prompt.token_ids[segment.start : segment.end]
            self.transformer.extend(token_ids, self.arena, 0, self.raw)
            return cache.store(
                key,
                self._states(0, len(token_ids)),
                content_id=segment.content_id,
                position=0,
                context_hash=NO_CONTEXT,
                request_id=request_id,
                part=part,
                attention=attention_alone(len(token_ids)),
            )

        return look_up(cache, prompt, self.switches, compute_alone)

    def prefill(self, request_id: str, prompt: Prompt, found: Found, policy: Policy) -> Prefilled:
        """Prefill over what was found. Nothing is written back yet."""
        check_layer = self.switches.check_layer
        wanted = "written-attention" in policy.needs or self.switches.write_back == "versions"
        saves = wanted and self.writes_back(found)
        check_rows = CheckRows(self.transformer, check_layer) if saves else None
        if found.prefix is not None:
            found.prefix.load(self.arena)
            return self._prefilled(prompt, found, self._extend(prompt, found.prefix.tokens, None))
        if found.last_used is None:
            hidden = self._extend(prompt, 0, check_rows)
            return self._prefilled(prompt, found, hidden, check_rows=check_rows)
        start = starting_layer(policy, check_layer)
        mixed = MixedCache(self.transformer, self.arena, self.raw, prompt, found, self.switches, start)
        mixed.load()
        request = RequestSignals(mixed, policy.name, request_id, self.auxiliary)
        selector = Selector(policy, request, self.ratio, generator(self.seed, request_id))
        below = mixed.compute_below(keep_fresh=bool(policy.needs & KEPT_FRESH))
        upper = self._upper_layers(mixed, below, selector, check_rows)
        hidden = upper.hidden
        if mixed.span.end < len(prompt.token_ids):
            hidden = self._extend(prompt, mixed.span.end, check_rows)
        seen, at_check = selector.deviation, below if start == check_layer else None
        choice = Choice(
            budget=selector.budget,
            layer=start,
            reusable=mixed.span.reusable,
            selected=upper.left,
            recomputed=round(upper.spent / (self.transformer.layers - start)),
            measure=lambda: request.deviation_as_recorded(at_check) if seen is None else seen,
        )
        return self._prefilled(prompt, found, hidden, choice, upper.kept_from, check_rows)

    def writes_back(self, found: Found) -> bool:
        """Whether `write_back` would store anything, whatever the prefill computes."""
        cache = self.cache
        if isinstance(cache, PrefixCache):
            return self.switches.write_back != "none"
        return any(is_written(cache, found, index, self.switches) for index in range(len(found.keys)))

    def write_back(self, request_id: str, part: Part, prompt: Prompt, prefilled: Prefilled) -> None:
        """Store chunks out of the mixed state in the arena, as the write-back discipline has it."""
        found, check_rows, cache = prefilled.found, prefilled.check_rows, self.cache
        if not self.writes_back(found):
            return
        if isinstance(cache, PrefixCache):
            assert found.prefix is not None
            cache.add(found.prefix, self.arena, request_id, part)
            return
        check_keys = prefilled.keys[self.switches.check_layer]
        computed_over: list[int] = []
        for index, (segment, key) in enumerate(zip(prompt.segments, found.keys, strict=True)):
            entry = found.used[index]
            if key is not None and is_written(cache, found, index, self.switches):
                states = self._states(segment.start, segment.end)
                if entry is not None:
                    keep_loaded_keys(states, entry, prefilled.kept_from[segment.start : segment.end])
                saved = None if check_rows is None else check_rows.attention(check_keys, index, prompt.segments)
                cache.store(
                    key,
                    states,
                    content_id=segment.content_id,
                    position=segment.start,
                    context_hash=found.contexts[index],
                    computed_over=computed_over,
                    before=chunks_before(prompt, index),
                    request_id=request_id,
                    part=part,
                    attention=entry.attention if saved is None and entry is not None else saved,
                )
            if entry is not None:
                computed_over.append(entry.write_ordinal)

    def _states(self, start: int, end: int) -> Tensor:
        """Raw keys and values [L, 2, G, end - start, D] of computed positions, as a copy; where keys are not moved,
        rotated keys."""
        if self.switches.keys == "unmoved":
            return self.arena[:, :, :, start:end].clone()
        return torch.stack((self.raw[:, :, start:end], self.arena[:, 1, :, start:end]), 1)

    def _upper_layers(
        self, mixed: MixedCache, below: Tensor, selector: Selector, check_rows: CheckRows | None
    ) -> Upper:
        """The starting layer and those above over the mixed cache, for the rows that the policy's selection leaves."""
        t, span = self.transformer, mixed.span
        whole = span.end == mixed.tokens
        hidden, at = below, np.arange(span.end)
        rows = mixed.rows(at[:0])
        kept_from = np.full(mixed.tokens, t.layers, dtype=np.int64)
        left, spent = span.reusable, 0
        for layer in range(mixed.start, t.layers):
            if check_rows is not None and layer == self.switches.check_layer:
                check_rows.add(at, hidden)
            if selector.selects_at(layer, left):
                stage = Stage(layer, left, at, hidden)
                left = selector.choose(stage)
                kept = np.union1d(span.computed, left)
                kept_from[np.setdiff1d(at, kept, assume_unique=True)] = layer
                hidden, at, rows = stage.pick(kept), kept, mixed.rows(kept)
            if not len(at):
                break
            spent += len(left)
            made = mixed.put(layer, hidden, rows, mixed.arena[layer], mixed.raw[layer])
            outputs: Outputs = "every" if layer < t.layers - 1 else "last" if whole else "none"
            hidden = mixed.follow(layer, hidden, made, rows, mixed.arena[layer], outputs)
        return Upper(hidden, kept_from, left, spent)

    def _extend(self, prompt: Prompt, start: int, check_rows: CheckRows | None) -> Tensor:
        """Everything from `start` on, over the mixed cache before it."""

        def show(layer: int, hidden: Tensor) -> None:
            if check_rows is not None and layer == self.switches.check_layer:
                check_rows.add(np.arange(start, len(prompt.token_ids)), hidden)

        return self.transformer.extend(prompt.token_ids[start:], self.arena, start, self.raw, show=show)

    def _prefilled(
        self,
        prompt: Prompt,
        found: Found,
        hidden: Tensor,
        choice: Choice = NOTHING_REUSABLE,
        kept_from: Positions | None = None,
        check_rows: CheckRows | None = None,
    ) -> Prefilled:
        tokens = len(prompt.token_ids)
        return Prefilled(
            logits=self.transformer.logits(hidden[-1:])[0],
            keys=self.arena[:, 0, :, :tokens],
            values=self.arena[:, 1, :, :tokens],
            found=found,
            choice=choice,
            reused_tokens=found.reused_tokens(prompt),
            kept_from=np.full(tokens, self.transformer.layers) if kept_from is None else kept_from,
            check_rows=check_rows,
        )
