"""Several versions of a chunk: the overlap by hand, what is written and used and leaves, and the slow reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from blend_cases import POOL, TOKEN_BYTES, Pair, engine_of, policy_named, prompt_of, rolling_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_versions import overlap as slow_overlap
from slow_versions import weights_then
from tiny_models import FAMILY_SETTINGS

from kvaudit.engines import PRESETS, Switches
from kvaudit.engines.embedded.cache import VERSIONS_KEPT, Entry, SavedAttention
from kvaudit.engines.embedded.versions import attended, best_version, overlap
from kvaudit.policies import ChunkAttention
from kvaudit.records import Prompt, Sampling, Write

CACHE_CRAFT = PRESETS["cache-craft"]


@pytest.mark.parametrize(
    ("took", "now", "expected"),
    [
        ({}, [], 1.0),
        ({}, ["a", "b"], 1.0),
        ({"a": 3.0}, [], 0.0),
        ({"a": 3.0}, ["b", "a"], 1.0),
        ({"a": 3.0, "b": 1.0}, ["a"], 0.75),
        ({"a": 3.0, "b": 1.0}, ["b", "c"], 0.25),
        ({"a": 3.0, "b": 1.0}, ["a", "c", "b"], 1.0),
        ({"a": 3.0, "b": 1.0}, ["b", "a"], 0.0),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, ["a", "c", "b"], 2 / 3),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, ["c", "b"], 0.0),
        ({"a": 1.0, "b": 1.0, "c": 2.0}, ["c", "a", "b"], 1 / 3),
        ({"a": 3.0, "b": 1.0}, ["b", "a", "b"], 0.0),
        ({"a": 3.0, "b": 1.0}, ["a", "b", "a"], 1.0),
    ],
    ids=lambda value: str(value),
)
def test_the_overlap_by_hand(took: dict[str, float], now: list[str], expected: float) -> None:
    """The share of what was taken that is still there, times the share of pairs in the same order as then."""
    assert overlap(took, now) == pytest.approx(expected)


names = st.sampled_from("abcdef")


@given(st.dictionaries(names, st.floats(0.125, 8), max_size=6), st.lists(names, max_size=8))
def test_the_overlap_is_the_slow_one_and_a_share(took: dict[str, float], now: list[str]) -> None:
    assert overlap(took, now) == pytest.approx(slow_overlap(list(took.items()), now))
    assert 0 <= overlap(took, now) <= 1
    assert overlap(took, [*took, *now]) == 1


def entry(before: str, ordinal: int = 0, context: str = "", over: dict[str, float] | None = None) -> Entry:
    """`before`: "a3 b1" is a chunk a of three tokens, then b of one."""
    write = Write("x", ordinal, 0, 1, context, (), 4)
    chunks = tuple((word[0], int(word[1:])) for word in before.split())
    saved = None if over is None else SavedAttention(np.zeros(1, np.float32), ChunkAttention(0.5, over))
    return Entry((b"x", context), None, write, "r", "request", chunks, saved)  # type: ignore[arg-type]


def test_tokens_count_where_no_attention_was_saved_of_every_chunk_before() -> None:
    assert attended(entry("a3 b1 a3")) == {"a": 6, "b": 1}
    assert attended(entry("a3 b1", over={"a": 0.1, "b": 0.4, "separator": 0.5})) == {"a": 0.1, "b": 0.4}
    assert attended(entry("a3 b1", over={"a": 0.1})) == {"a": 3, "b": 1}
    for before in ("a3 b1 a3", "c2"):
        then = [(word[0], int(word[1:])) for word in before.split()]
        assert list(attended(entry(before)).items()) == weights_then(then, None)


def test_of_equals_the_same_context_wins_then_the_first_writer() -> None:
    versions = [entry("a1", 2, "y"), entry("a1", 1, "x"), entry("a1 b1", 0, "z"), entry("a1", 3, "now")]
    assert best_version(versions, ["a"], "now") == (versions[3], 1.0)
    assert best_version(versions[:3], ["a"], "now") == (versions[1], 1.0)
    assert best_version(versions[2:3], ["a"], "now") == (versions[2], 0.5)
    assert best_version([], ["a"], "now") == (None, 0.0)


@dataclass
class History:
    """An engine with Cache-Craft's switches, and which request wrote the version that each serve used, by segment."""

    switches: Switches = CACHE_CRAFT

    def __post_init__(self) -> None:
        self.engine = engine_of(self.switches)
        self.served = 0

    def serve(self, words: str) -> dict[str, str]:
        prompt = prompt_of(words)
        served = self.engine.serve(f"r{self.served}", "request", prompt, Sampling(1), policy_named("none"))
        self.served += 1
        self.last = served
        return {words.split()[row.segment]: row.writer_request_id for row in served.provenance}

    def writers(self, word: str) -> list[str]:
        """Who wrote the stored versions of a chunk, least recently used first."""
        return [each.writer_request_id for each in self.engine.cache.entries() if each.token_ids == POOL[word]]


