"""vLLM's and SGLang's prefix caches, against vLLM's own code, slow references and cases by hand."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_caches import SlowBlocks, SlowRadix

from kvaudit.errors import UsageError
from kvaudit.preflight.prefix_caches import BlockPrefixCache, Hit, RadixPrefixCache

VLLM = json.loads((Path(__file__).parent / "vllm_blocks.json").read_text())
SGLANG = json.loads((Path(__file__).parent / "sglang_radix.json").read_text())


def ids(tokens: Sequence[int] | str) -> bytes:
    return array("i", map(int, tokens)).tobytes()


def repeating_prompts() -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Prompts out of a few pieces, so that prefixes, whole prompts and borders in and at the end of blocks recur."""
    piece = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
    pieces = st.lists(piece, min_size=1, max_size=4)
    return pieces.flatmap(
        lambda some: st.lists(
            st.lists(st.sampled_from(some), min_size=1, max_size=5).map(lambda parts: sum(parts, ())),
            min_size=1,
            max_size=25,
        )
    )


@pytest.mark.parametrize("case", VLLM["cases"], ids=lambda case: f"{case['blocks']} blocks")
def test_blocks_are_reused_as_vllm_itself_reuses_them(case: dict[str, Any]) -> None:
    cache = BlockPrefixCache(case["blocks"] * 16)

    assert [cache.serve(ids(prompt)) for prompt in case["prompts"]] == case["reused"]


@settings(max_examples=150, deadline=None)
@given(repeating_prompts(), st.integers(2, 12), st.sampled_from([1, 2, 4]))
def test_blocks_against_the_slow_reference(prompts: list[tuple[int, ...]], blocks: int, size: int) -> None:
    cache, slow = BlockPrefixCache(blocks * size, size), SlowBlocks(blocks, size)

    assert [cache.serve(ids(prompt)) for prompt in prompts] == [slow.serve(prompt) for prompt in prompts]


@settings(max_examples=100, deadline=None)
@given(repeating_prompts(), st.sampled_from([1, 2, 4]))
def test_without_a_limit_blocks_reuse_the_longest_prefix_in_whole_blocks(
    prompts: list[tuple[int, ...]], size: int
) -> None:
    cache, seen = BlockPrefixCache(None, size), set()
    for prompt in prompts:
        longest = max((end for end in range(0, len(prompt), size) if prompt[:end] in seen), default=0)
        assert cache.serve(ids(prompt)) == longest
        seen |= {prompt[:end] for end in range(len(prompt) + 1)}
        seen -= {prompt[:end] for end in range(len(prompt) - len(prompt) % size + 1, len(prompt) + 1)}


def test_a_cached_prompt_computes_its_last_block_again() -> None:
    cache = BlockPrefixCache(None)

    assert [cache.serve(ids("7" * n)) for n in (32, 32, 33, 34, 31)] == [0, 16, 32, 32, 16]


def test_a_block_that_is_not_full_is_not_kept() -> None:
    cache = BlockPrefixCache(None)
    cache.serve(ids("7" * 31))

    assert cache.serve(ids("7" * 40)) == 16


def test_the_same_tokens_after_another_start_are_another_block() -> None:
    cache = BlockPrefixCache(None, 2)
    cache.serve(ids("112233"))

    assert cache.serve(ids("4422331")) == 0


def test_a_prompts_last_block_is_forgotten_first() -> None:
    cache = BlockPrefixCache(5 * 2, 2)  # four blocks hold tokens
    cache.serve(ids("11223344"))
    cache.serve(ids("9"))  # takes one block, 44's, and keeps nothing

    assert cache.serve(ids("112233440")) is None
    assert cache.serve(ids("11223344")) == 6


def test_what_was_used_last_is_forgotten_last() -> None:
    cache = BlockPrefixCache(5 * 2, 2)
    cache.serve(ids("1122"))
    cache.serve(ids("3344"))
    cache.serve(ids("11220"[:4]))  # 11 is hit, 22 computed again: a fifth block, for which the oldest 22 goes
    cache.serve(ids("55"))  # the oldest is now 44

    assert cache.serve(ids("334")) == 2
    assert cache.serve(ids("3344")) == 2


def test_of_equal_blocks_the_one_that_came_first_is_hit() -> None:
    """A block that is computed again is a second one; which of them is hit decides what is forgotten next."""
    cache = BlockPrefixCache(6 * 2, 2)

    served = [cache.serve(ids(prompt)) for prompt in ("5", "11", "11", "3344", "11", "11", "112233", "3344")]
    assert served == [0, 0, 0, 0, 0, 0, 2, 0]


def test_a_prompt_larger_than_the_cache_changes_nothing() -> None:
    cache = BlockPrefixCache(4 * 2, 2)
    cache.serve(ids("1122"))

    assert cache.serve(ids("11223344")) is None
    assert cache.serve(ids("1122")) == 2


