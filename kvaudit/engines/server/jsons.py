"""JSON as servers send it, which may be none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson


def value_in(text: str | bytes) -> Any:
    """None where it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def parsed(data: bytes) -> Any:
    """Also where letters are cut in halves, as byte-level tokens cut them. Raises orjson.JSONDecodeError."""
    text = data.decode(errors="replace")
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        if "surrogate" not in str(error):
            raise
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise orjson.JSONDecodeError(error.msg, error.doc, error.pos) from error
    return orjson.loads(json.dumps(whole, ensure_ascii=False).encode(errors="replace"))


def object_in(text: str | bytes) -> Mapping[str, Any]:
    """Empty where it is no JSON object."""
    return as_object(value_in(text))


def as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed, however deep it is, in place; names of fields stay."""
    root = [value]
    waiting: list[Any] = [root]
    while waiting:
        container = waiting.pop()
        for name, part in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(part, str):
                container[name] = change(part)
            elif isinstance(part, dict | list):
                waiting.append(part)
    return root[0]
