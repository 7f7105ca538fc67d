"""Tools in chats as plain text: definitions and calls are written as JSON, because what a model's own template makes of
them is not in the log.
"""

from __future__ import annotations

from typing import Any

import orjson

from kvaudit.errors import TraceError

CALL_FIELDS = ("tool_calls", "function_call")
DEFINITION_FIELDS = ("tools", "functions")


def definitions_of(body: dict[str, Any]) -> Any:
    """The tool definitions of a request; None where it has none."""
    return next((body[name] for name in DEFINITION_FIELDS if body.get(name)), None)


def definitions_text(definitions: Any) -> str:
    """Compact JSON, keys in the order in which they were sent. Raises TypeError for what is too deep for JSON."""
    return orjson.dumps(definitions).decode()


def calls_of(message: dict[str, Any]) -> list[Any]:
    """The tool calls of a chat message."""
    calls: Any = next((message[name] for name in CALL_FIELDS if message.get(name)), [])
    return calls if type(calls) is list else [calls]


def call_text(call: Any) -> str:
    """`{"name": ..., "arguments": ...}` on one line, from a call as OpenAI or Anthropic write it, without its id.

    Arguments that are sent as JSON text stay as they were written. Raises TypeError for what is too deep for JSON.
    """
    if type(call) is not dict:
        return _json(call)
    inner = next((call[name] for name in ("function", "custom") if type(call.get(name)) is dict), call)
    if type(inner.get("name")) is not str:
        return _json(call)
    arguments: Any = next((inner[name] for name in ("arguments", "input", "args") if name in inner), {})
    return f'{{"name":{_json(inner["name"])},"arguments":{_arguments(arguments)}}}'


def result_text(result: Any) -> str:
    """A tool's result as text. Raises TraceError for what is too deep for JSON."""
    if result is None or type(result) is str:
        return result or ""
    try:
        return _json(result)
    except TypeError as error:
        raise TraceError("has a tool's result that cannot be written as JSON") from error


def _arguments(arguments: Any) -> str:
    if type(arguments) is not str:
        return _json(arguments)
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return _json(arguments)
    if type(parsed) is not dict:
        return _json(arguments)
    return _json(parsed) if "\n" in arguments else arguments


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
