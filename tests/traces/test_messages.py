"""Logged chat requests as traces."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces import read_trace
from kvaudit.traces.foreign import told_counts

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
    ("line", "reason", "where"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "has an image in its content",
            "message 1",
        ),
        (
            {"messages": [USER, {"role": "user", "content": [{"type": "file"}]}]},
            "has a file in its content",
            "message 2",
        ),
        ({"messages": [{"role": "user", "content": [5]}]}, "has a part of type None in its content", "message 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "has a part of type 'text' in its content",
            "message 1",
        ),
        (
            {"messages": [{"role": "user", "content": {"text": "x"}}]},
            "has a 'content' that is not a string",
            "message 1",
        ),
        ({"messages": [{"role": "oracle", "content": "x"}]}, "has the role 'oracle'", "message 1"),
        ({"messages": [{"content": "x"}]}, "has the role None", "message 1"),
        ({"messages": ["hello"]}, "is not an object", "message 1"),
        ({"messages": "hello"}, "has a 'messages' that is not a list", "the request"),
        ({"messages": []}, "has no messages", "the request"),
        ({"messages": [{"role": "user", "content": ""}]}, "has no text", "the request"),
        ({"other": "hello"}, "has no messages", "the request"),
        ({"messages": [USER], "id": "first"}, "has an id and a prompt that came before", "first in line 1"),
        (
            {"messages": [USER], "max_tokens": 0},
            "has a 'max_tokens' that is not a whole number from 1 on",
            "the request",
        ),
        ({"messages": [USER], "stop": [""]}, "has a 'stop' that is not a list of strings with something in them", None),
        ({"messages": [USER], "session": [1]}, "has a 'session' that is not a string with something in it", None),
        ({"messages": [USER], "modalities": ["text", "audio"]}, "is an audio request", ""),
        ({"messages": [USER], "response": {"error": {"type": "overloaded"}}}, "failed (overloaded)", ""),
        ({"messages": [USER], "response": {"success": False}}, "failed (success is false)", ""),
        ({"messages": [USER], "status": 503}, "failed (status 503)", ""),
        ({"messages": [USER], "error": "API key sk-123456 is wrong"}, "failed (an error)", ""),
    ],
)
def test_what_cannot_be_replayed_is_left_out_with_its_line(
    file: Path, line: object, reason: str, where: str | None
) -> None:
    trace = read(file, {"messages": [USER], "id": "first"}, line, {"messages": [USER], "id": "last"})

    place = {None: "line 2 (the request)", "": "line 2"}.get(where, f"line 2 ({where})")
    assert trace.header["left_out"] == [{"reason": reason, "count": 1, "places": [place]}]
    assert [request.request_id for request in trace.requests] == ["first", "last"]
    assert trace.header["records"] == 3


def test_a_log_in_which_nothing_is_left_is_refused(file: Path) -> None:
    with pytest.raises(
        TraceError, match=r"holds no request that can be replayed: 2 has no messages: line 1 .*, line 2"
    ):
        read(file, {"messages": []}, {"messages": []})


def test_reasons_that_differ_in_every_line_are_put_together(file: Path) -> None:
    odd = [{"messages": [{"role": f"oracle {number}", "content": "x"}]} for number in range(200)]

    rows = read(file, {"messages": [USER]}, *odd).header["left_out"]

    assert rows[0] == {  # type: ignore[index]
        "reason": "for other reasons",
        "count": 170,
        "places": ["line 32 (message 1)", "line 33 (message 1)", "line 34 (message 1)"],
    }
    assert len(rows) == 31  # type: ignore[arg-type]


def test_tools_and_calls_become_text_and_null_stays_empty(file: Path) -> None:
    tools = [{"type": "function", "function": {"name": "read", "b": 1, "a": 2}}]
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"z": 1.50, "a": "\u2028"}'}}
    called = [{**CALLED, "tool_calls": [call, call]}, {"role": "assistant", "content": "So.", "tool_calls": [call]}]

    trace = read(file, {"messages": [SYSTEM, USER, *called, TOOL], "tools": tools})

    text = '{"name":"read","arguments":{"z": 1.50, "a": "\u2028"}}'
    assert [(segment.role, segment.text) for segment in trace.requests[0].segments] == [
        ("system", "You help."),
        ("system", '[{"type":"function","function":{"name":"read","b":1,"a":2}}]'),
        ("user", USER["content"]),
        ("assistant", f"{text}\n{text}"),
        ("assistant", f"So.\n{text}"),
        ("tool", "three lines"),
    ]
    assert trace.requests[0].segments[1].kind == "instruction"
    assert trace.header["with_tools"] == 1


def test_old_functions_are_tools(file: Path) -> None:
    called = {**CALLED, "function_call": {"name": "f", "arguments": "not JSON"}}

    (request,) = read(
        file, {"messages": [USER, called, {"role": "function", "content": "x"}], "functions": [{"name": "f"}]}
    ).requests

    assert [segment.text for segment in request.segments[::3]] == ['[{"name":"f"}]', "x"]
    assert request.segments[2].text == '{"name":"f","arguments":"not JSON"}'
    assert request.segments[3].kind == "tool-result"


def test_the_length_of_a_logged_answer_is_the_limit_where_the_request_has_none(file: Path) -> None:
    response = {"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": 7}}

    one, two, three = read(
        file,
        {"messages": [USER], "response": response},
        {"messages": [USER], "response": response, "max_tokens": 3},
        {"messages": [USER], "timestamp": 1.7e12},
    ).requests

    assert [(r.max_tokens, r.limited) for r in (one, two, three)] == [(7, True), (3, True), (16, False)]
    assert three.timestamp == 1.7e9


def test_a_line_of_another_api_among_chats_is_taken_as_what_it_is(file: Path) -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "content": "found"}]}

    trace = read(file, {"messages": [USER]}, {"system": "Help.", "messages": [USER, result]}, {"prompt": "Once"})

    assert [[(segment.role, segment.text) for segment in request.segments] for request in trace.requests[1:]] == [
        [("system", "Help."), ("user", USER["content"]), ("tool", "found")],
        [(None, "Once")],
    ]


def test_answers_without_text_are_counted_and_their_requests_kept(file: Path) -> None:
    empty = {"choices": [{"message": {"content": ""}}]}
    trace = read(file, {"messages": [USER], "response": empty}, {"messages": [USER], "response": {"choices": []}})

    assert len(trace.requests) == 2
    assert trace.header["empty_answers"] == 2
    assert told_counts(trace.header) == ["2 logged answers without text; the requests are kept"]
