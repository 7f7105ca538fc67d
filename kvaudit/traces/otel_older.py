"""Prompts as older instrumentation wrote them (OpenLLMetry): one attribute for each field of each message.

`gen_ai.prompt.N.role`, `.content` (text, or parts as JSON text), `.tool_call_id`, `.tool_calls.M.name` and
`.arguments`; tools as `llm.request.functions.N.name`, `.description` and `.parameters`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvaudit.errors import TraceError
from kvaudit.traces.shapes import parsed

_MESSAGE = re.compile(r"gen_ai\.prompt\.(\d{1,6})\.(role|content|tool_call_id)")
_CALL = re.compile(r"gen_ai\.prompt\.(\d{1,6})\.tool_calls\.(\d{1,6})\.(id|name|arguments)")
_TOOL = re.compile(r"llm\.request\.functions\.(\d{1,6})\.(name|description|parameters)")

Numbered = dict[int, dict[str, Any]]


def has_older_prompt(attributes: Mapping[str, Any]) -> bool:
    return "gen_ai.prompt.0.role" in attributes or "gen_ai.prompt.0.content" in attributes


def older_messages(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a span, as OpenAI writes them. Raises TraceError where one between others is missing."""
    messages: Numbered = {}
    calls: dict[int, Numbered] = {}
    for name, value in attributes.items():
        if found := _MESSAGE.fullmatch(name):
            messages.setdefault(int(found[1]), {})[found[2]] = _parts(value) if found[2] == "content" else value
        elif found := _CALL.fullmatch(name):
            calls.setdefault(int(found[1]), {}).setdefault(int(found[2]), {})[found[3]] = value
    for number, found_calls in calls.items():
        messages.setdefault(number, {})["tool_calls"] = [call for _, call in sorted(found_calls.items())]
    missing = next((number for number, at in enumerate(sorted(messages)) if number != at), None)
    if missing is not None:
        raise TraceError(f"has no 'gen_ai.prompt.{missing}', which stands before others that it has")
    return [{"role": "user", **message} for _, message in sorted(messages.items())]


def older_tools(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The definitions of tools of a span."""
    tools: Numbered = {}
    for name, value in attributes.items():
        if found := _TOOL.fullmatch(name):
            tools.setdefault(int(found[1]), {})[found[2]] = parsed(value) if found[2] == "parameters" else value
    return [tool for _, tool in sorted(tools.items())]


def _parts(content: Any) -> Any:
    """Parts of a content that are written as JSON text; a text that only looks like a list stays a text."""
    found = parsed(content)
    return found if type(found) is list and found and all(_is_part(part) for part in found) else content


def _is_part(part: Any) -> bool:
    return type(part) is dict and type(part.get("type")) is str
