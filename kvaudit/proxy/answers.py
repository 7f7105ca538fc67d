"""Answers put together: from the events of a stream, or from one whole body.

Servers differ, so nothing here trusts a field to be there or of its type: what is missing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

UNSAYABLE = "(nested too deep to be recorded)"


@dataclass(slots=True)
class ToolCall:
    """`arguments` is the JSON text as the model wrote it, in pieces."""

    index: int | None
    call_id: str
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def is_before(self, name: object) -> bool:
        """Whether a nameless or named piece without index and id begins another call, because this one is whole."""
        return bool(name and self.name) and (name != self.name or is_json("".join(self.arguments)))

    def as_json(self) -> dict[str, object]:
        return {"id": self.call_id or None, "name": self.name, "arguments": "".join(self.arguments)}


@dataclass(slots=True)
class Choice:
    """One of the answers to a request, in pieces."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None

    def call(self, index: object, call_id: object, name: object) -> ToolCall:
        """The call that a piece belongs to, which may lack its index, its id or both.

        A new one where the index is new, or where another id comes with a name: some servers number every call 0.
        """
        given = call_id if isinstance(call_id, str) else ""
        number = index if isinstance(index, int) else None
        if number is not None:
            known = next((call for call in reversed(self.tool_calls) if call.index == number), None)
        elif given:
            known = next((call for call in self.tool_calls if call.call_id == given), None)
        else:
            known = self.tool_calls[-1] if self.tool_calls and not self.tool_calls[-1].is_before(name) else None
        if known is None or (given and known.call_id not in ("", given) and name):
            known = ToolCall(number, given)
            self.tool_calls.append(known)
        known.call_id = known.call_id or given
        return known

    def as_json(self) -> dict[str, object]:
        pieces = {"reasoning": "".join(self.reasoning), "refusal": "".join(self.refusal)}
        return {
            "text": "".join(self.text),
            **{name: text for name, text in pieces.items() if text},
            "tool_calls": [call.as_json() for call in self.tool_calls],
            "finish_reason": self.finish_reason,
        }


