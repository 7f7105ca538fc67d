"""What a request carries to prove who asks: never recorded, not even where a server repeats it in its answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

REMOVED = b"[secret removed]"

_SHORTEST = 12
"""Bytes. Shorter values (`EMPTY`, `dummy`) are placeholders, and would be found in plain text."""

_HEADERS = re.compile(rb"auth|key|token|secret|cookie|password|credential")
_PARAMETERS = re.compile(r"auth|key|token|secret|sig|password|credential|code", re.IGNORECASE)
_WORDS = re.compile(rb"[^\s;,=\"]+=*")
"""The parts of `Bearer KEY`, `name=value; name=value` and `Digest name="value"`."""


class Secrets:
    """The credentials of one request."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], query: bytes) -> None:
        found = {value for value in (*_in_headers(headers), *_in_query(query)) if len(value) >= _SHORTEST}
        self._values = sorted(found, key=len, reverse=True)

    def are_in(self, data: bytes) -> bool:
        return any(value in data for value in self._values)

    def removed(self, data: bytes) -> bytes:
        for value in self._values:
            data = data.replace(value, REMOVED)
        return data


def _in_headers(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    for name, value in headers:
        if _HEADERS.search(name.lower()):
            yield value
            yield from _WORDS.findall(value)


def _in_query(query: bytes) -> Iterator[bytes]:
    for part in query.split(b"&"):
        name, _, value = part.partition(b"=")
        if _PARAMETERS.search(name.decode("latin-1")):
            yield value
            yield unquote_to_bytes(value)
