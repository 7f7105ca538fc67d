"""Chat requests as JSON lines: `{"messages": [...]}`, one a line, as clients and gateways log them.

Of the other fields `id`, `request_id` or `custom_id`, `session` or `session_id`, `timestamp` or `created`,
`max_tokens` or `max_completion_tokens`, `stop`, and `response`, `status` and `error` where a log has them, are taken.
Sampling settings are not: a replay decodes greedily.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.records import Trace
from kvaudit.traces.apis import LOG_FIELDS, api_of_body, is_anthropic
from kvaudit.traces.bodies import CHAT
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import logged_failure
from kvaudit.traces.source import NotThisFormatError, TraceSource
from kvaudit.traces.tally import LeftOut

EXAMPLES: Examples = (
    (
        '{"id": "a", "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hi"}]}\n'
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": '
        '"?"}]}]}',
        {"a": ["system: Help.", "user: Hi"], "line-2": ["user: How ?"]},
    ),
    (
        '{"id": 1, "messages": [{"role": "user", "content": "Read it."}, {"role": "assistant", "content": null, '
        '"tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{\\"path\\": 1}"}}]}, '
        '{"role": "tool", "tool_call_id": "c", "content": "three lines"}], '
        '"tools": [{"type": "function", "function": {"name": "read"}}]}',
        {
            "1": [
                'system: [{"type":"function","function":{"name":"read"}}]',
                "user: Read it.",
                'assistant: {"name":"read","arguments":{"path": 1}}',
                "tool: three lines",
            ]
        },
    ),
)


def read(source: TraceSource) -> Trace:
    """Read logged chat requests. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    if "messages" not in first or first.keys() & LOG_FIELDS or is_anthropic(first):
        raise NotThisFormatError("the first line is no chat request with 'messages'")
    return foreign_trace(source, read_log(source), _calls)


def _calls(place: int, record: Record) -> Iterator[Call | LeftOut]:
    modalities = record.get("modalities")
    if type(modalities) is list and "audio" in modalities:
        yield LeftOut(place, "is an audio request")
        return
    yield Call(
        place,
        record,
        api_of_body(record) or CHAT,
        request_id=record.get("id") or record.get("request_id") or record.get("custom_id"),
        session=record.get("session") or record.get("session_id"),
        time=record.get("timestamp") or record.get("created"),
        response=record.get("response"),
        failure=logged_failure(record),
    )
