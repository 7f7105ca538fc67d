"""Cache-Craft: what a chunk looked at when it was written decides how much of it is recomputed (arXiv:2502.15734)."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvaudit.policies import ChunkAttention, Need, Policy, Positions, SegmentView, SelectionContext, Start
from kvaudit.policies.ranking import Doubles, apportion, segment_spans, top_k


@dataclass(frozen=True, slots=True)
class CacheCraft(Policy):
    """The budget goes to chunks whose context mattered and is no longer there, and in a chunk to the tokens that
    looked most outside it.

    Source: the paper's context impact (CCI), adjusted prefix overlap (beta') and fix overhead (CFO), as a third-party
    port has them. A chunk's overhead is its context impact times what it lost, 1 - overlap. The impact is
    1 / (1 + exp(-a / b)), a the sum of its mean attention to each chunk before it, b that to itself. The overlap is
    the share of its attention to other chunks that went to those which stand before it now too, times 1 - the Kendall
    tau distance between their orders then and now.

    The paper recomputes the overhead's share of each chunk (times a constant). Here k is shared in proportion to
    overhead times reusable tokens, by largest remainder. Where no chunk has an overhead the shares are in proportion
    to their tokens; tokens of which nothing was saved (zeroed gaps) come after all others. Assumed: attention is that
    of the check layer, not the mean over layers; the lengths of chunks that are no longer there were not saved, so the
    chunks before a chunk count as equally long. As in the port, a chunk that was written with nothing before it lost
    nothing. The best version of a chunk is the engine's choice.
    """

    name: ClassVar[str] = "cache-craft"
    needs: ClassVar[frozenset[Need]] = frozenset({"written-attention"})
    start: ClassVar[Start] = "first-layer"

    def select(self, context: SelectionContext) -> Positions:
        saved = context.written_attention()
        spans = segment_spans(context.segments, context.positions)
        lengths = spans[:, 1] - spans[:, 0]
        overheads = _overheads(saved.chunks, context.segments)
        was_saved = np.array([attention is not None for attention in saved.chunks], dtype=np.float64)
        shares = np.zeros_like(lengths)
        for weight in (overheads, was_saved, np.ones(len(spans))):
            shares += apportion(context.k - int(shares.sum()), weight * lengths, lengths - shares)
        chosen = [
            start + top_k(saved.outside[start:end], share)
            for (start, end), share in zip(spans.tolist(), shares.tolist(), strict=True)
        ]
        selected: Positions = context.positions[np.concatenate(chosen)]
        return selected


def _overheads(attentions: Sequence[ChunkAttention | None], segments: Sequence[SegmentView]) -> Doubles:
    """How much of each segment needs to be fixed, float64 from 0 to 1."""
    places: dict[str, int] = {}
    overheads = np.zeros(len(segments))
    for index, (attention, segment) in enumerate(zip(attentions, segments, strict=True)):
        written = segment.written
        if attention is not None and written is not None:
            chunks_then = [content_id for content_id in dict.fromkeys(written.over) if content_id in attention.over]
            given = {content_id: attention.over[content_id] for content_id in chunks_then}
            impact = _context_impact(attention.inside, given, segment.end - segment.start, written.position)
            overheads[index] = impact * (1.0 - _overlap(given, places))
        places.setdefault(segment.content_id, index)
    return overheads


def _context_impact(inside: float, given: Mapping[str, float], tokens: int, tokens_before: int) -> float:
    """CCI: the sum over chunks before of the mean attention `given` to each, against the mean attention inside."""
    if not inside > 0:
        return 1.0
    to_others = len(given) * sum(given.values()) / (tokens * tokens_before) if tokens_before else 0.0
    return 1.0 / (1.0 + math.exp(-to_others / (inside / tokens**2)))


def _overlap(given: Mapping[str, float], places: Mapping[str, int]) -> float:
    """Beta': the share of the attention `given` to chunks before, in their order then, that went to those which stand
    before it now, at these places, times the share of their pairs that are in the same order."""
    total = sum(given.values())
    if not total > 0:
        return 1.0
    still = [content_id for content_id in given if content_id in places]
    pairs, in_order = len(still) * (len(still) - 1) // 2, 0
    earlier: list[int] = []
    for content_id in still:
        in_order += bisect_left(earlier, places[content_id])
        insort(earlier, places[content_id])
    same_order = in_order / pairs if pairs else 1.0
    return sum(given[content_id] for content_id in still) / total * same_order
