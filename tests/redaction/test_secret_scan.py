"""What is found in the lines of a file, and how it is said where."""

from __future__ import annotations

import base64
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from redaction.sensitive_values import KEYS, detectors, long_token

from kvaudit.redaction.borders import REACH, Piece, stretch_digest
from kvaudit.redaction.findings import MOST_EXAMPLES, Finding
from kvaudit.redaction.scans import LineScan, Scan, TraceScan
from kvaudit.redaction.strings import masked, masked_name, strings_of

BOB, EVE = "bob@example.com", "eve@example.com"


def scanned(*lines: dict[str, Any] | str, by_request: bool = True) -> Scan:
    scan = TraceScan(detectors()) if by_request else LineScan(detectors())
    for number, line in enumerate(lines, start=1):
        if isinstance(line, str):
            scan.add_text(number, line)
        else:
            scan.add_object(number, line)
    return scan


def found(*lines: dict[str, Any] | str, by_request: bool = True) -> dict[str, Finding]:
    return {finding.detector: finding for finding in scanned(*lines, by_request=by_request).findings()}


def places(finding: Finding) -> list[str]:
    return [example.place for example in finding.examples.values()]


def segment(name: str, text: str, **more: object) -> dict[str, Any]:
    return {"segment": name, "kind": "document", "text": text, **more}


def test_a_segment_is_named_by_its_first_request_and_counted_once() -> None:
    finding = found(
        segment("a" * 16, f"to {BOB}"),
        segment("b" * 16, "nothing"),
        {"request": "r1", "segments": ["b" * 16, "b" * 16]},
        {"request": "r2", "segments": ["b" * 16], "prelude": [["b" * 16, "a" * 16]]},
        {"request": "r3", "segments": ["a" * 16, "a" * 16]},
    )["email"]
    assert (finding.places, finding.records, len(finding.values)) == (1, 2, 1)
    assert places(finding) == ["request 'r2', segment 3"]


def cut_trace(key: str, *positions: int, **request: object) -> list[dict[str, Any]]:
    bounds = [0, *positions, len(key)]
    parts = [key[start:end] for start, end in pairwise(bounds)]
    parts[0], parts[-1] = "long " * REACH + parts[0], parts[-1] + " long" * REACH
    segments = [segment(f"{number:016}", part) for number, part in enumerate(parts)]
    return [*segments, {"request": "r", "segments": [one["segment"] for one in segments], **request}]


def test_a_value_that_borders_cut_is_found_where_the_prompt_has_it() -> None:
    key = KEYS["Anthropic key"]
    lines = cut_trace(key, 15, 70)
    again = {"request": "r2", "segments": lines[-1]["segments"]}
    finding = found(*lines, again)["key"]
    assert (finding.places, finding.records, len(finding.values)) == (1, 2, 1)
    assert places(finding) == ["request 'r', segments 1 to 3"]
    assert next(iter(finding.examples.values())).masked == "sk... (108 characters)"


def test_messages_of_a_chat_do_not_touch_and_parts_of_one_do() -> None:
    key = KEYS["npm token"]
    lines = cut_trace(key, 20, chat=True)
    assert found(*lines).keys() == {"key"}
    assert found(*[{**line, "role": "user"} if "segment" in line else line for line in lines]) == {}


def test_a_text_that_is_another_segments_id_is_not_taken_for_it() -> None:
    key = KEYS["Anthropic key"]
    beginning, end = segment("a" * 16, key[:15]), segment("b" * 16, key[15:])
    same_name = {"kind": "document", "text": "a" * 16}

    finding = found(
        beginning,
        end,
        {"request": "r1", "segments": [same_name, "b" * 16]},
        {"request": "r2", "segments": ["a" * 16, "b" * 16]},
    )["key"]
    assert places(finding) == ["request 'r2', segments 1 to 2"]


def test_stretches_are_told_apart_by_their_texts_and_where_they_begin() -> None:
    one, other = [Piece(0, 0, "a"), Piece(1, 0, "b")], [Piece(0, 0, "a"), Piece(1, 7, "b")]
    digests = [stretch_digest(one, ["x", "y"]), stretch_digest(one, ["x", "z"]), stretch_digest(other, ["x", "y"])]
    digests += [stretch_digest(one, ["x', 0), ('x", "y"])]

    assert len(set(digests)) == 4
    assert stretch_digest(one, ["\ud800", "y"]) == stretch_digest(list(one), ["\ud800", "y"])


def test_everything_else_of_a_trace_is_looked_at_too() -> None:
    finding = found(
        {"kvaudit_trace": 1, "source": [f"{BOB}.csv"], EVE: 1},
        segment("a" * 16, "text", role="me@example.com"),
        {
            "request": "id@example.com",
            "segments": [{"kind": "query", "text": "inline@example.com"}],
            "session": "session@example.com",
            "stop": ["stop@example.com"],
            "expected": "expected@example.com",
        },
    )["email"]
    assert (finding.places, finding.records, len(finding.values)) == (8, 1, 8)
    assert places(finding) == ["line 1"] * 2 + ["request 'id...'"] * 3


