"""Langfuse exports: rows of observations as JSON lines, a JSON array or Parquet, in camel or snake case.

Generations are calls of a model; spans and events are not. `input` is a list of messages, an object with messages and
tools, or a plain prompt, and may be JSON text. The session is `sessionId` where there is one, else the trace. Rows are
sorted by their start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.apis import api_of_body
from kvaudit.traces.bodies import CHAT
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.langchain import chat_message
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import failure_of
from kvaudit.traces.shapes import as_number, as_object, first_of, parsed
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"id": "b", "traceId": "t", "type": "GENERATION", "startTime": "2024-01-01T00:00:02Z", "modelParameters": '
        '{"max_tokens": "7"}, "input": "[{\\"role\\": \\"user\\", \\"content\\": \\"And?\\"}]", "output": "Then."}\n'
        '{"id": "x", "traceId": "t", "type": "SPAN", "startTime": "2024-01-01T00:00:00Z", "input": {}}\n'
        '{"id": "a", "traceId": "t", "type": "GENERATION", "startTime": "2024-01-01T00:00:01Z", "input": {"messages": '
        '[{"role": "user", "content": "Hi"}], "tools": [{"name": "read"}]}, "usageDetails": {"output": 3}}',
        {"a": ['system: [{"name":"read"}]', "user: Hi"], "b": ["user: And?"]},
    ),
    (
        '[{"id": "a", "trace_id": "t", "type": "GENERATION", "start_time": "2024-01-01 00:00:01", "input": "Once upon",'
        ' "output": "a time"}]',
        {"a": ["query: Once upon"]},
    ),
)

_LIMITS = ("max_tokens", "max_completion_tokens", "maxTokens")


def read(source: TraceSource) -> Trace:
    """Read an export. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if not ("type" in first and "input" in first and first.keys() & {"traceId", "trace_id"}):
        raise NotThisFormatError("the first row is no observation of Langfuse")
    return foreign_trace(source, read_log(source), _calls, in_order=False)


def _calls(place: int, row: Record) -> Iterator[Call | LeftOut]:
    kind = row.get("type")
    if kind != "GENERATION":
        yield LeftOut(place, "is an embedding request" if kind == "EMBEDDING" else "is no call of a model")
        return
    body = _body(row)
    yield Call(
        place,
        body,
        api_of_body(body) or CHAT,
        request_id=row.get("id") or None,
        session=first_of(row, "sessionId", "session_id") or first_of(row, "traceId", "trace_id"),
        time=first_of(row, "startTime", "start_time"),
        output_tokens=parsed(first_of(row, "usageDetails", "usage_details", "usage")),
        response=parsed(row.get("output")),
        failure=failure_of(None, None, "an error" if row.get("level") == "ERROR" else None),
    )


def _body(row: Record) -> dict[str, Any]:
    given = parsed(row.get("input"))
    settings = as_object(parsed(first_of(row, "modelParameters", "model_parameters")))
    limit = as_number(first_of(settings, *_LIMITS))
    limits = {"max_tokens": limit} if type(limit) is int else {}
    if type(given) is list:
        return {**limits, "messages": [chat_message(message) for message in given]}
    if type(given) is str and given:
        return {**limits, "prompt": given}
    if type(given) is not dict or not given:
        raise TraceError("has no prompt: its content was not captured")
    if type(given.get("messages")) is list:
        given = {**given, "messages": [chat_message(message) for message in given["messages"]]}
    return {**limits, **given}