class Answer:
    """What a server answered. `finished`: the stream has told its end. `error`: what the body says went wrong."""

    def __init__(self) -> None:
        self.choices: dict[int, Choice] = {}
        self.usage: dict[str, Any] = {}
        self.response_id: str | None = None
        self.model: str | None = None
        self.error: str | None = None
        self.finished = False

    def add_event(self, event: Mapping[str, Any]) -> bool:
        """Takes one event of a stream; whether it brought content (text, reasoning, a call of a tool)."""
        raise NotImplementedError

    def set_whole(self, body: Mapping[str, Any]) -> None:
        """Takes the body of an answer that was not streamed."""
        raise NotImplementedError

    def counts(self) -> dict[str, int | None]:
        """Tokens: `prompt_tokens` with cached ones among them, `completion_tokens`, `cached_tokens`."""
        usage = self.usage
        details = _object(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
        cached = _count(details.get("cached_tokens"))
        return {
            "prompt_tokens": _first_count(usage, "prompt_tokens", "input_tokens"),
            "completion_tokens": _first_count(usage, "completion_tokens", "output_tokens"),
            "cached_tokens": _count(usage.get("prompt_cache_hit_tokens")) if cached is None else cached,
        }

    def as_json(self) -> dict[str, object]:
        return {
            "id": self.response_id,
            "model": self.model,
            "choices": [choice.as_json() for _, choice in sorted(self.choices.items())],
            "usage": self.usage or None,
        }

    def choice(self, index: object = 0) -> Choice:
        return self.choices.setdefault(index if isinstance(index, int) else 0, Choice())

    def _take_common(self, body: Mapping[str, Any]) -> None:
        self.response_id = self.response_id or _text(body.get("id")) or None
        self.model = self.model or _text(body.get("model")) or None
        self.usage |= {name: value for name, value in _object(body.get("usage")).items() if value is not None}
        self.error = self.error or error_in(body)

    def _finish(self, choice: Choice, reason: object) -> None:
        if isinstance(reason, str) and reason:
            choice.finish_reason = reason
            self.finished = True


class ChatAnswer(Answer):
    """OpenAI chat completions."""

    def add_event(self, event: Mapping[str, Any]) -> bool:
        self._take_common(event)
        content = False
        for part in _objects(event.get("choices")):
            choice = self.choice(part.get("index"))
            content |= _merge_message(choice, _object(part.get("delta") or part.get("message")))
            self._finish(choice, part.get("finish_reason"))
        return content

    def set_whole(self, body: Mapping[str, Any]) -> None:
        self.add_event(body)


class CompletionAnswer(Answer):
    """OpenAI completions: text without messages."""

    def add_event(self, event: Mapping[str, Any]) -> bool:
        self._take_common(event)
        content = False
        for part in _objects(event.get("choices")):
            choice = self.choice(part.get("index"))
            content |= _append(choice.text, part.get("text"))
            self._finish(choice, part.get("finish_reason"))
        return content

    def set_whole(self, body: Mapping[str, Any]) -> None:
        self.add_event(body)


class ResponsesAnswer(Answer):
    """OpenAI Responses: events that name what they bring; the last one holds the whole response."""

    def add_event(self, event: Mapping[str, Any]) -> bool:
        kind, choice = _text(event.get("type")), self.choice()
        if kind == "response.output_text.delta":
            return _append(choice.text, event.get("delta"))
        if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
            return _append(choice.reasoning, event.get("delta"))
        if kind == "response.refusal.delta":
            return _append(choice.refusal, event.get("delta"))
        if kind == "response.function_call_arguments.delta":
            call = choice.call(event.get("output_index"), None, None)
            return _append(call.arguments, event.get("delta"))
        if kind == "response.output_item.added":
            return self._open_item(choice, event)
        if kind == "error" or event.get("error"):
            self.error = self.error or error_in(event)
        elif response := _object(event.get("response")):
            self._take_response(response)
            self.finished |= kind in ("response.completed", "response.incomplete", "response.failed")
        return False

    def set_whole(self, body: Mapping[str, Any]) -> None:
        self._take_response(body)

    def _open_item(self, choice: Choice, event: Mapping[str, Any]) -> bool:
        item = _object(event.get("item"))
        if item.get("type") != "function_call":
            return False
        call = choice.call(event.get("output_index"), item.get("call_id"), item.get("name"))
        call.name = _text(item.get("name"))
        return True

    def _take_response(self, response: Mapping[str, Any]) -> None:
        self._take_common(response)
        items = _objects(response.get("output"))
        if items:
            self.choices = {0: Choice()}
        choice = self.choice()
        for item in items:
            self._take_item(choice, item)
        status = _text(response.get("status"))
        reason = _text(_object(response.get("incomplete_details")).get("reason"))
        choice.finish_reason = reason or (None if status in ("in_progress", "queued") else status) or None

    def _take_item(self, choice: Choice, item: Mapping[str, Any]) -> None:
        kind = item.get("type")
        if kind == "message":
            for part in _objects(item.get("content")):
                _append(choice.text, part.get("text"))
                _append(choice.refusal, part.get("refusal"))
        elif kind == "reasoning":
            for part in [*_objects(item.get("summary")), *_objects(item.get("content"))]:
                _append(choice.reasoning, part.get("text"))
        elif kind == "function_call":
            call = ToolCall(None, _text(item.get("call_id")), _text(item.get("name")))
            _append(call.arguments, item.get("arguments"))
            choice.tool_calls.append(call)


class MessagesAnswer(Answer):
    """Anthropic Messages."""

    def add_event(self, event: Mapping[str, Any]) -> bool:
        kind, choice = event.get("type"), self.choice()
        if kind == "message_start":
            self._take_common(_object(event.get("message")))
        elif kind == "content_block_start":
            return _merge_block(choice, event.get("index"), _object(event.get("content_block")))
        elif kind == "content_block_delta":
            return _merge_block(choice, event.get("index"), _object(event.get("delta")))
        elif kind == "message_delta":
            self._take_common({"usage": event.get("usage")})
            choice.finish_reason = _text(_object(event.get("delta")).get("stop_reason")) or choice.finish_reason
        elif kind == "message_stop":
            self.finished = True
        else:
            self.error = self.error or error_in(event)
        return False

    def set_whole(self, body: Mapping[str, Any]) -> None:
        self._take_common(body)
        for index, block in enumerate(_objects(body.get("content"))):
            _merge_block(self.choice(), index, block)
        self._finish(self.choice(), body.get("stop_reason"))

    def counts(self) -> dict[str, int | None]:
        """Here the server's `input_tokens` are those that were neither read from the cache nor written to it."""
        read = _count(self.usage.get("cache_read_input_tokens"))
        written = _count(self.usage.get("cache_creation_input_tokens"))
        fresh = _count(self.usage.get("input_tokens"))
        return {
            "prompt_tokens": None if fresh is None else fresh + (read or 0) + (written or 0),
            "completion_tokens": _count(self.usage.get("output_tokens")),
            "cached_tokens": read,
            "cache_written_tokens": written,
        }


def error_in(body: Mapping[str, Any]) -> str | None:
    """What a body says went wrong, whatever the status of its answer; None where it says nothing of the kind."""
    error = body.get("error")
    failed = body.get("success") is False or "error" in (body.get("object"), body.get("type"))
    if not error and not failed:
        return None
    for told in (_object(error).get("message"), error, body.get("message"), body.get("detail")):
        if isinstance(told, str) and told:
            return told
    return _json(error or dict(body))


def is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _merge_message(choice: Choice, message: Mapping[str, Any]) -> bool:
    content = _append(choice.text, message.get("content"))
    content |= _append(choice.reasoning, message.get("reasoning_content") or message.get("reasoning"))
    content |= _append(choice.refusal, message.get("refusal"))
    pieces = _objects(message.get("tool_calls"))
    if function := _object(message.get("function_call")):
        pieces.append({"index": 0, "function": function})
    for piece in pieces:
        function = _object(piece.get("function"))
        name = _text(function.get("name"))
        call = choice.call(piece.get("index"), piece.get("id"), name)
        call.name += name if name != call.name else ""
        _append_arguments(call, function.get("arguments"))
    return content or bool(pieces)


def _merge_block(choice: Choice, index: object, block: Mapping[str, Any]) -> bool:
    """A content block of Anthropic's, or a delta of one; both name their fields alike."""
    content = _append(choice.text, block.get("text"))
    content |= _append(choice.reasoning, block.get("thinking"))
    if block.get("type") == "tool_use":
        call = choice.call(index, block.get("id"), block.get("name"))
        call.name = _text(block.get("name"))
        _append_arguments(call, block.get("input") or None)
        content = True
    elif partial := _text(block.get("partial_json")):
        choice.call(index, None, None).arguments.append(partial)
        content = True
    return content


def _json(value: object) -> str:
    """Compact JSON; what the decoder takes can be nested deeper than the encoder goes."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return UNSAYABLE


def _append_arguments(call: ToolCall, arguments: object) -> None:
    if isinstance(arguments, dict):
        arguments = _json(arguments)
    _append(call.arguments, arguments)


def _append(pieces: list[str], text: object) -> bool:
    """Adds text, or the texts of content parts; whether there was any."""
    if isinstance(text, list):
        text = "".join(_text(_object(part).get("text")) for part in text)
    if not isinstance(text, str) or not text:
        return False
    pieces.append(text)
    return True


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _count(value: object) -> int | None:
    return value if type(value) is int else None


def _first_count(usage: Mapping[str, Any], *names: str) -> int | None:
    return next((count for name in names if (count := _count(usage.get(name))) is not None), None)
