"""The mixed cache of one prompt: what of it is loaded, zeroed and computed, and one layer of computation over it.

n prompt tokens, of which [0, E) are blended; L layers, G KV heads, D head dim. "As loaded" is the state before
anything was computed: cached chunks with their keys turned, and zeros in gaps that are not stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines import Switches
from kvaudit.engines.embedded.cache import Entry
from kvaudit.engines.embedded.forward import Projected, Rotation, Transformer, Visibility
from kvaudit.engines.embedded.lookup import Found
from kvaudit.errors import EngineError
from kvaudit.policies import Positions
from kvaudit.records import GAP_KINDS, Prompt

Outputs = Literal["every", "last", "none"]


@dataclass(frozen=True, slots=True)
class Range:
    """The blended range [0, end) of a prompt, and the spans in it whose KV is loaded or zeroed.

    reusable: int64 [N], what a policy may choose from. computed: int64, the rows of the range that every pass
    computes: chunks that were missed, gaps that are recomputed, the last prompt token. Both ascending.
    """

    end: int
    loaded: tuple[tuple[int, int, Entry], ...]
    zeroed: tuple[tuple[int, int], ...]
    reusable: Positions
    computed: Positions

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
        is_reusable, is_computed = np.zeros(end, dtype=bool), np.ones(end, dtype=bool)
        for start, stop in [(start, stop) for start, stop, _ in loaded] + zeroed:
            is_computed[start:stop] = False
        chosen_from = zeroed if switches.write_back == "versioned" else [*(each[:2] for each in loaded), *zeroed]
        for start, stop in chosen_from:
            is_reusable[start:stop] = True
        if end == tokens:
            is_reusable[-1], is_computed[-1] = False, True
        return cls(end, tuple(loaded), tuple(zeroed), np.flatnonzero(is_reusable), np.flatnonzero(is_computed))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows [R] that a pass computes: positions (int64, ascending, on the device), rotation, what each sees."""

    at: Tensor
    rotation: Rotation
    visibility: Visibility
    end: int


class MixedCache:
    """`arena` [L, 2, G, n, D] (rotated keys, values) and `raw` [L, G, n, D] (raw keys) view the engine's own.

    `start` is the layer from which selected tokens are recomputed; below it everything is computed for all tokens.
    """

    def __init__(
        self,
        transformer: Transformer,
        arena: Tensor,
        raw: Tensor,
        prompt: Prompt,
        found: Found,
        switches: Switches,
        start: int,
    ) -> None:
        tokens = len(prompt.token_ids)
        self.transformer, self.prompt, self.found, self.switches = transformer, prompt, found, switches
        self.arena, self.raw = arena[:, :, :, :tokens], raw[:, :, :tokens]
        self.span = Range.of(prompt, found, switches)
        self.start = start
        self.fresh_below: list[Projected] = []

    @property
    def tokens(self) -> int:
        return len(self.prompt.token_ids)

    def load(self) -> None:
        """Copy cached chunks to their places and turn their raw keys."""
        for start, end, entry in self.span.loaded:
            self.arena[:, :, :, start:end] = entry.states
        for start, end, rotation in self._turns():
            for layer in range(self.transformer.layers):
                rotation.in_place(self.arena[layer, 0, :, start:end])
        self._zero(self.arena)

    def loaded(self, layer: int) -> Tensor:
        """Keys and values [2, G, n, D] of a layer as loaded, in memory of their own; zeros where nothing is loaded."""
        states = torch.zeros_like(self.arena[layer])
        for start, end, entry in self.span.loaded:
            states[:, :, start:end] = entry.states[layer]
        for start, end, rotation in self._turns():
            rotation.in_place(states[0, :, start:end])
        return states

    def compute_below(self, keep_fresh: bool) -> Tensor:
        """Layers below the start for the whole range, exactly; hidden states [E, hidden] before the start.

        With `keep_fresh` what each layer projected stays at hand in `fresh_below`.
        """
        end = self.span.end

        def keep(layer: int, made: Projected) -> None:
            self.arena[layer, 0, :, :end], self.arena[layer, 1, :, :end] = made.keys, made.values
            self.raw[layer, :, :end] = made.raw_keys
            self._zero(self.arena[layer])
            if keep_fresh:
                self.fresh_below.append(made)

        return self.transformer.below(self.start, self.prompt.token_ids[:end], keep)

    def index(self, rows: Positions) -> Tensor | slice:
        """What takes these rows out of the range: a slice, which copies nothing, where they are all of it."""
        if len(rows) == self.span.end:
            return slice(0, self.span.end)
        return torch.from_numpy(rows).to(self.transformer.device)

    def rows(self, positions: Positions) -> Rows:
        """Rows of the range: what each sees follows from the mask."""
        at = torch.from_numpy(positions).to(self.transformer.device)
        end = self.span.end
        return Rows(at, self.transformer.rotation(0, end)[at], self.transformer.visibility(self._limits(at)), end)

    def rows_and_suffix(self, positions: Positions) -> Rows:
        """Rows of the range, then all tokens after it, which see every key up to their own."""
        t = self.transformer
        at = torch.from_numpy(positions).to(t.device)
        suffix = torch.arange(self.span.end, self.tokens, device=t.device)
        everything = torch.cat((at, suffix))
        visibility = t.visibility(torch.cat((self._limits(at), suffix)))
        return Rows(everything, t.rotation(0, self.tokens)[everything], visibility, self.tokens)

    def put(self, layer: int, hidden: Tensor, rows: Rows, states: Tensor, raw: Tensor | None = None) -> Projected:
        """Project rows and write their keys and values into `states` [2, G, n, D], their raw keys into `raw`."""
        t = self.transformer
        made = t.project(layer, t.normed(layer, hidden), rows.rotation)
        states[0].index_copy_(1, rows.at, made.keys)
        states[1].index_copy_(1, rows.at, made.values)
        if raw is not None:
            raw.index_copy_(1, rows.at, made.raw_keys)
        return made

    def follow(
        self, layer: int, hidden: Tensor, made: Projected, rows: Rows, states: Tensor, outputs: Outputs
    ) -> Tensor:
        """The layer's output for the rows, for the last one alone, or none at all: then `hidden` as it came."""
        t, (keys, values) = self.transformer, states[:, :, : rows.end]
        if outputs == "every":
            return t.after_attention(layer, hidden, t.attend(made.queries, keys, values, rows.visibility))
        if outputs == "last":
            return t.after_attention(layer, hidden[-1:], t.attend(made.queries[:, -1:], keys, values, None))
        return hidden

    def _limits(self, at: Tensor) -> Tensor:
        end = self.span.end
        return at if self.switches.mask == "exact" else torch.arange(end - len(at), end, device=at.device)

    def _zero(self, states: Tensor) -> None:
        for start, end in self.span.zeroed:
            states[..., start:end, :] = 0

    def _turns(self) -> Iterator[tuple[int, int, Rotation]]:
        """Ranges of the arena and the rotation of the raw keys in them; keys that are not moved are turned already."""
        if self.switches.keys == "moved":
            first, last = self.span.loaded[0][0], self.span.loaded[-1][1]
            yield first, last, self.transformer.rotation(first, last)
