"""How a logged call ended, read from what a log keeps of the answer: failed, empty, how long."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"[A-Za-z_.]{1,40}|\d{3}")
"""Names of errors, which never look like keys."""
_FAILED_STATES = ("failed", "failure", "error", "errored", "cancelled", "canceled", "expired")
_FIRST_FAILURE = 300
_LENGTHS = ("completion_tokens", "output_tokens", "output", "completionTokens", "outputTokens")
_OTHER_CALLS = {
    "embed": "is an embedding request",
    "image": "is an image request",
    "audio": "is an audio request",
    "speech": "is an audio request",
    "transcri": "is an audio request",
    "moderation": "is a moderation request",
    "rerank": "is a rerank request",
}


def failure_of(response: Any = None, status: Any = None, error: Any = None) -> str | None:
    """Why a call counts as failed: an error, an HTTP status, or a body that says so although the status is 200.

    The words of an error are not kept, for they may hold keys or texts of a user; its code or type is.
    """
    if _is_failed_status(status):
        return f"failed (status {status})"
    if error:
        return f"failed ({_code(error)})"
    if type(response) is not dict:
        return None
    if _is_failed_status(response.get("status_code")):
        return f"failed (status {response['status_code']})"
    if response.get("error"):
        return f"failed ({_code(response['error'])})"
    if response.get("success") is False:
        return "failed (success is false)"
    state = response.get("status")
    if type(state) is str and state.lower() in _FAILED_STATES:
        return f"failed (status {state})"
    return "failed (an error)" if response.get("type") == "error" else None


def logged_failure(record: dict[str, Any]) -> str | None:
    """As `failure_of`, of a record that holds status, error and response beside the request."""
    return failure_of(record) or failure_of(record.get("response"), record.get("status"))


def other_call(name: Any) -> str | None:
    """What a call is that asks no language model for an answer, told by its type or the path of its URL."""
    if type(name) is not str:
        return None
    return next((what for word, what in _OTHER_CALLS.items() if word in name.lower()), None)


def answer_is_empty(response: Any) -> bool:
    """Whether a logged answer, as text or as an API returns it, has neither text nor calls of tools."""
    if response is None:
        return False
    if type(response) is str:
        return not response.strip()
    if type(response) is not dict:
        return type(response) is list and not response
    choices = response.get("choices")
    if type(choices) is list:
        return not any(map(_choice_says_something, choices))
    if response.get("tool_calls"):
        return False
    for name in ("output", "content"):
        if type(response.get(name)) in (list, str):
            return not response[name]
    return False


def logged_length(usage: Any) -> int | None:
    """Tokens of the answer: a number, or the usage that an API returns, alone or in a response."""
    if type(usage) is int:
        return usage if usage > 0 else None
    if type(usage) is not dict:
        return None
    if type(usage.get("usage")) is dict:
        usage = usage["usage"]
    return next((length for name in _LENGTHS if type(length := usage.get(name)) is int and length > 0), None)


def _choice_says_something(choice: Any) -> bool:
    if type(choice) is not dict:
        return False
    message = choice.get("message")
    told = message if type(message) is dict else {}
    return bool(choice.get("text") or any(told.get(name) for name in ("content", "tool_calls", "function_call")))


def _is_failed_status(status: Any) -> bool:
    if type(status) is str and status.isascii() and status.isdigit() and len(status) == 3:
        status = int(status)
    return type(status) is int and status >= _FIRST_FAILURE


def _code(error: Any) -> str:
    values = [error.get(name) for name in ("code", "type", "error_class")] if type(error) is dict else [error]
    return next((value for value in values if type(value) is str and _CODE.fullmatch(value)), "an error")
