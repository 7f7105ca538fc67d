"""The strategy `json`: the items of a JSON list are documents, in the text in which they were written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json import JSONDecoder
from json.decoder import WHITESPACE  # type: ignore[attr-defined]

from kvaudit.records import DOCUMENT, SEPARATOR
from kvaudit.segmenting.pieces import Piece, Prepare, cutting_texts, sound

_DECODER = JSONDecoder(strict=False, parse_int=str, parse_float=str)
_FEWEST_ITEMS = 2
_ITEMS_BEGIN = ("{", "[", '"')


def json_items() -> Prepare:
    """Items of a list of two or more objects, lists or strings, wherever in a text it stands, are documents.

    Brackets, commas and the white space around them are separators, and what stands around the list keeps its kind.
    """

    def cut(piece: Piece) -> Sequence[Piece]:
        parts, position = [], 0
        for items in _lists(piece.text):
            start, end = items[0][0], items[-1][1]
            opened, closed = piece.text.rindex("[", position, start), piece.text.index("]", end) + 1
            parts.append((piece.kind, piece.text[position:opened]))
            position = opened
            for start, end in items:
                parts += [(SEPARATOR, piece.text[position:start]), (DOCUMENT, piece.text[start:end])]
                position = end
            parts.append((SEPARATOR, piece.text[position:closed]))
            position = closed
        if not parts:
            return (piece,)
        return tuple(sound([*parts, (piece.kind, piece.text[position:])]))

    return cutting_texts(cut)


def _lists(text: str) -> Iterator[list[tuple[int, int]]]:
    """The ranges of the items of each list, outer lists before what is in them."""
    position = text.find("[")
    while position >= 0:
        items, end = _items(text, position + 1)
        if items:
            yield items
        position = text.find("[", end)


def _items(text: str, position: int) -> tuple[list[tuple[int, int]], int]:
    """The items from behind a bracket on, and where to look on; none where this is not such a list.

    Behind one that is nested too deeply to be read, nothing is looked for.
    """
    items: list[tuple[int, int]] = []
    at = _behind_space(text, position)
    try:
        while True:
            if text[at : at + 1] not in _ITEMS_BEGIN:
                return [], position
            _, end = _DECODER.raw_decode(text, at)
            items.append((at, end))
            after = _behind_space(text, end)
            if text[after : after + 1] == "]":
                return (items, after + 1) if len(items) >= _FEWEST_ITEMS else ([], position)
            if text[after : after + 1] != ",":
                return [], position
            at = _behind_space(text, after + 1)
    except RecursionError:
        return [], len(text)
    except ValueError:
        return [], position


def _behind_space(text: str, position: int) -> int:
    found = WHITESPACE.match(text, position)
    return found.end() if found else position
