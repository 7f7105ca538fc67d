"""Chat messages as segments: what every format that holds chats shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvaudit.records import INSTRUCTION, MESSAGE, QUERY, TOOL_RESULT, Segment
from kvaudit.traces.fields import Fields, brief
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.source import TraceSource
from kvaudit.traces.tools import call_text, calls_of, definitions_text

_SYSTEM_ROLES = ("system", "developer")
_ROLES = (*_SYSTEM_ROLES, "user", "assistant", "tool")
_OLDER_ROLES = {"function": "tool"}
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PARTS = {
    "image_url": "an image",
    "input_image": "an image",
    "image": "an image",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "a video",
    "input_file": "a file",
    "file": "a file",
    "document": "a file",
}
_HINT = "only text can be replayed: take these requests out"


def chat_segments(
    source: TraceSource, line: int, messages: Sequence[Any], pool: SegmentPool, tools: Any = None
) -> tuple[Segment, ...]:
    """One segment a message. Definitions of `tools` follow the system messages that come first, as one of their own.

    Raises TraceError for a message that is not text under a known role.
    """
    texts = [_role_and_text(source, line, number, message) for number, message in enumerate(messages, start=1)]
    kinds = _kinds([role for role, _ in texts])
    segments = [pool.intern(kind, text, role) for kind, (role, text) in zip(kinds, texts, strict=True)]
    if tools:
        definitions = _as_json(Fields(source, line, {}, "the request"), definitions_text, tools)
        leading = next((at for at, (role, _) in enumerate(texts) if role not in _SYSTEM_ROLES), len(texts))
        segments.insert(leading, pool.intern(INSTRUCTION, definitions, "system"))
    return tuple(segments)


def _role_and_text(source: TraceSource, line: int, number: int, message: Any) -> tuple[str, str]:
    if type(message) is not dict:
        raise source.error(line, f"message {number} is not an object")
    fields = Fields(source, line, message, f"message {number}")
    given = fields.text("role")
    role = _OLDER_ROLES.get(given or "", given)
    if role not in _ROLES:
        raise fields.error(f"has the role {brief(given)}", f"roles: {', '.join(_ROLES)}")
    content = message.get("content")
    parts = [_part(fields, part) for part in content] if type(content) is list else [fields.text("content") or ""]
    calls = [_as_json(fields, call_text, call) for call in calls_of(message)]
    text = "".join(parts)
    return role, "\n".join([text, *calls] if text else calls)


def _as_json(fields: Fields, write: Callable[[Any], str], value: Any) -> str:
    try:
        return write(value)
    except TypeError as error:
        raise fields.error("has tools or calls that cannot be written as JSON") from error


def _part(fields: Fields, part: Any) -> str:
    if type(part) is str:
        return part
    kind = part.get("type", "text") if type(part) is dict else None
    text = part.get(_TEXTS[kind]) if type(kind) is str and kind in _TEXTS else None
    if type(text) is not str:
        raise fields.error(f"has {_named(kind)} in its content", _HINT)
    return text


def _named(kind: Any) -> str:
    return _PARTS.get(kind if type(kind) is str else "", f"a part of type {brief(kind)}")


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
