"""Exact prefix caches with their KV: the hits that kvaudit's counting (held against the real packages) gives, the KV of
exactly the same prefix, full prefill's answers whatever was served before, and a ledger that adds up."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from blend_cases import TOKEN_BYTES, TOLERANCE, engine_of, model_of, policy_named, prompt_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_reference import SlowEngine
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import PRESETS, Lookup, Switches
from kvaudit.engines.embedded.engine import EmbeddedEngine
from kvaudit.engines.embedded.prefix import BlockCache, PrefixCache, RadixCache
from kvaudit.errors import UsageError
from kvaudit.preflight.prefix_caches import BlockPrefixCache, RadixPrefixCache
from kvaudit.records import CacheState, Prompt, Sampling, Served

LOOKUPS: list[Lookup] = ["vllm-prefix", "sglang-prefix"]
BYTES = 2 * 8
"""What a token of `states_of` takes."""


def ids(tokens: Sequence[int] | str) -> bytes:
    return array("i", map(int, tokens)).tobytes()


def states_of(token_ids: bytes) -> torch.Tensor:
    """[1, 2, 1, n, 1] float64: at each position a number that only the same prefix up to it has."""
    ends = range(4, len(token_ids) + 1, 4)
    numbers = [int.from_bytes(hashlib.sha256(token_ids[:end]).digest()[:6], "big") for end in ends]
    return torch.tensor(numbers, dtype=torch.float64)[None, None, None, :, None].repeat(1, 2, 1, 1, 1)


piece = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
token_histories = st.lists(piece, min_size=1, max_size=4).flatmap(
    lambda some: st.lists(
        st.lists(st.sampled_from(some), min_size=1, max_size=5).map(lambda parts: sum(parts, ())),
        min_size=1,
        max_size=25,
    )
)
"""Prompts out of a few pieces, so that prefixes, whole prompts and borders in and at the end of blocks recur."""


def serve(cache: PrefixCache, token_ids: bytes, request_id: str = "r") -> int:
    """Hit tokens; what is loaded is the KV of exactly this prefix."""
    hit, states = cache.match(token_ids), states_of(token_ids)
    arena = torch.full_like(states, -1)
    hit.load(arena)
    assert torch.equal(arena[:, :, :, : hit.tokens], states[:, :, :, : hit.tokens])
    assert (arena[:, :, :, hit.tokens :] == -1).all()
    cache.add(hit, states, request_id, "request")
    return hit.tokens


def assert_ledger_adds_up(cache: PrefixCache, capacity: int | None) -> None:
    """Sizes are what writes brought and evictions took; each names a write that was not wholly evicted before."""
    writes, evictions = cache.take_journal()
    left = {write.write_ordinal: write.size_bytes for write in writes}
    assert list(left) == list(range(len(writes)))
    for eviction in evictions:
        assert eviction.content_id == writes[eviction.write_ordinal].content_id
        left[eviction.write_ordinal] -= eviction.size_bytes
    assert min(left.values(), default=0) >= 0
    assert cache.size_bytes == sum(left.values())
    assert all(write.size_bytes == write.tokens * BYTES for write in writes)
    assert capacity is None or cache.size_bytes <= capacity * BYTES


@settings(max_examples=100, deadline=None)
@example([(5,), (1, 1), (1, 1), (3, 3, 4, 4), (1, 1), (1, 1), (1, 1, 2, 2, 3, 3), (3, 3, 4, 4)], 6, 2)  # equal blocks
@given(token_histories, st.none() | st.integers(2, 12), st.sampled_from([1, 2, 4]))
def test_blocks_hit_as_they_are_counted(history: list[tuple[int, ...]], blocks: int | None, size: int) -> None:
    capacity = None if blocks is None else blocks * size
    cache, counted = BlockCache(capacity, size), BlockPrefixCache(capacity, size)
    for prompt in map(ids, history):
        assert serve(cache, prompt) == (counted.serve(prompt) or 0)
    assert_ledger_adds_up(cache, capacity)


@settings(max_examples=100, deadline=None)
@example([(1, 2), (1, 3), (4, 5), (1, 3, 9)], 4)  # which of two leaves goes
@given(token_histories, st.none() | st.integers(1, 40))
def test_the_tree_hits_as_it_is_counted(history: list[tuple[int, ...]], capacity: int | None) -> None:
    cache, counted = RadixCache(capacity), RadixPrefixCache(capacity)
    for prompt in map(ids, history):
        hit = counted.serve(prompt, "")
        assert serve(cache, prompt) == (0 if hit is None else hit.reused)
        assert cache.size_bytes == counted.tokens * BYTES
    assert_ledger_adds_up(cache, capacity)


@pytest.mark.parametrize("cache", [BlockCache(None, 2), RadixCache()], ids=["blocks", "tree"])
def test_a_hit_that_is_not_written_back_leaves_no_trace_in_the_ledger(cache: PrefixCache) -> None:
    serve(cache, ids("1122"))
    cache.take_journal()
    entries, size = len(cache), cache.size_bytes
    cache.match(ids("11223"))
    assert cache.take_journal() == ((), ())
    assert cache.size_bytes == size
    assert len(cache) == entries
    cache.clear()
    assert (len(cache), cache.size_bytes) == (0, 0)
    assert serve(cache, ids("1122")) == 0
    assert cache.take_journal()[0][0].write_ordinal == 0


def test_a_write_names_what_it_was_computed_over_and_its_place() -> None:
    cache = BlockCache(None, 2)
    for prompt in ("1122", "112233", "1122334455"):
        serve(cache, ids(prompt))
    first, second, third = cache.take_journal()[0]
    assert [(w.position, w.tokens, w.computed_over) for w in (first, second, third)] == [
        (0, 4, ()),
        (4, 2, (0,)),
        (6, 4, (0, 1)),
    ]
    assert second.context_hash == first.content_id, "the same hash of the same token ids"


def prompts_of(words: Sequence[str]) -> list[Prompt]:
    return [prompt_of(each) for each in words]


HISTORY = prompts_of(
    [
        "i0 s0 d3 s0 d1 s0 d0 q0",
        "i0 s0 d3 s0 d1 s0 d0 s0 d3 s0 d1 q1",
        "i0 s0 d3 s0 d1 s0 d0 q0",
        "d3 i0 s0 d1 s0 d3 s0 d0 q1",
        "i0 s0 d3 s0 d1 s0 d0 s0 d3 s0 d1 s0 d3 d1 q0",
        "i0 s0 d3 s0 d1 s0 d1 s0 d3 q0",
        "q0",
    ]
)


def engine_like(lookup: Lookup, family: str = "llama", **changes: object) -> EmbeddedEngine:
    preset = PRESETS[lookup.partition("-")[0]]
    return engine_of(replace(preset, **changes), 0.3, family)  # type: ignore[arg-type]


def counted_hits(lookup: Lookup, prompts: Sequence[Prompt], capacity: int | None) -> list[int]:
    served = []
    if lookup == "vllm-prefix":
        blocks = BlockPrefixCache(capacity)
        served = [blocks.serve(ids(prompt.token_ids)) or 0 for prompt in prompts]
    else:
        tree = RadixPrefixCache(capacity)
        served = [0 if (h := tree.serve(ids(prompt.token_ids), "")) is None else h.reused for prompt in prompts]
    return served


long_prompts = st.lists(
    st.sampled_from(["i0 s0 d3 d1", "i0 s0 d3 d1 s0 d0", "d3 d1 i0", "d0 d0 d1 d1", "q0", "q1", "d2"]),
    min_size=1,
    max_size=6,
).map(lambda parts: prompt_of(" ".join(parts)))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    lookup=st.sampled_from(LOOKUPS),
    history=st.lists(long_prompts, min_size=2, max_size=6),
    capacity=st.none() | st.integers(48, 160),
    family=st.sampled_from(list(FAMILY_SETTINGS)),
    policy=st.sampled_from(["none", "all", "token-topk", "every", "document-aligned"]),
)
def test_any_history_gives_full_prefills_logits_and_the_counted_hits(
    lookup: Lookup, history: list[Prompt], capacity: int | None, family: str, policy: str
) -> None:
    engine = engine_like(lookup, family, capacity_bytes=capacity and capacity * TOKEN_BYTES)
    for number, (prompt, counted) in enumerate(zip(history, counted_hits(lookup, history, capacity), strict=True)):
        expected = engine.prefill(f"r{number}", "request", prompt, None)
        logits, keys, values = (each.clone() for each in (expected.logits, expected.keys, expected.values))
        engine.blender.arena = torch.full_like(engine.blender.arena, 7)  # not what the last prompt left there
        got = engine.prefill(f"r{number}", "request", prompt, policy_named(policy))
        assert got.reused_tokens == counted
        assert not len(got.reusable)
        torch.testing.assert_close(got.logits, logits, **TOLERANCE)
        torch.testing.assert_close(got.keys, keys, **TOLERANCE)
        torch.testing.assert_close(got.values, values, **TOLERANCE)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_what_is_hit_is_loaded_and_not_computed_again(lookup: Lookup) -> None:
    engine = engine_like(lookup)
    cache, prompt = engine.cache, HISTORY[0]
    assert isinstance(cache, PrefixCache)
    engine.prefill("r0", "request", prompt, policy_named("none"))
    pieces = cache.match(ids(prompt.token_ids)).pieces
    for each in pieces:
        each.states = torch.full_like(each.states, 3)
    got = engine.prefill("r1", "request", prompt, policy_named("none"))
    reused = sum(each.tokens for each in pieces)
    assert got.reused_tokens == reused > 0
    for states in (got.keys, got.values):
        assert (states[:, :, :reused] == 3).all()
        assert not (states[:, :, reused:] == 3).any()


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_the_slow_reference_reuses_the_same_and_computes_the_same(lookup: Lookup) -> None:
    engine = engine_like(lookup)
    slow = SlowEngine(model_of("llama"), PRESETS[lookup.partition("-")[0]], 0.3)
    for number, prompt in enumerate(HISTORY):
        got = engine.prefill(f"r{number}", "request", prompt, policy_named("every"))
        expected = slow.serve(f"r{number}", prompt, policy_named("every"))
        assert got.reused_tokens == expected.reused_tokens
        torch.testing.assert_close(got.keys.double(), expected.keys, **TOLERANCE)
        torch.testing.assert_close(got.values.double(), expected.values, **TOLERANCE)
        torch.testing.assert_close(got.logits.double(), expected.logits, **TOLERANCE)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_the_fixture_history_reuses_prefixes_and_answers_as_full_prefill(lookup: Lookup) -> None:
    engine, untouched = engine_like(lookup), engine_like(lookup)
    served = []
    for number, prompt in enumerate(HISTORY):
        got = engine.serve(f"r{number}", "request", prompt, Sampling(6), policy_named("token-topk"))
        full = untouched.serve(f"r{number}", "request", prompt, Sampling(6), None)
        assert got.answer_ids == full.answer_ids
        served.append(got)
    assert [each.reused_tokens for each in served] == counted_hits(lookup, HISTORY, None)
    assert sum(each.reused_tokens > 0 for each in served) >= 4
    assert all(
        (each.reusable_tokens, each.recomputed_tokens, each.budget_k, each.selection) == (0, 0, 0, None)
        for each in served
    )
    assert engine.reset() == CacheState(0, 0)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_provenance_names_the_write_that_brought_the_last_token_of_each_segment_that_was_hit(lookup: Lookup) -> None:
    engine, writers = engine_like(lookup), {}
    for number, prompt in enumerate(HISTORY):
        served = engine.serve(f"r{number}", "request", prompt, Sampling(1), policy_named("none"))
        hit = served.reused_tokens
        reached = [index for index, segment in enumerate(prompt.segments) if segment.start < hit]
        assert [row.segment for row in served.provenance] == reached
        for row in served.provenance:
            segment = prompt.segments[row.segment]
            last = ids(prompt.token_ids[: min(segment.end, hit)])
            assert row.writer_request_id == writers[last]
            assert (row.content_id, row.old_position, row.new_position) == (
                segment.content_id,
                segment.start,
                segment.start,
            )
            assert row.context_hash_written == row.context_hash_now
        _note_writers(writers, served, prompt, f"r{number}")


def _note_writers(writers: dict[bytes, str], served: Served, prompt: Prompt, request_id: str) -> None:
    for write in served.writes:
        for end in range(write.position + 1, write.position + write.tokens + 1):
            writers.setdefault(ids(prompt.token_ids[:end]), request_id)


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_prelude_is_kept(lookup: Lookup) -> None:
    engine = engine_like(lookup)
    prelude = engine.serve("r", "prelude", HISTORY[0], Sampling(0), policy_named("none"))
    served = engine.serve("r", "request", HISTORY[1], Sampling(1), policy_named("none"))
    assert prelude.writes
    assert served.reused_tokens >= 16
    assert {row.writer_part for row in served.provenance} == {"prelude"}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_without_write_back_nothing_is_ever_reused(lookup: Lookup) -> None:
    engine = engine_like(lookup, write_back="none")
    for number, prompt in enumerate(HISTORY):
        served = engine.serve(f"r{number}", "request", prompt, Sampling(1), policy_named("none"))
        assert (served.reused_tokens, served.writes) == (0, ())


@pytest.mark.parametrize(
    ("lookup", "tokens", "message"), [("vllm-prefix", 31, "holds no block"), ("sglang-prefix", 0, "holds no token")]
)
def test_a_capacity_that_holds_nothing_is_refused(lookup: Lookup, tokens: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(Switches("exact", "recompute", lookup, capacity_bytes=tokens * TOKEN_BYTES + 1))
