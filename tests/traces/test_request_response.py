"""Lines of requests with their answers, which are no traces of kvaudit's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from foreign_examples import shown

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces import TraceSource, read_as, read_trace

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log"


def read(file: Path, *pairs: object) -> Trace:
    file.write_bytes(b"".join(orjson.dumps(pair) + b"\n" for pair in pairs))
    name, trace = read_as(TraceSource(str(file), file))
    assert name == "request-response"
    return trace


def left_out(trace: Trace) -> dict[str, list[str]]:
    rows: Any = trace.header.get("left_out", [])
    return {row["reason"]: row["places"] for row in rows}


def test_bodies_of_every_api_are_read(file: Path) -> None:
    trace = read(
        file,
        {"request": {**CHAT, "max_completion_tokens": 7, "stop": "#"}, "response": {"choices": []}},
        {"request": {"prompt": "Once", "max_tokens": 8}, "response": {"choices": [{"text": " upon"}]}},
        {"request": {"input": "Hi", "max_output_tokens": 9}, "response": {"output": []}},
        {"request": {"system": "Help.", "max_tokens": 10, **CHAT}, "response": {"type": "message", "content": []}},
    )

    assert shown(trace) == {
        "line-1": ["user: Hi"],
        "line-2": ["query: Once"],
        "line-3": ["user: Hi"],
        "line-4": ["system: Help.", "user: Hi"],
    }
    assert [request.max_tokens for request in trace.requests] == [7, 8, 9, 10]
    assert [request.chat for request in trace.requests] == [True, False, True, True]
    assert trace.requests[0].stop == ("#",)


def test_what_stands_beside_a_pair_is_taken(file: Path) -> None:
    usage = {"usage": {"completion_tokens": 12}, "choices": [{"message": {"content": "Hello."}}]}
    pair = {"id": "a", "session_id": "s", "timestamp": 1700000000123, "request": CHAT, "response": usage}

    (request,) = read(file, pair).requests

    assert (request.request_id, request.session, request.timestamp) == ("a", "s", 1700000000.123)
    assert request.max_tokens == 12


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ({"response": {"error": {"code": "overloaded"}}}, "failed (overloaded)"),
        ({"response": {"status_code": 503, "body": {}}}, "failed (status 503)"),
        ({"response": {"status_code": 200, "body": {"error": {"type": "overloaded"}}}}, "failed (overloaded)"),
        ({"response": None, "error": "timeout"}, "failed (timeout)"),
        ({"response": {}, "status": 429}, "failed (status 429)"),
        ({"response": '{"error": {"type": "overloaded"}}'}, "failed (overloaded)"),
        ({"url": "/v1/embeddings"}, "is an embedding request"),
        ({"request": {"input": "x", "model": "text-embedding-3"}}, "is an embedding request"),
        ({"request": {"url": "/v1/images/generations", "body": {"prompt": "a cat"}}}, "is an image request"),
        ({"request": None}, "asks for no answer of a model"),
        ({"request": {"temperature": 0}}, "asks for no answer of a model"),
    ],
)
def test_what_is_no_request_to_replay_is_left_out_with_its_line(
    file: Path, pair: dict[str, object], reason: str
) -> None:
    trace = read(file, {"request": CHAT, "response": {}}, {"request": CHAT, "response": {}, **pair})

    assert left_out(trace) == {reason: ["line 2"]}


def test_a_chain_of_responses_is_resolved(file: Path) -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]}
    trace = read(
        file,
        {"request": {"input": "Hi"}, "response": {"id": "resp_1", "output": [said]}},
        {"request": {"input": "And?", "previous_response_id": "resp_1"}, "response": {"id": "resp_2", "output": []}},
        {"request": {"input": "Lost", "previous_response_id": "resp_9"}, "response": {}},
        {"request": {"input": "Failed"}, "response": {"status_code": 500}},
    )

    assert shown(trace) == {"line-1": ["user: Hi"], "line-2": ["user: Hi", "assistant: Hello.", "user: And?"]}
    assert [request.session for request in trace.requests] == ["resp_1", "resp_1"]
    assert left_out(trace) == {
        "goes on from a response that the file does not hold before it": ["line 3"],
        "failed (status 500)": ["line 4"],
    }


def test_answers_without_text_are_counted(file: Path) -> None:
    trace = read(file, {"request": CHAT, "response": {"choices": [{"message": {"content": ""}}]}})

    assert trace.header["empty_answers"] == 1


def test_kvaudits_own_requests_are_told_from_them(file: Path) -> None:
    for request in (7, "a", '"{'):
        file.write_bytes(orjson.dumps({"request": request, "segments": [{"kind": "query", "text": "Hi"}]}))
        assert read_as(TraceSource(str(file), file))[0] == "kvaudit"

    file.write_bytes(orjson.dumps({"request": CHAT, "response": {}}))
    with pytest.raises(TraceError, match=r"is not a kvaudit trace: .* the id of a 'request'"):
        read_trace(file, "kvaudit")


def test_an_object_that_is_no_body_is_in_no_format(file: Path) -> None:
    file.write_bytes(orjson.dumps({"request": {"x": 1}, "answer": {}}))

    with pytest.raises(TraceError, match="in no known trace format: the first line has the fields 'request', 'answer'"):
        read_trace(file)
