"""Time stamps as logs write them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

_UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))
"""From which size on a number of 1973 or later counts nano-, micro- or milliseconds, and how many make a second."""


_NO_TIME = 10**20
"""More nanoseconds than any log counts."""


def seconds(value: Any) -> float | None:
    """Seconds since 1970 of a number, a text of digits, ISO 8601 (UTC where it names no zone) or a datetime.

    None for what is no time.
    """
    if type(value) is str:
        return _of_text(value.strip())
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if type(value) in (int, float) and abs(value) < _NO_TIME:
        return _of_number(float(value))
    return None


def _of_text(text: str) -> float | None:
    try:
        return _of_number(float(text))
    except ValueError:
        pass
    try:
        return seconds(datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        return None


def _of_number(number: float) -> float | None:
    if not math.isfinite(number):
        return None
    return number / next((unit for size, unit in _UNITS if abs(number) >= size), 1.0)
