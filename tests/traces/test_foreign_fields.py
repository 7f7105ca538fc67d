"""What single formats of other tools hold beside their messages."""

from __future__ import annotations

import base64
import datetime
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces import read_as, read_trace
from kvaudit.traces.results import ResultsOnlyError
from kvaudit.traces.source import open_source

USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log.json"


def read(file: Path, name: str, *lines: object) -> Trace:
    file.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    with open_source(file) as source:
        told, trace = read_as(source)
    assert told == name
    return trace


def texts(trace: Trace, at: int = 0) -> list[tuple[str | None, str]]:
    return [(segment.role, segment.text) for segment in trace.requests[at].segments]


def left_out(trace: Trace) -> list[tuple[str, list[str]]]:
    rows: Any = trace.header.get("left_out", [])
    return [(row["reason"], row["places"]) for row in rows]


# OpenAI Batch


def batch(name: str, body: object, url: str = "/v1/chat/completions") -> dict[str, object]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def test_a_batch_tells_what_is_no_chat(file: Path) -> None:
    trace = read(
        file,
        "openai-batch",
        batch("a", {"messages": [USER]}),
        batch("b", {"model": "m", "input": "x"}, "/v1/embeddings"),
        batch("c", {"model": "m", "prompt": "x"}, "/v1/images/generations"),
        batch("d", {"model": "m", "prompt": "Once"}, "/v1/completions"),
        batch("e", {"model": "m", "input": "x"}, "/v1/moderations"),
        {"custom_id": "f", "body": "x"},
    )

    assert [request.request_id for request in trace.requests] == ["a", "d"]
    assert not trace.requests[1].chat
    assert left_out(trace) == [
        ("is an embedding request", ["line 2"]),
        ("is an image request", ["line 3"]),
        ("is a moderation request", ["line 5"]),
        ("has no 'body'", ["line 6"]),
    ]


@pytest.mark.parametrize(
    "result",
    [
        {"response": {"status_code": 429, "body": {}}, "error": None},
        {"response": None, "error": {"code": "batch_expired"}},
        {"response": {"status_code": 200, "body": {"success": False}}},
        {"response": {"status_code": 200, "body": {"error": {"message": "no"}}}},
    ],
)
def test_results_say_which_requests_of_a_batch_failed(file: Path, result: dict[str, object]) -> None:
    good = {"custom_id": "b", "response": {"status_code": 200, "body": {"usage": {"completion_tokens": 3}}}}

    trace = read(
        file,
        "openai-batch",
        batch("a", {"messages": [USER]}),
        batch("b", {"messages": [USER]}),
        {"custom_id": "a", **result},
        good,
    )

    assert [(request.request_id, request.max_tokens) for request in trace.requests] == [("b", 3)]
    assert [reason.partition(" ")[0] for reason, _ in left_out(trace)] == ["failed"]


def test_results_alone_hold_no_prompts(file: Path) -> None:
    with pytest.raises(ResultsOnlyError, match="no prompts") as caught:
        read(file, "", {"custom_id": "a", "response": {"status_code": 500}}, {"custom_id": "b", "response": {}})

    assert caught.value.failures == {"a": "failed (status 500)"}


# OpenAI Responses


def test_chains_are_resolved_without_the_instructions_of_earlier_turns(file: Path) -> None:
    def turn(name: str, answer: str, **more: object) -> dict[str, object]:
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]}
        thought = {"type": "reasoning", "summary": []}
        called = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
        return {"id": name, "input": f"to {answer}", "output": [thought, said, called], **more}

    trace = read(
        file,
        "openai-responses",
        turn("r1", "one", instructions="First.", max_output_tokens=9),
        turn("r2", "two", previous_response_id="r1", instructions="Second."),
        turn("r3", "three", previous_response_id="r2"),
        turn("x1", "other"),
    )

    assert texts(trace, 2) == [
        ("user", "to one"),
        ("assistant", 'one\n{"name":"f","arguments":{}}'),
        ("user", "to two"),
        ("assistant", 'two\n{"name":"f","arguments":{}}'),
        ("user", "to three"),
    ]
    assert texts(trace, 1)[0] == ("system", "Second.")
    assert [request.session for request in trace.requests] == ["r1", "r1", "r1", "x1"]
    assert [request.max_tokens for request in trace.requests] == [9, 16, 16, 16]


