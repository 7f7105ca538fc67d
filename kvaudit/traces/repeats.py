"""When two requests of logs count as one, and what the second is called where they do not.

A request counts once if an earlier one has its id, its prompt, its time where both have one, and its session where
both have one. Ids that count records or exchanges (`line-3`, `r1-4`) begin anew in every file: over several files, such
requests count once only if both have the same time, finer than a second. Everything else is kept under an id of its
own: rather twice than lost.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator
from itertools import product

from kvaudit.records import Request

_NAMED_BY_PLACE = re.compile(
    r"(?P<file>.*:)?(?P<place>(?:(?:line|entry|row|message|payload)-\d+(?:-\d+)?|r\d+-\d+)(?:#\d+)?)", re.DOTALL
)
_ANY = object()


class Seen:
    """Requests that came before, by an id that may leave out the name of a file."""

    def __init__(self) -> None:
        self._first: dict[str, Request] = {}
        self._repeated: dict[str, set[Hashable]] = {}

    def holds(self, name: str, request: Request) -> bool:
        first = self._first.get(name)
        if first is None:
            return False
        known = self._repeated.setdefault(name, set(_remembered(first)))
        times = [_ANY] if request.timestamp is None else [request.timestamp, None]
        sessions = [_ANY] if request.session is None else [request.session, None]
        return not known.isdisjoint(product([_prompt(request)], times, sessions))

    def add(self, name: str, request: Request) -> None:
        if name not in self._first:
            self._first[name] = request
        else:
            self._repeated.setdefault(name, set(_remembered(self._first[name]))).update(_remembered(request))


def _remembered(request: Request) -> Iterator[Hashable]:
    return product([_prompt(request)], (request.timestamp, _ANY), (request.session, _ANY))


def _prompt(request: Request) -> tuple[str, ...]:
    return tuple(segment.content_id for segment in request.segments)


def is_place(request_id: str) -> bool:
    """Whether an id counts records or exchanges and does not name their file."""
    found = _NAMED_BY_PLACE.fullmatch(request_id)
    return found is not None and not found["file"]


def name_over_files(request: Request, sources: Collection[str] = ()) -> str | None:
    """The id by which a request may be one of another file; None where nothing tells that it is.

    `sources` are the names of files that an import may have put before it.
    """
    found = _NAMED_BY_PLACE.fullmatch(request.request_id)
    if found is not None:
        time = request.timestamp
        return None if time is None or float(time).is_integer() else found["place"]
    before, colon, name = request.request_id.partition(":")
    return name if colon and (before in sources or re.sub(r"-\d+$", "", before) in sources) else request.request_id


def distinct(name: str, taken: Collection[str], number: int = 2) -> tuple[str, int]:
    """The first of `name#2`, `name#3` and so on, from `number` on, that is not taken, and the number behind it."""
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}", number + 1
