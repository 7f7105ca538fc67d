"""Captures of the proxy as traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvaudit.errors import TraceError
from kvaudit.proxy.capture import open_capture
from kvaudit.records import Trace
from kvaudit.traces import read_trace
from kvaudit.traces.tally import told_left_out

HEADER = {"kvaudit_capture": 1, "upstream": "http://x", "started": 1.0}
USER = {"role": "user", "content": "Hello"}


def exchange(number: int, request: object, api: str = "chat", **more: Any) -> dict[str, Any]:
    line = {"exchange": f"r1-{number}", "api": api, "started": float(number), "session": None, "status": 200}
    return line | {"outcome": "complete", "request": request, "answer": {"id": None, "choices": []}} | more


def chat(number: int, text: str = "Hello", **more: Any) -> dict[str, Any]:
    return exchange(number, {"model": "m", "messages": [USER | {"content": text}]}, **more)


@pytest.fixture(params=["capture.jsonl", "capture.jsonl.gz", "capture.jsonl.zst"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "capture.jsonl"


def write(path: Path, *exchanges: dict[str, Any]) -> None:
    with open_capture(path, "http://x", print) as capture:
        for line in exchanges:
            capture.append(orjson.dumps(line) + b"\n")


def read(path: Path, *exchanges: dict[str, Any]) -> Trace:
    write(path, *exchanges)
    return read_trace(path)


def texts(trace: Trace) -> list[list[tuple[str | None, str]]]:
    return [[(segment.role, segment.text) for segment in request.segments] for request in trace.requests]


def notes(trace: Trace) -> str:
    told = trace.header.get("notes", [])
    assert isinstance(told, list)
    return "\n".join(told)


def left_out(trace: Trace) -> str:
    rows = trace.header.get("left_out", [])
    assert isinstance(rows, list)
    return "\n".join(map(told_left_out, rows))


def test_exchanges_become_requests_in_the_order_in_which_they_began(path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "system", "content": "You help."}, USER], "max_tokens": 9, "stop": "x"}

    trace = read(path, chat(3, "third"), exchange(1, body, session="s"), chat(2, "second"))

    first, second, third = trace.requests
    assert [request.request_id for request in trace.requests] == ["r1-1", "r1-2", "r1-3"]
    assert [request.ordinal for request in trace.requests] == [0, 1, 2]
    assert [(segment.kind, segment.role, segment.text) for segment in first.segments] == [
        ("instruction", "system", "You help."),
        ("query", "user", "Hello"),
    ]
    assert (first.max_tokens, first.limited, first.stop) == (9, True, ("x",))
    assert (first.session, first.timestamp, first.chat, first.expected) == ("s", 1.0, True, None)
    assert (second.limited, second.line) == (False, 4)
    assert third.segments[0].text == "third"
    assert trace.header["upstream"] == "http://x"
    assert trace.header["records"] == 3


@pytest.mark.parametrize("cut", [1, 10, 30])
def test_a_line_that_was_cut_off_is_noted_and_left_out(path: Path, cut: int) -> None:
    write(path, chat(1), chat(2))
    path.write_bytes(path.read_bytes()[:-cut])

    trace = read_trace(path)

    if cut == 1:  # the line is there; its end, or the frame's, is lost
        assert len(trace.requests) == 2
        assert bool(notes(trace)) is (path.suffix != ".jsonl")
        return
    assert [request.request_id for request in trace.requests] == ["r1-1"]
    assert "cut off behind line 2" in notes(trace)


def test_a_capture_of_another_version_is_an_error(file: Path) -> None:
    write(file, chat(1))
    with file.open("ab") as stream:
        stream.write(b'{"kvaudit_capture": 2}\n')

    with pytest.raises(TraceError, match=f"^{file}, line 3: a capture of version 2"):
        read_trace(file)


def test_runs_of_the_proxy_are_one_trace(path: Path) -> None:
    write(path, chat(1))

    trace = read(path, chat(2) | {"exchange": "r2-1"})

    assert [request.request_id for request in trace.requests] == ["r1-1", "r2-1"]


@pytest.mark.parametrize("outcome", ["client-gone", "upstream-gone", "cut-short", "stopped"])
def test_prompts_whose_answers_broke_off_were_served_and_stay(file: Path, outcome: str) -> None:
    assert len(read(file, chat(1, outcome=outcome)).requests) == 1


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        ("failed", 500, "failed (status 500)"),
        ("failed", 200, "failed (an error in the answer)"),
        ("unreachable", None, "failed (the server was not reached)"),
        ("complete", 307, "was redirected (status 307)"),
    ],
)
def test_exchanges_that_failed_are_left_out_and_counted(
    file: Path, outcome: str, status: int | None, reason: str
) -> None:
    failed = {"outcome": outcome, "status": status}
    trace = read(file, chat(1), chat(2, **failed), exchange(3, None, **failed))

    assert len(trace.requests) == 1
    assert left_out(trace) == f"2 {reason}: line 3, line 4"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (exchange(2, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "an image in its content"),
        (exchange(2, None), "a request that could not be parsed"),
        (exchange(2, {"messages": "x"}), "a 'messages' that is not a list"),
        (exchange(2, {"messages": [USER], "max_tokens": 0}), "not a whole number from 1 on"),
        (exchange(2, {"prompt": ["a", "b"]}, "completions"), "several prompts"),
        (exchange(2, {"prompt": "a", "suffix": "b"}, "completions"), "'suffix'"),
        (exchange(2, {"input": "x", "previous_response_id": "gone"}, "responses"), "does not hold before it"),
        (exchange(2, {"input": "x", "conversation": "c"}, "responses"), "a conversation that the server keeps"),
        (exchange(2, {}), "has no messages"),
        (exchange(2, {"input": [{"type": "item_reference"}]}, "responses"), "item_reference"),
        (
            exchange(2, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
            "an image in its content",
        ),
        (exchange(2, {"messages": [USER]}, "batches"), "the API 'batches'"),
    ],
)
def test_what_cannot_be_replayed_is_left_out_with_the_reason(file: Path, line: dict[str, Any], reason: str) -> None:
    trace = read(file, chat(1), line)

    assert [request.request_id for request in trace.requests] == ["r1-1"]
    assert reason in left_out(trace)
    assert ": line 3" in left_out(trace)


def test_a_capture_of_which_nothing_is_left_says_why(file: Path) -> None:
    with pytest.raises(TraceError, match="no request that can be replayed: 1 failed"):
        read(file, chat(1, outcome="failed"))


def test_anthropic_requests_become_the_same_messages(file: Path) -> None:
    body = {
        "system": [{"type": "text", "text": "You help."}],
        "messages": [
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi"}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "found"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
        "max_tokens": 7,
        "stop_sequences": ["##"],
    }

    trace = read(file, exchange(1, body, "messages"))

    assert texts(trace) == [
        [("system", "You help."), ("user", "Hello"), ("assistant", "Hi"), ("tool", "found"), ("user", "And?")]
    ]
    assert (trace.requests[0].max_tokens, trace.requests[0].stop) == (7, ("##",))


@pytest.mark.parametrize(
    ("prompt", "text", "ids"), [("Say", "Say", None), (["Say"], "Say", None), ([5, 6], "", (5, 6)), ([[5]], "", (5,))]
)
def test_completions_have_one_segment_and_no_template(file: Path, prompt: object, text: str, ids: object) -> None:
    (request,) = read(file, exchange(1, {"prompt": prompt, "max_tokens": 3}, "completions")).requests

    (segment,) = request.segments
    assert (request.chat, segment.text, segment.token_ids, segment.role) == (False, text, ids, None)


def test_responses_that_go_on_from_each_other_are_one_session(file: Path) -> None:
    def turn(number: int, text: str, previous: str | None, **more: Any) -> dict[str, Any]:
        body = {"input": text, "instructions": "You help.", "previous_response_id": previous} | more
        answer = {"id": f"resp-{number}", "choices": [{"text": f"answer {number}", "tool_calls": []}]}
        return exchange(number, body, "responses", answer=answer)

    trace = read(file, turn(1, "one", None), turn(2, "two", "resp-1"), turn(3, "three", "resp-2"), turn(4, "new", None))

    asked = ["one", "answer 1", "two", "answer 2", "three"]
    assert [[text for _, text in request] for request in texts(trace)] == [
        ["You help.", *asked[:1]],
        ["You help.", *asked[:3]],
        ["You help.", *asked],
        ["You help.", "new"],
    ]
    assert [request.session for request in trace.requests] == ["resp-1", "resp-1", "resp-1", "resp-4"]


def test_tools_are_replayed_as_text(file: Path) -> None:
    call = {"id": "c", "name": "read", "arguments": "{}"}
    first = exchange(
        1, {"input": "one"}, "responses", answer={"id": "r", "choices": [{"text": "", "tool_calls": [call]}]}
    )
    result = {"type": "function_call_output", "call_id": "c", "output": "three lines"}
    body = {"input": [result], "previous_response_id": "r", "tools": [{"name": "read"}]}

    trace = read(file, first, exchange(2, body, "responses"))

    assert texts(trace)[1] == [
        ("system", '[{"name":"read"}]'),
        ("user", "one"),
        ("assistant", '{"name":"read","arguments":{}}'),
        ("tool", "three lines"),
    ]


def test_items_of_responses_are_messages(file: Path) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]

    assert texts(read(file, exchange(1, {"input": items}, "responses"))) == [
        [("user", "Hello"), ("assistant", "Hi"), ("tool", "found")]
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(["messages", "input", "prompt", "system", "instructions", "max_tokens", "stop", "stop_sequences"]),
    json_values,
)
apis = st.sampled_from(["chat", "completions", "responses", "messages"])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(apis, bodies, json_values), min_size=1, max_size=4))
def test_no_exchange_is_too_odd(file: Path, exchanges: list[tuple[str, Any, Any]]) -> None:
    file.unlink(missing_ok=True)
    lines = [exchange(n, body, api, answer=answer) for n, (api, body, answer) in enumerate(exchanges)]

    trace = read(file, chat(9), *lines)

    assert trace.requests[-1].request_id == "r1-9"
