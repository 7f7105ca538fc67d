"""What finds secrets in a text, and what of it is still to be replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvaudit.redaction.placeholders import placeholders_of

Span = tuple[int, int]
"""Half-open, in characters."""

_ESCAPES = re.compile(r"\\+(?:[nrtbf]|u[0-9a-fA-F]{4})?")


class Searched(NamedTuple):
    """A text as it is, and as the built-in detectors look at it: JSON escapes (`\\n`, `\\"`) are blanks, so that what
    stands beside one in a quoted tool result begins and ends where it should. Both are equally long.
    """

    raw: str
    plain: str


Find = Callable[[Searched], Iterable[Span]]
"""Yields spans of a text, in any order, overlapping or not."""


@dataclass(frozen=True, slots=True)
class Detector:
    name: str
    find: Find


class Hit(NamedTuple):
    """A value that the detector `name` found at [start, end)."""

    start: int
    end: int
    name: str


def find(detectors: Sequence[Detector], text: str, known: Iterable[Hit] = ()) -> list[Hit]:
    """What is `known` and what the detectors find outside of placeholders, in the order of the text, without overlaps.

    Of values that overlap one is made, under the name of the longest.
    """
    searched = searched_text(text)
    found = [Hit(start, end, detector.name) for detector in detectors for start, end in detector.find(searched)]
    known = tuple(known)
    found += known
    if not found:
        return []
    names = tuple(sorted({hit.name for hit in known} | {detector.name for detector in detectors}))
    kept = [match.span() for match in placeholders_of(names).finditer(text)] if "[" in text else []
    return _merged([piece for hit in found for piece in _outside(hit, kept, text)])


def find_named(detectors: Sequence[Detector], name: str, text: str) -> list[Hit]:
    """What the detectors find in the text of a field because of the field's name: `password: ...`."""
    before = f"{name}: "
    length = len(before)
    return [
        Hit(max(hit.start - length, 0), hit.end - length, hit.name)
        for hit in find(detectors, before + text)
        if hit.end > length
    ]


def searched_text(text: str) -> Searched:
    return Searched(text, _ESCAPES.sub(_blanks, text) if "\\" in text else text)


def _blanks(match: re.Match[str]) -> str:
    return " " * len(match[0])


def _outside(hit: Hit, kept: Sequence[Span], text: str) -> Iterator[Hit]:
    """The pieces of a hit that no placeholder covers. What has neither letter nor digit tells nothing and stays."""
    start = hit.start
    for kept_start, kept_end in kept:
        if kept_end <= start or kept_start >= hit.end:
            continue
        if start < kept_start and _tells(text, start, kept_start):
            yield Hit(start, kept_start, hit.name)
        start = kept_end
    if start < hit.end and _tells(text, start, hit.end):
        yield Hit(start, hit.end, hit.name)


def _tells(text: str, start: int, end: int) -> bool:
    return any(character.isalnum() for character in text[start:end])


def _merged(hits: list[Hit]) -> list[Hit]:
    merged: list[Hit] = []
    longest = 0
    for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end)):
        if merged and hit.start < merged[-1].end:
            last = merged[-1]
            name = hit.name if hit.end - hit.start > longest else last.name
            longest = max(longest, hit.end - hit.start)
            merged[-1] = Hit(last.start, max(last.end, hit.end), name)
        else:
            merged.append(hit)
            longest = hit.end - hit.start
    return merged
