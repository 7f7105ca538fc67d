"""Which API a logged request was made for, told by its URL or by its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvaudit.traces.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES

LOG_FIELDS = frozenset({"call_type", "model_parameters", "litellm_call_id", "trajectory_format", "info", "run_type"})
"""Fields of logs that have messages among others, and are read by formats of their own."""

_PATHS = {"/chat/completions": CHAT, "/completions": COMPLETIONS, "/responses": RESPONSES, "/messages": MESSAGES}
_BLOCKS = ("tool_use", "tool_result", "thinking", "redacted_thinking")


def api_of_url(url: Any) -> str | None:
    """None for what is no call that these APIs answer with text."""
    path = url.partition("?")[0].rstrip("/") if type(url) is str else ""
    return next((api for end, api in _PATHS.items() if path.endswith(end)), None)


def api_of_body(body: Mapping[str, Any]) -> str | None:
    """None for a body that none of these APIs takes."""
    if "messages" in body:
        return MESSAGES if is_anthropic(body) else CHAT
    if "input" in body:
        return RESPONSES
    return COMPLETIONS if "prompt" in body else None


def is_anthropic(body: Mapping[str, Any]) -> bool:
    """Whether a body with messages is one of Anthropic's API, by what OpenAI's does not have."""
    model = body.get("model")
    if body.keys() & {"system", "anthropic_version", "stop_sequences"}:
        return True
    if type(model) is str and model.startswith("claude"):
        return True
    tools, messages = body.get("tools"), body.get("messages")
    if any(type(tool) is dict and "input_schema" in tool for tool in (tools if type(tools) is list else ())):
        return True
    return any(_has_blocks(message) for message in (messages if type(messages) is list else ()))


def is_embedding(body: Mapping[str, Any]) -> bool:
    """Whether a body with `input` asks for embeddings and not for an answer."""
    given, model = body.get("input"), body.get("model")
    if body.keys() & {"encoding_format", "dimensions"} or (type(model) is str and "embed" in model.lower()):
        return True
    return type(given) is list and bool(given) and all(type(item) in (str, int, list) for item in given)


def _has_blocks(message: Any) -> bool:
    content = message.get("content") if type(message) is dict else None
    blocks = content if type(content) is list else ()
    return any(type(block) is dict and block.get("type") in _BLOCKS for block in blocks)
