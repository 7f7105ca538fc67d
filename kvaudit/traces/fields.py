"""The fields of one JSON object of a trace, each taken with its type checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from reprlib import Repr
from typing import Any

import orjson

from kvaudit.errors import TraceError
from kvaudit.records import LARGEST_TOKEN_ID
from kvaudit.traces.source import TraceSource

_LONGEST_SHOWN = 80

_hide: ContextVar[Callable[[str], str] | None] = ContextVar("hide", default=None)


class _Shortened(Repr):
    """Long strings lose their middle, after what is to be hidden in them."""

    def repr_str(self, value: str, level: int) -> str:
        hide = _hide.get()
        return super().repr_str(hide(value) if hide else value, level)


_shortened = _Shortened()
_shortened.maxstring = _LONGEST_SHOWN


@contextmanager
def hiding_values(hide: Callable[[str], str]) -> Iterator[None]:
    """What errors and reasons show of a trace's values goes through `hide` before it is cut: a part of a secret is not
    known for one.
    """
    token = _hide.set(hide)
    try:
        yield
    finally:
        _hide.reset(token)


def brief(value: Any) -> str:
    """A value as errors show it: cut at 80 characters, however deep it is."""
    hide = _hide.get()
    if hide is not None:
        return hide(_shortened.repr(value))[:_LONGEST_SHOWN]
    if type(value) is str and len(value) < _LONGEST_SHOWN:
        return repr(value)[:_LONGEST_SHOWN]
    return _shortened.repr(value)[:_LONGEST_SHOWN]


class Fields:
    """`values` is the object, `what` its name in errors. A field that is absent or null is None."""

    def __init__(self, source: TraceSource, line: int, values: dict[str, Any], what: str) -> None:
        self._source, self._line, self._values, self._what = source, line, values, what

    def error(self, what: str, hint: str | None = None) -> TraceError:
        return self._source.error(self._line, f"{self._what} {what}", hint)

    def refuse_others(self, known: Collection[str]) -> None:
        unknown = [name for name in self._values if name not in known]
        if unknown:
            raise self.error(f"has an unknown field {min(unknown)!r}", f"known: {', '.join(known)}")

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and type(value) is not str:
            raise self.error(f"has a {name!r} that is not a string")
        return value

    def name(self, name: str) -> str | None:
        """An identifier: a string that is not empty, or a whole number."""
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) is int:
            return str(value)
        if type(value) is not str or not value:
            raise self.error(f"has a {name!r} that is not a string with something in it")
        return value

    def count(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(f"has a {name!r} that is not a whole number from 1 on")
        return value

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(f"has a {name!r} that is not a number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise self.error(f"has a {name!r} that is not true or false")
        return bool(value)

    def list(self, name: str) -> list[Any]:
        value = self._values.get(name)
        if value is None:
            return []
        if type(value) is not list:
            raise self.error(f"has a {name!r} that is not a list")
        return value

    def object(self, name: str) -> str:
        """A JSON object as text; empty where it has no field."""
        value = self._values.get(name)
        if value is not None and type(value) is not dict:
            raise self.error(f"has a {name!r} that is not an object")
        try:
            return orjson.dumps(value).decode() if value else ""
        except TypeError as error:
            raise self.error(f"has a {name!r} that is nested too deep") from error

    def stop(self) -> tuple[str, ...]:
        """`stop`: one string or a list of strings, none of them empty."""
        value = self._values.get("stop")
        strings = [] if value is None else value if type(value) is list else [value]
        if not all(type(text) is str and text for text in strings):
            raise self.error("has a 'stop' that is not a list of strings with something in them")
        return tuple(strings)

    def token_ids(self) -> tuple[int, ...] | None:
        """`token_ids`: whole numbers from 0 on that fit into 32 bits."""
        if self._values.get("token_ids") is None:
            return None
        ids = self.list("token_ids")
        if not all(type(token) is int and 0 <= token <= LARGEST_TOKEN_ID for token in ids):
            raise self.error("has 'token_ids' that are not whole numbers from 0 on")
        return tuple(ids)
