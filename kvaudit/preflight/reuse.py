"""What each request of a trace could reuse, where its prefix breaks, and what recomputation would save."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvaudit.preflight.chunks import ChunkCache
from kvaudit.preflight.pieces import PiecedPrompt
from kvaudit.preflight.prefix_caches import ID_BYTES, VLLM_BLOCK, BlockPrefixCache, Hit, RadixPrefixCache
from kvaudit.records import Request

RATIOS = (0.05, 0.10, 0.15, 0.20)
DEFAULT_CAPACITY = 500_000
SERIES = ("prompt_tokens", "vllm_reused", "sglang_reused", "chunk_reused_any", "chunk_reused_stop_at_miss")


@dataclass(frozen=True, slots=True)
class Caches:
    """`capacity` in tokens, the same for every cache; None is no limit."""

    capacity: int | None = DEFAULT_CAPACITY
    block_tokens: int = VLLM_BLOCK
    page_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Break:
    """Where a prompt leaves the longest cached prefix: in which piece, after how many tokens, and why (`Hit.how`).

    `segment` counts the trace's segments from 1, None for template glue; in a trace without prompts it counts blocks.
    `prefix_from` is the request that brought the prefix, None where there is none.
    """

    segment: int | None
    kind: str
    token: int
    how: str
    prefix_from: str | None


@dataclass(frozen=True, slots=True)
class RequestReuse:
    """Tokens of one request's prompt that each cache would have reused; None where it cannot hold the prompt.

    Without the prompt, segments and chunks are None.
    """

    request_id: str
    ordinal: int
    session: str | None
    segments: int | None
    prompt_tokens: int
    prelude_tokens: int
    vllm_reused: int | None
    sglang_reused: int | None
    chunk_reused_any: int | None
    chunk_reused_stop_at_miss: int | None
    broken: Break | None


class ReuseAnalysis:
    """Serves a trace to the caches, one prompt at a time, each request after its prelude."""

    def __init__(self, caches: Caches) -> None:
        self._vllm = BlockPrefixCache(caches.capacity, caches.block_tokens)
        self._sglang = RadixPrefixCache(caches.capacity, caches.page_tokens)
        self._chunks = ChunkCache(caches.capacity)

    def serve(self, request: Request, prompt: PiecedPrompt, prelude: Iterable[PiecedPrompt]) -> RequestReuse:
        prelude_tokens = 0
        for before in prelude:
            ids = before.ids
            prelude_tokens += len(ids) // ID_BYTES
            self._vllm.serve(ids)
            self._sglang.serve(ids, request.request_id)
            self._chunks.serve(before.pieces)
        ids = prompt.ids
        hit = self._sglang.serve(ids, request.request_id)
        chunks = self._chunks.serve(prompt.pieces)
        return RequestReuse(
            request_id=request.request_id,
            ordinal=request.ordinal,
            session=request.session,
            segments=len(prompt.pieces),
            prompt_tokens=len(ids) // ID_BYTES,
            prelude_tokens=prelude_tokens,
            vllm_reused=self._vllm.serve(ids),
            sglang_reused=None if hit is None else hit.reused,
            chunk_reused_any=chunks.any_position,
            chunk_reused_stop_at_miss=chunks.stop_at_miss,
            broken=_break(prompt, hit),
        )


def _break(prompt: PiecedPrompt, hit: Hit | None) -> Break | None:
    if hit is None or hit.how == "whole":
        return None
    end = 0
    for segment, piece in zip(prompt.segments, prompt.pieces, strict=True):
        end += piece.tokens
        if hit.reused < end:
            return Break(None if segment is None else segment + 1, piece.kind, hit.reused, hit.how, hit.writer)
    return None


@dataclass(slots=True)
class BreakTotal:
    """Breaks of one kind and cause: how many, and the tokens after them that some cached chunk holds.

    Where chunks cannot be seen, all tokens after them.
    """

    requests: int = 0
    tokens: int = 0
    worst: RequestReuse | None = None
    worst_tokens: int = -1


@dataclass(slots=True)
class ReuseTotals:
    """Sums over the requests of a trace; `prefilled` gives, per recompute ratio and lookup, the tokens computed."""

    requests: int = 0
    prompt_tokens: int = 0
    prelude_tokens: int = 0
    longest_prompt: int = 0
    longest_request: str = ""
    vllm_reused: int = 0
    sglang_reused: int = 0
    chunk_reused_any: int = 0
    chunk_reused_stop_at_miss: int = 0
    too_large: int = 0
    prefilled: Counter[tuple[float, str]] = field(default_factory=Counter)
    breaks: dict[tuple[str, str], BreakTotal] = field(default_factory=dict)
    series: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in SERIES})

    def add(self, row: RequestReuse) -> None:
        self.requests += 1
        self.prompt_tokens += row.prompt_tokens
        self.prelude_tokens += row.prelude_tokens
        if row.prompt_tokens > self.longest_prompt:
            self.longest_prompt, self.longest_request = row.prompt_tokens, row.request_id
        self.vllm_reused += row.vllm_reused or 0
        self.sglang_reused += row.sglang_reused or 0
        self.too_large += row.vllm_reused is None or row.sglang_reused is None
        if row.chunk_reused_any is not None and row.chunk_reused_stop_at_miss is not None:
            self._add_chunks(row.prompt_tokens, row.chunk_reused_any, row.chunk_reused_stop_at_miss)
        for name, values in self.series.items():
            values.append(getattr(row, name) or 0)
        if row.broken is not None:
            self._add_break(row, row.broken)

    def _add_chunks(self, tokens: int, at_any_position: int, up_to_a_miss: int) -> None:
        self.chunk_reused_any += at_any_position
        self.chunk_reused_stop_at_miss += up_to_a_miss
        for ratio in RATIOS:
            self.prefilled[ratio, "any"] += prefilled(tokens, at_any_position, ratio)
            self.prefilled[ratio, "stop-at-miss"] += prefilled(tokens, up_to_a_miss, ratio)

    def _add_break(self, row: RequestReuse, broken: Break) -> None:
        total = self.breaks.setdefault((broken.kind, broken.how), BreakTotal())
        known = row.prompt_tokens if row.chunk_reused_any is None else row.chunk_reused_any
        lost = max(0, known - broken.token)
        total.requests += 1
        total.tokens += lost
        if lost > total.worst_tokens:
            total.worst, total.worst_tokens = row, lost


def prefilled(prompt_tokens: int, reusable: int, ratio: float) -> int:
    """Tokens that are computed where k = max(1, floor(ratio * reusable)) reused tokens are computed again."""
    return prompt_tokens - reusable + (max(1, int(ratio * reusable)) if reusable else 0)


def binned_rates(totals: ReuseTotals, name: str, bins: int) -> list[float]:
    """The share of prompt tokens that was reused in each of at most `bins` equal stretches of the trace."""
    tokens, reused = totals.series["prompt_tokens"], totals.series[name]
    edges = _edges(len(tokens), bins)
    return [sum(reused[a:b]) / max(1, sum(tokens[a:b])) for a, b in pairwise(edges)]


def _edges(count: int, bins: int) -> Sequence[int]:
    bins = min(count, bins)
    return [count * index // bins for index in range(bins + 1)] if bins else [0]
