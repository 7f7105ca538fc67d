"""Values of foreign logs taken by the shape that they should have; what has another shape is as if it were absent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson


def first_of(values: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that is given."""
    return next((values[name] for name in names if values.get(name) is not None), None)


def as_object(value: Any) -> dict[str, Any]:
    return value if type(value) is dict else {}


def as_list(value: Any) -> list[Any]:
    return value if type(value) is list else []


def as_objects(value: Any) -> Iterator[dict[str, Any]]:
    return (item for item in as_list(value) if type(item) is dict)


def parsed(value: Any) -> Any:
    """An object or a list that is written as JSON text; any other value as it is."""
    if type(value) is not str or not value.lstrip().startswith(("{", "[")):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def as_number(value: Any) -> Any:
    """A whole number that is written as text; any other value as it is."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 18:
        return int(value)
    return value