def test_a_chunk_in_another_context_becomes_another_version_and_the_best_one_is_used() -> None:
    history = History()
    assert history.serve("i0 d0 d1 q0") == {}
    assert history.serve("i0 d3 d1 q0") == {"i0": "r0", "d1": "r0", "q0": "r0"}
    assert history.writers("d1") == ["r0", "r1"]
    assert history.serve("i0 d3 d1 q1")["d1"] == "r1"
    assert history.serve("i0 d0 d1 q1")["d1"] == "r0"
    assert history.writers("d1") == ["r1", "r0"], "what was used last stands last; nothing was written"
    assert history.serve("i0 d0 d3 d1 q1")["d1"] == "r0", "both overlap wholly: the first writer"
    assert len(history.writers("d1")) == 2, "a context with more before the chunk takes nothing from it"


def test_a_chunk_that_took_nothing_from_others_is_used_everywhere_and_written_once() -> None:
    history = History()
    history.serve("d0 d1")
    history.serve("d3 d0 d1")
    assert history.writers("d0") == ["r0"]
    assert [write.content_id for write in history.last.writes] == [prompt_of("d3").segments[0].content_id]


def test_the_version_that_was_used_least_recently_leaves() -> None:
    history, written = History(), {}
    for number, document in enumerate(["d0", "d2", "d3", "d4", "q1"]):
        history.serve(f"i0 {document} d1")
        assert len(history.writers("d1")) == number + 1
        written[f"r{number}"] = history.last.writes[-1].write_ordinal
    assert len(written) == VERSIONS_KEPT
    assert history.serve("i0 d0 d1")["d1"] == "r0"
    before = history.writers("d1")
    assert before[-1] == "r0"
    used = history.serve("i0 q0 d1")["d1"]
    left = [writer for writer in before if writer != used]
    assert history.writers("d1") == [*left[1:], used, "r6"]
    assert [gone.write_ordinal for gone in history.last.evictions] == [written[left[0]]]


def test_a_chunk_stops_the_lookup_when_no_version_of_it_is_there() -> None:
    history = History(replace(CACHE_CRAFT, lookup="stop-at-miss"))
    history.serve("i0 d0 d1")
    assert history.serve("i0 d3 d1") == {"i0": "r0"}
    assert history.writers("d1") == ["r0", "r1"], "computed in another context, though nobody looked for it"


def test_attention_decides_where_it_was_saved() -> None:
    """The saved attention weighs two contexts of equal tokens otherwise than their tokens would."""
    history = History()
    history.serve("i0 d0 d2 d1 q0")
    stored = [each for each in history.engine.cache.entries() if each.token_ids == POOL["d1"]]
    assert all(each.attention is not None for each in stored)
    weights = attended(stored[0])
    assert list(weights.values()) != [3, 4, 1]
    assert sum(weights.values()) < len(POOL["d1"])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    history=st.lists(rolling_prompts, min_size=4, max_size=7),
    mask=st.sampled_from(["exact", "bottom-right"]),
    gap=st.sampled_from(["recompute", "zero", "store"]),
    lookup=st.sampled_from(["any", "stop-at-miss"]),
    capacity=st.none() | st.integers(10, 40),
    policy=st.sampled_from(["none", "every", "token-topk", "legolink"]),
    family=st.sampled_from(list(FAMILY_SETTINGS)),
)
def test_any_history_against_the_slow_reference(
    history: list[str], mask: str, gap: str, lookup: str, capacity: int | None, policy: str, family: str
) -> None:
    switches = replace(
        CACHE_CRAFT,
        mask=mask,  # type: ignore[arg-type]
        gap=gap,  # type: ignore[arg-type]
        lookup=lookup,  # type: ignore[arg-type]
        capacity_bytes=capacity and capacity * TOKEN_BYTES,
    )
    pair = Pair(switches, 0.3, family)
    for number, words in enumerate(history):
        pair.prefill(f"r{number}", prompt_of(words), policy_named(policy))


def test_the_same_prompt_again_is_loaded_as_it_was_and_written_no_more() -> None:
    engine, prompt = engine_of(CACHE_CRAFT), prompt_of("i0 d0 d1 q0")
    first = engine.serve("r0", "request", prompt, Sampling(4), policy_named("none"))
    again = engine.serve("r1", "request", prompt, Sampling(4), policy_named("none"))
    assert again.answer_ids == first.answer_ids
    assert again.writes == ()
    assert again.reused_tokens == _tokens(prompt)


def _tokens(prompt: Prompt) -> int:
    return len(prompt.token_ids)
