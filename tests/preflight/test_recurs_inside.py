"""The finding `recurs-inside` and the strategy `auto` that it names: what one tells of, the other finds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inspections import Characters, chat, inspected, request

from kvaudit.preflight import inside as inside_lint
from kvaudit.preflight.findings import Finding
from kvaudit.records import Request
from kvaudit.segmenting.applying import segment_requests
from kvaudit.segmenting.strategies import parse_strategies

DRAWN = Random(8)
TEXTS = ["".join(DRAWN.choices("bcdefgijklmopqrsuvwxyz ", k=200)) for _ in range(4)]
ROWS = ["| 0 | 0 | none |\n", "-", "the quick brown fox jumps over it. ", "no row is longer than a run of thirty-two. "]
WORDS = ["red", "blue", "pink", "gray", "black", "white", "brown", "green", "amber", "olive", "ivory", "coral"]


class Offsets(Characters):
    def offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self.encode(text)
        ends, end = [], 0
        for token in ids:
            end += 2 if token >= 2_000_000 else 1
            ends.append(end)
        return ids, list(zip([0, *ends], ends, strict=False))


def finding(requests: list[Request]) -> Finding | None:
    found = [found for found in inspected(requests).findings if found.code == "recurs-inside"]
    return found[0] if found else None


def is_cut(requests: list[Request]) -> bool:
    """Whether `auto` cuts a prompt."""
    done = segment_requests(requests, parse_strategies(["auto"]), Offsets())
    pairs = zip(requests, done.requests, strict=True)
    return any(len(after.segments) > len(before.segments) for before, after in pairs)


def test_a_text_at_the_same_offset_behind_another_beginning_is_found() -> None:
    words = [word for word in WORDS if len(word) == 5]
    asked = [chat(f"r{n}", "y:You answer.", f"u:What is {word}?\n\n{TEXTS[0]}") for n, word in enumerate(words)]

    found = finding(asked)

    assert found is not None
    assert found.place.request_id == "r1"
    assert found.occurrences == len(words) - 1
    assert 200 * (len(words) - 1) <= found.tokens <= 205 * (len(words) - 1)
    assert is_cut(asked)


def test_a_text_at_the_start_of_messages_behind_others_is_found() -> None:
    asked = [chat(f"r{n}", f"y:You are {word}.", f"u:{TEXTS[0]} Why {n}?") for n, word in enumerate(WORDS[:4])]

    assert finding(asked) is not None
    assert is_cut(asked)


@pytest.mark.parametrize("row", ROWS)
def test_rows_that_repeat_at_the_same_place_are_left_to_prefix_caches(row: str) -> None:
    assert finding([request(f"r{n}", f"q:{row * 40}What about {word}?") for n, word in enumerate(WORDS)]) is None


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("times", [12, 40])
def test_rows_that_repeat_behind_other_text_are_found_and_cut(row: str, times: int) -> None:
    rows = row * (times if len(row) > 1 else 200)
    asked = [request(f"r{n}", f"q:Question {word}. {rows}What about {word}?") for n, word in enumerate(WORDS)]

    found = finding(asked)

    assert found is not None
    assert found.tokens > 0.8 * 11 * len(Characters().encode(rows))
    assert is_cut(asked)


def test_a_text_that_is_also_a_segment_of_its_own_is_found_where_it_is_not() -> None:
    apart = request("r0", f"d:{TEXTS[0]}", "q:Why?")
    inside = request("r1", f"q:Read {TEXTS[0]}. Why?")

    assert finding([apart, inside]) is not None
    assert is_cut([apart, inside])
    assert finding([apart, request("r1", f"m:{TEXTS[0]}", "q:And?")]) is None


def test_the_same_text_under_two_kinds_is_one() -> None:
    assert finding([request("r0", f"d:Read {TEXTS[0]}"), request("r1", "q:Now:", f"m:Read {TEXTS[0]}")]) is None


def test_what_is_searched_is_bounded_and_a_share_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request(f"r{n}", f"q:Question {word}. {TEXTS[0]}") for n, word in enumerate(WORDS)]
    monkeypatch.setattr(inside_lint, "MOST_SEARCHED", 1000)

    found = finding(asked)

    assert found is not None
    assert 3 * 200 <= found.tokens <= 4 * 210


PARTS = st.sampled_from([*TEXTS[:2], *(row * 12 for row in ROWS), ROWS[1] * 100, TEXTS[2][:40], *WORDS[:5], "\n\n"])
MESSAGES = st.tuples(st.sampled_from("diqms"), st.lists(PARTS, min_size=1, max_size=5).map("".join))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=3), min_size=2, max_size=5))
def test_whatever_is_told_is_found_by_the_command_that_is_named(prompts: list[list[tuple[str, str]]]) -> None:
    asked = [request(f"r{n}", *(f"{kind}:{text}" for kind, text in prompt)) for n, prompt in enumerate(prompts)]

    assert finding(asked) is None or is_cut(asked)
