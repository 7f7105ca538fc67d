"""Requests, as they are redacted: everything that a trace holds of them, and what is counted."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain

import pytest
from redaction.sensitive_values import KEYS, detectors, long_token, private_key

from kvaudit.errors import TraceError
from kvaudit.records import Request, Segment
from kvaudit.redaction.borders import LONGEST_REACH, edges
from kvaudit.redaction.detectors import find
from kvaudit.redaction.redactor import Redactor
from kvaudit.redaction.requests import ChangedSegment, RequestRedactor
from kvaudit.traces.segments import make_segment

SALT = b"a salt of the tests"
BOB = "bob@example.com"


def text(content: str, kind: str = "document", role: str | None = None) -> Segment:
    return make_segment(kind, content, role)


def redactor() -> RequestRedactor:
    return RequestRedactor(Redactor(detectors(), SALT))


def texts_of(request: Request) -> list[str]:
    segments = chain(request.segments, *request.prelude)
    other = [request.request_id, request.session, request.expected, *request.stop]
    return [part for one in segments for part in (one.text, one.role or "")] + [part or "" for part in other]


def test_every_text_of_a_request_is_redacted() -> None:
    request = Request(
        request_id=f"chat of {BOB}",
        ordinal=3,
        segments=(text(f"I am {BOB}.", "message", f"user {BOB}"), text("Nothing.", "message", "user")),
        prelude=((text(f"Before: {BOB}", "message", "user"),),),
        session=BOB,
        max_tokens=9,
        stop=(f"\n{BOB}", "\n"),
        chat=True,
        expected=f"Hello {BOB}",
        timestamp=12.5,
        limited=False,
        line=7,
    )
    (redacted,) = redactor().redact([request])

    (placeholder,) = set(re.findall(r"\[EMAIL-\w{8}\]", "".join(texts_of(redacted))))
    assert [part.replace(placeholder, BOB) for part in texts_of(redacted)] == texts_of(request)
    assert all(BOB not in part for part in texts_of(redacted))
    for made, given in zip(redacted.segments, request.segments, strict=True):
        assert made == make_segment(given.kind, made.text, made.role)
    assert redacted.segments[1] is request.segments[1]
    kept = {"ordinal", "max_tokens", "chat", "timestamp", "limited", "line"}
    assert all(getattr(redacted, name) == getattr(request, name) for name in kept)


def test_segments_that_recur_still_recur() -> None:
    shared, other = text(f"A letter to {BOB}."), text("Another of eve@example.com.")
    requests = [Request(str(at), at, (shared, other) if at % 2 else (other, shared)) for at in range(4)]
    redacted = list(redactor().redact(requests))
    pattern = [[segment.content_id for segment in request.segments] for request in redacted]
    assert pattern[0] == pattern[2] == pattern[1][::-1] == pattern[3][::-1]
    assert len({*chain.from_iterable(pattern)}) == 2
    assert redacted[0].segments[1] is redacted[1].segments[0]


def test_a_request_without_findings_is_the_same() -> None:
    request = Request("a", 0, (text("Nothing to see."),), expected="yes")
    assert list(redactor().redact([request])) == [request]


def test_the_tally_counts_places_values_and_requests() -> None:
    found = redactor()
    twice, once = text(f"{BOB} {BOB} 8.8.8.8"), text("eve@example.com")
    requests = [
        Request("a", 0, (twice,), session=BOB),
        Request("b", 1, (once, twice), session=BOB),
        Request("c", 2, (text("nothing"),)),
    ]
    list(found.redact(requests))
    tally = found.tally
    assert dict(tally.places) == {"email": 4, "ip": 1}
    assert {name: len(values) for name, values in tally.placeholders.items()} == {"email": 2, "ip": 1}
    assert dict(tally.requests) == {"email": 2, "ip": 2}
    assert tally.changed_requests == 2


def test_a_changed_segment_is_known_by_its_first_request_and_its_place() -> None:
    found = redactor()
    hello, document = text("Hello"), text(f"To {BOB}")
    requests = [Request(BOB, 0, (hello,), ((hello, document),)), Request("b", 1, (document, document))]
    redacted = list(found.redact(requests))
    assert found.changed == [
        ChangedSegment(redacted[0].request_id, 3, document.text, redacted[1].segments[0].text, requests=2)
    ]


def test_a_value_that_a_border_cuts_is_replaced_in_every_request_that_has_a_half() -> None:
    key = KEYS["Anthropic key"]
    first, second = text(f"The key is {key[:50]}"), text(f"{key[50:]}. It is new.")
    plain = text(" Not about keys. ")
    requests = [Request("a", 0, (plain, second)), Request("b", 1, (first, second)), Request("c", 2, (first, plain))]
    redacted = list(redactor().redact(requests))
    assert [re.sub(r"\[KEY-\w{8}\]", "[KEY]", segment.text) for segment in redacted[1].segments] == [
        "The key is [KEY]",
        "[KEY]. It is new.",
    ]
    assert redacted[0].segments == (plain, redacted[1].segments[1])
    assert redacted[2].segments == (redacted[1].segments[0], plain)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_long_value_that_a_border_cuts_is_replaced_whole(parts: int) -> None:
    token = long_token()
    size = len(token) // parts + 1
    cut = [token[start : start + size] for start in range(0, len(token), size)]
    cut[0], cut[-1] = "word " * 200 + "The token: " + cut[0], cut[-1] + " and" * 400
    (redacted,) = redactor().redact([Request("a", 0, tuple([text(part) for part in cut]))])
    left = " ".join(segment.text for segment in redacted.segments)
    assert not any(token[at : at + 20] in left for at in range(0, len(token), 20))


def test_how_far_a_border_is_looked_around_has_an_end() -> None:
    seen = edges("x" * 100_000)
    assert (len(seen.head), seen.length) == (LONGEST_REACH, 100_000)
    assert len(seen.tail) < LONGEST_REACH + 100


def test_a_private_key_is_found_through_the_borders_of_short_segments() -> None:
    parts = re.findall(r".{1,100}", private_key(), re.DOTALL)
    (redacted,) = redactor().redact([Request("a", 0, tuple([text(part) for part in parts]))])
    assert len(parts) > 5
    assert all(re.fullmatch(r"\[KEY-\w{8}\]", segment.text) for segment in redacted.segments)


def test_messages_of_a_chat_do_not_touch_and_parts_of_one_do() -> None:
    key = KEYS["npm token"]
    halves = [text(half, "message", role) for half, role in ((key[:20], "user"), (key[20:], "user"), (key[20:], None))]
    apart, together = Request("a", 0, tuple(halves[:2]), chat=True), Request("b", 0, (halves[0], halves[2]), chat=True)
    assert list(redactor().redact([apart])) == [apart]
    (redacted,) = redactor().redact([together])
    assert all("[KEY-" in segment.text for segment in redacted.segments)
    assert [segment.role for segment in redacted.segments] == ["user", None]


def test_token_ids_are_refused_with_their_place() -> None:
    ids = make_segment("document", "", None, (1, 2))
    request = Request("a", 0, (text("Hello"),), ((text("So"), ids),))
    with pytest.raises(TraceError, match="request 'a' carries token ids in segment 3, which cannot be redacted"):
        list(redactor().redact([request]))


def test_ids_that_differ_still_differ() -> None:
    addresses = [f"user{number}@example.com" for number in range(50)]
    requests = [Request(address, at, (text("x"),)) for at, address in enumerate(addresses)]
    assert len({request.request_id for request in redactor().redact(requests)}) == 50


def test_a_header_is_redacted_with_the_same_placeholders() -> None:
    found = redactor()
    (request,) = found.redact([Request(BOB, 0, (text("x"),))])
    header = found.redact_header({"source": [f"{BOB}.jsonl"], "notes": {BOB: 1}, "window": 8})
    assert header == {"source": [f"{request.request_id}.jsonl"], "notes": {request.request_id: 1}, "window": 8}
    assert find(detectors(), str(header)) == []


def test_names_of_fields_in_a_header_tell_what_a_value_is() -> None:
    password, key, pan = "hunT3r" + "2xY9", "k3y" + "x8Yz" * 6, int("41111111" + "11111111")
    given = {"settings": {"password": password, "api_key": key, "digest": key[::-1]}, "pan": [pan], "seed": 10**12}
    header = redactor().redact_header(given)
    assert not any(str(value) in str(header) for value in (password, key, pan))
    assert (header["settings"]["digest"], header["seed"]) == (key[::-1], 10**12)  # type: ignore[index]


def test_a_header_that_never_ends_is_an_error() -> None:
    header: dict[str, object] = {}
    for _ in range(5000):
        header = {"a": header}
    with pytest.raises(TraceError, match="nested too deep"):
        redactor().redact_header(header)


def test_a_redacted_request_is_not_changed_again() -> None:
    (once,) = redactor().redact([Request(BOB, 0, (text(f"{BOB} 8.8.8.8"),), session=BOB, expected=BOB)])
    (twice,) = redactor().redact([replace(once)])
    assert twice == once
