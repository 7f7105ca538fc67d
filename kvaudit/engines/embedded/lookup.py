"""Which cached chunks a prompt may use, and what that leaves to compute (the switches lookup, gap and write-back)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvaudit.engines import Switches
from kvaudit.engines.embedded.cache import ChunkCache, ChunkKey, Entry, PromptBytes
from kvaudit.records import GAP_KINDS, Prompt, PromptSegment

QUERY = "query"

ComputeAlone = Callable[[PromptSegment, ChunkKey], Entry]
"""Computes a chunk with nothing before it and stores it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Per segment: its key (None for gaps), the entry that is used (else None), and whether it was there before."""

    keys: tuple[ChunkKey | None, ...]
    used: tuple[Entry | None, ...]
    existed: tuple[bool, ...]
    contexts: tuple[str, ...]

    @property
    def last_used(self) -> int | None:
        return max((index for index, entry in enumerate(self.used) if entry is not None), default=None)


def is_chunk(segment: PromptSegment, switches: Switches) -> bool:
    """Gaps are chunks where separators are stored; an isolated cache leaves queries to their context."""
    if segment.kind in GAP_KINDS:
        return switches.gap == "store"
    return not (switches.write_back == "isolated" and segment.kind == QUERY)


def look_up(cache: ChunkCache, prompt: Prompt, switches: Switches, compute_alone: ComputeAlone) -> Found:
    seen = PromptBytes.of(prompt)
    versioned = switches.write_back == "versioned"
    keys = tuple(
        (seen.chunk(segment.start, segment.end), context if versioned else "") if is_chunk(segment, switches) else None
        for segment, context in zip(prompt.segments, seen.contexts, strict=True)
    )
    if switches.write_back == "isolated":
        return _isolated(cache, prompt, keys, seen.contexts, compute_alone)
    unbroken = versioned and (switches.mask == "bottom-right" or switches.gap == "zero")
    used = _usable(cache, keys, stop_at_miss=switches.lookup == "stop-at-miss", unbroken=unbroken)
    return Found(keys, used, tuple(entry is not None for entry in used), seen.contexts)


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
