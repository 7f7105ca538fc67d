"""Who wrote each chunk that LMCache holds: an entry a key, made when the key is first put into the store."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvaudit.engines.vllm.worker.job import Job
from kvaudit.policies import SegmentView, Written
from kvaudit.records import Eviction, Part, Prompt, PromptSegment, Provenance, Write

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored chunk. `before` is the digest's state over the token ids that stood before it when it was written,
    `over` holds the content ids of the chunks before it then."""

    key: str
    write: Write
    writer_request_id: str
    writer_part: Part
    token_ids: tuple[int, ...]
    before: hashlib._Hash
    over: tuple[str, ...]

    def context_hash(self, offset: int) -> str:
        """Of the token ids that stood before its token at `offset` when it was written."""
        seen = self.before.copy()
        seen.update(_bytes(self.token_ids[:offset]))
        return _short(seen)


class Ledger:
    """The entries of what is stored, and the journal of writes and evictions since it was last taken.

    The first writer wins, as in LMCache's store: a key that is there keeps its entry. Write ordinals count from 0.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._ordinal = 0
        self._writes: list[Write] = []
        self._evictions: list[Eviction] = []

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Entry | None:
        return self._entries.get(key)

    def put(
        self, key: str, job: Job, where: Range, chunks: Sequence[Range], loaded: Sequence[Entry], size_bytes: int
    ) -> None:
        """A chunk of the job's prompt at `where` came into the store under a key that was not in it.

        `chunks` are all chunks of the prompt, `loaded` those entries that it was computed over.
        """
        self._gone(key)
        start, end = where
        token_ids = job.prompt.token_ids
        before = hashlib.sha256(_bytes(token_ids[:start]))
        over = tuple(content_id(token_ids[a:b]) for a, b in chunks if a < b <= start)
        ordinals = tuple(entry.write.write_ordinal for entry in loaded)
        chunk = tuple(token_ids[start:end])
        write = Write(content_id(chunk), self._ordinal, start, end - start, _short(before), ordinals, size_bytes)
        self._ordinal += 1
        self._writes.append(write)
        self._entries[key] = Entry(key, write, job.request_id, job.part, chunk, before, over)

    def keep(self, held: Collection[str]) -> None:
        """Entries whose keys are no longer held were evicted."""
        for key in [key for key in self._entries if key not in held]:
            self._gone(key)

    def take_journal(self) -> tuple[tuple[Write, ...], tuple[Eviction, ...]]:
        writes, evictions = tuple(self._writes), tuple(self._evictions)
        self._writes, self._evictions = [], []
        return writes, evictions

    def _gone(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            write = entry.write
            self._evictions.append(Eviction(write.content_id, write.write_ordinal, write.size_bytes))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A chunk of a prompt that was loaded, and the entry behind it; None where the ledger saw no write of it."""

    start: int
    end: int
    entry: Entry | None


def segment_views(prompt: Prompt, loaded: Sequence[Loaded]) -> tuple[SegmentView, ...]:
    """The prompt's tiling. A segment is a hit where it lies within one loaded chunk."""
    return tuple(
        SegmentView(s.kind, s.content_id, s.start, s.end, chunk is not None, _written(prompt, s, chunk))
        for s, chunk in _places(prompt, loaded)
    )


def provenance(prompt: Prompt, loaded: Sequence[Loaded]) -> tuple[Provenance, ...]:
    """For every segment that lies within a loaded chunk whose write is known, in the order of the prompt."""
    made = []
    for index, (segment, chunk) in enumerate(_places(prompt, loaded)):
        written = _written(prompt, segment, chunk)
        if written is not None:
            made.append(
                Provenance(
                    index,
                    segment.content_id,
                    written.request_id,
                    written.part,
                    written.ordinal,
                    written.position,
                    segment.start,
                    written.context_hash,
                    written.context_hash_now,
                )
            )
    return tuple(made)


def content_id(token_ids: Sequence[int]) -> str:
    """As segments have it: 16 hexadecimal digits of the SHA-256 of the ids as little-endian 32-bit integers."""
    return _short(hashlib.sha256(_bytes(token_ids)))


def _places(prompt: Prompt, loaded: Sequence[Loaded]) -> list[tuple[PromptSegment, Loaded | None]]:
    """Each segment with the loaded chunk that it lies within. An empty segment lies within none."""
    return [
        (segment, next((c for c in loaded if c.start <= segment.start < segment.end <= c.end), None))
        for segment in prompt.segments
    ]


def _written(prompt: Prompt, segment: PromptSegment, chunk: Loaded | None) -> Written | None:
    if chunk is None or chunk.entry is None:
        return None
    entry, offset = chunk.entry, segment.start - chunk.start
    return Written(
        entry.writer_request_id,
        entry.writer_part,
        entry.write.write_ordinal,
        entry.write.position + offset,
        entry.context_hash(offset),
        content_id(prompt.token_ids[: segment.start]),
        entry.over,
    )


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def _short(digest: hashlib._Hash) -> str:
    return digest.hexdigest()[:16]
