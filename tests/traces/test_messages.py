"""Logged chat requests as traces."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces import read_trace

SYSTEM = {"role": "system", "content": "You help."}
USER = {"role": "user", "content": "What is in the file?"}
CALLED = {"role": "assistant", "content": None}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "three lines"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def read(file: Path, *lines: object) -> Trace:
    file.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    return read_trace(file)


def test_messages_become_segments_with_kinds_and_roles(file: Path) -> None:
    again = {"role": "user", "content": "And then?"}

    (request,) = read(file, {"messages": [SYSTEM, USER, CALLED, TOOL, again, SYSTEM]}).requests

    assert [(segment.kind, segment.role, segment.text) for segment in request.segments] == [
        ("instruction", "system", "You help."),
        ("message", "user", "What is in the file?"),
        ("message", "assistant", ""),
        ("tool-result", "tool", "three lines"),
        ("query", "user", "And then?"),
        ("message", "system", "You help."),
    ]
    assert request.chat
    assert request.request_id == "line-1"
    assert (request.max_tokens, request.stop, request.session) == (16, (), None)


def test_a_message_that_recurs_is_one_segment(file: Path) -> None:
    one, two = read(file, {"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, CALLED, USER]}).requests

    assert one.segments[0] is two.segments[0]
    assert one.segments[1] is two.segments[2]


@pytest.mark.parametrize("name", ["id", "request_id", "custom_id"])
def test_ids_are_taken(file: Path, name: str) -> None:
    trace = read(file, {"messages": [USER], name: "first"}, {"messages": [USER], name: 7})

    assert [request.request_id for request in trace.requests] == ["first", "7"]


def test_sessions_limits_and_stop_strings_are_taken(file: Path) -> None:
    trace = read(
        file,
        {"messages": [USER], "session": "a", "max_tokens": 5, "stop": "\n", "model": "m", "temperature": 1.0},
        {"messages": [USER], "session_id": "b", "max_completion_tokens": 6, "stop": ["x", "y"], "tools": []},
    )

    assert [(r.session, r.max_tokens, r.stop) for r in trace.requests] == [("a", 5, ("\n",)), ("b", 6, ("x", "y"))]


def test_batch_lines_carry_the_request_in_their_body(file: Path) -> None:
    body = {"messages": [SYSTEM, USER], "max_tokens": 9}

    (request,) = read(file, {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}).requests

    assert (request.request_id, request.max_tokens, len(request.segments)) == ("c", 9, 2)


def test_text_parts_are_joined(file: Path) -> None:
    parts = ["One. ", {"type": "text", "text": "Two. "}, {"type": "input_text", "text": "Three."}]

    (request,) = read(file, {"messages": [{"role": "user", "content": parts}]}).requests

    assert request.segments[0].text == "One. Two. Three."


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"messages": [USER], "tools": [{"type": "function"}]}, "the request has tools ('tools')"),
        ({"messages": [USER], "functions": [{}]}, "the request has tools ('functions')"),
        ({"messages": [USER, {**CALLED, "tool_calls": [{}]}]}, "message 2 has a tool call ('tool_calls')"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "message 1 has an image in its content",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "message 1 has a part of type 'file'"),
        ({"messages": [{"role": "user", "content": [5]}]}, "message 1 has a part of type None"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "message 1 has a part of type 'text'"),
        ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "message 1 has a 'content' that is not a string"),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "message 1 has the role 'oracle' (roles: system,"),
        ({"messages": [{"content": "x"}]}, "message 1 has the role None"),
        ({"messages": ["hello"]}, "message 1 is not an object"),
        ({"messages": "hello"}, "the request has a 'messages' that is not a list"),
        ({"messages": []}, "request 'line-2' has no segments"),
        ({"prompt": "hello"}, "request 'line-2' has no segments"),
        ({"messages": [USER], "id": "first"}, "request 'first' has the id of line 1"),
        ({"messages": [USER], "max_tokens": 0}, "has a 'max_tokens' that is not a whole number from 1 on"),
        ({"messages": [USER], "stop": [""]}, "has a 'stop' that is not a list of strings"),
        ({"messages": [USER], "session": [1]}, "has a 'session' that is not a string"),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_its_line(file: Path, line: object, what: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(file, {"messages": [USER], "id": "first"}, line)

    assert str(caught.value).startswith(f"{file}, line 2: ")
    assert what in str(caught.value)
