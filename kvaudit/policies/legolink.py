"""EPIC's LegoLink: the first tokens of every chunk (arXiv:2410.15332)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import BudgetContext, Need, Policy, Positions, SegmentView, SelectionContext, Start, ratio_budget
from kvaudit.policies.parameters import at_least
from kvaudit.policies.ranking import Indices, apportion, segment_spans
from kvaudit.records import GAP_KINDS


@dataclass(frozen=True, slots=True)
class LegoLink(Policy):
    """The first tokens of every chunk after the first, as many of each: where a chunk that was computed alone has
    attention sinks that it has no longer behind others.

    k: tokens a chunk, 1 to 64 in the paper; shorter chunks are recomputed whole, and the budget is what that makes,
        whatever the ratio. None: the common budget in equal shares, what does not divide to the earliest chunks, what
        a short chunk cannot hold to the others.

    The first chunk of the prompt comes after all others, and zeroed gaps last, both from their start: they are
    recomputed where the common budget is larger than the other chunks. The query, which the paper recomputes too, is
    computed by the engine unless it is a hit; then it is a chunk like any other.
    """

    k: int | None = None

    name: ClassVar[str] = "legolink"
    needs: ClassVar[frozenset[Need]] = frozenset()
    start: ClassVar[Start] = "first-layer"

    def __post_init__(self) -> None:
        if self.k is not None:
            at_least(self, "k", 1)

    def budget(self, request: BudgetContext) -> int:
        if self.k is None:
            return ratio_budget(request.reusable, request.ratio)
        spans = segment_spans(request.segments, request.positions)
        lengths = (spans[:, 1] - spans[:, 0])[_ranks(request.segments) == 0]
        return int(np.minimum(lengths, self.k).sum())

    def select(self, context: SelectionContext) -> Positions:
        spans = segment_spans(context.segments, context.positions)
        lengths, ranks = spans[:, 1] - spans[:, 0], _ranks(context.segments)
        shares = apportion(context.k, np.where(ranks == 0, 1.0, 0.0), lengths)
        for rank in (1, 2):
            for i in np.flatnonzero(ranks == rank):
                shares[i] = min(lengths[i], context.k - shares.sum())
        starts = spans[:, 0].tolist()
        chosen = [np.arange(start, start + share) for start, share in zip(starts, shares.tolist(), strict=True)]
        selected: Positions = context.positions[np.concatenate(chosen)]
        return selected


def _ranks(segments: Sequence[SegmentView]) -> Indices:
    """0 for chunks after the first, 1 for the first, 2 for what stands between chunks."""
    ranks = np.array([2 if segment.kind in GAP_KINDS else 0 for segment in segments], dtype=np.int64)
    ranks[np.flatnonzero(ranks == 0)[:1]] = 1
    return ranks
