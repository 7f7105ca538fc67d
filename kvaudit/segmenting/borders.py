"""Where the characters of a recurring text begin and end, the same in all of its places.

Tokens alone do not say: a word's token holds the space before it, or does not, so that a document that follows a space
here and a line end there has another first token, although it begins with the same word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LONGEST_WORD = 32
"""Characters by which a border moves at most."""

_SPACE = re.compile(r"\s+")


@dataclass(slots=True, eq=False)
class Place:
    """Where a recurring text stands in text number `where`: [start, end) of its characters, or of its tokens where it
    has no characters. Between `before` and `after` it may grow.
    """

    where: int
    text: str | None
    start: int
    end: int
    before: Place | None = None
    after: Place | None = None


def settle(groups: Sequence[Sequence[Place]]) -> None:
    """Move the borders of each group, all places of one text, to the ends of words that they share whole, and away
    from words that they share in part. Empty lines before the text and white space behind it are left outside.
    """
    _introduce(place for group in groups for place in group)
    alike = [group for group in groups if _are_alike(group)]
    for move in (_grow_left, _grow_right, _leave_split_words, _leave_space):
        for group in alike:
            move(group)


def _introduce(places: Iterable[Place]) -> None:
    ordered = sorted(places, key=lambda place: (place.where, place.start))
    for left, right in pairwise(ordered):
        if left.where == right.where:
            left.after, right.before = right, left


def _are_alike(places: Sequence[Place]) -> bool:
    """A tokenizer may give the same ids to different texts, and token ids have no characters."""
    first = places[0]
    if first.text is None:
        return False
    text = first.text[first.start : first.end]
    return all(place.text is not None and place.text[place.start : place.end] == text for place in places)


def _grow_left(places: Sequence[Place]) -> None:
    room = min(place.start - (place.before.end if place.before else 0) for place in places)
    by = _shared(places, [place.start - 1 for place in places], -1, room)
    for place in places:
        place.start -= by


def _grow_right(places: Sequence[Place]) -> None:
    """What ends in a space has its last word whole."""
    first = places[0]
    if (first.text or "")[first.start : first.end][-1:].isspace():
        return
    room = min((place.after.start if place.after else len(place.text or "")) - place.end for place in places)
    by = _shared(places, [place.end for place in places], 1, room)
    for place in places:
        place.end += by


def _shared(places: Sequence[Place], positions: Sequence[int], step: int, room: int) -> int:
    """How many characters from there on are the same in all places, up to a space."""
    texts = [place.text or "" for place in places]
    for by in range(min(room, LONGEST_WORD)):
        found = {text[position + step * by] for text, position in zip(texts, positions, strict=True)}
        if len(found) > 1 or found.pop().isspace():
            return by
    return max(0, min(room, LONGEST_WORD))


def _leave_split_words(places: Sequence[Place]) -> None:
    first = places[0]
    text = (first.text or "")[first.start : first.end]
    reach = min(LONGEST_WORD, len(text) // 4)
    spaces = list(_SPACE.finditer(text))
    if any(_splits_a_word(place, place.start) for place in places):
        space = next((space for space in spaces if space.start() <= reach), None)
        if space is not None:
            line_end = space[0].rfind("\n")
            for place in places:
                place.start += space.start() + line_end + 1
    if any(_splits_a_word(place, place.end) for place in places):
        space = next((space for space in reversed(spaces) if space.end() >= len(text) - reach), None)
        if space is not None:
            line_end = space[0].find("\n")
            for place in places:
                place.end -= len(text) - space.start() - line_end - 1


def _leave_space(places: Sequence[Place]) -> None:
    first = places[0]
    text = (first.text or "")[first.start : first.end]
    before = text[: len(text) - len(text.lstrip())].rfind("\n") + 1
    behind = len(text) - len(text.rstrip())
    for place in places:
        place.start, place.end = place.start + before, place.end - behind


def _splits_a_word(place: Place, position: int) -> bool:
    around = (place.text or "")[max(position - 1, 0) : position + 1]
    return position > 0 and len(around) == 2 and around.isalnum()
