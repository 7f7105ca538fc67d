"""The chunk cache: entries by content, least recently used first, and the ledger of who wrote what."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvaudit.records import Eviction, Part, Prompt, Write

ChunkKey = tuple[bytes, str]
"""Token ids as bytes, and the context hash where entries are versioned (else empty)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Raw keys and values [L, 2, G, tokens, D] of one chunk, and where they come from."""

    key: ChunkKey
    states: Tensor
    write: Write
    writer_request_id: str
    writer_part: Part

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


class ChunkCache:
    """Holds at most `capacity_bytes` (None: no limit) and keeps a journal of its writes and evictions."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[ChunkKey, Entry] = OrderedDict()
        self._writes: list[Write] = []
        self._evictions: list[Eviction] = []
        self.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def entries(self) -> list[Entry]:
        """Least recently used first."""
        return list(self._entries.values())

    def use(self, key: ChunkKey) -> Entry | None:
        """The entry, which becomes the most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
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
        request_id: str,
        part: Part,
    ) -> Entry:
        """Write an entry in place of one under the same key, then evict down to the capacity.

        An entry larger than the whole capacity is returned but not stored.
        """
        size = states.numel() * states.element_size()
        write = Write(content_id, self._ordinal, position, states.shape[3], context_hash, tuple(computed_over), size)
        entry = Entry(key, states, write, request_id, part)
        if self._capacity is not None and size > self._capacity:
            return entry
        self._ordinal += 1
        replaced = self._entries.pop(key, None)
        self.size_bytes += size - (replaced.size_bytes if replaced else 0)
        self._entries[key] = entry
        self._writes.append(write)
        while self._capacity is not None and self.size_bytes > self._capacity:
            _, oldest = self._entries.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
            self._evictions.append(Eviction(oldest.write.content_id, oldest.write_ordinal, oldest.size_bytes))
        return entry

    def take_journal(self) -> tuple[tuple[Write, ...], tuple[Eviction, ...]]:
        """What was written and evicted since the last time."""
        journal = tuple(self._writes), tuple(self._evictions)
        self._writes, self._evictions = [], []
        return journal

    def clear(self) -> None:
        """Forget everything; write ordinals start again at 0."""
        self._entries.clear()
        self._ordinal = 0
        self.size_bytes = 0
        self._writes, self._evictions = [], []


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
