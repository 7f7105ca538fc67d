"""Reuse at any position: a chunk is found by its token ids, wherever it stands (LMCache's CacheBlend and its kin)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvaudit.preflight.pieces import Piece


@dataclass(frozen=True, slots=True)
class ChunkHits:
    """Tokens of a prompt in chunks that were cached before it came, without the last token, which is always computed.

    `stop_at_miss` counts up to the first chunk that was missed (LMCache's lookup), `any_position` all of them.
    """

    any_position: int
    stop_at_miss: int


class ChunkCache:
    """Every chunk of every prompt, the least recently used leaves first. `capacity` in tokens, None for no limit."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[str, int] = OrderedDict()
        self._tokens = 0

    def serve(self, pieces: Sequence[Piece]) -> ChunkHits:
        chunks = [(piece.content_id, piece.tokens) for piece in pieces if piece.is_chunk]
        hits = [content_id in self._chunks for content_id, _ in chunks]
        found = sum(tokens for (_, tokens), hit in zip(chunks, hits, strict=True) if hit)
        first_miss = hits.index(False) if False in hits else len(hits)
        before_miss = sum(tokens for _, tokens in chunks[:first_miss])
        last = bool(chunks) and pieces[-1].is_chunk and hits[-1]
        for content_id, tokens in chunks:
            self._keep(content_id, tokens)
        return ChunkHits(found - last, before_miss - (last and first_miss == len(hits)))

    def _keep(self, content_id: str, tokens: int) -> None:
        if content_id in self._chunks:
            self._chunks.move_to_end(content_id)
            return
        if self._capacity is not None and tokens > self._capacity:
            return
        self._chunks[content_id] = tokens
        self._tokens += tokens
        while self._capacity is not None and self._tokens > self._capacity:
            self._tokens -= self._chunks.popitem(last=False)[1]
