"""Plain `{"messages": [...]}` JSON lines, as chat completion requests are logged; also as the `body` of a batch line.

Of the other fields `id`, `request_id` or `custom_id`, `session` or `session_id`, `max_tokens` or
`max_completion_tokens`, and `stop` are taken. Sampling settings are not: a replay decodes greedily.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvaudit.records import (
    DEFAULT_MAX_TOKENS,
    INSTRUCTION,
    MESSAGE,
    QUERY,
    TOOL_RESULT,
    Request,
    Segment,
    Trace,
)
from kvaudit.traces.assembly import build_trace
from kvaudit.traces.fields import Fields
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.source import NotThisFormatError, TraceSource

_SYSTEM_ROLES = ("system", "developer")
_ROLES = (*_SYSTEM_ROLES, "user", "assistant", "tool")
_UNSUPPORTED = {"tools": "tools", "functions": "tools", "tool_calls": "a tool call", "function_call": "a tool call"}
_PARTS = {"image_url": "an image", "input_image": "an image", "image": "an image", "input_audio": "audio"}
_HINT = "only text can be replayed: take these requests out"


def read(source: TraceSource) -> Trace:
    """Read logged chat requests. Raises NotThisFormatError, or TraceError with file and line."""
    first = source.first_object()
    if "messages" not in _call(first):
        raise NotThisFormatError("the first line has no 'messages'")
    return build_trace(source, _requests(source), {})


def _requests(source: TraceSource) -> Iterator[Request]:
    pool = SegmentPool()
    for ordinal, (line, outer) in enumerate(source.objects()):
        values = _call(outer)
        names = Fields(source, line, {**values, **outer}, "the request")
        fields = Fields(source, line, values, "the request")
        _refuse_unsupported(fields, values)
        limit = fields.count("max_completion_tokens") or fields.count("max_tokens")
        yield Request(
            request_id=names.name("id") or names.name("request_id") or names.name("custom_id") or f"line-{line}",
            ordinal=ordinal,
            segments=_segments(source, line, fields, pool),
            session=names.name("session") or names.name("session_id"),
            max_tokens=limit or DEFAULT_MAX_TOKENS,
            stop=fields.stop(),
            chat=True,
            limited=limit is not None,
            line=line,
        )


def _call(outer: dict[str, Any]) -> dict[str, Any]:
    body = outer.get("body")
    return body if type(body) is dict and "messages" not in outer else outer


def _refuse_unsupported(fields: Fields, values: dict[str, Any]) -> None:
    for name, what in _UNSUPPORTED.items():
        if values.get(name):
            raise fields.error(f"has {what} ({name!r})", _HINT)


def _segments(source: TraceSource, line: int, fields: Fields, pool: SegmentPool) -> tuple[Segment, ...]:
    texts = [
        _role_and_text(source, line, number, message) for number, message in enumerate(fields.list("messages"), start=1)
    ]
    kinds = _kinds([role for role, _ in texts])
    return tuple(pool.intern(kind, text, role) for kind, (role, text) in zip(kinds, texts, strict=True))


def _role_and_text(source: TraceSource, line: int, number: int, message: Any) -> tuple[str, str]:
    if type(message) is not dict:
        raise source.error(line, f"message {number} is not an object")
    fields = Fields(source, line, message, f"message {number}")
    _refuse_unsupported(fields, message)
    role = fields.text("role")
    if role not in _ROLES:
        raise fields.error(f"has the role {role!r:.80}", f"roles: {', '.join(_ROLES)}")
    content = message.get("content")
    if type(content) is not list:
        return role, fields.text("content") or ""
    return role, "".join(_part(fields, part) for part in content)


def _part(fields: Fields, part: Any) -> str:
    if type(part) is str:
        return part
    kind = part.get("type", "text") if type(part) is dict else None
    text = part.get("text") if kind in ("text", "input_text", "output_text") else None
    if type(text) is not str:
        raise fields.error(f"has {_PARTS.get(str(kind), f'a part of type {kind!r:.80}')} in its content", _HINT)
    return text


def _kinds(roles: Sequence[str]) -> list[str]:
    """The first system message instructs, the last user message asks."""
    kinds = [TOOL_RESULT if role == "tool" else MESSAGE for role in roles]
    instruction = next((index for index, role in enumerate(roles) if role in _SYSTEM_ROLES), None)
    query = next((index for index in reversed(range(len(roles))) if roles[index] == "user"), None)
    if instruction is not None:
        kinds[instruction] = INSTRUCTION
    if query is not None:
        kinds[query] = QUERY
    return kinds
