"""Request bodies of the APIs that services speak (OpenAI's and Anthropic's) as what is replayed of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvaudit.records import QUERY, Segment
from kvaudit.traces.chats import chat_segments
from kvaudit.traces.fields import Fields
from kvaudit.traces.segments import SegmentPool
from kvaudit.traces.source import TraceSource
from kvaudit.traces.tools import calls_of, definitions_of

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"

_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    COMPLETIONS: ("max_tokens",),
    RESPONSES: ("max_output_tokens",),
    MESSAGES: ("max_tokens",),
}
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
_NOT_SHOWN = ("reasoning", "thinking", "redacted_thinking")
"""What a server takes back from earlier turns and does not put into the prompt."""


def body_segments(
    api: str, source: TraceSource, line: int, body: dict[str, Any], pool: SegmentPool, before: Sequence[Any] = ()
) -> tuple[Segment, ...]:
    """The segments of a request. `before`: messages that the server kept, which precede those of a Responses request.

    Raises TraceError for a body that is no such request, or holds what cannot be replayed.
    """
    fields = Fields(source, line, body, "the request")
    if api == COMPLETIONS:
        return (_completion_segment(fields, source, line, body, pool),)
    return chat_segments(source, line, body_messages(api, fields, body, before), pool, definitions_of(body))


def body_messages(api: str, fields: Fields, body: Mapping[str, Any], before: Sequence[Any] = ()) -> list[Any]:
    """The messages of a request in the form of chat completions, instructions first."""
    return fields.list("messages") if api == CHAT else conversation(api, body, before)


def body_limit(api: str, fields: Fields) -> int | None:
    """The most tokens that the answer may have; None where the request does not say."""
    return next((limit for name in _LIMITS[api] if (limit := fields.count(name)) is not None), None)


def body_stop(api: str, source: TraceSource, line: int, body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop_sequences" if api == MESSAGES else "stop")
    return Fields(source, line, {"stop": stop}, "the request").stop()


def conversation(api: str, body: Mapping[str, Any], before: Sequence[Any] = ()) -> list[Any]:
    """The messages of a Responses or Anthropic request in the form of chat completions, instructions first."""
    instructions = body.get("instructions" if api == RESPONSES else "system")
    system = [{"role": "system", "content": instructions}] if instructions else []
    return [*system, *before, *(responses_input(body) if api == RESPONSES else _anthropic_messages(body))]


def responses_input(body: Mapping[str, Any]) -> list[Any]:
    """What a Responses request adds to the conversation."""
    given = body.get("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return responses_items(given if isinstance(given, list) else [])


def responses_items(items: Sequence[Any]) -> list[Any]:
    """Items of the Responses API as chat messages; calls belong to the assistant's message before them."""
    messages: list[Any] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind in _CALLS:
            last = messages[-1] if messages and _is_assistant(messages[-1]) else None
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [item]})
            else:
                messages[-1] = {**last, "tool_calls": [*calls_of(last), item]}
        elif kind in _CALL_OUTPUTS:
            messages.append({"role": "tool", "content": item.get("output")})
        elif kind == "message":
            messages.append(item)
        elif kind not in _NOT_SHOWN:
            messages.append({"role": "user", "content": [item]})
    return messages


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _anthropic_messages(body: Mapping[str, Any]) -> Iterator[Any]:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from _anthropic_turn(message, content)
        else:
            yield message


def _anthropic_turn(message: dict[str, Any], blocks: Sequence[Any]) -> Iterator[Any]:
    """Text and calls stay one message; each result of a tool, which Anthropic sends as the user's, becomes its own."""
    parts: list[Any] = []
    calls: list[Any] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            if parts:
                yield {**message, "content": parts}
                parts = []
            yield {"role": "tool", "content": block.get("content")}
        elif kind == "tool_use":
            calls.append(block)
        elif kind == "document":
            parts.append(_document_as_text(block))
        elif kind not in _NOT_SHOWN:
            parts.append(block)
    if parts or calls or not blocks:
        yield {**message, "content": parts, "tool_calls": calls}


def _document_as_text(block: dict[str, Any]) -> Any:
    origin = block.get("source")
    if isinstance(origin, dict) and origin.get("type") == "text":
        return {"type": "text", "text": origin.get("data")}
    return block


def _completion_segment(
    fields: Fields, source: TraceSource, line: int, body: Mapping[str, Any], pool: SegmentPool
) -> Segment:
    prompt = body.get("prompt")
    if body.get("suffix"):
        raise fields.error("has a 'suffix', and a replay only goes on behind a prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return pool.intern(QUERY, prompt)
    if not isinstance(prompt, list) or not prompt:
        raise fields.error("has no 'prompt'")
    if not isinstance(prompt[0], int):
        raise fields.error("has several prompts", "send one prompt a request")
    return pool.intern(QUERY, "", None, Fields(source, line, {"token_ids": prompt}, "the prompt").token_ids())
