"""Fields of a body that only its server understands: from a log to a trace, through a redaction, into the digest."""

from dataclasses import replace

import orjson
import pytest
from redaction.sensitive_values import detectors

from kvaudit.errors import TraceError
from kvaudit.records import Request
from kvaudit.redaction.redactor import Redactor
from kvaudit.redaction.requests import RequestRedactor
from kvaudit.traces import read_trace
from kvaudit.traces.extras import extra_fields
from kvaudit.traces.segments import make_segment
from kvaudit.traces.writer import write_trace

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "temperature": 0.7,
    "user": "me@example.org",
    "stream": True,
    "tools": [],
    "drop_message": [2],
    "cache_salt": "tenant",
    "chat_template_kwargs": {"enable_thinking": False},
    "guided_json": None,
}
KEPT = '{"drop_message":[2],"cache_salt":"tenant","chat_template_kwargs":{"enable_thinking":false}}'
REQUEST = Request("a", 0, (make_segment("query", "Hi", "user"),), chat=True, extra=KEPT)


def written(path, *lines):
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return read_trace(path)


def test_what_only_the_server_understands_is_kept_as_it_was_sent():
    assert extra_fields("chat", BODY) == KEPT
    assert extra_fields("completions", {"prompt": "x", "max_tokens": 3}) == ""
    assert extra_fields("messages", BODY) == ""


def test_a_capture_and_a_batch_keep_them_and_a_log_with_fields_of_its_own_does_not(tmp_path):
    exchange = {"exchange": "r1", "api": "chat", "started": 1, "outcome": "complete", "request": BODY, "answer": {}}
    capture = written(tmp_path / "c.jsonl", {"kvaudit_capture": 1, "upstream": "http://x", "started": 1}, exchange)
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    log = {**BODY, "id": "a", "latency": 3}
    assert capture.requests[0].extra == KEPT
    assert written(tmp_path / "b.jsonl", batch).requests[0].extra == KEPT
    assert written(tmp_path / "m.jsonl", log).requests[0].extra == ""


def test_they_survive_being_written_and_are_part_of_the_digest(tmp_path):
    path = tmp_path / "t.jsonl"
    told = write_trace(path, [REQUEST])
    read = read_trace(path)
    assert read.requests[0].extra == KEPT
    assert read.digest == told.digest
    assert write_trace(tmp_path / "u.jsonl", [replace(REQUEST, extra="")]).digest != told.digest


def test_what_is_no_object_is_refused(tmp_path):
    line = {"request": "a", "segments": [{"kind": "query", "text": "Hi"}], "extra": [1]}
    with pytest.raises(TraceError, match="'extra' that is not an object"):
        written(tmp_path / "t.jsonl", line)


@pytest.mark.parametrize("name", ["messages", "prompt", "n", "top_p", "max_completion_tokens", "stop", "echo"])
def test_what_a_replay_decides_is_no_extra_field_of_our_own_traces(tmp_path, name):
    line = {"request": "a", "segments": [{"kind": "query", "text": "Hi"}], "extra": {"drop_message": [1], name: 2}}
    with pytest.raises(TraceError, match=f"line 1: request 'a' has {name} in its 'extra'"):
        written(tmp_path / "t.jsonl", line)


def test_tools_of_our_own_traces_are_extra_fields(tmp_path):
    extra = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False}
    line = {"request": "a", "segments": [{"kind": "query", "text": "Hi"}], "extra": extra}
    assert orjson.loads(written(tmp_path / "t.jsonl", line).requests[0].extra) == extra


def test_they_are_redacted_with_everything_else():
    extra = orjson.dumps({"cache_salt": "me@example.org", "drop_message": [1]}).decode()
    redactor = RequestRedactor(Redactor(detectors("email"), b"salt"))
    (redacted,) = redactor.redact([replace(REQUEST, extra=extra)])
    assert "example.org" not in redacted.extra
    assert orjson.loads(redacted.extra)["drop_message"] == [1]
    assert redactor.tally.requests["email"] == 1
    assert redactor.redact([redacted])[0].extra == redacted.extra
