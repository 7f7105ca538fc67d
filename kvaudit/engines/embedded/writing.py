"""Writing back: which chunks of a served prompt are stored, and what is saved with them (the switch write-back)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvaudit.engines.embedded.cache import Entry, SavedAttention
from kvaudit.engines.embedded.forward import Transformer
from kvaudit.policies import ChunkAttention, Positions
from kvaudit.records import PromptSegment


@dataclass(frozen=True, slots=True)
class Sighting:
    """Hidden states [R, hidden] before the check layer of rows at these positions (int64 [R])."""

    at: Positions
    hidden: Tensor


class CheckRows:
    """The rows that a prefill computed at the check layer, for the attention that is saved with chunks."""

    def __init__(self, transformer: Transformer, check_layer: int) -> None:
        self._t, self._layer = transformer, check_layer
        self._seen: list[Sighting] = []

    def add(self, at: Positions, hidden: Tensor) -> None:
        self._seen.append(Sighting(at, hidden))

    def queries(self, start: int, end: int) -> Tensor | None:
        """Rotated queries [H, end - start, D] of positions [start, end); None where one of them was not computed."""
        parts = []
        for sighting in self._seen:
            inside = (sighting.at >= start) & (sighting.at < end)
            if inside.any():
                parts.append(sighting.hidden[torch.from_numpy(np.flatnonzero(inside)).to(sighting.hidden.device)])
        if sum(map(len, parts)) < end - start:
            return None
        normed = self._t.normed(self._layer, torch.cat(parts))
        return self._t.queries(self._layer, normed, self._t.rotation(start, end))

    def attention(self, keys: Tensor, index: int, segments: Sequence[PromptSegment]) -> SavedAttention | None:
        """What the rows of segment `index` looked at over the mixed cache's rotated keys [G, n, D] of the check layer,
        each over the tokens up to its own, whatever the mask; None where one of them was not computed."""
        start, end = segments[index].start, segments[index].end
        queries = self.queries(start, end)
        if queries is None:
            return None
        limits = torch.arange(start, end, device=keys.device)
        weights = self._t.attention(queries, keys[:, :end], limits).mean(0).double()
        outside = weights[:, :start].sum(1)
        over: defaultdict[str, float] = defaultdict(float)
        for before in segments[:index]:
            over[before.content_id] += float(weights[:, before.start : before.end].sum())
        inside = float(weights[:, start:].sum())
        return SavedAttention(outside.float().cpu().numpy(), ChunkAttention(inside, dict(over)))


def attention_alone(tokens: int) -> SavedAttention:
    """What a chunk looks at that is computed with nothing before it: itself."""
    return SavedAttention(np.zeros(tokens, dtype=np.float32), ChunkAttention(float(tokens), {}))


def keep_loaded_keys(states: Tensor, entry: Entry, kept_from: Positions) -> None:
    """Give `states` [L, 2, G, T, D] the entry's raw keys where these were not computed.

    kept_from: int64 [T], the layer from which each position was left as loaded; L where it was computed throughout.
    """
    for layer in np.unique(kept_from[kept_from < len(states)]).tolist():
        rows = torch.from_numpy(np.flatnonzero(kept_from == layer)).to(states.device)
        states[layer:, 0, :, rows] = entry.states[layer:, 0, :, rows]