def test_what_the_server_keeps_is_left_out(file: Path) -> None:
    trace = read(
        file,
        "openai-responses",
        {"input": "Hi"},
        {"input": "Hi", "previous_response_id": "gone"},
        {"input": "Hi", "previous_response_id": ["gone"]},
        {"input": "Hi", "conversation": "conv_1"},
        {"input": "Hi", "prompt": {"id": "p"}},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image"}]}]},
        {"input": ["one", "two"], "model": "m"},
        {"input": "one", "model": "text-embedding-3-small"},
        {"input": "x", "response": {"status": "failed", "error": {"code": "server_error"}}},
    )

    assert len(trace.requests) == 1
    assert left_out(trace) == [
        ("goes on from a response that the file does not hold before it", ["line 2", "line 3"]),
        ("is an embedding request", ["line 8", "line 9"]),
        ("has a conversation that the server keeps, and the file does not", ["line 4"]),
        ("has a prompt that the server keeps, and the file does not", ["line 5"]),
        ("has a part of type 'item_reference' in its content", ["line 6 (message 1)"]),
        ("has an image in its content", ["line 7 (message 1)"]),
        ("failed (server_error)", ["line 10"]),
    ]


# Anthropic


def test_anthropic_turns_keep_their_order(file: Path) -> None:
    blocks = [
        {"type": "text", "text": "Before."},
        {"type": "tool_result", "tool_use_id": "t", "content": "one"},
        {"type": "tool_result", "tool_use_id": "u"},
        {"type": "document", "source": {"type": "text", "data": "A document."}},
        {"type": "text", "text": "After.", "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        "system": "Help.",
        "max_tokens": 4,
        "stop_sequences": ["\n"],
        "messages": [{"role": "user", "content": blocks}],
    }

    trace = read(file, "anthropic", {**body, "session_id": "s"})

    assert texts(trace) == [
        ("system", "Help."),
        ("user", "Before."),
        ("tool", "one"),
        ("tool", ""),
        ("user", "A document.After."),
    ]
    request = trace.requests[0]
    assert (request.max_tokens, request.stop, request.session) == (4, ("\n",), "s")


@pytest.mark.parametrize(
    "block", [{"type": "image", "source": {}}, {"type": "document", "source": {"type": "base64", "data": "x"}}]
)
def test_anthropic_images_and_files_are_left_out(file: Path, block: object) -> None:
    bad = {"system": "x", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]}
    nested = {"role": "user", "content": [{"type": "tool_result", "content": [block]}]}

    trace = read(file, "anthropic", {"system": "x", "messages": [USER]}, bad, {**bad, "messages": [nested]})

    assert len(trace.requests) == 1
    assert [places for _, places in left_out(trace)] == [["line 2 (message 2)", "line 3 (message 2)"]]


# LiteLLM


def test_litellm_says_how_calls_ended(file: Path) -> None:
    def payload(name: str, **more: object) -> dict[str, object]:
        line = {"id": name, "trace_id": "t", "call_type": "acompletion", "messages": [USER], "status": "success"}
        return line | {"startTime": 1.0, "model_parameters": {}, "response": {}} | more

    trace = read(
        file,
        "litellm",
        payload("a", metadata={"session_id": "s"}),
        payload("b", status="failure", error_information={"error_class": "RateLimitError"}),
        payload("c", call_type="aembedding"),
        payload("d", response={"error": {"code": 500}}),
        payload("e", messages="Once", call_type="atext_completion", response="", completion_tokens=0),
        payload("a", metadata={"session_id": "s"}),
        payload("f", call_type="atranscription"),
        payload("g", status="failure"),
        payload("h", cache_hit=True),
        payload("i", messages=[{"role": "user", "content": "redacted-by-litellm"}]),
        payload("j", messages="redacted-by-litellm"),
        payload(
            "k",
            call_type="aresponses",
            messages=[{"type": "message", **USER}],
            model_parameters={"instructions": "Be."},
        ),
    )

    assert [(request.request_id, request.session) for request in trace.requests] == [("a", "s"), ("e", "t"), ("k", "t")]
    assert not trace.requests[1].chat
    assert texts(trace, 2) == [("system", "Be."), ("user", "Hi")]
    assert left_out(trace) == [
        ("has no prompt: it was redacted", ["line 10", "line 11"]),
        ("failed (RateLimitError)", ["line 2"]),
        ("is an embedding request", ["line 3"]),
        ("failed (an error)", ["line 4"]),
        ("has an id and a prompt that came before", ["line 6 (first in line 1)"]),
        ("is an audio request", ["line 7"]),
        ("failed (status failure)", ["line 8"]),
        ("was answered from LiteLLM's own cache", ["line 9"]),
    ]
    assert trace.header["empty_answers"] == 1


