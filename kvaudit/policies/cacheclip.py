"""CacheClip: an auxiliary model selects, neighbours stay together (arXiv:2510.10129)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import Need, Policy, Positions, SelectionContext, Start
from kvaudit.policies.parameters import at_least
from kvaudit.policies.ranking import by_mean, tiles, top_k, whole_spans
from kvaudit.records import GAP_KINDS


@dataclass(frozen=True, slots=True)
class CacheClip(Policy):
    """Windows of neighbours with most attention in the last layer of a small auxiliary model, the first chunk kept.

    Source: the abstract: the auxiliary model's last layer selects tokens, a sliding-window grouping keeps neighbours
    together, chunks share a prefix so that they have no sinks of their own, 20 % of the tokens. Assumed: attention of
    the query's rows, mean over them and over heads; windows of `group` neighbouring reusable tokens, side by side
    from the start of each chunk, by their mean; whole windows while they fit, and for what is left the best tokens
    among the others. The shared prefix is the prompt's first chunk and what stands before it: it is recomputed only
    where k is larger than the rest. The paper fine-tunes its auxiliary model; here it is used as it is.
    """

    group: int = 8

    name: ClassVar[str] = "cacheclip"
    needs: ClassVar[frozenset[Need]] = frozenset({"auxiliary-attention"})
    start: ClassVar[Start] = "first-layer"

    def __post_init__(self) -> None:
        at_least(self, "group", 1)

    def select(self, context: SelectionContext) -> Positions:
        # A sum ranks as the mean does, and does not part equals by the rounding of a division.
        attention = context.auxiliary_attention().sum(axis=0, dtype=np.float64)
        chunks = [segment for segment in context.segments if segment.kind not in GAP_KINDS]
        kept = int(np.searchsorted(context.positions, chunks[0].end)) if chunks else 0
        windows = tiles(context, self.group)
        windows = windows[windows[:, 0] >= kept]
        k = min(context.k, len(attention) - kept)
        _, chosen = whole_spans(by_mean(windows, attention), k)
        is_other = np.arange(len(attention)) >= kept
        is_other[chosen] = False
        others = np.flatnonzero(is_other)
        singles = others[top_k(attention[others], k - len(chosen))]
        prefix = top_k(attention[:kept], context.k - k)
        return context.positions[np.concatenate((chosen, singles, prefix))]
