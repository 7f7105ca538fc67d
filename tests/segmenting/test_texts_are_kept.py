"""No strategy, and no combination of them, changes a text, a role, or anything else of a request."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from segmenting_traces import Bytes, Words, segmented

from kvaudit.records import GAP_KINDS, KINDS, Request, Segment, message_spans, messages_of
from kvaudit.segmenting import recurring
from kvaudit.traces.assembly import RequestChecks
from kvaudit.traces.segments import make_segment

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(UNHURRIED, max_examples=40)
STRATEGIES = (
    "message",
    r"separator:\n",
    "separator:ab",
    "pattern:<a>.*?b",
    "pattern:[ab]+",
    "json",
    "tokens:3",
    "auto",
)
FRAGMENTS = st.sampled_from(["a", "b", " ", "\n", "ab", "<a>", '["a", "b"]', "[", "{}", ",", "é😀", "ab a b", "\u2028"])
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join) | st.text(string.printable, max_size=20)
KIND = st.sampled_from(KINDS)


@pytest.fixture(autouse=True, scope="module")
def short_texts_recur() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(recurring, "GRAM", 3)
    patch.setattr(recurring, "FEWEST_TOKENS", 1)
    yield
    patch.undo()


@st.composite
def messages(draw: st.DrawFn) -> list[Segment]:
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    rest = draw(st.lists(st.tuples(KIND, TEXTS.filter(bool)), max_size=3))
    return [make_segment(draw(KIND), draw(TEXTS), role), *(make_segment(kind, text) for kind, text in rest)]


CHATS = st.lists(messages(), min_size=1, max_size=4).map(lambda parts: tuple(one for part in parts for one in part))
CARRIED = st.tuples(KIND, st.lists(st.integers(0, 3), min_size=1, max_size=12)).map(
    lambda drawn: make_segment(drawn[0], "", token_ids=tuple(drawn[1]))
)
PLAIN = st.lists(
    CARRIED | st.tuples(KIND, TEXTS.filter(bool)).map(lambda drawn: make_segment(*drawn)), min_size=1, max_size=6
).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    found = []
    for number in range(draw(st.integers(1, 4))):
        chat = draw(st.booleans())
        prompts = CHATS if chat else PLAIN
        prelude = draw(st.lists(prompts, max_size=1).map(tuple))
        found.append(Request(f"r{number}", number, draw(prompts), prelude, session="s", chat=chat))
    return found


def content(request: Request) -> list[object]:
    prompts = (request.segments, *request.prelude)
    return [messages_of(prompt) if request.chat else _plain_content(prompt) for prompt in prompts]


def _plain_content(prompt: Sequence[Segment]) -> tuple[str, list[int]]:
    ids = [token for segment in prompt for token in segment.token_ids or ()]
    return "".join(segment.text for segment in prompt), ids


@UNHURRIED
@given(requests(), st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3), st.sampled_from([Words, Bytes]))
def test_the_same_text_is_asked_however_it_is_cut(
    before: list[Request], strategies: list[str], tokenizer: type[Words | Bytes]
) -> None:
    after = segmented(before, *strategies, tokenizer=tokenizer()).requests

    checks = RequestChecks()
    for old, new in zip(before, after, strict=True):
        assert content(new) == content(old)
        assert replace(new, segments=old.segments, prelude=old.prelude) == old
        assert checks.problem(new) is None
        for segment in (part for prompt in (new.segments, *new.prelude) for part in prompt):
            assert segment == make_segment(segment.kind, segment.text, segment.role, segment.token_ids)


@FEW
@given(requests(), st.sampled_from(STRATEGIES[1:]))
def test_a_message_is_what_it_was_when_it_is_joined_again(before: list[Request], strategy: str) -> None:
    whole = segmented(before, "message").requests
    again = segmented(before, "message", strategy, "message", tokenizer=Bytes()).requests

    for old, new in zip(whole, again, strict=True):
        if old.chat:
            assert messages_of(new.segments) == messages_of(old.segments)
            assert len(new.segments) == len(message_spans(old.segments))


@FEW
@given(requests(), st.sampled_from(STRATEGIES[1:]))
def test_gaps_are_never_cut(before: list[Request], strategy: str) -> None:
    after = segmented(before, strategy, tokenizer=Bytes()).requests

    for old, new in zip(before, after, strict=True):
        kept = iter(new.segments)
        assert all(segment in kept for segment in old.segments if segment.kind in GAP_KINDS)


@FEW
@given(requests())
def test_the_same_requests_are_cut_the_same_way(before: list[Request]) -> None:
    assert segmented(before, "auto", tokenizer=Bytes()) == segmented(before, "auto", tokenizer=Bytes())
