"""Which cached chunks a prompt may use, and which of its own are stored after it (lookup, gap and write-back)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvaudit.engines import PREFIX_LOOKUPS, Switches
from kvaudit.engines.embedded.cache import (
    VERSIONS_KEPT,
    ChunkCache,
    ChunkKey,
    Entry,
    PromptBytes,
    chunks_before,
)
from kvaudit.engines.embedded.prefix import PrefixCache, PrefixHit, prefix_cache
from kvaudit.engines.embedded.versions import best_version
from kvaudit.records import GAP_KINDS, Prompt, PromptSegment

QUERY = "query"

ComputeAlone = Callable[[PromptSegment, ChunkKey], Entry]
"""Computes a chunk with nothing before it and stores it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Per segment: its key (None for gaps), the entry that is used (else None), and whether it was there before.

    whole: per segment whether it is used as good as in its own context, so that a version of it would be none the
        better (`versions`).
    prefix: what an exact prefix cache hit (else None). Then `used` says of each segment that the hit reaches which
        write brought the last of it, and nothing is left to blend.
    """

    keys: tuple[ChunkKey | None, ...]
    used: tuple[Entry | None, ...]
    existed: tuple[bool, ...]
    contexts: tuple[str, ...]
    whole: frozenset[int] = frozenset()
    prefix: PrefixHit | None = None

    @property
    def last_used(self) -> int | None:
        return max((index for index, entry in enumerate(self.used) if entry is not None), default=None)

    def reused_tokens(self, prompt: Prompt) -> int:
        """Tokens that are loaded from what was there before the prompt came."""
        if self.prefix is not None:
            return self.prefix.tokens
        return sum(s.end - s.start for s, existed in zip(prompt.segments, self.existed, strict=True) if existed)


def is_chunk(segment: PromptSegment, switches: Switches) -> bool:
    """Gaps are chunks where separators are stored; an isolated cache leaves queries to their context."""
    if segment.kind in GAP_KINDS:
        return switches.gap == "store"
    return not (switches.write_back == "isolated" and segment.kind == QUERY)


def empty_cache(switches: Switches, token_bytes: int) -> ChunkCache | PrefixCache:
    """`token_bytes`: what one token takes. Raises UsageError for a capacity that holds nothing of a prefix."""
    if switches.lookup in PREFIX_LOOKUPS:
        return prefix_cache(switches.lookup, switches.capacity_bytes, token_bytes)
    return ChunkCache(switches.capacity_bytes, VERSIONS_KEPT if switches.write_back == "versions" else None)


def look_up_prefix(cache: PrefixCache, prompt: Prompt) -> Found:
    seen = PromptBytes.of(prompt)
    hit = cache.match(seen.ids)
    used = hit.entries(prompt, seen)
    return Found((None,) * len(used), used, tuple(entry is not None for entry in used), seen.contexts, prefix=hit)


def look_up(cache: ChunkCache, prompt: Prompt, switches: Switches, compute_alone: ComputeAlone) -> Found:
    seen = PromptBytes.of(prompt)
    by_context = switches.write_back in ("versioned", "versions")
    keys = tuple(
        (seen.chunk(segment.start, segment.end), context if by_context else "") if is_chunk(segment, switches) else None
        for segment, context in zip(prompt.segments, seen.contexts, strict=True)
    )
    if switches.write_back == "isolated":
        return _isolated(cache, prompt, keys, seen.contexts, compute_alone)
    stop_at_miss = switches.lookup == "stop-at-miss"
    if switches.write_back == "versions":
        return _best_versions(cache, prompt, keys, seen.contexts, stop_at_miss)
    unbroken = switches.write_back == "versioned" and (switches.mask == "bottom-right" or switches.gap == "zero")
    used = _usable(cache, keys, stop_at_miss=stop_at_miss, unbroken=unbroken)
    return Found(keys, used, tuple(entry is not None for entry in used), seen.contexts)


def is_written(cache: ChunkCache, found: Found, index: int, switches: Switches) -> bool:
    """Whether a segment of a served prompt is stored, as the cache stands at its turn.

    `versions` stores a chunk that was missed, and another version of one that was used in a context that lacks
    something of the one in which it was computed: what was loaded of it was mended there, or not, and stays apart.
    """
    key = found.keys[index]
    if key is None or switches.write_back in ("none", "isolated") or index in found.whole:
        return False
    return switches.write_back == "last-writer" or key not in cache


def _usable(
    cache: ChunkCache, keys: tuple[ChunkKey | None, ...], *, stop_at_miss: bool, unbroken: bool
) -> tuple[Entry | None, ...]:
    """`unbroken` ends the lookup at the first segment that is not used, gaps included."""
    used: list[Entry | None] = []
    stopped = False
    for key in keys:
        entry = None if key is None or stopped else cache.use(key)
        if entry is None and (unbroken or (stop_at_miss and key is not None)):
            stopped = True
        used.append(entry)
    return tuple(used)


def _best_versions(
    cache: ChunkCache,
    prompt: Prompt,
    keys: tuple[ChunkKey | None, ...],
    contexts: tuple[str, ...],
    stop_at_miss: bool,
) -> Found:
    """Of each chunk the version whose context overlaps most with the present one."""
    used: list[Entry | None] = []
    whole = set()
    stopped = False
    for index, key in enumerate(keys):
        entry = None
        if key is not None and not stopped:
            now = [content_id for content_id, _ in chunks_before(prompt, index)]
            entry, overlapping = best_version(cache.versions(key[0]), now, contexts[index])
            stopped = entry is None and stop_at_miss
            if entry is not None:
                cache.use(entry.key)
                if overlapping == 1:
                    whole.add(index)
        used.append(entry)
    return Found(keys, tuple(used), tuple(entry is not None for entry in used), contexts, frozenset(whole))


def _isolated(
    cache: ChunkCache,
    prompt: Prompt,
    keys: tuple[ChunkKey | None, ...],
    contexts: tuple[str, ...],
    compute_alone: ComputeAlone,
) -> Found:
    """Every chunk is used; those that are missing are computed alone first. Used ones outlive their eviction."""
    used: list[Entry | None] = []
    existed: list[bool] = []
    made: set[ChunkKey] = set()
    for segment, key in zip(prompt.segments, keys, strict=True):
        entry = None if key is None else cache.use(key)
        existed.append(entry is not None and key not in made)
        if key is not None and entry is None:
            entry = compute_alone(segment, key)
            made.add(key)
        used.append(entry)
    return Found(keys, tuple(used), tuple(existed), contexts)
