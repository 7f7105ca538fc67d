"""What the answer to a reset says: whether it was done, and where it was not, whether waiting helps."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from kvaudit.engines.server.jsons import value_in
from kvaudit.engines.server.saying import page_in

Waiting = Literal["helps", "may help", "is vain"]

_BUSY = frozenset({408, 409, 423, 425, 429, 502, 503, 504})
_NOT_OFFERED = frozenset({401, 403, 404, 405, 501})
_BUSY_WORDS = re.compile(
    r"(?i)\b(?:busy|pending|running|waiting|in use|in[- ]?progress|in[- ]?flight|ongoing|unfinished|not idle|queued?"
    r"|locked|draining|loading|starting|warming|try again|retry|later)\b"
)
_SAID_NO = re.compile(
    r"(?i)(?<!no )(?<!\b0 )(?<!without )\b(?:errors?|fail(?:ed|ure|ures|s)?|busy|denied|forbidden|unauthorized|refused"
    r"|rejected|unable|cannot|can't|could not|couldn't|(?:was|were|is|are) not|not (?:flushed|cleared|reset|emptied"
    r"|found|allowed|supported|implemented|permitted|available|idle|ready|possible|done|enabled|performed|authorized))\b"
)
_CLAIMS = frozenset({"success", "succeeded", "successful", "ok", "done", "flushed", "cleared", "reset"})
_PLAIN_CLAIMS = frozenset({"success", "succeeded", "successful", "ok"})
"""Those of which 0 is no count."""
_FAULTS = frozenset({"error", "errors", "failed", "failure", "failures", "busy", "exception"})
_STATES = frozenset({"status", "state", "result", "outcome", "code", "status_code"})
_REASONS = ("message", "detail", "reason", "msg", "error", "errors", "exception")
_NO = frozenset({"", "0", "false", "no", "none", "null", "off"})
_FAILED = re.compile(
    r"(?i)\s*(?:(?:err(?:or)?|fail(?:ed|ure)?|busy|rejected|refused|denied|unavailable|aborted|timed?[ _-]?out)(?!\w)"
    r"|(?:false|no|ko|nok)\s*$)"
)
_FIRST_FAILED_CODE = 400


def refused(status: int, text: str) -> str | None:
    """Why a reset did not happen, whatever the status says; None where it did."""
    page = page_in(text)
    shown = f"{page} came" if page else text.strip()
    said = f"status {status}: {shown}" if shown else f"status {status}"
    if status >= 300 or page:
        return said
    value = value_in(text)
    if value is None or isinstance(value, str):
        return said if _SAID_NO.search(_first_line(value or text)) else None
    return said if value is False or any(map(_is_no, _objects(value))) else None


def waiting(status: int, text: str, busy: Collection[int] = ()) -> Waiting:
    """Whether a reset that was refused may be granted later. `busy`: further statuses of a server that is in use."""
    if status in _BUSY:
        return "helps"
    if status in _NOT_OFFERED or 300 <= status < 400 or page_in(text) is not None:
        return "is vain"
    if status in busy or _BUSY_WORDS.search(text):
        return "helps"
    if status == 500:
        return "may help"
    return "helps" if status < 300 and not _gives_a_reason(text) else "is vain"


def _is_no(told: Mapping[str, Any]) -> bool:
    """Whether an object of an answer, by itself, says that something failed."""
    fields = {name.lower(): value for name, value in told.items()}
    states = [fields[name] for name in _STATES & fields.keys()]
    return (
        any(_is_denied(name, fields[name]) for name in _CLAIMS & fields.keys())
        or any(not _is_nothing(fields[name]) for name in _FAULTS & fields.keys())
        or any(state is False or (isinstance(state, str) and _FAILED.match(state)) for state in states)
        or any(type(state) is int and state >= _FIRST_FAILED_CODE for state in states)
        or (not _is_granted(fields) and any(map(_SAID_NO.search, _reasons(fields))))
    )


def _is_denied(name: str, value: object) -> bool:
    if name in _PLAIN_CLAIMS:
        return _is_nothing(value) or (isinstance(value, str) and _FAILED.match(value) is not None)
    return value is False or (isinstance(value, str) and value.strip().lower() in _NO)


def _is_granted(fields: Mapping[str, Any]) -> bool:
    return any(name in fields and not _is_denied(name, fields[name]) for name in _PLAIN_CLAIMS)


def _is_nothing(value: object) -> bool:
    return value.strip().lower() in _NO if isinstance(value, str) else not value


def _reasons(fields: Mapping[str, Any]) -> Iterator[str]:
    return (_first_line(fields[name]) for name in _REASONS if isinstance(fields.get(name), str))


def _gives_a_reason(text: str) -> bool:
    value = value_in(text)
    if not isinstance(value, dict | list):
        return len(text.split()) > 1
    return any(any(fields.get(name) for name in _REASONS) for fields in _objects(value))


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """Every object in an answer, however deep: one a worker, for instance."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
