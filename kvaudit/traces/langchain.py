"""Messages as LangChain serialises them, which traces of its applications hold, as chat messages."""

from __future__ import annotations

from typing import Any

from kvaudit.traces.shapes import as_list, as_object, first_of

_ROLES = {"human": "user", "ai": "assistant", "function": "tool"}
_NOT_SHOWN = ("tool_use", "thinking", "reasoning")
"""Parts of an answer that stand in `tool_calls` too, or that are not in the next prompt."""


def chat_message(message: Any) -> Any:
    """`{"role", "content", "tool_calls"}` of a message in any of its serialised forms; others come back as they are."""
    if type(message) is not dict or "role" in message:
        return message
    kind, values = _kind_and_values(message)
    if type(kind) is not str:
        return message
    name = kind.lower().removesuffix("chunk").removesuffix("message")
    content = values.get("content")
    if type(content) is list:
        content = [part for part in content if as_object(part).get("type") not in _NOT_SHOWN]
    calls = first_of(values, "tool_calls") or as_object(values.get("additional_kwargs")).get("tool_calls")
    return {"role": values.get("role") or _ROLES.get(name, name), "content": content, "tool_calls": as_list(calls)}


def _kind_and_values(message: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if type(message.get("kwargs")) is dict:
        path = as_list(message.get("id"))
        return (path[-1] if path else None), message["kwargs"]
    return message.get("type"), message["data"] if type(message.get("data")) is dict else message
