"""OpenTelemetry GenAI spans: OTLP JSON (`resourceSpans`, as one document or one export a line), or one span a line.

Prompts are the attributes `gen_ai.system_instructions`, `gen_ai.input.messages` and `gen_ai.tool.definitions`, on the
span or on an event of it, as structures or as JSON text; older spans have one attribute a field (`otel_older.py`). The
session is `gen_ai.conversation.id`, else the trace. Spans are exported as they end, so they are sorted by their start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.records import Trace
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import LINE, Log, Record, first_key, first_record, is_document, read_log, whole_document
from kvaudit.traces.otel_older import has_older_prompt, older_messages, older_tools
from kvaudit.traces.outcomes import failure_of, other_call
from kvaudit.traces.shapes import as_list, as_number, as_object, as_objects, first_of
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut
from kvaudit.traces.tools import result_text

EXAMPLES: Examples = (
    (
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "t", "spanId": "s", "startTimeUnixNano": '
        '"1700000000000000000", "attributes": [{"key": "gen_ai.operation.name", "value": {"stringValue": "chat"}}, '
        '{"key": "gen_ai.request.max_tokens", "value": {"intValue": "7"}}, {"key": "gen_ai.input.messages", "value": '
        '{"stringValue": "[{\\"role\\": \\"user\\", \\"parts\\": [{\\"type\\": \\"text\\", \\"content\\": '
        '\\"Hi\\"}]}]"}}]}]}]}]}',
        {"s": ["user: Hi"]},
    ),
    (
        '{"name": "chat m", "context": {"trace_id": "t", "span_id": "s"}, "start_time": "2024-01-01T00:00:00Z", '
        '"attributes": {"gen_ai.conversation.id": "c", "gen_ai.system_instructions": [{"type": "text", "content": '
        '"Help."}], "gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "Read it."}]}, '
        '{"role": "assistant", "parts": [{"type": "tool_call", "id": "x", "name": "read", "arguments": {"path": 1}}]}, '
        '{"role": "tool", "parts": [{"type": "tool_call_response", "id": "x", "response": "three lines"}]}], '
        '"gen_ai.tool.definitions": [{"name": "read"}]}}',
        {
            "s": [
                "system: Help.",
                'system: [{"name":"read"}]',
                "user: Read it.",
                'assistant: {"name":"read","arguments":{"path":1}}',
                "tool: three lines",
            ]
        },
    ),
    (
        '{"name": "openai.chat", "context": {"trace_id": "t", "span_id": "s"}, "attributes": {"llm.request.type": '
        '"chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Read it.", "gen_ai.prompt.1.role": '
        '"assistant", "gen_ai.prompt.1.tool_calls.0.name": "read", "gen_ai.prompt.1.tool_calls.0.arguments": '
        '"{\\"path\\": 1}", "gen_ai.prompt.2.role": "tool", "gen_ai.prompt.2.content": "three lines", '
        '"gen_ai.completion.0.content": "Done.", "gen_ai.usage.completion_tokens": 3}}',
        {
            "s": [
                "user: Read it.",
                'assistant: {"name":"read","arguments":{"path": 1}}',
                "tool: three lines",
            ]
        },
    ),
)

_EXPORTS = ("resourceSpans", "resource_spans")
_DEEPEST = 50
_STATUS_ERROR = (2, "2", "ERROR", "STATUS_CODE_ERROR")
_INPUT = "gen_ai.input.messages"


def read(source: TraceSource) -> Trace:
    """Read spans. Raises NotThisFormatError, or TraceError with file and line."""
    if first_key(source) in _EXPORTS and is_document(source):
        log = Log(LINE, iter([(1, as_object(whole_document(source)))]))
    else:
        first = first_record(source)
        if not first.keys() & set(_EXPORTS) and not ("attributes" in first and _span_id(first)):
            raise NotThisFormatError("the first line is neither an OTLP export nor a span")
        log = read_log(source)
    return foreign_trace(source, log, _calls, in_order=False)


def _calls(place: int, record: Record) -> Iterator[Call | LeftOut]:
    spans = list(_spans(record)) if record.keys() & set(_EXPORTS) else [record]
    for span in spans:
        try:
            yield _call(place, span)
        except TraceError as error:
            yield LeftOut(place, error.message)


def _spans(export: Record) -> Iterator[Record]:
    for resource in as_objects(first_of(export, *_EXPORTS)):
        for scope in as_objects(first_of(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")):
            yield from as_objects(scope.get("spans"))


def _call(place: int, span: Record) -> Call | LeftOut:
    attributes = _attributes(span.get("attributes"))
    for event in as_objects(span.get("events")):
        attributes = {**_attributes(event.get("attributes")), **attributes}
    operation = first_of(attributes, "gen_ai.operation.name", "llm.request.type")
    if other := other_call(operation):
        return LeftOut(place, other)
    if _INPUT not in attributes and not has_older_prompt(attributes):
        return LeftOut(place, _without_input(operation))
    status = as_object(span.get("status"))
    return Call(
        place,
        _body(attributes),
        request_id=_span_id(span),
        session=attributes.get("gen_ai.conversation.id") or _trace_id(span),
        time=first_of(span, "startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime"),
        output_tokens=first_of(attributes, "gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
        response=_outputs(attributes.get("gen_ai.output.messages")),
        failure=failure_of(
            None,
            attributes.get("http.response.status_code"),
            attributes.get("error.type") or first_of(status, "code", "status_code") in _STATUS_ERROR,
        ),
    )


def _without_input(operation: Any) -> str:
    if operation in ("chat", "generate_content", "text_completion", "completion"):
        return "has no prompt: its content was not captured"
    return "is no call of a model"


def _body(attributes: dict[str, Any]) -> dict[str, Any]:
    if _INPUT not in attributes:
        given = {"messages": older_messages(attributes), "tools": older_tools(attributes)}
        return {**given, **_sampling(attributes)}
    instructions = _decoded(attributes, "gen_ai.system_instructions")
    system = [{"role": "system", "parts": instructions if type(instructions) is list else [instructions]}]
    given = _decoded(attributes, _INPUT)
    if type(given) is not list:
        raise TraceError(f"has a {_INPUT!r} that is not a list")
    return {
        "messages": list(_chat([*(system if instructions else []), *given])),
        "tools": _decoded(attributes, "gen_ai.tool.definitions"),
        **_sampling(attributes),
    }


def _sampling(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_tokens": attributes.get("gen_ai.request.max_tokens"),
        "stop": attributes.get("gen_ai.request.stop_sequences"),
    }


def _chat(messages: Iterable[Any]) -> Iterator[Any]:
    for message in messages:
        parts = message.get("parts") if type(message) is dict else None
        if type(parts) is not list:
            yield message
            continue
        shown: list[Any] = []
        calls: list[Any] = []
        for part in parts:
            kind = part.get("type") if type(part) is dict else None
            if kind == "tool_call_response":
                yield {"role": "tool", "content": result_text(first_of(part, "response", "result"))}
            elif kind == "tool_call":
                calls.append(part)
            elif kind == "text":
                shown.append({"type": "text", "text": part.get("content")})
            elif kind not in ("reasoning", "thinking"):
                shown.append(part if kind is None else {"type": part.get("modality", kind)})
        if shown or calls or not parts:
            yield {"role": message.get("role"), "content": shown, "tool_calls": calls}


def _outputs(value: Any) -> Any:
    """What `outcomes.answer_is_empty` looks at."""
    if type(value) is str:
        return None
    return (
        None if value is None else {"output": [part for turn in as_objects(value) for part in turn.get("parts") or ()]}
    )


def _decoded(attributes: dict[str, Any], name: str) -> Any:
    value = attributes.get(name)
    if type(value) is not str:
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        if name == "gen_ai.system_instructions":
            return {"type": "text", "content": value}
        raise TraceError(f"has a {name!r} that is broken JSON") from error


def _attributes(given: Any) -> dict[str, Any]:
    """Attributes as one object, or as OTLP writes them: a list of keys and typed values."""
    if type(given) is dict:
        return dict(given)
    return {item["key"]: _value(item.get("value"), 0) for item in as_objects(given) if type(item.get("key")) is str}


def _value(typed: Any, depth: int) -> Any:
    if type(typed) is not dict or depth > _DEEPEST:
        return None
    for name, value in typed.items():
        match name.replace("_", "").lower():
            case "intvalue":
                return as_number(value)
            case "arrayvalue":
                return [_value(item, depth + 1) for item in as_list(as_object(value).get("values"))]
            case "kvlistvalue":
                return {
                    str(item.get("key")): _value(item.get("value"), depth + 1)
                    for item in as_objects(as_object(value).get("values"))
                }
            case "stringvalue" | "boolvalue" | "doublevalue":
                return value
    return None


def _span_id(span: Record) -> Any:
    return first_of(span, "spanId", "span_id") or as_object(span.get("context")).get("span_id")


def _trace_id(span: Record) -> Any:
    return first_of(span, "traceId", "trace_id") or as_object(span.get("context")).get("trace_id")
