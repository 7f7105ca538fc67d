"""Reuse of requests that are known by hashes of their blocks, against prompts that have the same blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_caches import SlowBlocks

from kvaudit.errors import UsageError
from kvaudit.preflight.facts import About, as_data
from kvaudit.preflight.hashed import BlockNumbers, inspect_hashes, limits
from kvaudit.preflight.inspection import Inspection
from kvaudit.preflight.prefix_caches import RadixPrefixCache
from kvaudit.preflight.reuse import Break, Caches, RequestReuse
from kvaudit.records import HashedRequest

SIZE = 4


def hashed(name: str, tokens: int, *ids: int | str, namespace: str = "") -> HashedRequest:
    return HashedRequest(name, int(name.strip("r")), tokens, ids, namespace)


def inspected(*requests: HashedRequest, capacity: int | None = None) -> tuple[list[RequestReuse], Inspection]:
    rows: list[RequestReuse] = []
    found = inspect_hashes(requests, Caches(capacity, SIZE, SIZE), rows.append)
    return rows, found


def chained(prompt: Sequence[int], known: dict[tuple[int, ...], int]) -> tuple[int, ...]:
    """Ids as Mooncake gives them: a number for each prefix that ends with a block, the cut one too."""
    ends = range(SIZE, len(prompt) + SIZE, SIZE)
    return tuple(known.setdefault(tuple(prompt[:end]), len(known)) for end in ends)


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(2, 12) | st.none())
def test_hashes_of_prompts_reuse_what_the_prompts_do(given: list[tuple[int, ...]], blocks: int | None) -> None:
    known: dict[tuple[int, ...], int] = {}
    requests = [hashed(f"r{n}", len(prompt), *chained(prompt, known)) for n, prompt in enumerate(given)]
    capacity = None if blocks is None else blocks * SIZE
    slow = SlowBlocks(blocks or 10_000, SIZE)
    rows, _ = inspected(*requests, capacity=capacity)

    assert [row.vllm_reused for row in rows] == [slow.serve(prompt) for prompt in given]


@settings(max_examples=150, deadline=None)
@given(prompts, st.integers(2, 12) | st.none())
def test_pages_by_number_reuse_what_pages_of_token_ids_do(given: list[tuple[int, ...]], pages: int | None) -> None:
    capacity = None if pages is None else pages * SIZE
    by_number, by_ids = RadixPrefixCache(capacity, SIZE, ids_a_page=1), RadixPrefixCache(capacity, SIZE)
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in given:
        page_ends = range(SIZE, len(prompt) + 1, SIZE)
        page = array("I", (numbers.setdefault(tuple(prompt[:end]), len(numbers)) for end in page_ends))
        found = by_number.serve_pages(page.tobytes(), len(prompt), "")
        assert found == by_ids.serve(array("i", prompt).tobytes(), "")
        assert by_number.tokens == by_ids.tokens


def test_without_a_limit_both_caches_reuse_the_longest_prefix_in_full_blocks() -> None:
    rows, _ = inspected(
        hashed("r0", 9, 0, 1, 2), hashed("r1", 13, 0, 1, 3, 4), hashed("r2", 12, 0, 1, 3), hashed("r3", 13, 0, 1, 3, 4)
    )

    assert [row.vllm_reused for row in rows] == [row.sglang_reused for row in rows] == [0, 8, 8, 12]
    assert [row.broken for row in rows] == [
        Break(1, "block", 0, "empty", None),
        Break(3, "block", 8, "extends", "r0"),  # the third block of r0 was cut short, so that it was never cached
        None,
        None,
    ]


def test_the_break_names_block_and_cause() -> None:
    rows, found = inspected(hashed("r0", 12, 0, 1, 2), hashed("r1", 12, 0, 5, 6), hashed("r2", 12, 7, 8, 9))

    assert rows[1].broken == Break(2, "block", 4, "differs", "r0")
    (differs,) = [total for (_, how), total in found.totals.breaks.items() if how == "differs"]
    assert (differs.requests, differs.tokens) == (1, 8)


def test_ids_of_other_namespaces_are_other_blocks() -> None:
    rows, found = inspected(hashed("r0", 9, 1, 2, namespace="a"), hashed("r1", 9, 1, 2, namespace="b"))

    assert [row.vllm_reused for row in rows] == [0, 0]
    assert found.hashed is not None
    assert found.hashed.distinct_blocks == 4


def test_global_ids_are_known_again_behind_a_local_session() -> None:
    together, whole = inspected(hashed("r0", 9, 1, 2), hashed("r1", 9, 1, 2), hashed("r2", 9, 1, 2, namespace="a"))
    apart, found = inspected(hashed("r0", 9, 1, 2), hashed("r2", 9, 1, 2, namespace="a"), hashed("r1", 9, 1, 2))

    assert together[1].vllm_reused
    assert (apart[2].vllm_reused, apart[2].sglang_reused) == (together[1].vllm_reused, together[1].sglang_reused)
    assert found.totals.vllm_reused == whole.totals.vllm_reused
    assert found.hashed is not None
    assert found.hashed == whole.hashed


def test_ids_that_do_not_fit_the_length_are_counted_and_never_trusted_beyond_it() -> None:
    short, long = hashed("r0", 17, 0, 1), hashed("r1", 6, 0, 1, 2, 3)
    rows, found = inspected(hashed("r2", 16, 0, 1, 2, 3), short, long)
    facts = found.hashed
    assert facts is not None

    assert [row.vllm_reused for row in rows] == [0, 8, 4]
    assert (facts.too_few_ids.count, facts.too_few_ids.first, facts.unnamed_tokens) == (1, "r0", 8)
    assert (facts.too_many_ids.count, facts.too_many_ids.first) == (1, "r1")
    told = " ".join(limits(found, "Mooncake", " (try this)"))
    assert "request 'r0' has fewer ids than full blocks of 4 tokens" in told
    assert "request 'r1' has more ids than blocks of 4 tokens; the surplus is not counted (try this)" in told


def test_both_ways_to_treat_the_last_block_fit() -> None:
    _, found = inspected(hashed("r0", 9, 0, 1, 2), hashed("r1", 9, 0, 1))
    facts = found.hashed

    assert facts is not None
    assert (facts.too_few_ids.count, facts.too_many_ids.count, facts.blocks) == (0, 0, 4)


def test_it_says_why_answers_and_other_positions_cannot_be_seen() -> None:
    _, found = inspected(hashed("r0", 8, 0, 1))
    told = " ".join(limits(found, "Mooncake", ""))

    assert "no answer can be audited: a model is asked with prompts" in told
    assert "the same text elsewhere has another hash" in told


def test_ids_that_are_no_hashes_of_prefixes_are_told_and_still_chained() -> None:
    rows, found = inspected(hashed("r0", 9, 1, 2), hashed("r1", 9, 3, 2), hashed("r2", 9, 3, 2))

    assert [row.vllm_reused for row in rows] == [0, 0, 8]
    assert found.hashed is not None
    assert found.hashed.moved_blocks == 1
    told = " ".join(limits(found, "WEKA", ""))
    assert "1 blocks have an id that came before under another prefix" in told
    assert "another hash" not in told


@given(prompts)
def test_numbers_tell_prefixes_apart_and_know_them_again(given: list[tuple[int, ...]]) -> None:
    numbers = BlockNumbers()
    named: dict[tuple[int, ...], int] = {}
    for prompt in given:
        for end, number in enumerate(numbers.of("", prompt), start=1):
            assert named.setdefault(prompt[:end], number) == number
    assert len(set(named.values())) == len(named) == numbers.distinct


def test_what_cannot_be_seen_is_null_and_not_nought() -> None:
    rows, found = inspected(hashed("r0", 8, 0, 1), hashed("r1", 8, 0, 1))
    data = as_data(found, About("t", None, None, None, hashes="Mooncake"), 5)
    reuse, tokens = data["reuse"], data["counts"]
    assert isinstance(reuse, dict)
    assert isinstance(tokens, dict)

    assert rows[0].segments is rows[0].chunk_reused_any is rows[0].chunk_reused_stop_at_miss is None
    assert reuse["chunk_reused_any"] is reuse["chunk_reused_stop_at_miss"] is None
    assert (reuse["vllm_reused"], tokens["prompt_tokens"], data["recompute"], data["findings"]) == (4, 16, [], [])
    assert data["breaks"] == [
        {
            "kind": "block",
            "how": "empty",
            "requests": 1,
            "computed_tokens_after": 8,
            "worst": {
                "request_id": "r0",
                "segment": 1,
                "token": 0,
                "prefix_from": None,
                "computed_tokens_after": 8,
            },
        }
    ]


def test_a_prompt_that_fits_no_cache_is_null_in_its_row() -> None:
    rows, found = inspected(hashed("r0", 40, *range(10)), hashed("r1", 8, 0, 1), capacity=12)

    assert (rows[0].vllm_reused, rows[0].sglang_reused, found.totals.too_large) == (None, None, 1)


def test_a_cache_without_room_for_a_block_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="holds no block"):
        inspected(hashed("r0", 8, 0, 1), capacity=3)
