"""Secrets taken out of what servers say: out of the texts in it once it is parsed, never out of its raw bytes."""

from __future__ import annotations

from collections.abc import Iterable

from kvaudit.proxy.secrets import written

SECRET = "[secret removed]"
_SHORTEST, _SHORTEST_IN_ERRORS = 8, 4


def sought(secrets: Iterable[str], *, in_errors: bool = False) -> tuple[str, ...]:
    """Those that may be looked for in answers, the longest first.

    What is given where no key is asked for (`EMPTY`, `token`, `x`, `1`) is no secret, and stands in ordinary words. An
    error, in which a word too many costs nothing, is searched for shorter ones.
    """
    least = _SHORTEST_IN_ERRORS if in_errors else _SHORTEST
    return tuple(
        sorted({secret for secret in secrets if len(secret) >= least}, key=lambda secret: (-len(secret), secret))
    )


def without(text: str, secrets: Iterable[str]) -> str:
    """The text without secrets, however they are escaped there (JSON in a string, percent signs)."""
    for secret in secrets:
        text = text.replace(secret, SECRET)
        if "\\" in text or "%" in text:
            text = written(secret).sub(SECRET, text)
    return text
