"""What the slow reference keeps of earlier requests: chunks, from the least to the most recently used."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from slow_blend import SlowAttention

from kvaudit.records import Part

FLOAT32_BYTES = 4
Key = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclass(eq=False)
class SlowEntry:
    """A stored chunk. keys (before rotation), values: float64 [L, G, len, D]; `context`: the ids before it; `over`,
    `tokens_over`: the chunks before it and their lengths; `places`: the positions to which keys were turned, [L, len].
    """

    token_ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    position: int
    writer_request_id: str
    writer_part: Part
    context: tuple[int, ...]
    computed_over: tuple[SlowEntry, ...]
    content_id: str
    over: tuple[str, ...] = ()
    attention: SlowAttention | None = None
    tokens_over: tuple[int, ...] = ()
    places: torch.Tensor | None = None
    write_ordinal: int = -1

    @property
    def size_bytes(self) -> int:
        return (self.keys.numel() + self.values.numel()) * FLOAT32_BYTES

    @property
    def ordinals_over(self) -> tuple[int, ...]:
        return tuple(entry.write_ordinal for entry in self.computed_over)


@dataclass
class SlowStore:
    """`entries` from the least to the most recently used; `written` and `evicted` are all of them so far."""

    capacity_bytes: int | None
    versions: int | None = None
    entries: dict[Key, SlowEntry] = field(default_factory=dict)
    written: list[SlowEntry] = field(default_factory=list)
    evicted: list[SlowEntry] = field(default_factory=list)

    def find(self, key: Key) -> SlowEntry | None:
        if key not in self.entries:
            return None
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def write(self, key: Key, entry: SlowEntry) -> None:
        if self.capacity_bytes is not None and entry.size_bytes > self.capacity_bytes:
            return
        self.entries.pop(key, None)
        entry.write_ordinal = len(self.written)
        self.written.append(entry)
        self.entries[key] = entry
        same = [other for other in self.entries if other[0] == key[0]]
        if self.versions is not None and len(same) > self.versions:
            self.evicted.append(self.entries.pop(same[0]))
        while self.capacity_bytes is not None and self.size_bytes > self.capacity_bytes:
            self.evicted.append(self.entries.pop(next(iter(self.entries))))

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())
