"""LiteLLM's standard log: one payload a line, as its callbacks write it to files and buckets.

A payload holds the request (`messages`, `model_parameters`), the answer and how it ended. The session is the
`metadata.session_id` where there is one, else `trace_id`. Lines are written as calls end, so they are sorted by
`startTime`. Calls that LiteLLM answered from its own cache never reached a model, and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.apis import api_of_body
from kvaudit.traces.bodies import CHAT
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import failure_of, other_call
from kvaudit.traces.shapes import as_list, as_object
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"id": "b", "trace_id": "t", "call_type": "acompletion", "stream": true, "status": "success", "startTime": '
        '1700000002.5, "messages": [{"role": "user", "content": "And?"}], "model_parameters": {"max_tokens": 7}, '
        '"response": {"choices": [{"message": {"content": "Then."}}]}}\n'
        '{"id": "a", "trace_id": "t", "call_type": "acompletion", "status": "success", "startTime": 1700000001, '
        '"messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hi"}], '
        '"completion_tokens": 9, "model_parameters": {}, "response": "Hello."}',
        {"a": ["system: Help.", "user: Hi"], "b": ["user: And?"]},
    ),
)

_REDACTED = "redacted-by-litellm"


def read(source: TraceSource) -> Trace:
    """Read a LiteLLM log. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if not first.keys() & {"call_type", "litellm_call_id"} or not first.keys() & {"messages", "model_parameters"}:
        raise NotThisFormatError("the first line is no payload of LiteLLM's standard log")
    return foreign_trace(source, read_log(source), _calls, in_order=False)


def _calls(place: int, record: Record) -> Iterator[Call | LeftOut]:
    if other := other_call(record.get("call_type")):
        yield LeftOut(place, other)
        return
    if record.get("cache_hit") in (True, "True", "true"):
        yield LeftOut(place, "was answered from LiteLLM's own cache")
        return
    body = _body(record)
    session = as_object(record.get("metadata")).get("session_id")
    yield Call(
        place,
        body,
        api_of_body(body) or CHAT,
        request_id=record.get("id") or record.get("litellm_call_id"),
        session=session or record.get("trace_id") or None,
        time=record.get("startTime"),
        output_tokens=record.get("completion_tokens"),
        response=record.get("response"),
        failure=_failure(record),
    )


def _body(record: Record) -> dict[str, Any]:
    settings = as_object(record.get("model_parameters"))
    messages = record.get("messages")
    if _REDACTED in (messages, *(as_object(message).get("content") for message in as_list(messages))):
        raise TraceError("has no prompt: it was redacted")
    if record.get("call_type") in ("responses", "aresponses"):
        return {**settings, "input": messages}
    if type(messages) is str:
        return {**settings, "prompt": messages}
    return {**settings, "messages": messages}


def _failure(record: Record) -> str | None:
    information = as_object(record.get("error_information"))
    error = information if any(information.values()) else record.get("error_str")
    return failure_of(record, None, error) or failure_of(record.get("response"))
