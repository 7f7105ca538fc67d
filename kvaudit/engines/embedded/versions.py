"""Which of several stored versions of a chunk suits a prompt best: Cache-Craft's adjusted prefix overlap.

A port: written from descriptions of the paper (arXiv 2502.15734, equations 6 to 8) and of others' ports, for want of
code of its authors'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from kvaudit.engines.embedded.cache import Entry


def best_version(versions: Sequence[Entry], now: Sequence[str], context_hash: str) -> tuple[Entry | None, float]:
    """The version with the largest overlap, and that; (None, 0) where there is none.

    `now`: content ids of the chunks before the place where it is wanted, in order. Of equals the one that was written
    in the very same context (`context_hash`), then the one that was written first.
    """
    best, best_rank = None, (-1.0, False, 0)
    for entry in versions:
        rank = (overlap(attended(entry), now), entry.context_hash == context_hash, -entry.write_ordinal)
        if rank > best_rank:
            best, best_rank = entry, rank
    return best, max(0.0, best_rank[0])


def attended(entry: Entry) -> dict[str, float]:
    """How much a chunk took from each chunk that stood before it when it was written, in their order: the attention
    that was saved of that, else their numbers of tokens."""
    weights: dict[str, float] = {}
    for content_id, tokens in entry.before:
        weights[content_id] = weights.get(content_id, 0.0) + tokens
    saved = {} if entry.attention is None else entry.attention.chunk.over
    return {content_id: saved[content_id] for content_id in weights} if weights.keys() <= saved.keys() else weights


def overlap(attended: Mapping[str, float], now: Sequence[str]) -> float:
    """The share, 0 to 1, of what a chunk took from those before it (`attended`, in their order then) that comes from
    chunks that stand before it `now`, times the share of pairs of these that stand in the same order now as then.

    1 for a chunk that took nothing from others: no context can take anything from it.
    """
    total = sum(attended.values())
    if not total:
        return 1.0
    places = {content_id: place for place, content_id in reversed(list(enumerate(now)))}
    common = [content_id for content_id in attended if content_id in places]
    pairs = list(combinations((places[content_id] for content_id in common), 2))
    in_order = sum(first < second for first, second in pairs) / len(pairs) if pairs else 1.0
    return sum(attended[content_id] for content_id in common) / total * in_order