# OpenTelemetry


def span(name: str, start: object = "1700000000000000000", **attributes: object) -> dict[str, object]:
    keys = [{"key": f"gen_ai.{key}".replace("__", "."), "value": value} for key, value in attributes.items()]
    return {"traceId": "t", "spanId": name, "startTimeUnixNano": start, "attributes": keys}


def said(text: str) -> dict[str, object]:
    part = {"kvlistValue": {"values": [attribute("type", "text"), attribute("content", text)]}}
    parts = {"key": "parts", "value": {"arrayValue": {"values": [part]}}}
    return {"arrayValue": {"values": [{"kvlistValue": {"values": [attribute("role", "user"), parts]}}]}}


def attribute(key: str, text: str) -> dict[str, object]:
    return {"key": key, "value": {"stringValue": text}}


def test_otlp_exports_a_line_with_typed_values(file: Path) -> None:
    def export(*spans: object) -> dict[str, object]:
        return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}

    late = span("b", "1700000002000000000", input__messages=said("And?"), usage__output_tokens={"intValue": "12"})
    failed = {**span("c", input__messages=said("x")), "status": {"code": 2}}
    image = '[{"role": "user", "parts": [{"type": "blob", "modality": "image"}]}]'
    event = {**span("f"), "events": [{"attributes": span("", input__messages=said("In an event"))["attributes"]}]}

    trace = read(
        file,
        "otel",
        export(late, span("a", input__messages=said("Hi")), failed),
        export(
            span("d", operation__name={"stringValue": "embeddings"}, input__messages=said("x")),
            span("e", operation__name={"stringValue": "chat"}),
            span("x"),
            span("g", input__messages={"stringValue": image}),
            span("h", input__messages={"stringValue": "[broken"}),
            span("i", prompt__0__role={"stringValue": "user"}),
            event,
        ),
    )

    assert [request.request_id for request in trace.requests] == ["a", "f", "b"]
    assert texts(trace, 1) == [("user", "In an event")]
    assert [(request.max_tokens, request.timestamp) for request in trace.requests][2] == (12, 1700000002.0)
    assert left_out(trace) == [
        ("failed (an error)", ["line 1"]),
        ("is an embedding request", ["line 2"]),
        ("has no prompt: its content was not captured", ["line 2"]),
        ("is no call of a model", ["line 2"]),
        ("has an image in its content", ["line 2 (message 1)"]),
        ("has a 'gen_ai.input.messages' that is broken JSON", ["line 2"]),
        ("has no text", ["line 2 (the request)"]),
    ]
    assert trace.header["notes"] == ["requests are sorted by their times, which are not in order in the log"]


def test_a_pretty_printed_export_is_one_document(file: Path) -> None:
    export = {"resourceSpans": [{"scopeSpans": [{"spans": [span("a", input__messages=said("Hi"))]}]}]}
    file.write_bytes(orjson.dumps(export, option=orjson.OPT_INDENT_2))

    assert texts(read_trace(file)) == [("user", "Hi")]


# Langfuse and LangSmith