def test_a_segment_that_no_request_has_is_in_the_file_all_the_same() -> None:
    finding = found(segment("a" * 16, BOB), {"request": "r", "segments": []})["email"]
    assert (finding.places, finding.records) == (1, 0)
    assert places(finding) == [f"segment {'a' * 16}, which no request has"]


def test_other_files_are_counted_by_line() -> None:
    lines = [{"messages": [{"content": f"{BOB} {BOB}"}], "user": BOB}, {"x": "nothing"}, f"no JSON, {BOB}"]
    finding = found(*lines, by_request=False)["email"]
    assert (finding.places, finding.records, len(finding.values)) == (4, 2, 1)
    assert places(finding) == ["line 1"]


def test_names_of_fields_tell_what_a_value_is() -> None:
    assert found({"settings": {"api_key": "k3y" + "x8Yz" * 6}}, by_request=False).keys() == {"key"}
    assert found({"settings": {"digest": "k3y" + "x8Yz" * 6}}, by_request=False).keys() == set()


def test_names_of_fields_tell_it_in_a_header_and_in_a_request() -> None:
    key = "k3y" + "x8Yz" * 6
    assert found({"kvaudit_trace": 1, "settings": {"api_key": key, "pan": int("41111111" + "11111111")}}).keys() == {
        "key",
        "card",
    }
    assert found({"request": "r", "segments": [], "client_secret": key}).keys() == {"key"}
    assert found({"request": "r", "segments": [], "client_digest": key}).keys() == set()


def test_a_long_value_that_a_border_cuts_is_found() -> None:
    token = long_token()
    half = len(token) // 2
    segments = [segment("a" * 16, "word " * 200 + token[:half]), segment("b" * 16, token[half:] + " and" * 400)]
    finding = found(*segments, {"request": "r", "segments": ["a" * 16, "b" * 16]})["key"]
    assert f"({len(token):,} characters)" in " ".join(one.masked for one in finding.examples.values())


def test_long_numbers_are_looked_at_as_text() -> None:
    assert found({"card": int("41111111" + "11111111")}, by_request=False).keys() == {"card"}


def test_a_body_that_a_capture_keeps_in_base64_is_decoded() -> None:
    body = base64.b64encode(f"prompt={BOB}".encode()).decode()
    assert found({"exchange": "r1-1", "request_raw": {"base64": body}}, by_request=False).keys() == {"email"}
    assert found({"exchange": "r1-1", "request_raw": {"base64": "no base64!"}}, by_request=False) == {}


def test_examples_are_different_values_and_few() -> None:
    addresses = [f"user{number}@example.com" for number in range(9)]
    finding = found(*[{"a": address, "b": address} for address in addresses], by_request=False)["email"]
    assert (finding.places, len(finding.values)) == (18, 9)
    assert places(finding) == [f"line {number}" for number in range(1, 1 + MOST_EXAMPLES)]


def test_no_example_shows_a_value() -> None:
    key = KEYS["Anthropic key"]
    assert masked(key) == "sk... (108 characters)"
    finding = found({"request": f"{key} of {BOB}", "segments": []})["key"]
    assert places(finding) == ["request 'sk... of bo...'"]
    assert masked_name("plain", detectors()) == "'plain'"


def test_findings_come_in_the_order_of_the_detectors() -> None:
    line = {"a": f"8.8.8.8 {BOB} +14155552671 {KEYS['npm token']} {'4111 1111 ' + '1111 1111'}"}
    assert list(found(line, by_request=False)) == ["key", "email", "phone", "card", "ip"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(max_size=5), below, max_size=4),
    max_leaves=12,
)


def every_string(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for name, below in value.items() for text in [name, *every_string(below)]]
    return [text for below in value for text in every_string(below)] if isinstance(value, list) else []


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_no_string_of_an_object_is_missed(values: dict[str, Any]) -> None:
    seen = {text for pair in strings_of(values) for text in pair}
    assert set(every_string(values)) <= seen


@given(
    st.lists(st.dictionaries(st.sampled_from(["request", "segment", "segments", "prelude", "text"]), JSON), max_size=4)
)
@settings(max_examples=60, deadline=None)
def test_no_line_breaks_the_scan(lines: list[dict[str, Any]]) -> None:
    for by_request in (True, False):
        scanned(*lines, by_request=by_request).findings()


def test_nesting_has_no_limit() -> None:
    deep: Any = BOB
    for _ in range(10_000):
        deep = [deep]
    assert found({"a": deep}, by_request=False).keys() == {"email"}
