"""The chunk cache: entries by content, least recently used first, and the ledger of who wrote what."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvaudit.policies import ChunkAttention, Floats
from kvaudit.records import GAP_KINDS, Eviction, Part, Prompt, Write

ChunkKey = tuple[bytes, str]
"""Token ids as bytes, and the context hash where a chunk is stored once for each context (else empty)."""

Before = tuple[tuple[str, int], ...]
"""Content ids and token counts of the chunks that stand before a place in a prompt, in order; gaps left out."""

VERSIONS_KEPT = 5
"""Versions of a chunk under `versions`. Cache-Craft keeps several of each (arXiv 2502.15734, section 3.3) and ranks
them by how often they are used for what they cost to mend; that five are kept, and by least recent use, is ours."""


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """What a chunk's rows looked at at the check layer, mean over heads: `outside` float32 [tokens] is the share that
    each gave to tokens before the chunk, `chunk` the sums over the rows."""

    outside: Floats
    chunk: ChunkAttention


@dataclass(frozen=True, slots=True)
class Entry:
    """Keys and values [L, 2, G, tokens, D] of one chunk, and where they come from.

    Keys are raw; where the engine does not move keys, they are as they were turned when they were written.
    """

    key: ChunkKey
    states: Tensor
    write: Write
    writer_request_id: str
    writer_part: Part
    before: Before = ()
    attention: SavedAttention | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.key[0], dtype=np.int32).tolist())

    @property
    def position(self) -> int:
        return self.write.position

    @property
    def write_ordinal(self) -> int:
        return self.write.write_ordinal

    @property
    def context_hash(self) -> str:
        return self.write.context_hash

    @property
    def computed_over(self) -> tuple[int, ...]:
        return self.write.computed_over

    @property
    def size_bytes(self) -> int:
        return self.write.size_bytes


class Ledger(ABC):
    """What a cache wrote and evicted: write ordinals since it was empty, the journal, and the bytes that it holds."""

    def __init__(self) -> None:
        self.size_bytes = self._ordinal = 0
        self._writes: list[Write] = []
        self._evictions: list[Eviction] = []

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def clear(self) -> None:
        """Forget everything; write ordinals start again at 0."""

    def take_journal(self) -> tuple[tuple[Write, ...], tuple[Eviction, ...]]:
        """What was written and evicted since the last time."""
        journal = tuple(self._writes), tuple(self._evictions)
        self._writes, self._evictions = [], []
        return journal

    def _forget(self) -> None:
        self.size_bytes = self._ordinal = 0
        self._writes, self._evictions = [], []

    def _wrote(self, write: Write) -> None:
        self._ordinal += 1
        self.size_bytes += write.size_bytes
        self._writes.append(write)

    def _evicted(self, write: Write, size_bytes: int) -> None:
        self.size_bytes -= size_bytes
        self._evictions.append(Eviction(write.content_id, write.write_ordinal, size_bytes))


class ChunkCache(Ledger):
    """Holds at most `capacity_bytes`, and at most `versions` entries of one chunk (None: no limit)."""

    def __init__(self, capacity_bytes: int | None = None, versions: int | None = None) -> None:
        super().__init__()
        self._capacity, self._versions_kept = capacity_bytes, versions
        self._entries: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._versions: defaultdict[bytes, OrderedDict[ChunkKey, Entry]] = defaultdict(OrderedDict)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def entries(self) -> list[Entry]:
        """Least recently used first."""
        return list(self._entries.values())

    def versions(self, token_ids: bytes) -> list[Entry]:
        """The entries of one chunk, least recently used first."""
        return list(self._versions[token_ids].values()) if token_ids in self._versions else []

    def use(self, key: ChunkKey) -> Entry | None:
        """The entry, which becomes the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
            self._versions[key[0]].move_to_end(key)
        return entry

    def store(
        self,
        key: ChunkKey,
        states: Tensor,
        *,
        content_id: str,
        position: int,
        context_hash: str,
        computed_over: Sequence[int] = (),
        before: Before = (),
        request_id: str,
        part: Part,
        attention: SavedAttention | None = None,
    ) -> Entry:
        """Write an entry in place of one under the same key, then evict down to the limits.

        Another version too many takes the place of the chunk's least recently used one. An entry larger than the
        whole capacity is returned but not stored.
        """
        size = states.numel() * states.element_size()
        write = Write(content_id, self._ordinal, position, states.shape[3], context_hash, tuple(computed_over), size)
        entry = Entry(key, states, write, request_id, part, before, attention)
        if self._capacity is not None and size > self._capacity:
            return entry
        if (replaced := self._removed(key)) is not None:
            self.size_bytes -= replaced.size_bytes
        self._entries[key] = self._versions[key[0]][key] = entry
        self._wrote(write)
        while self._versions_kept is not None and len(self._versions[key[0]]) > self._versions_kept:
            self._evict(next(iter(self._versions[key[0]])))
        while self._capacity is not None and self.size_bytes > self._capacity:
            self._evict(next(iter(self._entries)))
        return entry

    def clear(self) -> None:
        self._entries.clear()
        self._versions.clear()
        self._forget()

    def _evict(self, key: ChunkKey) -> None:
        if (oldest := self._removed(key)) is not None:
            self._evicted(oldest.write, oldest.size_bytes)

    def _removed(self, key: ChunkKey) -> Entry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            versions = self._versions[key[0]]
            del versions[key]
            if not versions:
                del self._versions[key[0]]
        return entry


def context_hash(seen: hashlib._Hash) -> str:
    return seen.hexdigest()[:16]


NO_CONTEXT = context_hash(hashlib.sha256())


@dataclass(frozen=True, slots=True)
class PromptBytes:
    """A prompt's token ids as int32 bytes, and per segment the hash of all token ids before it."""

    ids: bytes
    contexts: tuple[str, ...]

    @classmethod
    def of(cls, prompt: Prompt) -> PromptBytes:
        ids = np.asarray(prompt.token_ids, dtype=np.int32).tobytes()
        seen = hashlib.sha256()
        contexts = []
        for segment in prompt.segments:
            contexts.append(context_hash(seen))
            seen.update(ids[4 * segment.start : 4 * segment.end])
        return cls(ids, tuple(contexts))

    def chunk(self, start: int, end: int) -> bytes:
        return self.ids[4 * start : 4 * end]


def chunks_before(prompt: Prompt, index: int) -> Before:
    """The chunks that stand before a segment."""
    return tuple((s.content_id, s.end - s.start) for s in prompt.segments[:index] if s.kind not in GAP_KINDS)
