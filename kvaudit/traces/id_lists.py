"""Prompts as lists of content ids, read against the prompt before: most of it stood there already.

A rolling window, a growing conversation, a shared beginning repeat nearly all of the list before them. Ids have one
width, so that what repeats is found by comparing bytes, and is neither parsed nor looked up again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import orjson

from kvaudit.records import Segment

LISTED = b'{"request":"'
"""How every line begins that is looked at here."""
_LIST = b',"segments":['
_HEAD = re.compile(re.escape(LISTED) + rb'[^"\\]*"' + re.escape(_LIST))
_WIDTH = len('"0123456789abcdef",')
_MISSES = 4
"""Ids looked up one by one, before the rest of a list is taken as new."""
_PAUSE = 15
"""Lists that are not compared after one that shared less than half of its ids with the list before."""
_REACH = 64 * _WIDTH
"""How far on, in the list before, an id is looked for: windows move by a few segments."""


@dataclass(frozen=True, slots=True)
class ListedPrompt:
    """The line's other `values`, its `segments`, and their ids as JSON, just as `orjson` writes them.

    `fresh` are those of its segments that the list before it need not have had, in their order.
    """

    values: dict[str, Any]
    segments: tuple[Segment, ...]
    json: bytes
    fresh: Sequence[Segment]


class IdLists:
    """Reads lines as kvaudit writes them; `by_id` are the segments that have been defined so far."""

    def __init__(self, by_id: Mapping[str, Segment]) -> None:
        self._by_id = by_id
        self._list = b""
        self._segments: tuple[Segment, ...] = ()
        self._pause = 0

    def read(self, line: bytes) -> ListedPrompt | None:
        """A request whose prompt is a list of known ids without white space; None for any other line.

        None, too, for some whose neighbours share little.
        """
        head = _HEAD.match(line)
        if head is None:
            return None
        if self._pause:
            self._pause -= 1
            return None
        begin, end = head.end(), line.find(b"]", head.end())
        ids = line[begin:end] + b","
        if end < 0 or len(ids) % _WIDTH:
            return None
        try:
            values = orjson.loads(line[: begin - len(_LIST)] + line[end + 1 :])
            segments, fresh = self._known(ids)
        except (ValueError, KeyError, TypeError):
            return None
        if "segments" in values:
            return None
        shares_little = bool(self._list) and 2 * len(fresh) > len(segments)
        self._list, self._segments, self._pause = ids, segments, _PAUSE * shares_little
        return ListedPrompt(values, segments, line[begin - 1 : end + 1], fresh)

    def _known(self, ids: bytes) -> tuple[tuple[Segment, ...], list[Segment]]:
        """All segments of a list, and those that were looked up. Raises an error where one is not known."""
        segments: list[Segment] = []
        fresh: list[Segment] = []
        at = before = misses = 0
        while at < len(ids):
            found = -1
            if misses < _MISSES:
                found = self._list.find(ids[at : at + _WIDTH], before, before + _REACH)
            if found >= 0 and not found % _WIDTH:
                length = self._common(ids, at, found)
                segments += self._segments[found // _WIDTH : (found + length) // _WIDTH]
                before, at = found + length, at + length
                continue
            misses += 1
            looked_up = self._one(ids[at : at + _WIDTH]) if misses < _MISSES else self._many(ids[at:])
            segments += looked_up
            fresh += looked_up
            at += _WIDTH * len(looked_up)
        return tuple(segments), fresh

    def _common(self, ids: bytes, at: int, found: int) -> int:
        """Bytes, in whole ids and at least one, that the list has from `at` and the list before it from `found`."""
        longest = min(len(ids) - at, len(self._list) - found)
        if self._list.startswith(ids[at : at + longest], found):
            return longest
        length, step = _WIDTH, _WIDTH
        while step:
            if length + step < longest and self._list.startswith(ids[at + length : at + length + step], found + length):
                length, step = length + step, 2 * step
            else:
                step = step // (2 * _WIDTH) * _WIDTH
        return length

    def _one(self, element: bytes) -> tuple[Segment, ...]:
        if element[:1] != b'"' or element[-2:] != b'",':
            raise KeyError("no id of one width")
        return (self._by_id[element[1:-2].decode()],)

    def _many(self, elements: bytes) -> tuple[Segment, ...]:
        """As many known ids as fit into these bytes have one width: there is neither white space nor an escape."""
        parts = orjson.loads(b"[%b]" % elements[:-1])
        found = itemgetter(*parts)(self._by_id)
        segments: tuple[Segment, ...] = found if len(parts) > 1 else (found,)
        if len(segments) * _WIDTH != len(elements):
            raise KeyError("ids of several widths")
        return segments
