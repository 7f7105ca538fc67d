"""The chunk cache: LRU by bytes, the journal, and context hashes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvaudit.engines.embedded.cache import ChunkCache, Entry, PromptBytes
from kvaudit.records import Prompt, PromptSegment

TOKEN_BYTES = 2 * 2 * 1 * 4 * 4
"""Two layers, keys and values, one head, four dims, float32."""


def put(cache: ChunkCache, name: str, tokens: int = 1, **ledger: object) -> Entry:
    states = torch.zeros(2, 2, 1, tokens, 4)
    facts = {"content_id": name, "position": 0, "context_hash": "", "request_id": "r", "part": "request"} | ledger
    return cache.store((name.encode(), ""), states, **facts)  # type: ignore[arg-type]


def names(cache: ChunkCache) -> list[str]:
    return [entry.write.content_id for entry in cache.entries()]


def test_the_least_recently_used_entry_makes_room() -> None:
    cache = ChunkCache(3 * TOKEN_BYTES)
    for name in "abc":
        put(cache, name)
    assert cache.use((b"a", "")) is not None
    put(cache, "d")
    assert names(cache) == ["c", "a", "d"]
    writes, evictions = cache.take_journal()
    assert [write.content_id for write in writes] == ["a", "b", "c", "d"]
    assert [(e.content_id, e.write_ordinal, e.size_bytes) for e in evictions] == [("b", 1, TOKEN_BYTES)]
    assert cache.take_journal() == ((), ())


def test_an_entry_larger_than_the_capacity_is_not_stored() -> None:
    cache = ChunkCache(2 * TOKEN_BYTES)
    put(cache, "a")
    big = put(cache, "big", tokens=3)
    assert big.size_bytes == 3 * TOKEN_BYTES
    assert names(cache) == ["a"]
    assert [write.content_id for write in cache.take_journal()[0]] == ["a"]


def test_a_rewrite_replaces_its_bytes_and_has_a_new_ordinal() -> None:
    cache = ChunkCache()
    put(cache, "a")
    put(cache, "b")
    again = put(cache, "a", tokens=2)
    assert (again.write_ordinal, cache.size_bytes, names(cache)) == (2, 3 * TOKEN_BYTES, ["b", "a"])


def test_clear_forgets_everything_and_starts_ordinals_again() -> None:
    cache = ChunkCache(2 * TOKEN_BYTES)
    for name in "abc":
        put(cache, name)
    cache.clear()
    assert (len(cache), cache.size_bytes, cache.take_journal()) == (0, 0, ((), ()))
    assert put(cache, "d").write_ordinal == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 4), st.booleans())), st.integers(1, 8))
def test_size_and_order_match_a_plain_list(actions: list[tuple[str, int, bool]], capacity: int) -> None:
    cache = ChunkCache(capacity * TOKEN_BYTES)
    kept: list[tuple[str, int]] = []
    for name, tokens, read in actions:
        if read:
            found = cache.use((name.encode(), ""))
            held = [item for item in kept if item[0] == name]
            assert (found is not None) == bool(held)
            kept = [item for item in kept if item[0] != name] + held
        elif tokens <= capacity:
            put(cache, name, tokens)
            kept = [item for item in kept if item[0] != name] + [(name, tokens)]
            while sum(size for _, size in kept) > capacity:
                kept.pop(0)
        else:
            put(cache, name, tokens)
    assert names(cache) == [name for name, _ in kept]
    assert cache.size_bytes == TOKEN_BYTES * sum(size for _, size in kept)


def test_a_context_hash_covers_the_token_ids_before_a_segment_and_nothing_else() -> None:
    def contexts(*parts: list[int]) -> tuple[str, ...]:
        ids: list[int] = []
        segments = []
        for part in parts:
            segments.append(PromptSegment("document", "x", len(ids), len(ids) + len(part)))
            ids += part
        return PromptBytes.of(Prompt(tuple(ids), tuple(segments))).contexts

    first = contexts([1, 2], [3], [4])
    assert first == contexts([1, 2], [3], [9])
    assert contexts([1], [2, 3], [4])[2] == first[2]
    assert contexts([1, 5], [3], [4])[1:] != first[1:]
    assert len(set(first)) == 3
