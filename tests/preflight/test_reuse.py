"""What each request could reuse, where its prefix breaks, and the counts over a trace."""

from __future__ import annotations

import pytest
from inspections import Characters, inspected, request, rows

from kvaudit.preflight.inspection import Reading, inspect
from kvaudit.preflight.reuse import Break, Caches, binned_rates, prefilled
from kvaudit.records import Request
from kvaudit.traces.segments import make_segment

ROLLING = [request(f"r{n}", "i:rules.", *(f"d:row {n + k}." for k in range(3)), "q:why?") for n in range(4)]


def test_chunks_are_found_wherever_they_stand() -> None:
    first, second, *_ = rows(ROLLING)

    assert first.chunk_reused_any == first.chunk_reused_stop_at_miss == 0
    # rules., row 1. and row 2. are known, row 3. is new, why? is known: its last token is computed all the same
    assert second.prompt_tokens == 6 + 3 * 6 + 4
    assert second.chunk_reused_any == 6 + 2 * 6 + 4 - 1
    assert second.chunk_reused_stop_at_miss == 6 + 2 * 6


def test_a_chunk_that_comes_twice_in_one_prompt_was_not_there_before_it() -> None:
    one, two = rows([request("r0", "d:same", "d:same", "q:a"), request("r1", "d:same", "d:same", "q:b")])

    assert (one.chunk_reused_any, two.chunk_reused_any) == (0, 8)


def test_separators_are_no_chunks() -> None:
    assert [row.chunk_reused_any for row in rows([request(f"r{n}", "s: # # ", f"q:{n}") for n in range(2)])] == [0, 0]


def test_chunks_leave_a_full_cache_least_recently_used_first() -> None:
    prompts = [("d:aaaa",), ("d:bbbb",), ("d:aaaa", "q:x"), ("d:cccc",), ("d:bbbb", "q:x"), ("d:aaaa", "q:x")]
    found = rows([request(f"r{n}", *prompt) for n, prompt in enumerate(prompts)], Caches(9, 1))

    assert [row.chunk_reused_any for row in found] == [0, 0, 4, 0, 0, 0]


def test_a_prompt_breaks_at_the_segment_that_differs_and_names_whose_prefix_it_left() -> None:
    second = rows(ROLLING)[1]

    assert second.sglang_reused == len("rules.row ")
    assert second.broken == Break(2, "document", len("rules.row "), "differs", "r0")


def test_a_border_belongs_to_the_segment_after_it() -> None:
    _, longer = rows([request("r0", "d:one", "q:two"), request("r1", "d:one", "q:two", "d:three", "q:four")])

    assert longer.broken == Break(3, "document", 6, "extends", "r0")


def test_a_prompt_that_was_served_before_does_not_break() -> None:
    same = rows([request("r0", "d:one", "q:two"), request("r1", "d:one", "q:two")])[1]

    assert (same.sglang_reused, same.broken) == (5, None)


def test_a_prelude_is_served_before_its_request_and_is_no_row() -> None:
    (row,) = rows([request("r0", "d:one", "d:two", "q:x", prelude=[("d:one",), ("d:two",)])])

    assert (row.prompt_tokens, row.prelude_tokens) == (7, 6)
    assert (row.sglang_reused, row.chunk_reused_any) == (3, 6)
    assert row.broken == Break(2, "document", 3, "extends", "r0")


def test_the_tokenizers_leading_ids_stand_before_the_first_segment_only() -> None:
    one, two, three = rows(
        [request("r0", "d:one", "q:x"), request("r1", "d:one", "q:x"), request("r2", "q:x", "d:one")],
        tokenizer=Characters((1,)),
    )

    assert [row.prompt_tokens for row in (one, two, three)] == [5, 5, 5]
    assert two.sglang_reused == 4
    assert three.sglang_reused == 1


def test_a_prompt_larger_than_the_cache_is_not_reused_and_counted() -> None:
    small = Caches(40, 16)
    found = rows([request("r0", "d:" + "a" * 41, "q:x")], small)
    whole = inspect([request("r0", "d:" + "a" * 41, "q:x")], Reading(Characters()), small)

    assert (found[0].vllm_reused, found[0].sglang_reused) == (None, None)
    assert whole.totals.too_large == 1


def test_recomputation_takes_at_least_one_token_of_what_is_reused() -> None:
    assert prefilled(100, 0, 0.15) == 100
    assert prefilled(100, 5, 0.15) == 96
    assert prefilled(100, 80, 0.15) == 20 + 12


def test_totals_are_sums_over_requests() -> None:
    found, each = inspected(ROLLING), rows(ROLLING)

    totals = found.totals
    assert totals.prompt_tokens == sum(row.prompt_tokens for row in each)
    assert totals.vllm_reused == sum(row.vllm_reused or 0 for row in each)
    assert totals.prefilled[0.15, "any"] == sum(prefilled(r.prompt_tokens, r.chunk_reused_any, 0.15) for r in each)
    assert dict(found.kinds) == {"instruction": 4, "document": 12, "query": 4}
    assert found.kind_tokens["document"] == 12 * 6
    assert found.distinct_chunks == 1 + 6 + 1
    broken = totals.breaks["document", "differs"]
    assert (broken.requests, broken.tokens) == (3, sum(row.chunk_reused_any - 10 for row in each[1:]))


def test_rates_over_the_trace_are_weighed_by_tokens() -> None:
    totals = inspected(ROLLING).totals

    assert binned_rates(totals, "chunk_reused_any", 2) == [21 / 56, 42 / 56]
    assert len(binned_rates(totals, "chunk_reused_any", 60)) == 4


def test_a_trace_with_token_ids_needs_no_tokenizer() -> None:
    def carried(name: str, *ids: int) -> Request:
        return Request(
            name, 0, (make_segment("document", "", token_ids=ids), make_segment("query", "", token_ids=(9,)))
        )

    texts = request("r2", "d:text", "q:x")
    found = inspect([carried("r0", 1, 2, 3), carried("r1", 1, 2, 3), texts], Reading(None), Caches(None, 1))

    assert (found.requests, found.totals.requests, found.left_out) == (3, 2, 1)
    assert (found.totals.prompt_tokens, found.totals.sglang_reused, found.totals.vllm_reused) == (8, 3, 3)


def test_an_empty_separator_takes_no_part() -> None:
    one, two = rows([request("r0", "d:one", "s:", "q:x"), request("r1", "d:one", "s:", "q:x")])

    assert (one.segments, two.sglang_reused) == (2, 3)


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_does_not_become_ids_is_told_and_left_out(count: int) -> None:
    bad = [request(f"r{n}", "d: ", "q:x") for n in range(count)]

    class NoBlanks(Characters):
        def encode(self, text: str) -> list[int]:
            return super().encode(text.strip())

    found = inspected([*bad, request("r7", "d:a", "q:x")], NoBlanks())

    assert (found.refused, found.totals.requests) == (count, 1)
    assert "request 'r0', segment 1 (document) has no tokens" in found.findings[-1].what