@pytest.mark.parametrize("capacity", [0, 16, 31])
def test_a_cache_without_a_block_is_wrong_usage(capacity: int) -> None:
    with pytest.raises(UsageError, match="holds no block"):
        BlockPrefixCache(capacity)


@pytest.mark.parametrize("case", SGLANG["cases"], ids=lambda case: f"{case['capacity']} tokens, page {case['page']}")
def test_the_radix_tree_reuses_what_sglang_itself_reuses(case: dict[str, Any]) -> None:
    tree = RadixPrefixCache(case["capacity"], case["page"])
    found = [tree.serve(ids(prompt), "") for prompt in case["prompts"]]

    assert [hit and hit.reused for hit in found] == case["reused"]


@settings(max_examples=150, deadline=None)
@given(repeating_prompts(), st.one_of(st.none(), st.integers(1, 40)))
def test_the_radix_tree_against_the_slow_reference(prompts: list[tuple[int, ...]], capacity: int | None) -> None:
    tree, slow = RadixPrefixCache(capacity), SlowRadix(capacity)
    for index, prompt in enumerate(prompts):
        hit, expected = tree.serve(ids(prompt), str(index)), slow.serve(prompt)
        assert (None if hit is None else hit.reused) == expected
        assert capacity is None or tree.tokens <= capacity


@settings(max_examples=100, deadline=None)
@given(repeating_prompts(), st.sampled_from([1, 3]))
def test_without_a_limit_the_tree_reuses_the_longest_common_prefix(prompts: list[tuple[int, ...]], page: int) -> None:
    tree = RadixPrefixCache(None, page)
    for index, prompt in enumerate(prompts):
        longest = 0
        for other in prompts[:index]:
            kept = other[: len(other) // page * page]
            common = next((i for i, (a, b) in enumerate(zip(prompt, kept, strict=False)) if a != b), None)
            longest = max(longest, min(len(prompt), len(kept)) if common is None else common)
        hit = tree.serve(ids(prompt), str(index))
        assert hit is not None
        assert hit.reused == min(longest, len(prompt) - 1) // page * page


def hits(tree: RadixPrefixCache, *prompts: str) -> list[Hit | None]:
    return [tree.serve(ids(prompt), name) for name, prompt in zip("abcdefgh", prompts, strict=False)]


def test_a_hit_says_whose_prefix_it_is_and_why_it_ends() -> None:
    tree = RadixPrefixCache()

    assert hits(tree, "1234", "1299", "123456", "1234", "56") == [
        Hit(0, None, "empty"),
        Hit(2, "a", "differs"),
        Hit(4, "a", "extends"),
        Hit(3, "a", "whole"),
        Hit(0, None, "empty"),
    ]


def test_the_longest_cached_prefix_names_the_request_that_brought_its_last_token() -> None:
    tree = RadixPrefixCache()

    assert hits(tree, "12", "1234", "123499")[2] == Hit(4, "b", "extends")


def test_the_leaf_that_was_used_least_recently_goes_first_and_as_a_whole() -> None:
    tree = RadixPrefixCache(8)
    hits(tree, "1122", "334", "1123")  # 112 is shared: with 2, 334 and 3 that makes 8
    assert tree.tokens == 8
    hits(tree, "7")

    assert tree.tokens == 6  # 334 went, though one token was needed
    assert tree.serve(ids("1129"), "x") == Hit(3, "a", "whole")
    assert tree.serve(ids("334"), "x") == Hit(0, None, "empty")


def test_what_prompts_shared_goes_when_all_that_went_on_from_it_is_gone() -> None:
    tree = RadixPrefixCache(4)
    hits(tree, "1234", "1256", "7777")

    assert tree.tokens == 4
    assert tree.serve(ids("1299"), "x") == Hit(0, None, "empty")


def test_a_leaf_that_is_hit_is_never_evicted_for_its_own_prompt() -> None:
    tree = RadixPrefixCache(6)
    hits(tree, "1234", "99")

    assert hits(tree, "123456") == [Hit(4, "a", "extends")]
    assert tree.serve(ids("99"), "x") == Hit(0, None, "empty")


def test_a_prefix_whose_end_was_evicted_is_told_from_one_that_goes_on() -> None:
    tree = RadixPrefixCache(7)
    hits(tree, "1234", "1299")  # 12, 34, 99
    hits(tree, "77")  # takes 34's room

    assert tree.serve(ids("1234"), "x") == Hit(2, "a", "differs")
    tree = RadixPrefixCache(6)
    hits(tree, "1234", "125", "8888")  # takes the room of 34, then that of 5

    assert tree.serve(ids("1299"), "x") == Hit(2, "a", "evicted")


def test_a_prompt_larger_than_the_tree_is_not_kept() -> None:
    tree = RadixPrefixCache(3)

    assert hits(tree, "123", "1234", "1239"[:3]) == [Hit(0, None, "empty"), None, Hit(2, "a", "whole")]
