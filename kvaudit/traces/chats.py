"""Chat messages as segments: what every format that holds chats shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvaudit.records import INSTRUCTION, MESSAGE, QUERY, SEPARATOR, TOOL_RESULT, Segment
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
    """One segment a message, or one a part of its content where `source` keeps parts; the first has the role.

    A tool call is a part of its own. Definitions of `tools` follow the system messages that come first, as a message.
    Raises TraceError for a message that is not text under a known role.
    """
    told = [_role_and_parts(source, line, number, message) for number, message in enumerate(messages, start=1)]
    kinds = _kinds([role for role, _ in told])
    spoken = [(kind, role, parts) for kind, (role, parts) in zip(kinds, told, strict=True)]
    if tools:
        definitions = _as_json(Fields(source, line, {}, "the request"), definitions_text, tools)
        leading = next((at for at, (role, _) in enumerate(told) if role not in _SYSTEM_ROLES), len(told))
        spoken.insert(leading, (INSTRUCTION, "system", [definitions]))
    if not source.keeps_parts:
        return tuple(pool.intern(kind, "".join(parts), role) for kind, role, parts in spoken)
    return tuple(segment for kind, role, parts in spoken for segment in _part_segments(pool, kind, role, parts))


def _part_segments(pool: SegmentPool, kind: str, role: str, parts: Sequence[str]) -> Iterator[Segment]:
    """Parts with something in them; of a message without any, one empty segment."""
    texts = [part for part in parts if part] or [""]
    for at, text in enumerate(texts):
        between = text.isspace() and len(texts) > 1
        yield pool.intern(SEPARATOR if between else kind, text, None if at else role)


def _role_and_parts(source: TraceSource, line: int, number: int, message: Any) -> tuple[str, list[str]]:
    """The parts of a message, which joined are its text. A line end stands before each call that follows something."""
    if type(message) is not dict:
        raise source.error(line, f"message {number} is not an object")
    fields = Fields(source, line, message, f"message {number}")
    given = fields.text("role")
    role = _OLDER_ROLES.get(given or "", given)
    if role not in _ROLES:
        raise fields.error(f"has the role {brief(given)}", f"roles: {', '.join(_ROLES)}")
    content = message.get("content")
    parts = [_part(fields, part) for part in content] if type(content) is list else [fields.text("content") or ""]
    for call in calls_of(message):
        parts += ["\n"] * any(parts) + [_as_json(fields, call_text, call)]
    return role, parts


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
