"""Values that a border between segments cuts in two: each half alone may look like nothing."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate
from typing import NamedTuple

from kvaudit.redaction.detectors import Hit

REACH = 512
"""Characters on either side of a border in which values that it cuts are looked for."""
LONGEST_REACH = 1 << 14
"""How far that goes where no blank ends what stands there, as in tokens."""
_BEFORE_RUN = 64
"""Characters of what announces such a token."""
_RUN = re.compile(r"[\w.+/=-]*", re.ASCII)


class Edges(NamedTuple):
    """What is looked at of a text of `length` characters: all of it as `head` where `tail` is empty, else both ends."""

    head: str
    tail: str
    length: int


class Piece(NamedTuple):
    """A part of the text number `at`, from `start` on."""

    at: int
    start: int
    text: str


def edges(text: str) -> Edges:
    if len(text) <= 2 * REACH:
        return Edges(text, "", len(text))
    head = REACH + _length_of_run(text[REACH:LONGEST_REACH])
    before_tail = _length_of_run(text[-LONGEST_REACH:-REACH][::-1])
    tail = REACH + (before_tail + _BEFORE_RUN if before_tail else 0)
    if head + tail >= len(text):
        return Edges(text, "", len(text))
    return Edges(text[:head], text[-tail:], len(text))


def _length_of_run(text: str) -> int:
    run = _RUN.match(text)
    return run.end() if run else 0


def stretches(texts: Iterable[Edges]) -> Iterator[list[Piece]]:
    """Neighbouring pieces around the borders between texts that follow each other without anything in between."""
    stretch: list[Piece] = []
    for at, text in enumerate(texts):
        stretch.append(Piece(at, 0, text.head))
        if text.tail:
            if len(stretch) > 1:
                yield stretch
            stretch = [Piece(at, text.length - len(text.tail), text.tail)]
    if len(stretch) > 1:
        yield stretch


def stretch_digest(stretch: Sequence[Piece], names: Sequence[str]) -> bytes:
    """SHA-256 of where the pieces of a stretch begin, and of the names of their texts, which tell texts apart."""
    return sha256(repr([(names[piece.at], piece.start) for piece in stretch]).encode()).digest()


class Cut(NamedTuple):
    """A value that goes over a border. `parts`: the number of a text, and where the value is in it."""

    detector: str
    value: str
    parts: tuple[tuple[int, Hit], ...]


def cut_values(stretch: Sequence[Piece], find: Callable[[str], Iterable[Hit]]) -> list[Cut]:
    """What `find` finds in the pieces together that goes over a border between them."""
    ends = list(accumulate(len(piece.text) for piece in stretch))
    joined = "".join(piece.text for piece in stretch)
    cuts = []
    for hit in find(joined):
        first = bisect_right(ends, hit.start)
        if hit.end <= ends[first]:
            continue
        last = bisect_left(ends, hit.end)
        parts = tuple(_part(stretch[at], ends[at], hit) for at in range(first, last + 1) if stretch[at].text)
        cuts.append(Cut(hit.name, joined[hit.start : hit.end], parts))
    return cuts


def _part(piece: Piece, end: int, hit: Hit) -> tuple[int, Hit]:
    begin = end - len(piece.text)
    start, stop = max(hit.start, begin) - begin, min(hit.end, end) - begin
    return piece.at, Hit(piece.start + start, piece.start + stop, hit.name)
