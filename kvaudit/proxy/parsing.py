"""JSON as servers take it: strictly, and where that fails as Python's own library reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_SURROGATES = re.compile("[\ud800-\udfff]")
_LARGEST = 1 << 63


def parsed_object(data: bytes) -> tuple[dict[str, Any] | None, bool]:
    """(the object, whether it is proper JSON); None for anything else.

    What Python servers take beside JSON is made writable: a lone surrogate becomes U+FFFD, NaN null, a number beyond 64
    bits a float.
    """
    try:
        value, proper = orjson.loads(data), True
    except orjson.JSONDecodeError:
        value, proper = _lenient(data), False
    return (value, proper) if isinstance(value, dict) else (None, proper)


def text_of(data: bytes) -> str:
    """The text of JSON, also in UTF-16 or UTF-32, which Python servers take; U+FFFD for what is none."""
    return data.decode(json.detect_encoding(data), errors="replace")


def _lenient(data: bytes) -> Any:
    try:
        value = json.loads(data, parse_constant=lambda _: None, parse_int=_integer, object_pairs_hook=_pairs)
    except (ValueError, RecursionError):
        return None
    _replace_surrogates(value)
    return value


def _integer(digits: str) -> int | float:
    number = float(digits)
    return int(digits) if -_LARGEST < number < _LARGEST else number


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {_SURROGATES.sub("\ufffd", name): value for name, value in pairs}


def _replace_surrogates(root: Any) -> None:
    waiting = [root]
    while waiting:
        container = waiting.pop()
        if not isinstance(container, dict | list):
            continue
        for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(value, str):
                container[key] = _SURROGATES.sub("\ufffd", value)
            else:
                waiting.append(value)
