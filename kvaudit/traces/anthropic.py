"""Anthropic Messages requests as JSON lines, also as the `params` of a message batch.

`system` (a string or blocks) comes first. A result of a tool becomes a message of its own, a call is appended to its
assistant's text, thinking of earlier turns is not in the prompt, and `cache_control` changes no text.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvaudit.records import Trace
from kvaudit.traces.apis import LOG_FIELDS, is_anthropic
from kvaudit.traces.bodies import MESSAGES
from kvaudit.traces.foreign import Call, Examples, foreign_trace
from kvaudit.traces.logs import Record, first_record, read_log
from kvaudit.traces.outcomes import logged_failure
from kvaudit.traces.source import NotThisFormatError, TraceSource

EXAMPLES: Examples = (
    (
        '{"model": "claude-x", "max_tokens": 5, "system": [{"type": "text", "text": "Help.", "cache_control": '
        '{"type": "ephemeral"}}], "tools": [{"name": "read", "input_schema": {}}], "messages": [{"role": "user", '
        '"content": "Read it."}, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": '
        '"text", "text": "I read."}, {"type": "tool_use", "id": "t", "name": "read", "input": {"path": 1}}]}, '
        '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": '
        '"three lines"}]}, {"type": "text", "text": "And?"}]}]}',
        {
            "line-1": [
                "system: Help.",
                'system: [{"name":"read","input_schema":{}}]',
                "user: Read it.",
                'assistant: I read.\n{"name":"read","arguments":{"path":1}}',
                "tool: three lines",
                "user: And?",
            ]
        },
    ),
    (
        '{"custom_id": "b", "params": {"max_tokens": 5, "system": "Help.", "messages": [{"role": "user", "content": '
        '"Hi"}]}}',
        {"b": ["system: Help.", "user: Hi"]},
    ),
)


def read(source: TraceSource) -> Trace:
    """Read Anthropic requests. Raises NotThisFormatError, or TraceError with file and line."""
    first = first_record(source)
    batch = type(first.get("params")) is dict and "messages" in first["params"]
    if not batch and ("messages" not in first or first.keys() & LOG_FIELDS or not is_anthropic(first)):
        raise NotThisFormatError("the first line is no request of Anthropic's Messages API")
    return foreign_trace(source, read_log(source), _calls)


def _calls(place: int, record: Record) -> Iterator[Call]:
    params = record.get("params")
    yield Call(
        place,
        params if type(params) is dict else record,
        MESSAGES,
        request_id=record.get("id") or record.get("request_id") or record.get("custom_id"),
        session=record.get("session") or record.get("session_id"),
        time=record.get("timestamp") or record.get("created_at"),
        response=record.get("response"),
        failure=logged_failure(record),
    )
