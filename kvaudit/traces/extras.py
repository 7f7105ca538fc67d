"""Fields of a request's body that only its server understands, kept as they were sent (AKV's `drop_message`,
`cache_salt`, arguments of chat templates), so that a replay against a server asks the same.

Tools of a logged request are text of its prompt (`tools.py`) and are not kept here: a server would put them in twice. A
native trace may carry `tools` and `tool_choice` in a request's `extra`; they are sent with its messages as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.traces.bodies import CHAT, COMPLETIONS

_PROMPT = ("messages", "prompt", "suffix", "tools", "functions", "tool_choice", "function_call", "parallel_tool_calls")
"""What a trace has as segments, or cannot have."""
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "best_of",
    "use_beam_search",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""What a trace has in fields of its own, or a greedy replay does without."""
_ASIDE = (
    "model",
    "stream",
    "stream_options",
    "echo",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "request_id",
)
"""What changes no answer: how it is sent, for whom, and what is told beside it."""
_KNOWN = frozenset({*_PROMPT, *_SAMPLING, *_ASIDE})
_TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"})
"""What a native trace may carry all the same."""


def not_extra(names: Iterable[str]) -> tuple[str, ...]:
    """Those of a native trace's `extra` that are none: the trace says them elsewhere, or a replay decides them."""
    return tuple(sorted(_KNOWN.intersection(names) - _TOOLS))


def extra_fields(api: str, body: Mapping[str, Any]) -> str:
    """A JSON object as text, empty where there are none. Raises TraceError for what is too deep for JSON."""
    if api not in (CHAT, COMPLETIONS):
        return ""
    kept = {name: value for name, value in body.items() if name not in _KNOWN and value is not None}
    try:
        return orjson.dumps(kept).decode() if kept else ""
    except TypeError as error:
        raise TraceError(f"has fields that cannot be written as JSON: {', '.join(kept)}") from error