def test_langfuse_rows_of_parquet(file: Path) -> None:
    rows = [
        {
            "id": f"o{at}",
            "trace_id": "t",
            "session_id": "s",
            "type": kind,
            "start_time": datetime.datetime(2024, 1, 1, 0, 0, 9 - at),
            "input": orjson.dumps([{**USER, "content": f"Hi {at}"}]).decode(),
            "output": "",
            "level": "ERROR" if at == 2 else "DEFAULT",
            "model_parameters": '{"max_tokens": 5}',
        }
        for at, kind in enumerate(["GENERATION", "GENERATION", "GENERATION", "EMBEDDING", "SPAN"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)

    trace = read_trace(file)

    assert [(r.request_id, r.session, r.max_tokens, r.timestamp) for r in trace.requests] == [
        ("o1", "s", 5, 1704067208.0),
        ("o0", "s", 5, 1704067209.0),
    ]
    assert left_out(trace) == [
        ("failed (an error)", ["row 3"]),
        ("is an embedding request", ["row 4"]),
        ("is no call of a model", ["row 5"]),
    ]
    assert trace.header["empty_answers"] == 2


def test_langsmith_runs_of_parquet(file: Path) -> None:
    def run(at: int, **more: object) -> dict[str, object]:
        inputs = {"messages": [{"type": "human", "data": {"content": [{"type": "text", "text": f"Hi {at}"}]}}]}
        extra = {"metadata": {"thread_id": "th"}, "invocation_params": {"stop": ["\n"]}}
        texts = {"inputs": orjson.dumps(inputs).decode(), "extra": orjson.dumps(extra).decode()}
        times = {"start_time": datetime.datetime(2024, 1, 1, 0, 0, at)}
        return {"id": str(uuid.UUID(int=at)), "run_type": "llm", "error": None, **times, **texts, **more}

    rows = [run(0), run(1, error="RateLimitError"), run(2, run_type="retriever"), run(3, inputs="{}")]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table.set_column(2, "error", pa.array([row["error"] for row in rows], pa.string())), file)

    trace = read_trace(file)

    assert texts(trace) == [("user", "Hi 0")]
    assert (trace.requests[0].session, trace.requests[0].stop) == ("th", ("\n",))
    assert left_out(trace) == [
        ("failed (RateLimitError)", ["row 2"]),
        ("is no call of a model", ["row 3"]),
        ("has no prompt: neither 'messages' nor 'prompts'", ["row 4"]),
    ]


def test_nanoseconds_and_bytes_of_parquet_are_survived(file: Path) -> None:
    table = pa.table(
        {
            "id": pa.array([b"\xff", b"a"]),
            "run_type": ["llm", "llm"],
            "inputs": ['{"prompts": ["x"]}', '{"prompts": ["x"]}'],
            "start_time": pa.array([1_700_000_000_000_000_001, None], pa.timestamp("ns", "UTC")),
        }
    )
    pq.write_table(table, file)

    assert [request.request_id for request in read_trace(file).requests] == ["ff", "61"]
    without_pandas = """
import sys
from pathlib import Path
from kvaudit.traces import read_trace

class NoPandas:
    def find_spec(self, name, *rest):
        if name == "pandas":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoPandas())
print(read_trace(Path(sys.argv[1])).requests[0].timestamp)
"""
    ran = subprocess.run([sys.executable, "-c", without_pandas, str(file)], capture_output=True, text=True, check=True)
    assert ran.stdout == "1700000000.0\n"


def test_a_damaged_parquet_file_is_one_error(file: Path) -> None:
    file.write_bytes(b"PAR1" + b"x" * 100)

    with pytest.raises(TraceError, match=rf"^{file} .*Parquet"):
        read_trace(file)


# Documents


def test_trajectories_are_told_apart_by_agent_and_demonstrations_are_no_steps(file: Path) -> None:
    history = [
        {"role": "system", "content": "Main.", "agent": "main"},
        {"role": "assistant", "content": "A demonstration.", "agent": "main", "is_demo": True},
        {"role": "user", "content": "Other.", "agent": "other"},
        {"role": "assistant", "content": "From other.", "agent": "other"},
        {"role": "assistant", "content": "From main.", "agent": "main"},
    ]

    trace = read(file, "swe-agent", {"history": history, "info": {}})

    assert [request.request_id for request in trace.requests] == ["log/1", "log/2"]
    assert texts(trace) == [("user", "Other.")]
    assert texts(trace, 1) == [("system", "Main."), ("assistant", "A demonstration.")]
    assert {request.session for request in trace.requests} == {"log"}


def test_har_keeps_no_headers_and_tells_what_failed(file: Path) -> None:
    def entry(status: int, answer: str = "{}", path: str = "chat/completions", **posted: object) -> dict[str, object]:
        text = posted or {"text": orjson.dumps({"messages": [USER]}).decode()}
        headers = [{"name": "Authorization", "value": "Bearer sk-secret"}, {"name": "Cookie", "value": "sk-secret"}]
        request = {"method": "POST", "url": f"https://x/v1/{path}", "headers": headers, "cookies": headers}
        response = {"status": status, "content": {"text": answer}, "headers": headers}
        return {
            "startedDateTime": "2024-01-01T00:00:00Z",
            "request": {**request, "postData": text},
            "response": response,
        }

    encoded = base64.b64encode(orjson.dumps({"messages": [USER]})).decode()
    trace = read(
        file,
        "har",
        {
            "log": {
                "entries": [
                    entry(200),
                    entry(200, text=encoded, encoding="base64"),
                    entry(500),
                    entry(0),
                    entry(200, '{"success": false}'),
                    entry(200, path="embeddings"),
                    entry(200, text="no JSON"),
                    entry(200, text="*", encoding="base64"),
                ]
            }
        },
    )

    assert [request.request_id for request in trace.requests] == ["entry-1", "entry-2"]
    assert "secret" not in repr(trace)
    assert left_out(trace) == [
        ("failed (status 500)", ["entry 3"]),
        ("failed (no response)", ["entry 4"]),
        ("failed (success is false)", ["entry 5"]),
        ("is an embedding request", ["entry 6"]),
        ("has no body that is a JSON object", ["entry 7"]),
        ("has a body that is broken base64", ["entry 8"]),
    ]


def test_a_har_entry_that_posts_nothing_is_no_call(file: Path) -> None:
    posted = {"method": "POST", "url": "https://x/v1/chat/completions", "postData": {"text": '{"messages": []}'}}
    asked = {**posted, "method": "OPTIONS"}

    with pytest.raises(TraceError, match=r"1 has no messages: entry 1 .*; 1 is no call of a model: entry 2"):
        read(file, "har", {"log": {"entries": [{"request": posted}, {"request": asked}]}})


def test_the_logged_length_of_an_agentic_turn_is_its_limit(file: Path) -> None:
    turn = {"session_id": "s", "input": [USER], "output_length": 7, "pre_gap": 0.5}

    trace = read(file, "lmcache-agentic", turn, {**turn, "output_length": 0})

    assert [(r.session, r.max_tokens, r.limited) for r in trace.requests] == [("s", 7, True), ("s", 16, False)]


def test_aiperf_payloads_that_are_no_chats_are_left_out(file: Path) -> None:
    payloads = [{"input": "x", "model": "m-embed"}, {"model": "m"}, {"prompt": "Once", "max_tokens": 3}]

    trace = read(file, "aiperf", {"data": [{"session_id": "s", "payloads": payloads}, {"payloads": [{"prompt": "x"}]}]})

    assert [(request.request_id, request.session) for request in trace.requests] == [("s/3", "s"), ("payload-4", None)]
    assert left_out(trace) == [
        ("is an embedding request", ["payload 1"]),
        ("asks for no answer of a model", ["payload 2"]),
    ]


@pytest.mark.parametrize("start", ['{"log":\n {"entries": [', '{"data":\n [', '{"resourceSpans":\n ['])
def test_a_broken_document_is_one_error_with_its_line(file: Path, start: str) -> None:
    file.write_text(start + '\n"x" y')

    with pytest.raises(TraceError, match=rf"^{file}, line 3: broken JSON at column 5"):
        read_trace(file)


def test_a_document_that_is_too_large_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvaudit.traces.logs.LARGEST_DOCUMENT", 1000)
    file.write_text('{"log":\n {"entries": [' + " " * 1000 + "]}}")

    with pytest.raises(TraceError, match="is one JSON document of more than 0 MiB"):
        read_trace(file)


def test_an_array_is_read_as_a_log(file: Path) -> None:
    long = [{"messages": [{"role": "user", "content": "x" * 20_000}]}, {"messages": [USER]}]
    file.write_bytes(orjson.dumps(long, option=orjson.OPT_INDENT_2))

    assert [request.request_id for request in read_trace(file).requests] == ["entry-1", "entry-2"]


@pytest.mark.parametrize("text", ["[", "[]", "[1]", '[{"messages": [}]', "[" * 100_000])
def test_an_array_that_is_no_log_is_refused(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(TraceError, match=rf"^{file}"):
        read_trace(file)
