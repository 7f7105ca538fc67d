"""What the answer to a reset says: whether it was done, and where it was not, whether waiting helps.

Not done: a status from 300 on, a web page, JSON whose object (or one just below it) has a claim that is false
(`success`, `is_ok`, `reset`), a state that names a failure (`status`, `result`) or an error that is something, and a
text that begins with the name of a failure and says no more, or goes on behind a colon. All else counts as done:
nothing rests on that, since the probe looks whether the cache is empty.

Busy, and waited for: the statuses of that, those of the preset, a body that says that something is in use, and a claim
that is false with nothing beside it, as vLLM answers while it holds blocks. All else ends the audit at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvaudit.engines.server.jsons import value_in
from kvaudit.engines.server.saying import page_in

_BUSY = frozenset({409, 423, 425, 429, 503})
_BUSY_WORDS = re.compile(r"(?i)\b(?:busy|running|pending|queued|in[ _-]progress|in[ _-]use|active)\b")
_FAILURE = re.compile(
    r"(?i)\W*(?:err(?:or)?|exception|fail(?:ed|ure)?|skip(?:ped)?|busy|pending|queued|in[ _-]progress|rejected|refused"
    r"|(?:access |permission )?denied|aborted|disabled|forbidden|unauthorized|unavailable|time(?:d[ _-]?)?out"
    r"|not[ _-][a-z]+|unsuccessful|nok|ko|no|false)\s*(?:[.:,;!(].*)?",
    re.DOTALL,
)
_CLAIM = re.compile(r"(?i)(?:is_?)?(?:success(?:ful)?|succeeded|ok|acknowledged|(done|reset|cleared|flushed|emptied))")
"""The group: those of which 0 is a count, as each claim is one further below."""
_STATES = frozenset({"status", "state", "result", "outcome", "code", "status_code"})
_ERRORS = frozenset({"error", "errors", "exception", "busy"})
_NOTHING = frozenset({"", "0", "false", "no", "no error", "none", "null", "ok", "success"})


def refused(status: int, text: str) -> str | None:
    """Why a reset did not happen; None where it did."""
    page = page_in(text)
    shown = f"{page} came" if page else text.strip()
    said = f"status {status}: {shown}" if shown else f"status {status}"
    return said if status >= 300 or page or _denies(text) else None


def is_busy(status: int, text: str, busy: Collection[int] = ()) -> bool:
    """Whether a reset that was refused may be granted later. `busy`: further statuses of a server that is in use."""
    if status in _BUSY or status in busy:
        return True
    if 300 <= status < 400 or page_in(text) is not None:
        return False
    return bool(_BUSY_WORDS.search(text)) or (status < 300 and _is_bare_claim(value_in(text)))


def _denies(text: str) -> bool:
    value = value_in(text)
    if not isinstance(value, dict | list):
        return value is False or _says_failure(value if isinstance(value, str) else text)
    return any(
        _is_no(name.lower(), told, on_top=part is value) for part in _objects(value) for name, told in part.items()
    )


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """An answer's object and those just below it: one a worker, for instance."""
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        yield from (below for below in (part if isinstance(part, list) else [part]) if isinstance(below, dict))


def _is_no(name: str, told: object, *, on_top: bool) -> bool:
    if claim := _CLAIM.fullmatch(name):
        may_count = claim[1] is not None or not on_top
        return _says_failure(told) or (_is_false(told) and not (may_count and type(told) is int))
    if name in _STATES:
        number = str(told).strip()
        return told is False or _says_failure(told) or (number.isdecimal() and _is_failed(name, int(number)))
    return name in _ERRORS and not _is_nothing(told)


def _is_failed(name: str, number: int) -> bool:
    """Codes are 0 or HTTP's where all went well; a status below those may mean anything."""
    return not (number == 0 or 200 <= number < 300) if name.endswith("code") else number >= 400


def _says_failure(told: object) -> bool:
    return isinstance(told, str) and _FAILURE.fullmatch(told) is not None


def _is_false(told: object) -> bool:
    return told.strip().lower() in ("false", "no", "0") if isinstance(told, str) else told in (False, 0)


def _is_nothing(told: object) -> bool:
    if isinstance(told, dict | list):
        return all(map(_is_nothing, told.values() if isinstance(told, dict) else told))
    return told.strip().lower() in _NOTHING if isinstance(told, str) else not told


def _is_bare_claim(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and any(_CLAIM.fullmatch(name) for name in value)
        and all(map(_is_false, value.values()))
    )
